"""The mean over the workers that have arrived when a round closes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from laconic.algorithms.exchange import Arrival, Combine, Exchange
from laconic.algorithms.exchanges.coded import ReplicatedMean
from laconic.algorithms.exchanges.mean import Mean
from laconic.algorithms.update import Clock, State
from laconic.codecs import Codec
from laconic.errors import check_choice, check_float, check_int
from laconic.links.cost import Cost
from laconic.links.link import AsyncLink
from laconic.tensors import state_dtype

Pace = Literal["equal", "own"]


@dataclass(frozen=True)
class QuorumMean(Exchange):
    """The mean over the workers that have arrived when the round closes.

    A round closes ``grace`` seconds after ``workers`` of them (None: all) have arrived, or as soon
    as all have. A worker that arrives later takes part in a later round, with all steps since it
    last took part. Let ``a`` be the result of the previous round, ``b_i`` the result from which
    worker i started, and M the set of workers that have arrived. Of all n workers the mean is
    taken, by `Mean` or, with a ``codec``, `ReplicatedMean`, of::

        y_i = a - (b_i - x_i)   from those of M (x_i if b_i = a)
        y_i = a                 from the others, which are computing

    It is ``a - sum over M of (a - y_i) / n``: a step has the same weight in whichever round it is
    delivered (Liu et al. 2024, arXiv 2401.09135, Algorithm 3). If all workers have arrived, the
    result is the plain mean, bit for bit. With a codec, the others send what their codes have left
    out before. Every worker takes the outer step.

    ``pace="own"``: each worker takes as many steps as it can while the fastest worker takes those
    of the period (dynamic local updates). ``anchored=False``: for an update without an anchor, such
    as that of module buffers. All send whether they have arrived, and the result is the mean of
    ``x`` over M.
    """

    workers: int | None = None
    grace: float = 0.0
    pace: Pace = "equal"
    codec: Codec | None = None
    anchored: bool = True

    agrees = True

    def __post_init__(self) -> None:
        if self.workers is not None:
            check_int("quorum", self.workers, 1)
        check_float("grace", self.grace, 0.0)
        check_choice("pace", self.pace, get_args(Pace))
        object.__setattr__(self, "slots", self.inner.slots)

    @property
    def inner(self) -> Exchange:
        """The mean over all workers."""
        return Mean() if self.codec is None else ReplicatedMean(self.codec, relative=True)

    def replicated(self) -> Exchange:
        return self

    def multiple(self, n: int) -> int:
        return self.inner.multiple(n)

    def cost(self, length: int, itemsize: int, n: int) -> Cost:
        return self.inner.cost(length, itemsize, n)

    def init(self, x: Tensor, owned: slice) -> State:
        return self.inner.init(x, owned)

    def rebase(self, x: Tensor, state: State) -> None:
        self.inner.rebase(x, state)

    def contribution(
        self,
        x: Tensor,
        arrived: bool,
        base: Tensor | None,
        anchor: Tensor | None,
        *,
        all_arrive: bool = False,
    ) -> Tensor:
        """The message of a worker that has ``arrived`` with x, or has not: x is then any tensor
        like it. ``base``: b_i, None if it is a. ``anchor``: a. Unless ``all_arrive``, messages are
        as wide as a: in x's dtype, those of the others would pull a back to it. Without an anchor
        they are in float64, so that the mean over one worker is its x, to the bit."""
        if anchor is None:
            wide = x.to(state_dtype(x.dtype) if all_arrive else torch.float64)
            wide = torch.cat([wide, wide.new_ones(1)])
            return wide if arrived else torch.zeros_like(wide)
        dtype = x.dtype if all_arrive else anchor.dtype
        if not arrived:
            return anchor.to(dtype, copy=True)
        if base is None:
            return x.to(dtype, copy=True)
        return (anchor - (base - x.to(anchor.dtype))).to(dtype)

    async def run(
        self, link: AsyncLink, message: Tensor, combine: Combine, clock: Clock, state: State
    ) -> Arrival:
        if self.anchored:
            return await self.inner.run(link, message, combine, clock, state)
        await link.mean(message)
        return Arrival(combine(message[:-1] / message[-1]))
