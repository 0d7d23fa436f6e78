"""The mean over all workers of the link: on whole messages, or on one slice per worker. Or no mean:
each worker uses its own message in its place."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from laconic.algorithms.exchange import Arrival, Combine, Exchange
from laconic.algorithms.update import Clock, State
from laconic.links import cost
from laconic.links.cost import Cost
from laconic.links.link import AsyncLink


@dataclass(frozen=True)
class Mean(Exchange):
    """All-reduce, after which every worker combines everything. Sends 2(n-1)/n of the message."""

    agrees = True

    def replicated(self) -> Exchange:
        return self

    def cost(self, length: int, itemsize: int, n: int) -> Cost:
        return cost.mean(length * itemsize, n, length % n == 0)

    async def run(
        self, link: AsyncLink, message: Tensor, combine: Combine, clock: Clock, state: State
    ) -> Arrival:
        await link.mean(message)
        result = combine(message)
        return Arrival(message if result is message else message.copy_(result))


@dataclass(frozen=True)
class ShardedMean(Exchange):
    """Reduce-scatter, combine on the owner's slice, all-gather.

    Sends the same bytes as one all-reduce. Each worker does 1/n of the outer step's arithmetic and
    stores 1/n of its state.
    """

    agrees = True

    def replicated(self) -> Exchange:
        return Mean()

    def owners(self, n: int) -> int | None:
        return n

    def cost(self, length: int, itemsize: int, n: int) -> Cost:
        at = length * itemsize, n
        return cost.reduce_scatter(*at) + cost.all_gather(*at)

    async def run(
        self, link: AsyncLink, message: Tensor, combine: Combine, clock: Clock, state: State
    ) -> Arrival:
        result = combine(await link.reduce_scatter(message))
        await link.all_gather(result, message)
        return Arrival(message)


@dataclass(frozen=True)
class Alone(Exchange):
    """Send nothing. Each worker combines its own message, so the workers remain different."""

    communicates = False

    def replicated(self) -> Exchange:
        return self

    async def run(
        self, link: AsyncLink, message: Tensor, combine: Combine, clock: Clock, state: State
    ) -> Arrival:
        result = combine(message)
        return Arrival(message if result is message else message.copy_(result))


@dataclass(frozen=True)
class Identical(Alone):
    """Send nothing, because the workers hold the same x, to the last bit: each one's message is the
    mean. For rounds over a recipe that averages gradients in every step, such as `ddp`."""

    agrees = True
