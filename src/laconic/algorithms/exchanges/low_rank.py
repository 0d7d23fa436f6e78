"""The mean over all workers of matrices of low rank, and of what these leave out nothing gets lost.

For each tensor of two or more dimensions, as a matrix of its first dimension by all others, with
g_i its gradient on worker i and e_i the residual there:

    M_i = g_i + e_i
    P = mean(M_i Q) ;  P <- orthonormal(P) ;  Q_i = M_i^T P ;  Q = mean(Q_i)
    result = P Q^T ;   e_i <- M_i - P Q_i^T ;  Q is where the next round starts

PowerSGD: Vogels, Karimireddy, Jaggi, NeurIPS 2019, arXiv 1905.13727, Algorithms 1 and 2. The
residuals' mean is what the mean of all M_i has and the result lacks: what was brought, and what is
left, add up to all that went in. P and Q may travel coded; Q_i is then what this worker's code
stands for, with what the owner's code of the mean lacks, and what is rounded off is left in e_i. To
subtract the mean Q on every worker brings the same results, but leaves what workers differ by to
add up in their residuals without end, and codes of these would be ever coarser.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from laconic.algorithms.exchanges.coded import CodedMean
from laconic.algorithms.exchanges.mean import Mean
from laconic.algorithms.round import Arrival, Clock, Combine, Exchange, Slot, State
from laconic.buckets import state_dtype
from laconic.codecs import Codec
from laconic.codecs.codec import check_told
from laconic.errors import NotFiniteError, check_int
from laconic.links.cost import Cost
from laconic.links.link import Link

SEED = 1905_13727
"""Of the first Q, which is alike on all workers."""


class _Stretch(NamedTuple):
    """A tensor in its bucket: ``rows`` by ``columns`` from element ``start`` on."""

    start: int
    rows: int
    columns: int

    def of(self, flat: Tensor) -> Tensor:
        """Its matrix, a view of the bucket's ``flat``."""
        end = self.start + self.rows * self.columns
        return flat[self.start : end].view(self.rows, self.columns)


@dataclass(frozen=True)
class LowRank(Exchange):
    """For gradients (or other messages that do not build on the ones before). ``rank``: r, at least
    1. A tensor of m by k elements travels as r*(m + k), and as it is where that is not less: a
    vector always, a matrix of r*(m + k) >= m*k. Everything in two all-reduces for each bucket: one
    of all P and of what travels as it is, one of all Q. ``codec``: what both travel in; None: as
    they are.

    Arithmetic and messages are of float32 at least. The first Q is Gaussian. Of M Q only the span
    of Q's columns matters: they are made orthonormal before use, so that no product is larger than
    M, and columns that came to nothing are replaced. All workers compute the result from the same
    means, and hold the same bits where their machines compute alike. State: a residual as long as
    the message, this worker's own; Q, r numbers for each of the matrices' columns, on every worker.

    Raises `NotFiniteError`, on every rank, where a sum has NaN or an infinity; the state is then as
    it was.
    """

    rank: int
    codec: Codec | None = None
    shapes: tuple[torch.Size, ...] = ()
    """Of the tensors that a message consists of."""

    agrees = True
    whole = True
    for_gradients = True
    slots: ClassVar[dict[str, Slot]] = {"residual": "pooled", "basis": "everywhere"}

    def __post_init__(self) -> None:
        check_int("rank", self.rank, 1)
        if self.codec is not None:
            check_told(self.codec)

    @property
    def averages(self) -> bool:
        return True

    def multiple(self, n: int) -> int:
        return 1

    @property
    def _mean(self) -> Exchange:
        """By which P and Q are averaged; state, if any, is made for each round."""
        return Mean() if self.codec is None else CodedMean(self.codec, relative=False)

    def cost(self, length: int, itemsize: int, n: int) -> Cost:
        low, dense = self._stretches()
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
        assert len(x) >= sum(shape.numel() for shape in self.shapes), "a bucket of whole tensors"
        low, _ = self._stretches()
        columns = sum(m.columns for m in low)
        generator = torch.Generator().manual_seed(SEED)
        basis = torch.randn(columns, self.rank, generator=generator)
        return {"residual": torch.zeros_like(x), "basis": basis.to(x.device, x.dtype)}

    def run(
        self, link: Link, message: Tensor, combine: Combine, clock: Clock, state: State
    ) -> Arrival:
        low, dense = self._stretches()
        total = message.to(state_dtype(message.dtype)).add_(state["residual"])
        starts = torch.split(state["basis"], [m.columns for m in low])
        with torch.autocast(total.device.type, enabled=False):
            matrices = [m.of(total) for m in low]
            left = [m @ orthonormal(q) for m, q in zip(matrices, starts, strict=True)]
            first = self._average(link, [*left, *(m.of(total) for m in dense)], clock)
            left = [orthonormal(p) for p, _ in first[: len(low)]]  # P
            right = [m.mH @ p for m, p in zip(matrices, left, strict=True)]
            second = self._average(link, right, replace(clock, bucket=-2 - clock.bucket))
            for m, p, (q, own) in zip(low, left, second, strict=True):
                torch.sub(m.of(total), p @ own.mH, out=m.of(state["residual"]))
                m.of(message).copy_(p @ q.mH)
        for m, (mean, own) in zip(dense, first[len(low) :], strict=True):
            torch.sub(m.of(total), own, out=m.of(state["residual"]))
            m.of(message).copy_(mean)
        if second:
            state["basis"].copy_(torch.cat([q for q, _ in second]))
        return Arrival(combine(message))

    def _average(
        self, link: Link, tensors: Sequence[Tensor], clock: Clock
    ) -> list[tuple[Tensor, Tensor]]:
        """Their means over the ranks, in one all-reduce, and what this rank brought, of which they
        are the mean; finite, else all ranks raise."""
        if not tensors:
            return []
        exchange, n = self._mean, link.size
        flat = torch.cat([t.reshape(-1) for t in tensors])
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % exchange.multiple(n)))
        owned = exchange.region(link, len(padded))
        state = exchange.init(torch.zeros_like(padded), owned) if exchange.slots else {}
        mean = exchange.run(link, padded.clone(), lambda mean: mean, clock, state).flat
        if not bool(mean.isfinite().all()):
            raise NotFiniteError("some ranks had NaN or an infinity to send, or numbers too large")
        if state:
            exchange.give_back(state, owned, n)
            padded -= state["residual"]
        sizes = [t.numel() for t in tensors]
        means, own = (torch.split(x[: len(flat)], sizes) for x in (mean, padded))
        return [
            (m.view(t.shape), o.view(t.shape)) for t, m, o in zip(tensors, means, own, strict=True)
        ]

    def _stretches(self) -> tuple[list[_Stretch], list[_Stretch]]:
        """The tensors that travel as P and Q, and those that travel as they are."""
        low: list[_Stretch] = []
        dense: list[_Stretch] = []
        start = 0
        for shape in self.shapes:
            rows = shape[0] if len(shape) > 1 else 1
            columns = shape.numel() // rows
            shorter = self.rank * (rows + columns) < rows * columns
            (low if shorter else dense).append(_Stretch(start, rows, columns))
            start += shape.numel()
        return low, dense


def orthonormal(p: Tensor) -> Tensor:
    """Orthonormal columns that span those of ``p``, (m, r) with m >= r, and, where these depend on
    each other, more; the same for the same bits."""
    largest = p.abs().amax().clamp(min=torch.finfo(p.dtype).tiny)  # so that no square overflows
    q: Tensor = torch.linalg.qr(p / largest).Q
    return q
