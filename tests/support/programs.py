"""Python programs that tests start run in forks of one process that has imported torch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "preloaded"
ADDRESS = "LACONIC_PRELOADED"
NEW = [sys.executable, "-s"]
"""A new interpreter, for programs whose process id, privileges or sudden end the test is about. The
programs that it starts are preloaded again."""


def serve_programs(config: pytest.Config) -> None:
    """Start the server, and have the programs that this process starts look for it, those of
    pytest-xdist included.

    Not where LACONIC_COLD is set: every program is a new interpreter then.
    """
    given = os.environ.get("PYTHONPATH", "")
    if sys.platform != "linux" or os.environ.get("LACONIC_COLD") or hasattr(config, "workerinput"):
        return
    server = Server(config)
    if config.getoption("numprocesses", None):
        server.start()
    else:
        sys.addaudithook(server.audit)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER), given]))


class Server:
    """The preloaded process. It ends with this one, if not before."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.folder = tempfile.TemporaryDirectory(prefix="laconic-tests-")
        self.path = f"{self.folder.name}/server"
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = False
        config.add_cleanup(self.end)
        found = importlib.util.find_spec("laconic")
        assert found is not None
        user = os.readlink("/proc/self/ns/user")
        where = [self.path, str(os.geteuid()), user, sys.prefix, str(found.origin)]
        os.environ[ADDRESS] = "|".join(where)
        self.env = {**os.environ, "OMP_NUM_THREADS": "1"}

    def audit(self, event: str, arguments: tuple[object, ...]) -> None:
        """Start it when a test starts a first program."""
        if event in ("subprocess.Popen", "os.exec", "os.posix_spawn") and not self.starts:
            self.start()

    def start(self) -> None:
        self.starts = True  # which is a first program, too
        self.process = subprocess.Popen(
            [sys.executable, str(FOLDER / "server.py"), self.path],
            env=self.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"

    def end(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None and self.process.stdout is not None
            self.process.stdin.close()
            self.process.wait(30)
            self.process.stdout.close()
        self.folder.cleanup()
