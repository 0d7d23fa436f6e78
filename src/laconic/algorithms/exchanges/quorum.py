"""The mean over the workers that have arrived when a round closes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from laconic.algorithms.exchange import Arrival, Combine, Exchange
from laconic.algorithms.update import Clock, Slot, State
from laconic.buckets import mean_in_rank_order, state_dtype
from laconic.errors import check_choice, check_float, check_int
from laconic.links.cost import Cost
from laconic.links.link import Link

Pace = Literal["equal", "own"]
Weigh = Literal["alike", "steps"]


class Contribution(NamedTuple):
    """What one worker delivers: its ``x``; the result from which x started, ``base``, or None if
    that is the result of the previous round; and the number of ``steps`` from base to x."""

    x: Tensor
    base: Tensor | None
    steps: int


@dataclass(frozen=True)
class QuorumMean(Exchange):
    """The mean over the workers that have arrived when the round closes.

    A round closes ``grace`` seconds after ``workers`` of them (None: all) have arrived, or as soon
    as all expected workers have. A worker that arrives later takes part in a later round, with all
    steps since it last took part. Let ``a`` be the result of the previous round, ``b_i`` the result
    from which worker i started, and ``y_i = a - (b_i - x_i)``, so that ``y_i = x_i`` for a worker
    that is not late. The mean over the set M of workers that have arrived, out of n, is::

        weigh="alike":  a - sum over M of (a - y_i) / n
        weigh="steps":  sum over M of (s_i * y_i) / sum over M of s_i

    With ``"alike"``, a step has the same weight in whichever round it is delivered (Liu et al.
    2024, arXiv 2401.09135, Algorithm 3). If all workers have arrived, the result is the plain mean,
    bit for bit. ``"steps"`` is the weight of Decoupled DiLoCo (Douillard et al. 2026, arXiv
    2604.21428), ``tokens**2 / steps`` divided by its sum, for workers whose steps have equally many
    tokens. ``s_i`` is the number of steps.

    ``pace="own"``: each worker takes as many steps as it can while the fastest worker takes those
    of the period (dynamic local updates). ``anchored=False``: for an update without an anchor, such
    as that of module buffers. The result is then the mean of ``x`` over M.

    Rank 0 keeps the outer state. Its process receives a message from every other worker of the
    round, averages them, and sends each of these workers the result.
    """

    workers: int | None = None
    grace: float = 0.0
    pace: Pace = "equal"
    weigh: Weigh = "alike"
    anchored: bool = True

    slots: ClassVar[dict[str, Slot]] = {"base": "private"}
    agrees = True

    def __post_init__(self) -> None:
        if self.workers is not None:
            check_int("quorum", self.workers, 1)
        check_float("grace", self.grace, 0.0)
        check_choice("pace", self.pace, get_args(Pace))
        check_choice("weigh", self.weigh, get_args(Weigh))

    def owners(self, n: int) -> int | None:
        return 1

    def cost(self, length: int, itemsize: int, n: int) -> Cost:
        return Cost(2 * (n - 1) * length * itemsize // n, 2 * min(n - 1, 1))

    def busiest(self, length: int, itemsize: int, n: int) -> Cost:
        """Rank 0 receives the messages of all others, and then sends the result to each."""
        return Cost(2 * (n - 1) * length * itemsize, 2 * min(n - 1, 1))

    def typical(self) -> QuorumMean:
        return replace(self, workers=None, grace=0.0, pace="equal")

    def init(self, x: Tensor, owned: slice) -> State:
        return {"base": x}

    def rebase(self, x: Tensor, state: State) -> None:
        """See `Rebase`."""
        state["base"].copy_(x)

    def run(
        self, link: Link, message: Tensor, combine: Combine, clock: Clock, state: State
    ) -> Arrival:
        raise AssertionError("rounds with a quorum run by laconic.engine.quorum_rounds")

    def mean(self, arrived: Sequence[Contribution], anchor: Tensor | None, n: int) -> Tensor:
        """The mean of ``arrived``, in rank order, out of ``n`` workers; in at least float32.
        ``anchor`` is a, None if not `anchored`."""
        dtype = state_dtype(arrived[0].x.dtype)
        ys = []
        for x, base, _ in arrived:
            y = x.to(dtype)
            if base is not None and anchor is not None:
                y = anchor - (base.to(dtype) - y)
            ys.append(y)
        steps = [c.steps for c in arrived]
        if self.weigh == "steps" and len({*steps}) > 1:
            total = torch.zeros_like(ys[0])
            for y, s in zip(ys, steps, strict=True):
                total.add_(y, alpha=s / sum(steps))
            return total
        mean = mean_in_rank_order(ys)
        if self.weigh == "alike" and anchor is not None and len(arrived) < n:
            mean = anchor - (anchor - mean) * (len(arrived) / n)
        return mean
