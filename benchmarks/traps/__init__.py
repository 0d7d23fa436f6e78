"""Reproduce ways in which a training run can fail silently, and what laconic does about them.

A trap is a function. It returns a short description of what happened if all went well, and raises
`Trapped` if a user would have lost something. ``python -m benchmarks.traps`` runs all traps.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path


class Trapped(Exception):  # noqa: N818 (a result of a trap, not an error in it)
    """What a user would have lost, or what a message got wrong."""


@dataclass(frozen=True)
class Trap:
    """``run`` checks what ``title`` says, within ``seconds``."""

    title: str
    run: Callable[[], str]
    seconds: float


ENDS = ("out", "err")
TRAPS: dict[str, Trap] = {}
"""Traps by name, in the order in which they run."""


def trap(title: str, seconds: float = 120.0) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Register a function as a trap under its name."""

    def register(run: Callable[[], str]) -> Callable[[], str]:
        TRAPS[run.__name__] = Trap(title, run, seconds)
        return run

    return register


@dataclass(frozen=True)
class Outcome:
    """How one process ended. ``code`` is None if it was killed at the time limit."""

    code: int | None
    out: str
    err: str
    seconds: float

    @property
    def last_line(self) -> str:
        """The last line of its error output, such as an exception's."""
        lines = [line for line in self.err.splitlines() if line.strip()]
        return lines[-1] if lines else ""


def free_port() -> int:
    """Return an unused TCP port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(
    code: str,
    ranks: int = 2,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
    culprit: int | None = None,
) -> list[Outcome]:
    """Run the program ``code`` once per rank, with torchrun's environment variables, on 127.0.0.1.

    Kills processes that run longer than ``timeout`` seconds, and the ``culprit`` once all others
    have ended. Returns how each process ended.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        program = Path(folder, "program.py")
        program.write_text(code)
        common = {
            **os.environ,
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
        }
        start = time.monotonic()
        processes, logs = [], []
        for rank in range(ranks):
            log = [stack.enter_context(Path(folder, f"{rank}.{end}").open("w+")) for end in ENDS]
            variables = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), **(env or {})}
            argv = [sys.executable, str(program), *arguments]
            processes.append(subprocess.Popen(argv, env=variables, stdout=log[0], stderr=log[1]))
            logs.append(log)
        ended: dict[int, tuple[int | None, float]] = {}
        while len(ended) < ranks:
            for rank, process in enumerate(processes):
                if rank not in ended and process.poll() is not None:
                    ended[rank] = process.returncode, time.monotonic() - start
            running, seconds = set(range(ranks)) - set(ended), time.monotonic() - start
            if seconds > timeout or running == {culprit}:
                for rank in running:
                    processes[rank].kill()
                    processes[rank].wait()
                    ended[rank] = None, seconds
            time.sleep(0.02)
        outcomes = []
        for rank, (out, err) in enumerate(logs):
            out.seek(0)
            err.seek(0)
            outcomes.append(Outcome(ended[rank][0], out.read(), err.read(), ended[rank][1]))
        return outcomes
