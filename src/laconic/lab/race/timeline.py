"""What one rank of a race does when, recorded beside the training: computing, sending, waiting.

Times are of `time.perf_counter`, which all processes of a machine share. Waiting: training stands
still for a round. Computing: the rest of the time on the training clock. Sending: this rank's data
leaves its host's network card, as seen by the card's counter; where there is no card of its own to
look at, a collective is under way.
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
from laconic.links.wrapped import Wrapped

KEPT = 400
"""Sends and waits that are kept from the beginning of a run, and as many from its end."""
SHORTEST = 1e-4
"""Seconds; sends and waits that are shorter are left out, and waits count as computing."""
LARGEST_ACKNOWLEDGEMENT = 200
"""Bytes; packets that are larger on average carry data."""
POLL_SECONDS = 0.004
"""Between two looks at the card's counter while messages are under way."""


def interface_counts(interface: str) -> tuple[float, float]:
    """Bytes and packets that this host's ``interface`` has sent so far; NaN where there is none."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return float(counts.split()[8]), float(counts.split()[9])
    return math.nan, math.nan


class Card:
    """Sees when data leaves through ``interface`` while a collective is under way."""

    def __init__(self, interface: str) -> None:
        self._interface = interface
        self._seen: list[float] = []
        self._looking = threading.Event()
        threading.Thread(target=self._look, daemon=True, name="laconic-card").start()

    def start(self) -> None:
        """A collective starts."""
        self._seen = []
        self._looking.set()

    def stop(self, start: float) -> list[tuple[float, float]]:
        """It has ended; when its data left, ``start`` being when it started."""
        self._looking.clear()
        return stretches(start, tuple(self._seen))  # a last look may still add to it

    def _look(self) -> None:
        while self._looking.wait():
            seen, before = self._seen, interface_counts(self._interface)
            while self._looking.is_set() and seen is self._seen:
                time.sleep(POLL_SECONDS)
                now = interface_counts(self._interface)
                packets = now[1] - before[1]
                if packets and (now[0] - before[0]) / packets > LARGEST_ACKNOWLEDGEMENT:
                    seen.append(time.perf_counter())
                before = now


def stretches(start: float, seen: Sequence[float]) -> list[tuple[float, float]]:
    """When data left without a pause, if it was ``seen`` to leave at these times. What leaves at
    once may be 20 kB, which takes its time on a slow network: a pause is four times as long as
    what is usual between two sights, and five looks at least."""
    if not seen:
        return []
    gaps = [after - before for before, after in pairwise([start, *seen])]
    usual = median(gaps)
    found = [(start, start)]
    for at, gap in zip(seen, gaps, strict=True):
        if gap > max(4 * usual, 5 * POLL_SECONDS):
            found.append((at - usual, at))
        else:
            found[-1] = found[-1][0], at
    return found


class Recorder:
    """One rank's record of a run: between `resume` and `pause`, and of bounded length."""

    def __init__(self, interface: str | None = None) -> None:
        self._card = None if interface is None else Card(interface)
        self._lock = threading.Lock()
        self.ran: list[tuple[float, float]] = []
        """When the training clock ran."""
        self._resumed: float | None = None
        self._first: list[Span] = []
        self._last: deque[Span] = deque(maxlen=KEPT)
        self._lost = False
        self._bytes: dict[int, int] = {}

    def resume(self) -> None:
        """The training clock starts."""
        self._resumed = time.perf_counter()

    def pause(self) -> None:
        """The training clock stops."""
        assert self._resumed is not None, "paused before it was resumed"
        self.ran.append((self._resumed, time.perf_counter()))
        self._resumed = None

    def waited(self, start: float, end: float) -> None:
        """Training stood still."""
        self._keep((start, end, "wait"))

    def book(self, step: int | None, amount: Cost) -> None:
        """The round after ``step`` sends so much; None: it is no round's."""
        if step is not None:
            self._bytes[step] = self._bytes.get(step, 0) + amount.bytes

    @contextmanager
    def sending(self, step: int | None, amount: Cost) -> Iterator[None]:
        """The block is a collective of the round after ``step``; None: of no round."""
        self.book(step, amount)
        if self._resumed is None:
            yield
            return
        if self._card is not None:
            self._card.start()
        start = time.perf_counter()
        yield
        end = time.perf_counter()
        for begin, finish in [(start, end)] if self._card is None else self._card.stop(start):
            self._keep((begin, min(finish, end), "send"))

    def _keep(self, span: Span) -> None:
        with self._lock:
            if self._resumed is None or span[1] - span[0] < SHORTEST:
                return
            if len(self._first) < KEPT:
                self._first.append(span)
            else:
                self._lost = self._lost or len(self._last) == KEPT
                self._last.append(span)

    def spans(self) -> list[Span]:
        """All that is known, in the order of time; nothing of the middle of a long run."""
        with self._lock:
            kept = [*self._first, *self._last]
            unknown = (self._first[-1][1], self._last[0][1]) if self._lost else None
        waits = sorted((start, end) for start, end, kind in kept if kind == "wait")
        computed = without(self.ran, [*waits, unknown] if unknown else waits)
        return sorted([*kept, *((start, end, "compute") for start, end in computed)])

    def rounds(self) -> list[Rounds]:
        """What the rounds sent, those that follow each other regularly as one."""
        return in_runs(self._bytes)


def without(
    whole: Sequence[tuple[float, float]], holes: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """The intervals of ``whole``, which do not overlap, less those of ``holes``."""
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


def on_one_clock(
    ran: Sequence[Sequence[Sequence[float]]], spans: Sequence[Sequence[Span]]
) -> tuple[tuple[Span, ...], ...]:
    """The ranks' spans in seconds from the start of the training, without the time in which it
    stood on all ranks. ``ran``: by rank, the intervals of its training clock, as many on each."""
    if not ran or not ran[0]:
        return tuple(() for _ in spans)
    starts = [min(interval[0] for interval in same) for same in zip(*ran, strict=True)]
    ends = [max(interval[1] for interval in same) for same in zip(*ran, strict=True)]
    pauses = [(0.0, starts[0]), *zip(ends, starts[1:], strict=False)]

    def clock(time: float) -> float:
        stood: float = sum(max(min(time, until) - since, 0.0) for since, until in pauses)
        return round(time - stood, 5)

    return tuple(
        tuple((clock(start), clock(end), kind) for start, end, kind in rank) for rank in spans
    )


def in_runs(sent: dict[int, int]) -> list[Rounds]:
    """Rounds (bytes by step) as arithmetic progressions of steps with equal bytes."""
    runs: list[Rounds] = []
    open_runs: dict[int, int] = {}  # the latest run of so many bytes
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


class Watched(Wrapped):
    """``link``, with every collective told to a recorder."""

    def __init__(self, link: Link, recorder: Recorder) -> None:
        super().__init__(link)
        self._recorder = recorder
        self._step: int | None = None

    def around(self, collective: str, amount: Cost, received: int) -> AbstractContextManager[None]:
        if collective == "agree":  # its messages were sent before
            self._recorder.book(self._step, amount)
            return nullcontext()
        return self._recorder.sending(self._step, amount)

    def like(self, link: Link) -> Link:
        return Watched(link, self._recorder)

    def begin_call(self, call: Call, *, wait: bool) -> bool:
        # ranks wait for a call of the user's, and not for a round; gradients come before their step
        self._step = None if wait else call.step + (call.name == GRADIENTS)
        return super().begin_call(call, wait=wait)
