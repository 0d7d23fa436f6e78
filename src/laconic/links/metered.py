"""The byte ledger: a link that counts what the inner link sends, by the cost model's formulas."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from laconic.links.calls import Call
from laconic.links.cost import Cost
from laconic.links.link import Link
from laconic.links.wrapped import Wrapped

MEASUREMENT = "measurement"
"""Under what `Ledger.by_collective` has the bytes of measurements."""


@dataclass
class CallTotals:
    """What went over the link in the calls of one name, such as that of a round: how many calls,
    the step of the last one, the payload bytes sent, and the seconds in collectives, the wait for
    slower ranks included (on CUDA: until they were queued)."""

    count: int = 0
    step: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass
class Ledger:
    """Payload bytes that this rank sent and received; the sent ones also by collective, by set of
    ranks, and by name of the call.

    Not counted: packet headers and acknowledgements of the network (below 5% for large messages).
    ``measures``: see `measuring`.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    by_collective: dict[str, int] = field(default_factory=dict)
    by_set: dict[str, int] = field(default_factory=dict)
    by_call: dict[str, CallTotals] = field(default_factory=dict)
    call: str = "setting up"
    measures: bool = False

    def begin(self, call: Call) -> None:
        """Book what comes under the name of ``call`` until the next call begins."""
        self.call = call.name
        totals = self.by_call.setdefault(call.name, CallTotals())
        totals.count += 1
        totals.step = call.step

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """A context for collectives that only measure the network: all of them are booked as
        `MEASUREMENT`."""
        self.measures = True
        try:
            yield
        finally:
            self.measures = False

    @contextmanager
    def book(self, collective: str, ranks: str, amount: Cost, received: int) -> Iterator[None]:
        """A context for a collective among the set of ranks named ``ranks``: booked once it has
        completed."""
        start = time.perf_counter()
        yield
        totals = self.by_call.setdefault(self.call, CallTotals())
        totals.seconds += time.perf_counter() - start
        totals.bytes += amount.bytes
        self.bytes_sent += amount.bytes
        self.bytes_received += received
        collective = MEASUREMENT if self.measures else collective
        for total, key in ((self.by_collective, collective), (self.by_set, ranks)):
            total[key] = total.get(key, 0) + amount.bytes


class Metered(Wrapped):
    """``link``, with every collective booked in ``ledger`` under the ``name`` of its set of
    ranks."""

    overlaps = True

    def __init__(self, link: Link, ledger: Ledger | None = None, name: str = "world") -> None:
        super().__init__(link)
        self.name = name
        self.ledger = Ledger() if ledger is None else ledger

    def around(self, collective: str, amount: Cost, received: int) -> AbstractContextManager[None]:
        return self.ledger.book(collective, self.name, amount, received)

    def begin_call(self, call: Call, *, wait: bool) -> bool:
        self.ledger.begin(call)
        return super().begin_call(call, wait=wait)
