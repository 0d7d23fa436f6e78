"""Workers keep their momentum private and share only the largest frequencies of every tile.

g_i is the gradient on worker i, e_i its momentum, and DCT the transform of `laconic.codecs.dct`:

    e_i <- decay*e_i + g_i
    q_i  = the k largest coefficients of each tile of DCT(e_i)
    e_i <- e_i - inverse DCT(q_i)
    result = inverse DCT(mean(q_i)) ,  each coefficient averaged over the workers that sent it

DeMo: Peng, Quesnelle, Kingma 2024, arXiv 2411.19870, Algorithm 1. The mean over senders follows the
authors' code. A coefficient that nobody sent is 0. The authors' code multiplies the gradient by the
learning rate before adding it to e. With a constant rate this is equivalent, because it affects
neither which coefficients are the largest nor their signs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from laconic.algorithms.exchange import Arrival, Combine, Exchange
from laconic.algorithms.exchanges.coding import check_codable
from laconic.algorithms.update import Clock, Slot, State
from laconic.codecs import TopK
from laconic.codecs.dct import Tiling
from laconic.codecs.topk import INDEX_BITS, index_bytes, unpack_indices
from laconic.errors import NotFiniteError, check_float, check_int
from laconic.links import cost
from laconic.links.cost import Cost
from laconic.links.link import AsyncLink
from laconic.tensors import state_dtype

BySize = dict[int, Tensor]
"""Coefficients, (tiles, elements of a tile), by tile size. Tiles of one size are coded together."""


@dataclass(frozen=True)
class FastComponents(Exchange):
    """Average the part of the momentum that is sent, which the paper calls fast components.

    ``decay`` is in [0, 1]. ``k`` is the number of coefficients sent for each tile; a tile with
    fewer elements sends all of them. ``chunk`` is the largest side of a tile, at most 64.

    A tile of h by w elements is sent as min(k, h*w) indices of 12 bits and as many float32 values.
    With the defaults of `laconic.demo` this is 0.34 bits per element of a matrix whose sides are
    multiples of 64. It is 22 bits if a side is prime, because the tiles are then vectors, so choose
    sizes with large divisors. Every worker sends its message to every other, (n-1) times in total.

    All workers compute the result from the same messages. They hold the same bits if their
    machines compute alike. State: each worker's own momentum, as long as the message.

    Raises `NotFiniteError` on every rank if a rank has NaN or an infinity. The state then remains
    as it was.
    """

    decay: float
    k: int
    chunk: int
    shapes: tuple[torch.Size, ...] = ()
    """Shapes of the tensors in a message."""

    agrees = True
    scope = "tensors"
    slots: ClassVar[dict[str, Slot]] = {"momentum": "private"}

    def __post_init__(self) -> None:
        check_float("decay", self.decay, 0.0, most=1.0)
        check_int("k", self.k, 1)
        if check_int("chunk", self.chunk, 1) > 2 ** (INDEX_BITS // 2):
            raise ValueError(f"chunk must be at most {2 ** (INDEX_BITS // 2)}, not {self.chunk}")

    def multiple(self, n: int) -> int:
        return 1

    def shaped(self, shapes: Sequence[torch.Size]) -> Exchange:
        return replace(self, shapes=tuple(shapes))

    def init(self, x: Tensor, owned: slice) -> State:
        assert len(x) >= sum(shape.numel() for shape in self.shapes), "the bucket lacks tensors"
        check_codable(self, x)
        return {"momentum": torch.zeros_like(x)}

    def cost(self, length: int, itemsize: int, n: int) -> Cost:
        tilings = [Tiling.of(shape, self.chunk) for shape in self.shapes]
        return cost.gather(sum(t.count * self._codec(t.size).nbytes(t.size) for t in tilings), n)

    async def run(
        self, link: AsyncLink, message: Tensor, combine: Combine, clock: Clock, state: State
    ) -> Arrival:
        tilings = [Tiling.of(shape, self.chunk) for shape in self.shapes]
        e = message.to(state_dtype(message.dtype)).add_(state["momentum"], alpha=self.decay)
        tensors = torch.split(e, [t.numel for t in tilings])
        coefficients: dict[int, list[Tensor]] = {}
        for t, x in zip(tilings, tensors, strict=True):
            coefficients.setdefault(t.size, []).append(t.forward(x))
        joined = {size: torch.cat(c) for size, c in coefficients.items()}
        payload = torch.cat([self._encode(c) for c in joined.values()])
        rows = await link.gather(payload)
        counts = {size: len(c) for size, c in joined.items()}
        mean = self._mean(rows, counts, e.dtype)
        if not _finite(mean):
            by_rank = [self._mean(row[None], counts, e.dtype) for row in rows]
            ranks = [r for r, means in enumerate(by_rank) if not _finite(means)]
            raise NotFiniteError(f"ranks {ranks} of its link had NaN or infinite values to send")
        sent = self._mean(payload[None], counts, e.dtype)
        torch.sub(e, _inverse(tilings, sent), out=state["momentum"])
        return Arrival(combine(_inverse(tilings, mean)))

    def _codec(self, size: int) -> TopK:
        return TopK(min(self.k, size), size)

    def _encode(self, coefficients: Tensor) -> Tensor:
        """Return the codes of all tiles, one after the other.

        NaN and infinities count as the largest values and are sent unchanged, so all ranks learn of
        them.
        """
        count, size = coefficients.shape
        codec = self._codec(size)
        payload = coefficients.new_empty(count, codec.nbytes(size), dtype=torch.uint8)
        codec.encode_rows(coefficients, payload)
        return payload.view(-1)

    def _mean(self, rows: Tensor, counts: Mapping[int, int], dtype: torch.dtype) -> BySize:
        """Average each coefficient over the ``rows`` that contain it, in row order.

        Each row is one rank's code.
        """
        means = {}
        start = 0
        for size, count in counts.items():
            codec = self._codec(size)
            stop = start + count * codec.nbytes(size)
            total = torch.zeros(count, size, dtype=dtype, device=rows.device)
            senders = torch.zeros_like(total)
            for row in rows[:, start:stop]:
                indices, values = _decode(row.view(count, -1), codec.k)
                total.scatter_add_(1, indices, values.to(dtype))
                senders.scatter_add_(1, indices, torch.ones_like(values, dtype=dtype))
            means[size] = total.div_(senders.clamp_(min=1))
            start = stop
        return means


def _decode(codes: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the indices and the values of the tiles' coefficients, (tiles, k) each."""
    size = index_bytes(k)
    # a contiguous copy is aligned, so it can be viewed as float32
    values = codes[:, size:].clone(memory_format=torch.contiguous_format)
    return unpack_indices(codes[:, :size], k), values.view(torch.float32)


def _inverse(tilings: Sequence[Tiling], by_size: BySize) -> Tensor:
    """Return the tensors with these coefficients, flat and one after the other."""
    counts = {size: [t.count for t in tilings if t.size == size] for size in by_size}
    own = {size: iter(torch.split(c, counts[size])) for size, c in by_size.items()}
    return torch.cat([t.inverse(next(own[t.size])) for t in tilings])


def _finite(by_size: BySize) -> bool:
    return bool(torch.stack([c.isfinite().all() for c in by_size.values()]).all())
