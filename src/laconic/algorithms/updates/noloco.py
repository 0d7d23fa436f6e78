"""m <- mu*m + eta*mean(a - x) + gamma*(a - mean(a)) ;  a <- a - m ;  x <- a    (means of a pair)

NoLoCo: Kolehmainen et al. 2025, arXiv 2506.10911, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.algorithms.round import Clock, Slot, State, Update


@dataclass(frozen=True)
class NoLoCo(Update):
    """The outer step of NoLoCo (Kolehmainen et al. 2025), between neighbours alone::

        m_i <- mu*m_i + eta*mean(a - x) + gamma*(a_i - mean(a)) ;  a_i <- a_i - m_i ;  x_i <- a_i

    with means over the pair that worker i is in (its neighbourhood in any other graph), and over
    itself where it is in none. ``lr`` is eta (> 0), ``momentum`` is mu (0 <= mu < 1), ``gamma``
    (>= 0) pulls the anchors of a pair together; its terms cancel in the sum over a pair, so that
    the mean of a moves as with a mean over all workers. Any shape; ``a`` and ``m``, each worker's
    own, have x's unit. Messages are (a - x, a), twice as long as x, of float32 at least.
    """

    lr: float
    momentum: float
    gamma: float

    models = 2
    slots: ClassVar[dict[str, Slot]] = {"anchor": "private", "m": "private"}

    def init(self, x: Tensor) -> State:
        return {"anchor": x, "m": torch.zeros_like(x)}

    def send(self, x: Tensor, state: State, clock: Clock) -> Tensor:
        a = state["anchor"]
        return torch.cat([a - x, a])

    def fold(
        self, x: Tensor, received: Tensor, sent: Tensor | None, state: State, clock: Clock
    ) -> Tensor:
        assert clock.weight is not None, "what arrives tells how much of it there is"
        a, m, own = state["anchor"], state["m"], 1 - clock.weight
        delta, anchor = received.chunk(2)  # the neighbours', times their weights
        delta = delta.add_(a - x, alpha=own)  # mean(a - x)
        apart = torch.sub(a, anchor.add_(a, alpha=own))  # a - mean(a)
        m.mul_(self.momentum).add_(delta, alpha=self.lr).add_(apart, alpha=self.gamma)
        return a.sub_(m)
