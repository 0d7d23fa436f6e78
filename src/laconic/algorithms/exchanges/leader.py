"""Broadcast of the leader's message. The leader is the worker with the lowest score."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.algorithms.exchange import Arrival, Combine, Exchange
from laconic.algorithms.scores import elect
from laconic.algorithms.update import Clock, State
from laconic.links import cost
from laconic.links.cost import Cost
from laconic.links.link import AsyncLink


@dataclass(frozen=True)
class Leader(Exchange):
    """Gather the scores (16 bytes each), then broadcast the message of the worker whose score is
    lowest.

    If scores are equal, the lowest rank wins. ``window``: how many recent losses a score averages,
    if losses are reported.
    """

    window: int

    @property
    def score_window(self) -> int:
        return self.window

    def cost(self, length: int, itemsize: int, n: int) -> Cost:
        return cost.gather(16, n) + cost.broadcast(length * itemsize, n)

    async def run(
        self, link: AsyncLink, message: Tensor, combine: Combine, clock: Clock, state: State
    ) -> Arrival:
        leader = elect(await link.gather(torch.tensor(clock.score, dtype=torch.float64)))
        await link.broadcast(message, leader)
        return Arrival(message)
