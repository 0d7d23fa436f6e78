"""Stands in for a slow network: a link that takes as long as the cost model predicts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from laconic.links.cost import Cost
from laconic.links.link import Link
from laconic.links.wrapped import Wrapped
from laconic.units import parse_duration, parse_rate


class Throttled(Wrapped):
    """``link``, slowed down to ``bandwidth`` per rank and ``latency`` per round trip.

    ``bandwidth``: bit/s, or text such as ``"100mbit"``; None: unlimited. ``latency``: seconds, or
    text such as ``"20ms"``; each message takes half of it. A collective returns the cost model's
    seconds after the last rank joined it. That moment cannot be seen from outside the inner link,
    so the inner link's own time is added: use it around links that are fast by comparison."""

    def __init__(
        self, link: Link, bandwidth: float | str | None = None, latency: float | str = 0.0
    ) -> None:
        super().__init__(link)
        self.latency = parse_duration(str(latency))
        self._free = 0.0
        self._rate = float("inf") if bandwidth is None else parse_rate(str(bandwidth))

    @property
    def joined(self) -> float:
        return self._free

    @contextmanager
    def around(self, collective: str, amount: Cost, received: int) -> Iterator[None]:
        """The link is busy for the collective's time, from when the inner link completed it."""
        yield
        start = max(self.link.joined, self._free)
        self._free = start + amount.seconds(self._rate, self.latency / 2)
        time.sleep(max(self._free - time.perf_counter(), 0.0))
