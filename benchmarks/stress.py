"""Start labs, end them in every possible way, and check that nothing is left.

    python -m benchmarks.stress [COUNT]

The exit code is 1 if a process, a network namespace or a file is left, or if an exit code is wrong.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

LAB = [sys.executable, "-m", "laconic", "lab"]
# The child leaves its session, so no signal to the process group reaches it.
STAYS = "setsid sleep 1000 & echo ready; wait"
WAYS = {
    # way: (program, signal to the command, exit code)
    "ends normally": ("echo ready", None, 0),
    "a rank crashes": (f'test "$RANK" = 1 && exit 3; {STAYS}', None, 3),
    "Ctrl-C": (STAYS, signal.SIGINT, 130),
    "SIGTERM": (STAYS, signal.SIGTERM, 143),
    "kill -9": (STAYS, signal.SIGKILL, -9),
    "kill -9 of its keeper too": (STAYS, signal.SIGKILL, -9),
}
SECONDS = 60.0


def namespaces(pid: int) -> Iterator[str]:
    """Yield the network namespaces that a process is in or has open."""
    try:
        for link in (Path(f"/proc/{pid}/ns/net"), *Path(f"/proc/{pid}/fd").iterdir()):
            if (name := os.readlink(link)).startswith("net:["):
                yield name
    except OSError:
        pass  # the process ended


def holders(names: set[str]) -> list[psutil.Process]:
    """Return the processes that are in one of these network namespaces or have it open."""
    return [process for process in psutil.process_iter() if names & {*namespaces(process.pid)}]


def alive(processes: list[psutil.Process]) -> list[str]:
    """Return the processes that are still alive, as text."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process}")
    return found


def start_and_end(way: str, directory: str) -> list[str]:
    """Start and end one lab. Return what went wrong."""
    program, number, code = WAYS[way]
    lab = subprocess.Popen(
        [*LAB, "--hosts", "2", "--", "sh", "-c", program],
        env={**os.environ, "TMPDIR": directory},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert lab.stdout is not None
    for _ in range(1 if "crashes" in way else 2):
        lab.stdout.readline()
    members = [psutil.Process(lab.pid), *psutil.Process(lab.pid).children(recursive=True)]
    networks = {name for member in members for name in namespaces(member.pid)}
    networks.discard(os.readlink("/proc/self/ns/net"))
    # Look now: a namespace's number may be reused as soon as the namespace is gone.
    inside = [*members, *holders(networks)]
    if "keeper" in way:
        for keeper in (member for member in members if "keep" in member.cmdline()):
            keeper.kill()
    if number is not None:
        lab.send_signal(number)
    lab.stdout.close()
    wrong = [] if lab.wait(SECONDS) == code else [f"exit code {lab.returncode}, not {code}"]
    deadline = time.monotonic() + SECONDS
    while True:
        left = [*alive(inside), *os.listdir(directory)]
        if not left or time.monotonic() > deadline:
            return wrong + left
        time.sleep(0.02)


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    bad = 0
    with tempfile.TemporaryDirectory() as directory:
        for number in range(count):
            way = list(WAYS)[number % len(WAYS)]
            wrong = start_and_end(way, directory)
            bad += bool(wrong)
            for what in wrong:
                print(f"lab {number + 1}, {way}: {what}", flush=True)
    print(f"{count} labs started and ended, {count - bad} of them without leaving anything")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
