"""Messages to peers alone: gossip."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.algorithms.round import Arrival, Clock, Combine, Exchange, State
from laconic.algorithms.topology import Graph
from laconic.buckets import state_dtype
from laconic.links import cost
from laconic.links.cost import Cost
from laconic.links.link import Link


@dataclass(frozen=True)
class Push(Exchange):
    """The message to each out-peer of ``graph``; what arrives is the sum of the in-peers', each
    times its share, in the order of their ranks. Sends ``peers`` times the message, whatever the
    number of workers; a message that has a push weight takes it along in 8 bytes more, and is
    its sender's to scale: its share is 1."""

    graph: Graph

    gossips = True

    def out_degree(self, clock: Clock) -> int:
        at = clock.worker, clock.workers, clock.executed, clock.seed
        return len(self.graph.out_peers(*at))

    def cost(self, length: int, itemsize: int, n: int) -> Cost:
        peers = max(len(self.graph.out_peers(rank, n, 0, 0)) for rank in range(n))
        return cost.swap(length * itemsize, peers)

    def run(
        self, link: Link, message: Tensor, combine: Combine, clock: Clock, state: State
    ) -> Arrival:
        at = link.size, clock.executed, clock.seed
        sources = self.graph.in_peers(link.rank, *at)
        weighted = clock.weight is not None
        parcel = message if clock.weight is None else _with_weight(message, clock.weight)
        parcels = link.swap(parcel, self.graph.out_peers(link.rank, *at), sources)
        total = torch.zeros_like(message, dtype=state_dtype(message.dtype))
        weight = 0.0
        for source, received in zip(sources, parcels, strict=True):
            share = 1.0 if weighted else self.graph.share(link.rank, source, *at)
            total.add_(received[: len(message)], alpha=share)
            weight += _weight(received[len(message) :]) if weighted else share
        return Arrival(total, weight)


def _with_weight(message: Tensor, weight: float) -> Tensor:
    """``message``, and behind it the 8 bytes of the weight as elements of its dtype."""
    rider = torch.tensor([weight], dtype=torch.float64, device=message.device)
    return torch.cat([message, rider.view(message.dtype)])


def _weight(rider: Tensor) -> float:
    return float(rider.clone().view(torch.float64))
