"""Record what one rank of a race does when: computing, sending, waiting.

Times are from `time.perf_counter`, which all processes of a machine share. A rank is waiting while
training is blocked by a round, and computing for the rest of the time on the training clock. It is
sending while its data leaves the host, according to the counter of its network interface. If the
rank has no interface of its own, it is sending while a collective is in progress.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import median

from laconic.lab.race.result import Rounds, Span
from laconic.links import Link
from laconic.links.calls import GRADIENTS, Call
from laconic.links.cost import Cost
from laconic.links.quorum.port import Port
from laconic.links.quorum.wrapped import WrappedPort
from laconic.links.wrapped import Wrapped

MAX_SPANS = 400
"""Number of sends and waits kept from the beginning of a run, and again from its end."""
SHORTEST = 1e-4
"""In seconds. Shorter sends and waits are dropped; such waits count as computing."""
LARGEST_ACKNOWLEDGMENT = 200
"""In bytes. Packets that are larger on average carry data."""
POLL_SECONDS = 0.004
"""Interval between two readings of the interface's counter during a collective."""


def interface_counts(interface: str) -> tuple[float, float]:
    """Return the bytes and packets that ``interface`` has sent so far, NaN if there is none."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return float(counts.split()[8]), float(counts.split()[9])
    return math.nan, math.nan


class InterfaceMonitor:
    """Detects when data leaves through ``interface`` during a collective."""

    def __init__(self, interface: str) -> None:
        self._interface = interface
        self._seen: list[float] = []
        self._active = threading.Event()
        threading.Thread(target=self._poll, daemon=True, name="laconic-interface").start()

    def start(self) -> None:
        """Start monitoring at the start of a collective."""
        self._seen = []
        self._active.set()

    def stop(self, start: float) -> list[tuple[float, float]]:
        """Stop, and return when data was sent in the collective that began at ``start``."""
        self._active.clear()
        return transmissions(start, tuple(self._seen))  # a last reading may still add to it

    def _poll(self) -> None:
        while self._active.wait():
            seen, before = self._seen, interface_counts(self._interface)
            while self._active.is_set() and seen is self._seen:
                time.sleep(POLL_SECONDS)
                now = interface_counts(self._interface)
                packets = now[1] - before[1]
                if packets and (now[0] - before[0]) / packets > LARGEST_ACKNOWLEDGMENT:
                    seen.append(time.perf_counter())
                before = now


def transmissions(start: float, seen: Sequence[float]) -> list[tuple[float, float]]:
    """Return the intervals of continuous sending, given the times at which data was ``seen``.

    Up to 20 kB may leave at once, which takes time on a slow network. So a pause is a gap four
    times as long as the median gap, and at least five polls.
    """
    if not seen:
        return []
    gaps = [after - before for before, after in pairwise([start, *seen])]
    usual = median(gaps)
    intervals = [(start, start)]
    for at, gap in zip(seen, gaps, strict=True):
        if gap > max(4 * usual, 5 * POLL_SECONDS):
            intervals.append((at - usual, at))
        else:
            intervals[-1] = intervals[-1][0], at
    return intervals


class Recorder:
    """Records one rank's run between `resume` and `pause`, with bounded memory."""

    def __init__(self, interface: str | None = None) -> None:
        self._monitor = None if interface is None else InterfaceMonitor(interface)
        self._lock = threading.Lock()
        self.ran: list[tuple[float, float]] = []
        """Intervals in which the training clock ran."""
        self._resumed: float | None = None
        self._first: list[Span] = []
        self._last: deque[Span] = deque(maxlen=MAX_SPANS)
        self._dropped = False
        self._bytes: dict[int, int] = {}

    def resume(self) -> None:
        """Start the training clock."""
        self._resumed = time.perf_counter()

    def pause(self) -> None:
        """Stop the training clock."""
        assert self._resumed is not None, "paused before it was resumed"
        self.ran.append((self._resumed, time.perf_counter()))
        self._resumed = None

    def add_wait(self, start: float, end: float) -> None:
        """Record that training was blocked."""
        self._add((start, end, "wait"))

    def add_bytes(self, step: int | None, amount: Cost) -> None:
        """Add to the bytes of the round after ``step``. None means that it is not a round."""
        if step is not None:
            self._bytes[step] = self._bytes.get(step, 0) + amount.bytes

    @contextmanager
    def sending(self, step: int | None, amount: Cost) -> Iterator[None]:
        """Record the block as a collective of the round after ``step``, or of no round (None)."""
        self.add_bytes(step, amount)
        if self._resumed is None:
            yield
            return
        if self._monitor is not None:
            self._monitor.start()
        start = time.perf_counter()
        yield
        end = time.perf_counter()
        for begin, finish in [(start, end)] if self._monitor is None else self._monitor.stop(start):
            self._add((begin, min(finish, end), "send"))

    def _add(self, span: Span) -> None:
        with self._lock:
            if self._resumed is None or span[1] - span[0] < SHORTEST:
                return
            if len(self._first) < MAX_SPANS:
                self._first.append(span)
            else:
                self._dropped = self._dropped or len(self._last) == MAX_SPANS
                self._last.append(span)

    def spans(self) -> list[Span]:
        """Return all spans by time. The middle of a long run is missing."""
        with self._lock:
            spans = [*self._first, *self._last]
            unknown = (self._first[-1][1], self._last[0][1]) if self._dropped else None
        waits = sorted((start, end) for start, end, kind in spans if kind == "wait")
        computed = subtract(self.ran, [*waits, unknown] if unknown else waits)
        return sorted([*spans, *((start, end, "compute") for start, end in computed)])

    def rounds(self) -> list[Rounds]:
        """Return what the rounds sent, with rounds at regular intervals combined."""
        return progressions(self._bytes)


def subtract(
    whole: Sequence[tuple[float, float]], holes: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Return the disjoint intervals ``whole`` without the intervals ``holes``."""
    left = []
    for begin, finish in whole:
        for start, end in sorted(holes):
            if end <= begin or start >= finish:
                continue
            if start > begin:
                left.append((begin, start))
            begin = max(begin, end)
        if begin < finish:
            left.append((begin, finish))
    return left


def on_common_clock(
    ran: Sequence[Sequence[Sequence[float]]], spans: Sequence[Sequence[Span]]
) -> tuple[tuple[Span, ...], ...]:
    """Return the ranks' spans in seconds of training, excluding pauses of all ranks.

    ``ran`` contains the intervals of each rank's training clock, equally many per rank.
    """
    if not ran or not ran[0]:
        return tuple(() for _ in spans)
    starts = [min(interval[0] for interval in same) for same in zip(*ran, strict=True)]
    ends = [max(interval[1] for interval in same) for same in zip(*ran, strict=True)]
    pauses = [(0.0, starts[0]), *zip(ends, starts[1:], strict=False)]

    def clock(time: float) -> float:
        paused: float = sum(max(min(time, until) - since, 0.0) for since, until in pauses)
        return round(time - paused, 5)

    return tuple(
        tuple((clock(start), clock(end), kind) for start, end, kind in rank) for rank in spans
    )


def progressions(sent: dict[int, int]) -> list[Rounds]:
    """Group rounds (bytes by step) into arithmetic progressions of steps with equal bytes."""
    runs: list[Rounds] = []
    open_runs: dict[int, int] = {}  # bytes -> index of their latest run
    for step, amount in sorted(sent.items()):
        index = open_runs.get(amount)
        if index is not None:
            run = runs[index]
            gap = step - run.last
            if run.first == run.last or gap == run.every:
                runs[index] = Rounds(run.first, step, gap, amount)
                continue
        open_runs[amount] = len(runs)
        runs.append(Rounds(step, step, 0, amount))
    return runs


class RecordedLink(Wrapped):
    """A ``link`` whose collectives are reported to a recorder."""

    overlaps = True

    def __init__(self, link: Link, recorder: Recorder) -> None:
        super().__init__(link)
        self._recorder = recorder
        self._step: int | None = None

    def around(self, collective: str, amount: Cost, received: int) -> AbstractContextManager[None]:
        if collective == "agree":  # its message has already been sent
            self._recorder.add_bytes(self._step, amount)
            return nullcontext()
        return self._recorder.sending(self._step, amount)

    def like(self, link: Link) -> Link:
        return RecordedLink(link, self._recorder)

    def around_port(self, port: Port) -> Port:
        return RecordedPort(port, self._recorder, self.rank, self.size)

    def begin_call(self, call: Call, *, wait: bool) -> bool:
        # Only a round's call is not waited for. Gradients are announced before their step.
        self._step = None if wait else call.step + (call.name == GRADIENTS)
        return super().begin_call(call, wait=wait)


class RecordedPort(WrappedPort):
    """``port`` of worker ``rank`` of ``size``, whose rounds are reported to a recorder.

    Rank 0 records the bytes, by its own steps, because it knows of all rounds. Each round counts
    with the mean over hosts: each worker of the roster sends the model, and rank 0 sends it back.
    What rank 0 sends while it computes is not among its spans.
    """

    def __init__(self, port: Port, recorder: Recorder, rank: int, size: int) -> None:
        super().__init__(port, rank)
        self._recorder, self._size = recorder, size

    def watched(self) -> AbstractContextManager[None]:
        return self._recorder.sending(None, Cost(0, 0))

    def book(self, step: int, sent: Cost, received: int, seconds: float) -> None:
        if not self._rank:
            both_ways = sent.bytes + received
            self._recorder.add_bytes(step, Cost(both_ways // self._size, 0))
