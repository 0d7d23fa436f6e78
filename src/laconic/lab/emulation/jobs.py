"""Start processes that die with their launcher, and jobs of one process per rank."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Final, TypeAlias, final

from laconic.lab.emulation.namespaces import Entry

__all__ = [
    "KILL_SECONDS",
    "Job",
    "Outcome",
    "Output",
    "Processes",
    "close_all",
    "read_all",
    "signals_deferred",
    "tail",
    "terminate_as_exit",
    "unnamed_file",
]

Output: TypeAlias = int | IO[bytes] | None

KILL_SECONDS: Final = 10.0  # time for SIGKILL to take effect
_TERMINATE_SECONDS: Final = 2.0  # between SIGTERM and SIGKILL
_TAIL_BYTES: Final = 8192
_TAIL_LINES: Final = 20


@dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    `code` is its exit code, or -n if signal n killed it, or None while it runs. `stopped` is true
    if the job killed it, most often because another rank had failed. `stderr` holds its last lines
    if the job captures output.
    """

    rank: int
    host: int
    code: int | None
    stopped: bool
    stderr: str

    @property
    def failed(self) -> bool:
        """Whether the rank ended unsuccessfully by itself."""
        return bool(self.code) and not self.stopped

    @property
    def exit_code(self) -> int | None:
        """The exit code by the shell's convention: 128 plus the number of a signal."""
        return self.code if self.code is None or self.code >= 0 else 128 - self.code

    @property
    def signal(self) -> str | None:
        """The name of the signal that killed it, or None."""
        if self.code is None or self.code >= 0:
            return None
        try:
            return signal.Signals(-self.code).name
        except ValueError:
            return f"signal {-self.code}"  # a real-time signal

    @property
    def how(self) -> str:
        """How it ended, for display."""
        return "running" if self.code is None else self.signal or f"exit code {self.code}"

    def __str__(self) -> str:
        stopped = ", stopped with its job" if self.stopped else ""
        return f"rank {self.rank} on host{self.host}: {self.how}{stopped}"


@final
class Job:
    """One program on all hosts, created by `launch`. Its processes end with their cluster.

    `logs` are descriptors of the files for each rank's stdout and stderr. The job closes them.
    Without them, output is not captured.
    """

    def __init__(
        self, processes: Processes, hosts: Sequence[int], logs: Sequence[tuple[int, int]] = ()
    ) -> None:
        self._processes = processes
        self._hosts = hosts
        self._logs = logs
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._stopped: set[int] = set()
        self._lost: set[int] = set()
        self._awaited: set[int] = set()
        weakref.finalize(self, close_all, [log for pair in logs for log in pair])

    def settled(self, timeout: float) -> bool:
        """Return whether all ranks ended or one failed within `timeout` seconds."""
        with self._processes.changed:
            return self._processes.changed.wait_for(self._settled, timeout)

    def wait(self, timeout: float | None = None, *, grace: float = 5.0) -> list[Outcome]:
        """Return the outcomes by rank once all have ended.

        When one rank fails, the others have `grace` seconds to end before they are killed. Raises
        TimeoutError if after `timeout` seconds no rank has failed and some still run. They are
        left running.
        """
        changed = self._processes.changed
        with changed:
            if not changed.wait_for(self._settled, timeout):
                running = sum(process.returncode is None for process in self._ranks)
                text = f"{running} of {len(self._ranks)} ranks still running after {timeout:g} s"
                raise TimeoutError(text)
            changed.wait_for(self._all_ended, grace)
        self.kill()
        with changed:
            return self._outcomes()

    def running(self) -> bool:
        """Return whether some rank runs."""
        with self._processes.changed:
            return not self._all_ended()

    def first_failure(self) -> Outcome | None:
        """Return the outcome of the rank that failed first, or None."""
        with self._processes.changed:
            outcomes = dict(zip(self._ranks, self._outcomes(), strict=True))
            ended = [outcomes[process] for process in self._processes.ended if process in outcomes]
        return next((outcome for outcome in ended if outcome.failed), None)

    def kill(self) -> None:
        """Kill the ranks that still run, and wait until they end."""
        changed = self._processes.changed
        with changed:
            for rank, process in enumerate(self._ranks):
                if process.returncode is None:
                    self._stopped.add(rank)
                    self._processes.signal(process, signal.SIGKILL)
            changed.wait_for(self._all_ended, KILL_SECONDS)

    def stdout(self, rank: int) -> str:
        """Return everything the rank has written to stdout so far."""
        return read_all(self._logs[rank][0]).decode(errors="replace")

    def stderr(self, rank: int) -> str:
        """Return everything the rank has written to stderr so far."""
        return read_all(self._logs[rank][1]).decode(errors="replace")

    def add(self, process: subprocess.Popen[bytes]) -> None:
        """Add the process of the next rank."""
        self._ranks.append(process)

    def running_on(self, host: int) -> list[int]:
        """Return the ranks on `host` whose process runs."""
        with self._processes.changed:
            return [
                rank
                for rank, process in enumerate(self._ranks)
                if self._hosts[rank] == host and process.returncode is None
            ]

    def lose(self, rank: int, *, returns: bool) -> None:
        """Do not count the end of this rank's process as a failure.

        If it `returns`, the job waits for the process that replaces it. Otherwise the job does not
        wait for the rank.
        """
        with self._processes.changed:
            self._stopped.add(rank)
            (self._awaited if returns else self._lost).add(rank)
            (self._lost if returns else self._awaited).discard(rank)

    def replace(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Go on with another process of a rank that was lost."""
        with self._processes.changed:
            self._ranks[rank] = process
            for ranks in (self._stopped, self._awaited, self._lost):
                ranks.discard(rank)

    def failed(self) -> list[Outcome]:
        """Return the outcomes of the ranks that have failed."""
        with self._processes.changed:
            return [outcome for outcome in self._outcomes() if outcome.failed]

    def succeeded(self) -> bool:
        """Return whether a rank has ended with exit code 0."""
        with self._processes.changed:
            return any(process.returncode == 0 for process in self._ranks)

    def _all_ended(self) -> bool:
        return all(
            rank in self._lost or (process.returncode is not None and rank not in self._awaited)
            for rank, process in enumerate(self._ranks)
        )

    def _settled(self) -> bool:
        return self._all_ended() or any(
            process.returncode
            for rank, process in enumerate(self._ranks)
            if rank not in self._stopped
        )

    def _outcomes(self) -> list[Outcome]:
        return [
            Outcome(
                rank=rank,
                host=self._hosts[rank],
                code=process.returncode,
                stopped=rank in self._stopped,
                stderr=tail(self._logs[rank][1]) if self._logs else "",
            )
            for rank, process in enumerate(self._ranks)
        ]


@contextlib.contextmanager
def terminate_as_exit() -> Iterator[None]:
    """Raise SystemExit (143 or 129) on SIGTERM or SIGHUP within the block, so that it unwinds.

    For use in the main thread. Otherwise these signals end the process, and its clusters, at once.
    """

    def exit_on_signal(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with _handlers((signal.SIGTERM, signal.SIGHUP), exit_on_signal):
        yield


@final
class Processes:
    """Children of this process, each in its own session, that die with it.

    `changed` is notified when a child has ended and its `returncode` is set. `ended` lists them in
    that order.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.ended: list[subprocess.Popen[bytes]] = []
        self._children: list[tuple[int, subprocess.Popen[bytes]]] = []  # with their hosts
        self._closed = False
        # The kernel kills a child when the thread that started it ends, so one thread starts all.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="laconic-start")

    def start(
        self,
        host: int,
        entry: Entry,
        argv: Sequence[str],
        env: Mapping[str, str],
        stdout: Output,
        stderr: Output,
    ) -> subprocess.Popen[bytes]:
        """Start `argv` on a host, by its `entry`, with an empty stdin.

        Raises ValueError after `close`.
        """

        def spawn() -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                entry.command(argv),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=entry.descriptors(),
                start_new_session=True,
            )
            with self.changed:
                self._children.append((host, process))
            threading.Thread(target=self._await_end, args=(process,), daemon=True).start()
            return process

        if self._closed:
            raise ValueError("the cluster is closed")
        return self._starter.submit(spawn).result()

    def signal(self, process: subprocess.Popen[bytes], number: int) -> None:
        """Send the signal to the process and to its process group."""
        with self.changed:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    def signal_host(self, host: int, number: int) -> None:
        """Send the signal to the processes on a host and to all that they have started."""
        with self.changed:
            roots = [p for at, p in self._children if at == host and p.returncode is None]
            reached = set[int]()
            while new := descendants([p.pid for p in roots]) - reached:
                _kill(new, number)
                reached |= new
            for process in roots:  # last, since its children would go to another parent
                self.signal(process, number)

    def close(self) -> None:
        """End all processes: SIGTERM, then SIGKILL after 2 seconds."""
        self._closed = True
        with self.changed:
            strays = descendants([p.pid for _, p in self._children if p.returncode is None])
        for number, seconds in (
            (signal.SIGTERM, _TERMINATE_SECONDS),
            (signal.SIGKILL, KILL_SECONDS),
        ):
            with self.changed:
                for _, process in self._children:
                    self.signal(process, number)
                self.changed.wait_for(self._all_ended, seconds)
        _kill(strays, signal.SIGKILL)  # those that left their session
        self._starter.shutdown()

    def _all_ended(self) -> bool:
        return all(process.returncode is not None for _, process in self._children)

    def _await_end(self, process: subprocess.Popen[bytes]) -> None:
        """Wait in a thread until one child ends, and kill the rest of its process group."""
        if sys.platform == "linux":
            # Until the child is reaped, no other process group can get its number.
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
                self.signal(process, signal.SIGKILL)
        with self.changed:
            process.wait()
            self.ended.append(process)
            self.changed.notify_all()


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Defer SIGINT, SIGTERM and SIGHUP to the end of the block, so that cleanup is complete.

    Python runs signal handlers only in the main thread. In other threads this does nothing.
    """
    deferred: list[int] = []
    try:
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        with _handlers(signals, lambda number, _: deferred.append(number)):
            yield
    finally:
        for number in dict.fromkeys(deferred):
            signal.raise_signal(number)


@contextlib.contextmanager
def _handlers(
    numbers: Sequence[int], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Set `handler` for the signals within the block, except for signals that are ignored."""
    old = {}
    if threading.current_thread() is threading.main_thread():
        # None stands for a handler set by C code, which could not be restored.
        unchanged = (None, signal.SIG_IGN)
        old = {n: signal.getsignal(n) for n in numbers if signal.getsignal(n) not in unchanged}
    try:
        for number in old:
            signal.signal(number, handler)
        yield
    finally:
        for number, previous in old.items():
            signal.signal(number, previous)


def descendants(roots: Iterable[int]) -> set[int]:
    """Return the children of processes, their children, and so on. Empty if this is not Linux."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            # The name, in parentheses, may contain any character.
            parent = stat.read_text(errors="replace").rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    found = set[int]()
    left = [*roots]
    while left:
        new = children.get(left.pop(), [])
        found.update(new)
        left += new
    return found


def _kill(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def unnamed_file() -> int:
    """Return a descriptor of a file that nobody else finds."""
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def close_all(descriptors: Sequence[int]) -> None:
    """Close the descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)


def read_all(descriptor: int, start: int = 0) -> bytes:
    """Return the contents of a file from `start` on, without using the shared file position."""
    pieces = []
    while piece := os.pread(descriptor, 1 << 16, start):
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)


def tail(descriptor: int) -> str:
    """Return the last 20 lines of a file."""
    size = os.fstat(descriptor).st_size
    text = read_all(descriptor, max(0, size - _TAIL_BYTES)).decode(errors="replace")
    return "\n".join(text.rstrip().splitlines()[-_TAIL_LINES:])
