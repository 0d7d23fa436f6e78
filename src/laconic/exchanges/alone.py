"""No exchange: each worker's own message stands for the mean."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from laconic.links.link import Link
from laconic.round import Arrival, Clock, Combine


@dataclass(frozen=True)
class Alone:
    """Nothing is sent; each worker combines its own message, and they go on disagreeing."""

    communicates = False
    agrees = False
    scored = 0

    def region(self, link: Link, length: int) -> slice:
        return slice(0, length)

    def run(self, link: Link, message: Tensor, combine: Combine, clock: Clock) -> Arrival:
        result = combine(message)
        return Arrival(message if result is message else message.copy_(result))
