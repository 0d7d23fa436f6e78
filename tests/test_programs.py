"""A program in a fork of the preloaded process does what it does in a new interpreter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import programs

PROGRAMS = {
    "what it is given": (
        "import os, sys; print(sys.argv, os.getcwd(), os.environ['WORD'], sys.stdin.read(), "
        "__name__, sorted(vars(sys.modules['__main__'])))"
    ),
    "exit code": "raise SystemExit(3)",
    "exit message": "raise SystemExit('because')",
    "exception": "def f():\n    1 / 0\nf()",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "interrupt": "raise KeyboardInterrupt",
    "thread and atexit": (
        "import atexit, threading, time\n"
        "atexit.register(print, 'last')\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\n"
        "print('first')"
    ),
    "limits": (
        "import os, resource, signal; print(resource.getrlimit(resource.RLIMIT_NOFILE), "
        "os.umask(0), signal.getsignal(signal.SIGINT))"
    ),
    "a child": (
        "import subprocess, sys\n"
        "child = [sys.executable, '-c', 'import os; os.write(1, os.read(0, 9)); os._exit(5)']\n"
        "print(subprocess.run(child, input=b'to it', stdout=subprocess.PIPE))"
    ),
}


def ended(command: list[str], directory: Path) -> tuple[int, str, str]:
    env = {**os.environ, "WORD": "a word"}
    run = subprocess.run(
        command, input="some words", capture_output=True, text=True, cwd=directory, env=env
    )
    return run.returncode, run.stdout, run.stderr


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("way", ["-c", "file", "-m"])
def test_it_does_what_it_does_in_a_new_interpreter(name: str, way: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAMS[name])
    what = {"-c": ["-c", PROGRAMS[name]], "-m": ["-m", "program"]}.get(way, ["program.py"])
    found = ended([sys.executable, *what, "one", "--two"], tmp_path)
    assert found == ended([*programs.NEW, *what, "one", "--two"], tmp_path)


def test_it_has_imported_torch() -> None:
    asks = "import sys; print('torch' in sys.modules)"
    for command, there in (
        ([sys.executable], programs.ADDRESS in os.environ),
        (programs.NEW, False),
    ):
        run = subprocess.run([*command, "-c", asks], capture_output=True, text=True)
        assert run.stdout == f"{there}\n", run.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_ends_with_the_process_that_started_it(number: signal.Signals, tmp_path: Path) -> None:
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        fork = Path(f"/proc/{int(process.stdout.readline())}")
        process.send_signal(number)
        assert process.wait() == -number
    end = time.monotonic() + 100
    while fork.exists():
        assert time.monotonic() < end
        time.sleep(0.01)
