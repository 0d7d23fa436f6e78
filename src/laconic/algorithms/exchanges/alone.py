"""No exchange: each worker uses its own message in place of the mean."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from laconic.algorithms.exchange import Arrival, Combine, Exchange
from laconic.algorithms.update import Clock, State
from laconic.links.link import AsyncLink


@dataclass(frozen=True)
class Alone(Exchange):
    """Send nothing. Each worker combines its own message, so the workers remain different."""

    communicates = False

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

    def replicated(self) -> Exchange:
        return self
