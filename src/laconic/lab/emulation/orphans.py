"""What a lab that was killed may leave behind, found by a mark in its processes' environment.

A lab keeps no file and no named namespace: only processes can survive it, those that left their
session where the lab could not clean up any more. Every process of a lab carries LACONIC_LAB,
which says which process launched it; whether that one still lives is known from its start time,
so a number that the system has given away again does not mislead. Linux only; elsewhere nothing
is found.
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

__all__ = ["MARK", "Member", "end", "members", "new_mark"]

MARK: Final = "LACONIC_LAB"
_END_SECONDS: Final = 10.0  # for SIGKILL to take effect
_EXEC_SECONDS: Final = 5.0
_STATE, _START_TIME, _ENV_END = 3, 22, 51  # in /proc/PID/stat
_numbers = itertools.count()


@dataclass(frozen=True)
class Member:
    """A process of a lab: its number and command line, and its lab's mark and launcher."""

    pid: int
    command: str
    mark: str
    launcher: int
    launcher_lives: bool


def new_mark() -> str:
    """Return what the processes of one more lab of this process carry as LACONIC_LAB."""
    return f"{_pid_namespace()}:{os.getpid()}:{_start_time(os.getpid())}:{next(_numbers)}"


def members() -> Iterator[Member]:
    """Yield the processes of all labs on this machine, as far as this user may see them.

    Labs of other process namespaces (containers) are left out: nothing is known of their launchers.
    """
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):  # it ended, or is somebody else's
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


def end(member: Member) -> bool:
    """Kill the process and wait for its end; return whether it was there and has ended."""
    try:
        descriptor = os.pidfd_open(member.pid)
    except OSError:
        return False
    try:
        # Looked at after the pidfd is held, so that the number cannot have changed hands.
        if _mark_of(Path(f"/proc/{member.pid}")) != member.mark:
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return bool(select.select([descriptor], [], [], _END_SECONDS)[0])
    except OSError:
        return False
    finally:
        os.close(descriptor)


def end_all(mark: str) -> None:
    """Kill every process that carries `mark`, and those they start meanwhile."""
    deadline = time.monotonic() + _END_SECONDS
    unseen = 0
    # Two looks: a process started during the first, by one that then ended, is in the second.
    while unseen < 2 and time.monotonic() < deadline:
        strays = [member for member in members() if member.mark == mark]
        unseen = 0 if strays else unseen + 1
        for member in strays:
            end(member)


@functools.cache
def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _mark_of(process: Path) -> str | None:
    prefix = f"{MARK}=".encode()
    environment = (process / "environ").read_bytes()
    if not environment:
        # In the middle of exec a process has none for a moment: 2 of 600 were overlooked.
        deadline = time.monotonic() + _EXEC_SECONDS
        while _in_exec(process) and time.monotonic() < deadline:
            time.sleep(0.001)
        environment = (process / "environ").read_bytes()
    for variable in environment.split(b"\0"):
        if variable.startswith(prefix):
            return variable[len(prefix) :].decode()
    return None


def _in_exec(process: Path) -> bool:
    """Whether it has a program but not yet a place for the environment; raises OSError where it
    has no program, as threads of the kernel and what has ended."""
    os.readlink(process / "exe")
    return _fields(process)[_ENV_END] == "0"


def _start_time(pid: int) -> int:
    """Return when a process was started, in clock ticks since the system was; 0 where it is gone,
    be it that nobody has asked for its exit code yet."""
    try:
        fields = _fields(Path(f"/proc/{pid}"))
    except OSError:
        return 0
    return 0 if fields[_STATE] in "ZX" else int(fields[_START_TIME])


def _fields(process: Path) -> list[str]:
    """Return what /proc/PID/stat says, counted as proc(5) does, from 1; the first two left out."""
    # After the name, which is in parentheses and may hold any character.
    text = (process / "stat").read_text(errors="replace")
    return ["", "", "", *text.rpartition(")")[2].split()]
