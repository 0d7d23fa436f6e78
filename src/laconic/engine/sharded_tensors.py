"""Whole tensors where each rank of a worker has shards: brought together, and computed by one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from laconic.algorithms.update import Tensors
from laconic.buckets import Bucket
from laconic.links.comm_thread import CommThread
from laconic.links.link import Link


class ShardedTensors(Tensors):
    """Those of ``bucket``, of which every rank of ``inside`` has a shard.

    `map` sends each chosen tensor's shards to one rank, which computes, and returns the results:
    twice (r-1)/r of the tensors' bytes for each of r ranks. The ranks share the tensors by size.
    """

    def __init__(self, bucket: Bucket, inside: Link, comm: CommThread) -> None:
        super().__init__([s.tensor.shape for s in bucket.segments])
        self._axes = [s.tensor.placements[0].dim for s in bucket.segments]  # type: ignore[attr-defined]
        self._sizes = bucket.sizes
        self._inside, self._comm = inside, comm

    def only(self, index: int) -> Tensors:
        raise ValueError("an update that changes matrices after every step needs whole ones")

    def map(
        self,
        flat: Tensor,
        function: Callable[[Tensor], Tensor],
        where: Callable[[torch.Size], bool] = lambda shape: True,
    ) -> None:
        self._comm.call(partial(self._map, flat, function, where), "matrices of a worker")

    def _map(
        self,
        flat: Tensor,
        function: Callable[[Tensor], Tensor],
        where: Callable[[torch.Size], bool],
    ) -> None:
        ranks, own = self._inside.size, self._inside.rank
        pieces = torch.split(flat[: sum(self._sizes)], self._sizes)
        chosen = [k for k, shape in enumerate(self.shapes) if where(shape)]
        if not chosen:
            return
        ends = [0] * ranks  # of the row for each rank
        places: dict[int, tuple[int, int]] = {}  # the rank that computes, and where its row begins
        for k in sorted(chosen, key=lambda k: -self.shapes[k].numel()):
            rank = ends.index(min(ends))
            places[k] = rank, ends[rank]
            ends[rank] += self._shard(k, 0).numel()  # the first shard is the largest
        rows, came = (flat.new_zeros(ranks, max(ends)) for _ in range(2))
        for k, (rank, start) in places.items():
            rows[rank, start : start + self._sizes[k]] = pieces[k]
        self._inside.all_to_all(rows, came)
        for k, (rank, start) in places.items():
            if rank == own:
                shapes = [self._shard(k, r) for r in range(ranks)]
                shards = [
                    row[start : start + shape.numel()].view(shape)
                    for row, shape in zip(came, shapes, strict=True)
                ]
                axis = self._axes[k]
                result = function(torch.cat(shards, axis))
                parts = torch.split(result, [shape[axis] for shape in shapes], axis)
                for shard, part in zip(shards, parts, strict=True):
                    shard.copy_(part)
        self._inside.all_to_all(came, rows)
        for k, (rank, start) in places.items():
            pieces[k].copy_(rows[rank, start : start + self._sizes[k]])

    def _shard(self, k: int, rank: int) -> torch.Size:
        """The shape of the shard of tensor ``k`` on a rank, as FSDP cuts it."""
        shape, axis = list(self.shapes[k]), self._axes[k]
        each = -(-shape[axis] // self._inside.size)
        shape[axis] = min(max(shape[axis] - rank * each, 0), each)
        return torch.Size(shape)
