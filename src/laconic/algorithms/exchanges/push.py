"""Gossip: messages go to peers only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.algorithms.exchange import Arrival, Combine, Exchange
from laconic.algorithms.topology import Graph
from laconic.algorithms.update import Clock, State
from laconic.links import cost
from laconic.links.cost import Cost
from laconic.links.link import AsyncLink
from laconic.tensors import state_dtype


@dataclass(frozen=True)
class Push(Exchange):
    """Send the message to each out-peer of ``graph``, and sum what arrives from the in-peers.

    Each received message is multiplied by its share, and the sum is taken in rank order. A message
    with a push weight carries it in 8 extra bytes. Its sender has already scaled it, so its share
    is 1. Sends ``peers`` times the message, whatever the number of workers.
    """

    graph: Graph

    def out_degree(self, clock: Clock) -> int:
        at = clock.worker, clock.workers, clock.executed, clock.seed
        return len(self.graph.out_peers(*at))

    def replicated(self) -> Exchange:
        return self

    def cost(self, length: int, itemsize: int, n: int) -> Cost:
        peers = max(len(self.graph.out_peers(rank, n, 0, 0)) for rank in range(n))
        return cost.swap(length * itemsize, peers)

    async def run(
        self, link: AsyncLink, message: Tensor, combine: Combine, clock: Clock, state: State
    ) -> Arrival:
        at = link.size, clock.executed, clock.seed
        sources, peers = self.graph.in_peers(link.rank, *at), self.graph.out_peers(link.rank, *at)
        weighted = clock.weight is not None
        total = torch.zeros_like(message, dtype=state_dtype(message.dtype))
        weight, parcel = 0.0, message
        if clock.weight is not None:
            # x and w were divided for `out_degree` peers; workers may have come and gone since
            share, own = clock.out_degree / len(peers) if peers else 0.0, clock.out_degree
            if not peers:
                total.add_(message, alpha=own)
                weight = own * clock.weight
            elif share != 1:
                message = message * share
            parcel = _with_weight(message, clock.weight * share)
        parcels = await link.swap(parcel, peers, sources)
        for source, received in zip(sources, parcels, strict=True):
            if received is None:  # a newcomer repeats a round: nobody else has this message
                continue
            share = 1.0 if weighted else self.graph.share(link.rank, source, *at)
            total.add_(received[: len(message)], alpha=share)
            weight += _weight(received[len(message) :]) if weighted else share
        return Arrival(total, weight)


def _with_weight(message: Tensor, weight: float) -> Tensor:
    """Append the weight's 8 bytes to ``message``, as elements of its dtype, at least one."""
    padding = [0.0] * (message.itemsize // 8 - 1)  # one number of complex128 has 16 bytes
    tail = torch.tensor([weight, *padding], dtype=torch.float64, device=message.device)
    return torch.cat([message, tail.view(message.dtype)])


def _weight(tail: Tensor) -> float:
    return float(tail.clone().view(torch.float64)[0])
