"""Record what one rank of a race does when: computing, sending, waiting.

Times are from `time.perf_counter`, which all processes of a machine share. A rank is waiting while
training is blocked by a round, and computing for the rest of the time on the training clock. It is
sending while a collective is in progress.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from laconic.lab.race.result import Span

MAX_SPANS = 400
"""Number of sends and waits kept from the beginning of a run, and again from its end."""
SHORTEST = 1e-4
"""In seconds. Shorter sends and waits are dropped; such waits count as computing."""


class Recorder:
    """Records one rank's run between `resume` and `pause`, with bounded memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.ran: list[tuple[float, float]] = []
        """Intervals in which the training clock ran."""
        self._resumed: float | None = None
        self._first: list[Span] = []
        self._last: deque[Span] = deque(maxlen=MAX_SPANS)
        self._dropped = False

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

    def add_send(self, start: float, end: float) -> None:
        """Record a collective."""
        self._add((start, end, "send"))

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
