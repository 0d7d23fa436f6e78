"""D = Delta/n + late ;  a <- outer(a, D) ;  x <- a ;  on arrival: late <- mean - Delta/n

Eager updates: Kale, Douillard, Donchev 2025, arXiv 2502.12996. ``Delta = a - x``, and ``mean`` is
the mean of Delta over all workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.algorithms.update import Clock, Slot, State, Update


@dataclass(frozen=True)
class Eager(Update):
    """DiLoCo's outer step, taken at once (Kale et al. 2025). In round t, worker i computes::

        Delta_i(t) = a_i - x_i                                                      (sent)
        D   = Delta_i(t)/n + (mean(Delta(t-1)) - Delta_i(t-1)/n)                    Delta(0) = 0
        m_i <- mu*m_i + D ;  a_i <- a_i - eta*(D + mu*m_i) ;  x_i <- a_i

    D contains the worker's own current pseudo-gradient and the other workers' pseudo-gradients of
    the previous round. The delay must be at least 1 step and at most the period. Its length does
    not change the result, only how much communication overlaps with training. ``lr`` is eta (> 0)
    and ``momentum`` is mu (0 <= mu < 1). Works for any shape. ``a``, ``m``, and ``late`` are
    private to each worker and have the unit of x. With one worker this is DiLoCo.
    """

    lr: float
    momentum: float

    slots: ClassVar[dict[str, Slot]] = {"anchor": "private", "m": "private", "late": "private"}

    sends_changes = True

    def init(self, x: Tensor) -> State:
        return {"anchor": x, "m": torch.zeros_like(x), "late": torch.zeros_like(x)}

    def send(self, x: Tensor, state: State, clock: Clock) -> Tensor:
        a, m, late = state["anchor"], state["m"], state["late"]
        delta = x.copy_(a - x)
        own = delta.to(a.dtype) / clock.workers  # Delta/n, after rounding to the sent dtype
        late.add_(own)  # D
        m.mul_(self.momentum).add_(late)
        a.sub_(late.add_(m, alpha=self.momentum), alpha=self.lr)  # a <- a - eta*(D + mu*m)
        torch.neg(own, out=late)
        return delta

    def after_send(self, x: Tensor, state: State, clock: Clock) -> None:
        x.copy_(state["anchor"])

    def fold(
        self, x: Tensor, received: Tensor, sent: Tensor | None, state: State, clock: Clock
    ) -> Tensor:
        state["late"].add_(received)
        return x

    def quiesce(self, x: Tensor, state: State, averaged: bool) -> None:
        """Apply ``late`` without momentum, ``a <- a - eta*late ; x <- a``, if x still equals a.

        This holds right after a round. Later, the workers' own steps have made up for part of
        ``late``, and applying both would overshoot. ``late`` then stays for the next round.
        """
        a, late = state["anchor"], state["late"]
        if torch.equal(x, a.to(x.dtype)):
            a.sub_(late, alpha=self.lr)
            x.copy_(a)
            late.zero_()
