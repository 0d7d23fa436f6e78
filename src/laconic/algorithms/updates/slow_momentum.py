"""u <- beta*u + (a - mean(x))/lr ;  a <- a - alpha*lr*u ;  x <- a

SlowMo: Wang et al., ICLR 2020, arXiv 1910.00643, Algorithm 1, lines 5-8.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.algorithms.update import Clock, Slot, State, Update

RESTART = 10.0
"""If lr grows by more than this factor after u was built, the schedule is assumed to have
restarted."""


def momentum_for(workers: int) -> float:
    """Return the slow momentum that fairscale's guide recommends for ``workers`` workers::

        workers     below 4    4 to 7    8 to 15    16 or more
        momentum       0         0.2       0.5         0.6

    A mean over more workers has less noise, so momentum can carry more of it over. The guide found
    these values for translation. Tune them for other tasks.
    """
    return next((m for n, m in ((16, 0.6), (8, 0.5), (4, 0.2)) if workers >= n), 0.0)


@dataclass(frozen=True)
class SlowMomentum(Update):
    """The slow step of SlowMo (Wang et al. 2020, Algorithm 1)::

        u <- beta*u + (a - xbar)/lr          xbar = mean(x)
        a <- a - alpha*lr*u ;  x <- a
        at lr = 0:  a <- a - alpha*(a - xbar) ;  u unchanged ;  x <- a

    ``momentum`` is beta (0 <= beta < 1). None takes `momentum_for` the number of workers that take
    part in the slow step. ``lr`` is alpha (> 0, no unit). The lr in the formula is the current
    learning rate of the parameter group. ``u`` has the unit of a gradient. Warns if lr has grown
    tenfold since u was last updated, because u is then too large.
    """

    momentum: float | None
    lr: float

    slots: ClassVar[dict[str, Slot]] = {"anchor": "owner", "u": "owner", "lr": "everywhere"}
    anchor = "anchor"
    replaces = True
    uses_lr = True

    def init(self, x: Tensor) -> State:
        return {"anchor": x, "u": torch.zeros_like(x), "lr": torch.tensor(0.0)}

    def combine(self, mean: Tensor, state: State, clock: Clock) -> Tensor:
        a, u, lr = state["anchor"], state["u"], clock.lr
        d = torch.sub(a, mean, out=mean)  # d = a - mean(x), reusing the memory of mean
        if lr == 0:
            return a.sub_(d, alpha=self.lr)  # a <- a - alpha*d
        beta = momentum_for(clock.workers) if self.momentum is None else self.momentum
        _check_restart(state["lr"], lr, beta)
        u.mul_(beta).add_(d, alpha=1 / lr)  # u <- beta*u + d/lr
        return a.sub_(u, alpha=self.lr * lr)  # a <- a - alpha*lr*u


def _check_restart(last: Tensor, lr: float, beta: float) -> None:
    before = float(last)
    if beta and 0 < before * RESTART < lr:
        warnings.warn(
            f"the learning rate rose from {before:g} to {lr:g} since the last slow step. The slow "
            "momentum was built at the lower rate and is now too large. To restart a learning rate "
            "schedule, call laconic.attach again",
            stacklevel=3,
        )
    last.fill_(lr)
