"""Messages to peers alone: gossip."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.links.link import Link
from laconic.round import Arrival, Clock, Combine
from laconic.tensors import state_dtype
from laconic.topology import Graph


@dataclass(frozen=True)
class Push:
    """The message to each out-peer of ``graph``; what arrives is the sum of the in-peers', each
    times its share, in the order of their ranks. Sends ``peers`` times the message, whatever the
    number of workers; where ``weighted``, with its push weight behind it in 8 bytes."""

    graph: Graph
    weighted: bool = True

    communicates = True
    agrees = False
    scored = 0

    def region(self, link: Link, length: int) -> slice:
        return slice(0, length)

    def run(self, link: Link, message: Tensor, combine: Combine, clock: Clock) -> Arrival:
        at = link.size, clock.executed, clock.seed
        sources = self.graph.in_peers(link.rank, *at)
        parcel = _with_weight(message, clock.weight) if self.weighted else message
        parcels = link.swap(parcel, self.graph.out_peers(link.rank, *at), sources)
        total = torch.zeros_like(message, dtype=state_dtype(message.dtype))
        weight = 0.0
        for source, received in zip(sources, parcels, strict=True):
            share = self.graph.share(link.rank, source, *at)
            total.add_(received[: len(message)], alpha=share)
            weight += share * (_weight(received[len(message) :]) if self.weighted else 1.0)
        return Arrival(total, weight)


def _with_weight(message: Tensor, weight: float) -> Tensor:
    """``message``, and behind it the 8 bytes of the weight as elements of its dtype."""
    rider = torch.tensor([weight], dtype=torch.float64, device=message.device)
    return torch.cat([message, rider.view(message.dtype)])


def _weight(rider: Tensor) -> float:
    return float(rider.clone().view(torch.float64))
