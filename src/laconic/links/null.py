"""A link that sends nothing: of a set of one rank, or to time the computation of rounds without a
network.

It acts as if every other rank sent what this one sends, so that everything that is decoded, checked
and summed is well-formed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.links.calls import Call
from laconic.links.link import Quiet


class NullLink(Quiet):
    """The link of ``rank`` among ``size`` ranks that all have the same tensors. `mean` does
    nothing: a real link's sum is timed with the network."""

    threaded = True

    def __init__(self, size: int = 1, rank: int = 0) -> None:
        self.size, self.rank = size, rank

    @property
    def joined(self) -> float:
        return time.perf_counter()

    def begin_call(self, call: Call, *, wait: bool) -> bool:
        return False

    def mean(self, x: Tensor) -> None:
        """Does nothing: all ranks have the same."""

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x.view(self.size, -1)[self.rank]

    def all_gather(self, mine: Tensor, out: Tensor) -> None:
        rows = out.view(self.size, -1)
        if mine.data_ptr() != rows.data_ptr():
            rows[0].copy_(mine)
        rows[1:].copy_(rows[0].expand_as(rows[1:]))

    def all_to_all(self, x: Tensor, out: Tensor) -> None:
        out.copy_(x)

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        """Does nothing: all ranks have the same."""

    def swap(self, x: Tensor, to: Sequence[int], source: Sequence[int]) -> list[Tensor]:
        return [x] * len(source)

    def gather(self, x: Tensor) -> Tensor:
        return torch.stack([x] * self.size)

    def split(self, sets: Sequence[Sequence[int]]) -> NullLink:
        mine = next(ranks for ranks in sets if self.rank in ranks)
        return NullLink(len(mine), mine.index(self.rank))
