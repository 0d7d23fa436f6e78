"""Find processes of labs that were killed, by a mark in the processes' environment.

A lab creates no files and no named namespaces. Only processes can survive it: those that left
their session, if the lab was killed before it could clean up. Every process of a lab has the
environment variable LACONIC_LAB, which names the process that launched it and its start time. The
start time tells a live launcher from another process that got the same pid. On systems other than
Linux, nothing is found.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import select
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["HOST", "MARK", "Member", "end", "members", "new_mark", "signal_host"]

MARK: Final = "LACONIC_LAB"
HOST: Final = "LACONIC_LAB_HOST"
"""Names the host of a process, in its environment."""
_END_SECONDS: Final = 10.0  # time for SIGKILL to take effect
_EXEC_SECONDS: Final = 5.0
_STATE, _START_TIME, _ENV_END = 3, 22, 51  # fields of /proc/PID/stat
_numbers = itertools.count()


@dataclass(frozen=True)
class Member:
    """A process of a lab: its pid and command line, and its lab's mark and launcher."""

    pid: int
    command: str
    mark: str
    launcher: int
    launcher_lives: bool


def new_mark() -> str:
    """Return a new value of LACONIC_LAB, for the processes of one lab of this process."""
    return f"{_pid_namespace()}:{os.getpid()}:{_start_time(os.getpid())}:{next(_numbers)}"


def members() -> Iterator[Member]:
    """Yield the processes of all labs on this machine that this user may see.

    Labs in other PID namespaces (containers) are skipped, because their launchers are unknown.
    """
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):  # it ended, or belongs to another user
            mark = _mark_of(entry)
            if mark is None:
                continue
            namespace, launcher, started, _ = map(int, mark.split(":"))
            if namespace != _pid_namespace() or int(entry.name) == os.getpid():
                continue
            words = (entry / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            command = b" ".join(words).decode(errors="replace")
            lives = _start_time(launcher) == started
            yield Member(int(entry.name), command, mark, launcher, lives)


def signal_host(mark: str, host: int, number: int) -> None:
    """Send a signal to all processes with `mark` on `host`, including those started meanwhile."""
    reached: set[str] = set()
    while True:
        before = len(reached)
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it ended, or belongs to another user
                if entry.name not in reached and _signal(entry, mark, host, number):
                    reached.add(entry.name)
        if len(reached) == before:
            return


def _signal(process: Path, mark: str, host: int, number: int) -> bool:
    """Send a signal to the process if it has `mark` and is on `host`. Return whether it is."""
    descriptor = os.pidfd_open(int(process.name))
    try:
        # Check after opening the pidfd, so that the pid cannot have been reused.
        if _mark_of(process) != mark or _variable(process, HOST) != str(host):
            return False
        signal.pidfd_send_signal(descriptor, number)
        return True
    finally:
        os.close(descriptor)


def end(member: Member) -> bool:
    """Kill the process and wait until it ends. Return whether it has ended, perhaps by itself."""
    try:
        descriptor = os.pidfd_open(member.pid)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    try:
        # Check after opening the pidfd, so that the pid cannot have been reused.
        if _mark_of(Path(f"/proc/{member.pid}")) != member.mark:
            return True  # it is a zombie, or another process has its pid
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return bool(select.select([descriptor], [], [], _END_SECONDS)[0])
    except OSError as error:
        return isinstance(error, (ProcessLookupError, FileNotFoundError))
    finally:
        os.close(descriptor)


def end_all(mark: str) -> None:
    """Kill every process with `mark`, including processes started meanwhile."""
    deadline = time.monotonic() + _END_SECONDS
    empty_scans = 0
    # Scan twice: the first scan may miss a process whose parent started it and then ended.
    while empty_scans < 2 and time.monotonic() < deadline:
        strays = [member for member in members() if member.mark == mark]
        empty_scans = 0 if strays else empty_scans + 1
        for member in strays:
            end(member)


@functools.cache
def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _mark_of(process: Path) -> str | None:
    return _variable(process, MARK)


def _variable(process: Path, name: str) -> str | None:
    """Return a variable of the environment that a process was started with."""
    prefix = f"{name}=".encode()
    environment = (process / "environ").read_bytes()
    if not environment:
        # The environment is empty for a moment during exec: without the wait, 2 of 600 were missed.
        deadline = time.monotonic() + _EXEC_SECONDS
        while _in_exec(process) and time.monotonic() < deadline:
            time.sleep(0.001)
        environment = (process / "environ").read_bytes()
    for variable in environment.split(b"\0"):
        if variable.startswith(prefix):
            return variable[len(prefix) :].decode()
    return None


def _in_exec(process: Path) -> bool:
    """Return whether the process has a program but no environment yet.

    Raises OSError for a process without a program, as kernel threads and ended processes.
    """
    os.readlink(process / "exe")
    return _fields(process)[_ENV_END] == "0"


def _start_time(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot, or 0 if it has ended.

    A zombie has ended.
    """
    try:
        fields = _fields(Path(f"/proc/{pid}"))
    except OSError:
        return 0
    return 0 if fields[_STATE] in "ZX" else int(fields[_START_TIME])


def _fields(process: Path) -> list[str]:
    """Return the fields of /proc/PID/stat, indexed from 1 as in proc(5), the first two empty."""
    # The name, in parentheses, may contain any character, so parse after the last parenthesis.
    text = (process / "stat").read_text(errors="replace")
    return ["", "", "", *text.rpartition(")")[2].split()]
