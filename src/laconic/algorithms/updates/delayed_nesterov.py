"""B <- B + D ;  a <- a - eta*D ;  after n contributions: m <- mu*m + B, a <- a - eta*mu*m, B <- 0

Delayed Nesterov: Liu et al. 2024, arXiv 2401.09135, Algorithm 3 with c = 0. ``D = a - mean``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.algorithms.update import Clock, Slot, State, Update
from laconic.algorithms.updates.outer_step import OuterStep


@dataclass(frozen=True)
class DelayedNesterov(Update):
    """DiLoCo's outer step where workers contribute at different times (Liu et al. 2024, Algorithm 3
    with momentum activation c = 0)::

        D = a - mean                             one n-th of each pseudo-gradient that has arrived
        B <- B + D ;  a <- a - eta*D             at once, without momentum
        once n contributions have come since m was updated:
            m <- mu*m + B ;  a <- a - eta*mu*m ;  B <- 0

    So momentum decays once for every n contributions, not at each, and each pseudo-gradient enters
    it once. Algorithm 3 has one contribution in each step. A round here may have several, so B may
    hold more than n; all of it then enters m. If all n workers contribute to a round, that round is
    the Nesterov step of `OuterStep`, bit for bit. ``lr`` is eta (> 0), ``momentum`` is mu
    (0 <= mu < 1). Works for any shape. ``B`` and ``m`` have the unit of x.
    """

    lr: float
    momentum: float

    slots: ClassVar[dict[str, Slot]] = {**OuterStep.slots, "B": "owner", "count": "owner"}
    anchor = "anchor"
    replaces = True

    def init(self, x: Tensor) -> State:
        state = {"anchor": x}
        if self.momentum:
            state["m"], state["B"] = torch.zeros_like(x), torch.zeros_like(x)
            state["count"] = torch.tensor(0)
        return state

    def combine(self, mean: Tensor, state: State, clock: Clock) -> Tensor:
        a = state["anchor"]
        delta = torch.sub(a, mean, out=mean)  # D = a - mean, reusing the memory of mean
        if not self.momentum:
            return a.sub_(delta, alpha=self.lr)
        buffer, count = state["B"].add_(delta), state["count"].add_(clock.arrived)
        if int(count) < clock.workers:
            return a.sub_(delta, alpha=self.lr)
        m = state["m"].mul_(self.momentum).add_(buffer)  # m <- mu*m + B
        a.sub_(delta.add_(m, alpha=self.momentum), alpha=self.lr)  # a <- a - eta*(D + mu*m)
        buffer.zero_()
        count.zero_()
        return a
