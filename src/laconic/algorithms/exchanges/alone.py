"""No exchange: each worker's own message stands for the mean."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from laconic.algorithms.round import Arrival, Clock, Combine, Exchange, State
from laconic.links.link import Link


@dataclass(frozen=True)
class Alone(Exchange):
    """Nothing is sent; each worker combines its own message, and they go on disagreeing."""

    communicates = False

    def run(
        self, link: Link, message: Tensor, combine: Combine, clock: Clock, state: State
    ) -> Arrival:
        result = combine(message)
        return Arrival(message if result is message else message.copy_(result))
