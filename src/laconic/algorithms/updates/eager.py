"""D = Delta/n + late ;  a <- outer(a, D) ;  x <- a ;  once it has arrived: late <- mean - Delta/n

Eager updates: Kale, Douillard, Donchev 2025, arXiv 2502.12996. Delta = a - x, mean = mean(Delta)
over all workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.algorithms.round import Clock, Slot, State, Update


@dataclass(frozen=True)
class Eager(Update):
    """DiLoCo's outer step, taken at once (Kale et al. 2025): in round t, of worker i::

        Delta_i(t) = a_i - x_i                                                      is sent
        D   = Delta_i(t)/n + (mean(Delta(t-1)) - Delta_i(t-1)/n)                    Delta(0) = 0
        m_i <- mu*m_i + D ;  a_i <- a_i - eta*(D + mu*m_i) ;  x_i <- a_i

    what the others did being a round late, what the worker did itself not. For a delay of at least
    1 step and at most the period, on which nothing but the overlap depends. ``lr`` is eta (> 0),
    ``momentum`` is mu (0 <= mu < 1). Any shape; ``a``, ``m`` and ``late``, each worker's own, have
    x's unit. For one worker it is DiLoCo.
    """

    lr: float
    momentum: float

    slots: ClassVar[dict[str, Slot]] = {"anchor": "private", "m": "private", "late": "private"}

    def init(self, x: Tensor) -> State:
        return {"anchor": x, "m": torch.zeros_like(x), "late": torch.zeros_like(x)}

    def send(self, x: Tensor, state: State, clock: Clock) -> Tensor:
        a, m, late = state["anchor"], state["m"], state["late"]
        delta = x.copy_(a - x)
        own = delta.to(a.dtype) / clock.workers  # Delta/n, as it is sent
        late.add_(own)  # D
        m.mul_(self.momentum).add_(late)
        a.sub_(late.add_(m, alpha=self.momentum), alpha=self.lr)  # a <- a - eta*(D + mu*m)
        torch.neg(own, out=late)
        return delta

    def depart(self, x: Tensor, state: State, clock: Clock) -> None:
        x.copy_(state["anchor"])

    def fold(
        self, x: Tensor, received: Tensor, sent: Tensor | None, state: State, clock: Clock
    ) -> Tensor:
        state["late"].add_(received)
        return x

    def settle(self, x: Tensor, state: State, averaged: bool) -> None:
        """Right after a round, when x is still a, what is late is taken in at once, without
        momentum: a <- a - eta*late ; x <- a. Later the workers' own steps have made up for part of
        it, and both together would overshoot: then it waits for the next round."""
        a, late = state["anchor"], state["late"]
        if torch.equal(x, a.to(x.dtype)):
            a.sub_(late, alpha=self.lr)
            x.copy_(a)
            late.zero_()
