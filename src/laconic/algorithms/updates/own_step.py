"""m <- mu*m + d ;  x <- x + d - eta*S(d + mu*m)    (d: the local optimizer's steps since the last)

SNOO: Kallusky et al. 2025, arXiv 2510.15830, Algorithm 1, on each worker. S: see `MuonStep`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.algorithms.update import Clock, Slot, State, Update
from laconic.algorithms.updates.muon_step import operations, turned


@dataclass(frozen=True)
class OwnStep(Update):
    """An outer step that each worker takes by itself (Kallusky et al. 2025, Algorithm 1)::

        every step: d <- d + (x before the local optimizer's step) - (x after it)
        m <- mu*m + d ;  s = d + mu*m ;  x <- x + d - eta*s ;  d <- 0

    Other rounds may move x meanwhile; that is not part of d. ``lr`` is eta (> 0) and ``momentum``
    is mu (0 <= mu < 1). ``muon``: a matrix s gets Muon's direction, as in `MuonStep`. d and m have
    the unit of x.
    """

    lr: float
    momentum: float
    muon: bool = False

    slots: ClassVar[dict[str, Slot]] = {"d": "private", "m": "private"}
    scope = "tensors"
    sends = "change"

    def init(self, x: Tensor) -> State:
        return {"d": torch.zeros_like(x), "m": torch.zeros_like(x)}

    def before_step(self, x: Tensor, state: State, clock: Clock) -> None:
        state["d"].add_(x)

    def after_step(self, x: Tensor, state: State, clock: Clock) -> None:
        state["d"].sub_(x)

    def send(self, x: Tensor, state: State, clock: Clock) -> Tensor:
        return state["d"].to(x.dtype, copy=True)

    def fold(
        self, x: Tensor, received: Tensor, sent: Tensor | None, state: State, clock: Clock
    ) -> Tensor:
        d = state["d"]
        m = state["m"].mul_(self.momentum).add_(d)  # m <- mu*m + d
        step = torch.add(d, m, alpha=self.momentum)
        if self.muon:
            clock.tensors.map(step, turned, lambda shape: operations(shape) > 0)
        x.add_(d.sub_(step, alpha=self.lr).to(x.dtype))  # x is rounded once
        d.zero_()
        return x
