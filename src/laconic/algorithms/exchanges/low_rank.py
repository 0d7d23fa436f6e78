"""The mean over all workers of low-rank gradient matrices, with error feedback.

Each tensor of two or more dimensions is taken as a matrix: its first dimension by all others. g_i
is its gradient on worker i, and e_i is the residual there:

    M_i = g_i + e_i
    P = mean(M_i Q) ;  P <- orthonormal(P) ;  Q_i = M_i^T P ;  Q = mean(Q_i)
    result = P Q^T ;   e_i <- M_i - P Q_i^T ;  the next round starts from Q

PowerSGD: Vogels, Karimireddy, Jaggi, NeurIPS 2019, arXiv 1905.13727, Algorithms 1 and 2. The
result plus the mean of the residuals equals the mean of M_i, so nothing is lost.

P and Q may be sent coded. Q_i is then the decoded value of this worker's code, plus what the
owner's code of the mean lacks, and e_i receives the rounding error. Subtracting the mean Q instead
of Q_i would give the same results. But the workers' differences would then accumulate in their
residuals without bound, and codes of these would become coarser and coarser.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from laconic.algorithms.exchange import Arrival, Combine, Exchange
from laconic.algorithms.exchanges.coded import CodedMean
from laconic.algorithms.exchanges.mean import Mean
from laconic.algorithms.update import Clock, Slot, State
from laconic.codecs import Codec
from laconic.codecs.codec import check_repr
from laconic.errors import NotFiniteError, check_int
from laconic.links.cost import Cost
from laconic.links.link import AsyncLink
from laconic.tensors import state_dtype

SEED = 1905_13727
"""Seed of the first Q, which is the same on all workers."""


class _Matrix(NamedTuple):
    """The place of a tensor in its bucket: ``rows`` by ``columns``, from element ``start``."""

    start: int
    rows: int
    columns: int

    def of(self, flat: Tensor) -> Tensor:
        """Return the matrix as a view of the bucket's ``flat``."""
        end = self.start + self.rows * self.columns
        return flat[self.start : end].view(self.rows, self.columns)


@dataclass(frozen=True)
class LowRank(Exchange):
    """PowerSGD's mean of gradients, or of other messages that do not depend on earlier ones.

    ``rank`` is r, at least 1. A matrix of m by k elements is sent as r*(m + k) numbers. If that is
    not fewer than m*k, and for vectors, the tensor is sent in full. Each bucket takes two
    all-reduces: one for all P and the tensors sent in full, and one for all Q. ``codec``: how both
    are coded; None: not at all.

    Arithmetic and messages use float32 or wider. The first Q is Gaussian. Only the span of Q's
    columns matters for M Q. The columns are made orthonormal before use, so no product is larger
    than M, and columns that have become zero are replaced. All workers compute the result from the
    same means. They hold the same bits if their machines compute alike. State: on each worker its
    own residual, as long as the message; and Q, with r numbers for each column of the matrices, on
    every worker.

    Raises `NotFiniteError` on every rank if a sum contains NaN or an infinity. The state then
    remains as it was.
    """

    rank: int
    codec: Codec | None = None
    shapes: tuple[torch.Size, ...] = ()
    """Shapes of the tensors in a message."""

    agrees = True
    scope = "tensors"
    slots: ClassVar[dict[str, Slot]] = {"residual": "private", "basis": "everywhere"}

    def __post_init__(self) -> None:
        check_int("rank", self.rank, 1)
        if self.codec is not None:
            check_repr(self.codec)

    def multiple(self, n: int) -> int:
        return 1

    @property
    def _mean(self) -> Exchange:
        """Return the exchange that averages P and Q. Its state, if any, lasts for one round."""
        return Mean() if self.codec is None else CodedMean(self.codec, relative=False)

    def cost(self, length: int, itemsize: int, n: int) -> Cost:
        low, dense = self._matrices()
        left = sum(self.rank * m.rows for m in low) + sum(m.columns for m in dense)
        right = sum(self.rank * m.columns for m in low)
        multiple = self._mean.multiple(n)
        each = [-(-count // multiple) * multiple for count in (left, right) if count]
        costs = [self._mean.cost(count, itemsize, n) for count in each]
        return sum(costs, Cost(0, 0))

    @property
    def direct(self) -> bool:
        return self.codec is not None

    def shaped(self, shapes: Sequence[torch.Size]) -> Exchange:
        return replace(self, shapes=tuple(shapes))

    def init(self, x: Tensor, owned: slice) -> State:
        assert len(x) >= sum(shape.numel() for shape in self.shapes), "the bucket lacks tensors"
        low, _ = self._matrices()
        columns = sum(m.columns for m in low)
        generator = torch.Generator().manual_seed(SEED)
        basis = torch.randn(columns, self.rank, generator=generator)
        return {"residual": torch.zeros_like(x), "basis": basis.to(x.device, x.dtype)}

    async def run(
        self, link: AsyncLink, message: Tensor, combine: Combine, clock: Clock, state: State
    ) -> Arrival:
        low, dense = self._matrices()
        total = message.to(state_dtype(message.dtype)).add_(state["residual"])
        starts = torch.split(state["basis"], [m.columns for m in low])
        full = partial(torch.autocast, total.device.type, enabled=False)
        with full():
            matrices = [m.of(total) for m in low]
            left = [m @ orthonormal(q) for m, q in zip(matrices, starts, strict=True)]
        first = await self._average(link, [*left, *(m.of(total) for m in dense)], clock)
        with full():
            left = [orthonormal(p) for p, _ in first[: len(low)]]  # P
            right = [m.mH @ p for m, p in zip(matrices, left, strict=True)]
        second = await self._average(link, right, clock)
        with full():
            for m, p, (q, own) in zip(low, left, second, strict=True):
                torch.sub(m.of(total), p @ own.mH, out=m.of(state["residual"]))
                m.of(message).copy_(p @ q.mH)
        for m, (mean, own) in zip(dense, first[len(low) :], strict=True):
            torch.sub(m.of(total), own, out=m.of(state["residual"]))
            m.of(message).copy_(mean)
        if second:
            state["basis"].copy_(torch.cat([q for q, _ in second]))
        return Arrival(combine(message))

    async def _average(
        self, link: AsyncLink, tensors: Sequence[Tensor], clock: Clock
    ) -> list[tuple[Tensor, Tensor]]:
        """Average ``tensors`` over the ranks in one all-reduce.

        Return for each tensor the mean, and this rank's contribution after coding. Raises on all
        ranks if a mean is not finite.
        """
        if not tensors:
            return []
        exchange, n = self._mean, link.size
        flat = torch.cat([t.reshape(-1) for t in tensors])
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % exchange.multiple(n)))
        owned = exchange.region(link, len(padded))
        state = exchange.init(torch.zeros_like(padded), owned) if exchange.slots else {}
        arrival = await exchange.run(link, padded.clone(), lambda x: x, clock, state)
        mean = arrival.flat
        if not bool(mean.isfinite().all()):
            raise NotFiniteError("some ranks had NaN, infinite, or too large values to send")
        if state:
            exchange.collect(state, owned, n)
            padded -= state["residual"]
        sizes = [t.numel() for t in tensors]
        means, own = (torch.split(x[: len(flat)], sizes) for x in (mean, padded))
        return [
            (m.view(t.shape), o.view(t.shape)) for t, m, o in zip(tensors, means, own, strict=True)
        ]

    def _matrices(self) -> tuple[list[_Matrix], list[_Matrix]]:
        """Return the tensors that are sent as P and Q, and those that are sent in full."""
        low: list[_Matrix] = []
        dense: list[_Matrix] = []
        start = 0
        for shape in self.shapes:
            rows = shape[0] if len(shape) > 1 else 1
            columns = shape.numel() // rows
            shorter = self.rank * (rows + columns) < rows * columns
            (low if shorter else dense).append(_Matrix(start, rows, columns))
            start += shape.numel()
        return low, dense


def orthonormal(p: Tensor) -> Tensor:
    """Return orthonormal columns that span at least the columns of ``p``, (m, r) with m >= r.

    If the columns of ``p`` are linearly dependent, the result spans more. Deterministic: the same
    bits give the same result.
    """
    largest = p.abs().amax().clamp(min=torch.finfo(p.dtype).tiny)  # scale so no square overflows
    q: Tensor = torch.linalg.qr(p / largest).Q
    return q
