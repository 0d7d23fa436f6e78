"""A slow network where there is none: a link that takes as long as the cost model says."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from laconic.links import cost
from laconic.links.cost import Cost
from laconic.links.link import Link
from laconic.links.metered import size_of
from laconic.units import parse_duration, parse_rate


class Throttled:
    """``link``, slowed down to ``bandwidth`` per rank and ``latency`` per message.

    ``bandwidth``: bit/s, or text such as ``"100mbit"``; None: unlimited. ``latency``: seconds, or
    text such as ``"20ms"``. A collective returns the cost model's seconds after the last rank
    joined it. Its start cannot be seen from outside the link inside, so that link's own time
    comes on top: use it over links that are fast by comparison.
    """

    def __init__(
        self, link: Link, bandwidth: float | str | None = None, latency: float | str = 0.0
    ) -> None:
        self.link = link
        self.bandwidth, self.latency = bandwidth, parse_duration(str(latency))
        self._free = 0.0
        self._rate = float("inf") if bandwidth is None else parse_rate(str(bandwidth))

    @property
    def rank(self) -> int:
        return self.link.rank

    @property
    def size(self) -> int:
        return self.link.size

    @property
    def threaded(self) -> bool:
        return self.link.threaded

    @property
    def joined(self) -> float:
        return self._free

    def _pass(self, amount: Cost) -> None:
        """The link is taken for the collective's time, from when it was complete without."""
        start = max(self.link.joined, self._free)
        self._free = start + amount.seconds(self._rate, self.latency)
        time.sleep(max(self._free - time.perf_counter(), 0.0))

    def agree(self, step: int, code: int, names: Sequence[str], *, wait: bool) -> bool:
        spoke = self.link.agree(step, code, names, wait=wait)
        if spoke:
            self._pass(cost.gather(8, self.size))
        return spoke

    def check(self) -> None:
        self.link.check()

    def leave(self, broken: bool) -> None:
        self.link.leave(broken)

    def mean(self, x: Tensor) -> None:
        self.link.mean(x)
        self._pass(cost.mean(size_of(x), self.size, x.numel() % self.size == 0))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        own = self.link.reduce_scatter(x)
        self._pass(cost.reduce_scatter(size_of(x), self.size))
        return own

    def all_gather(self, mine: Tensor, out: Tensor) -> None:
        self.link.all_gather(mine, out)
        self._pass(cost.all_gather(size_of(out), self.size))

    def swap(self, x: Tensor, to: Sequence[int], source: Sequence[int]) -> list[Tensor]:
        received = self.link.swap(x, to, source)
        self._pass(cost.swap(size_of(x), len(to)))
        return received

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        self.link.broadcast(x, root)
        self._pass(cost.broadcast(size_of(x), self.size))

    def gather(self, x: Tensor) -> Tensor:
        everyone = self.link.gather(x)
        self._pass(cost.gather(size_of(x), self.size))
        return everyone

    def split(self, sets: Sequence[Sequence[int]]) -> Link:
        return Throttled(self.link.split(sets), self.bandwidth, self.latency)

    def status(self, text: str) -> None:
        self.link.status(text)
