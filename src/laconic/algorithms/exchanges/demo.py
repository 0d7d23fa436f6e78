"""Each worker keeps its momentum to itself, but for the largest frequencies of every tile.

With g_i the gradient on worker i, e_i the momentum there, DCT that of `laconic.codecs.dct`:

    e_i <- decay*e_i + g_i
    q_i  = the k largest coefficients of each tile of DCT(e_i)
    e_i <- e_i - inverse DCT(q_i)
    result = inverse DCT(mean(q_i)) ,  of each coefficient over the workers that sent it

DeMo: Peng, Quesnelle, Kingma 2024, arXiv 2411.19870, Algorithm 1. The mean over senders is that of
the authors' code; a coefficient that nobody sent is 0. There the gradient enters e times the
learning rate, which for a constant one is the same: neither the choice nor the sign depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from laconic.algorithms.round import Arrival, Clock, Combine, Exchange, Slot, State
from laconic.buckets import state_dtype
from laconic.codecs import TopK
from laconic.codecs.dct import Tiling
from laconic.codecs.topk import INDEX_BITS, index_bytes, unpack_indices
from laconic.errors import NotFiniteError, check_float, check_int
from laconic.links import cost
from laconic.links.cost import Cost
from laconic.links.link import Link

BySize = dict[int, Tensor]
"""Coefficients, (tiles, elements of a tile), by the latter: such tiles are coded together."""


@dataclass(frozen=True)
class FastComponents(Exchange):
    """What of the momentum is sent (the paper's fast components), averaged. ``decay`` in [0, 1];
    ``k`` coefficients of a tile, all of one that has fewer; ``chunk``: the most elements of a
    tile's side, 64 at most.

    A tile of h by w elements is sent as min(k, h*w) indices of 12 bits and as many float32: with
    the defaults of `laconic.demo` 0.34 bits for each element of a matrix whose sides are multiples
    of 64, and 22 bits where one of them is prime, as the tiles are then vectors: choose sizes with
    large divisors. Every worker sends its message to every other, (n-1) times in all.

    All workers compute the result from the same messages, and hold the same bits where their
    machines compute alike. State: the momentum, as long as the message, this worker's own.

    Raises `NotFiniteError`, on every rank, where one of them has NaN or an infinity; the state is
    then as it was.
    """

    decay: float
    k: int
    chunk: int
    shapes: tuple[torch.Size, ...] = ()
    """Of the tensors that a message consists of."""

    agrees = True
    whole = True
    for_gradients = True
    slots: ClassVar[dict[str, Slot]] = {"momentum": "pooled"}

    def __post_init__(self) -> None:
        check_float("decay", self.decay, 0.0, most=1.0)
        check_int("k", self.k, 1)
        if check_int("chunk", self.chunk, 1) > 2 ** (INDEX_BITS // 2):
            raise ValueError(f"chunk must be at most {2 ** (INDEX_BITS // 2)}, not {self.chunk}")

    @property
    def averages(self) -> bool:
        return True

    def multiple(self, n: int) -> int:
        return 1

    def shaped(self, shapes: Sequence[torch.Size]) -> Exchange:
        return replace(self, shapes=tuple(shapes))

    def init(self, x: Tensor, owned: slice) -> State:
        assert len(x) >= sum(shape.numel() for shape in self.shapes), "a bucket of whole tensors"
        return {"momentum": torch.zeros_like(x)}

    def cost(self, length: int, itemsize: int, n: int) -> Cost:
        tilings = [Tiling.of(shape, self.chunk) for shape in self.shapes]
        return cost.gather(sum(t.count * self._codec(t.size).nbytes(t.size) for t in tilings), n)

    def run(
        self, link: Link, message: Tensor, combine: Combine, clock: Clock, state: State
    ) -> Arrival:
        tilings = [Tiling.of(shape, self.chunk) for shape in self.shapes]
        e = message.to(state_dtype(message.dtype)).add_(state["momentum"], alpha=self.decay)
        tensors = torch.split(e, [t.numel for t in tilings])
        coefficients: dict[int, list[Tensor]] = {}
        for t, x in zip(tilings, tensors, strict=True):
            coefficients.setdefault(t.size, []).append(t.forward(x))
        joined = {size: torch.cat(c) for size, c in coefficients.items()}
        payload = torch.cat([self._encode(c) for c in joined.values()])
        rows = link.gather(payload)
        counts = {size: len(c) for size, c in joined.items()}
        mean = self._mean(rows, counts, e.dtype)
        if not _finite(mean):
            each = [self._mean(row[None], counts, e.dtype) for row in rows]
            odd = [r for r, own in enumerate(each) if not _finite(own)]
            raise NotFiniteError(f"ranks {odd} of its link had NaN or an infinity to send")
        sent = self._mean(payload[None], counts, e.dtype)
        torch.sub(e, _inverse(tilings, sent), out=state["momentum"])
        return Arrival(combine(_inverse(tilings, mean)))

    def _codec(self, size: int) -> TopK:
        return TopK(min(self.k, size), size)

    def _encode(self, coefficients: Tensor) -> Tensor:
        """The code of each tile, one after the other. NaN and infinities count as the largest, and
        are sent as they are: so all ranks learn of them."""
        count, size = coefficients.shape
        codec = self._codec(size)
        payload = coefficients.new_empty(count, codec.nbytes(size), dtype=torch.uint8)
        codec.encode_rows(coefficients, payload, None)
        return payload.view(-1)

    def _mean(self, rows: Tensor, counts: Mapping[int, int], dtype: torch.dtype) -> BySize:
        """Of every coefficient the mean over those ``rows``, one rank's code each, that have it,
        added in their order."""
        means = {}
        start = 0
        for size, count in counts.items():
            codec = self._codec(size)
            stop = start + count * codec.nbytes(size)
            total = torch.zeros(count, size, dtype=dtype, device=rows.device)
            senders = torch.zeros_like(total)
            for row in rows[:, start:stop]:
                kept, values = _decode(row.view(count, -1), codec.k)
                total.scatter_add_(1, kept, values.to(dtype))
                senders.scatter_add_(1, kept, torch.ones_like(values, dtype=dtype))
            means[size] = total.div_(senders.clamp_(min=1))
            start = stop
        return means


def _decode(codes: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The indices of tiles' coefficients, and these: (tiles, k) each."""
    size = index_bytes(k)
    values = codes[:, size:].clone(memory_format=torch.contiguous_format)  # aligned
    return unpack_indices(codes[:, :size], k), values.view(torch.float32)


def _inverse(tilings: Sequence[Tiling], by_size: BySize) -> Tensor:
    """The tensors, one after the other, that have these coefficients."""
    counts = {size: [t.count for t in tilings if t.size == size] for size in by_size}
    own = {size: iter(torch.split(c, counts[size])) for size, c in by_size.items()}
    return torch.cat([t.inverse(next(own[t.size])) for t in tilings])


def _finite(by_size: BySize) -> bool:
    return bool(torch.stack([c.isfinite().all() for c in by_size.values()]).all())
