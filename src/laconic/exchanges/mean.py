"""The mean over all workers of the link: whole, or cut into one slice per worker."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from laconic.links.link import Link
from laconic.round import Arrival, Clock, Combine, Exchange


@dataclass(frozen=True)
class Mean(Exchange):
    """All-reduce; every worker then combines everything. Sends 2(n-1)/n of the message."""

    agrees = True

    def run(self, link: Link, message: Tensor, combine: Combine, clock: Clock) -> Arrival:
        link.mean(message)
        result = combine(message)
        return Arrival(message if result is message else message.copy_(result))


@dataclass(frozen=True)
class ShardedMean(Exchange):
    """Reduce-scatter, combine on the owner's slice, all-gather: the bytes of one all-reduce, 1/n
    of the outer step's arithmetic and state on each worker."""

    agrees = True

    def region(self, link: Link, length: int) -> slice:
        each = length // link.size
        return slice(link.rank * each, (link.rank + 1) * each)

    def run(self, link: Link, message: Tensor, combine: Combine, clock: Clock) -> Arrival:
        result = combine(link.reduce_scatter(message))
        link.all_gather(result, message)
        return Arrival(message)
