"""x <- lo*x + sum of received x ;  w <- lo*w + sum of received w ;  z = x/w    (z is the model)

Stochastic Gradient Push: Assran et al., ICML 2019, arXiv 1811.10792, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.algorithms.update import Clock, Slot, State, Update


@dataclass(frozen=True)
class PushSum(Update):
    """Gossip over a directed graph (Assran et al. 2019, Algorithm 1)::

        w = 1 ; z = x/w                              # forward and backward use z
        each step: x <- x - lr*direction(gradient at z)
                   lo = 1/(out_degree + 1) ; send lo*x, lo*w to each out-peer
                   x <- lo*x + sum of received x ; w likewise ; z = x/w

    Between steps the model holds z. It holds x while the user's optimizer runs. With a delay
    (overlap SGP), what is sent leaves x and w at once and is folded in when due. A gossip never
    changes the sums of x and w over workers and in-flight messages. ``w`` has no unit.
    """

    slots: ClassVar[dict[str, Slot]] = {"w": "private"}
    weight = "w"

    def init(self, x: Tensor) -> State:
        return {"w": torch.tensor(1.0, dtype=torch.float64)}

    def before_step(self, x: Tensor, state: State, clock: Clock) -> None:
        if (w := float(state["w"])) != 1.0:
            x.mul_(w)  # x = w*z

    def after_step(self, x: Tensor, state: State, clock: Clock) -> None:
        if (w := float(state["w"])) != 1.0:
            x.div_(w)  # z = x/w

    def send(self, x: Tensor, state: State, clock: Clock) -> Tensor:
        w = state["w"].div_(clock.out_degree + 1)  # lo*w: each peer gets as much as stays here
        return x.mul_(float(w))  # lo*x

    def fold(
        self, x: Tensor, received: Tensor, sent: Tensor | None, state: State, clock: Clock
    ) -> Tensor:
        assert clock.weight is not None, "a push-sum message carries its weight"
        total = received.add_(x, alpha=float(state["w"]))  # lo*x + sum of received x
        return total.div_(float(state["w"].add_(clock.weight)))  # z = x/w

    def quiesce(self, x: Tensor, state: State, averaged: bool) -> None:
        if averaged:
            x.mul_(float(state["w"]))  # the mean of x over workers is sum(x)/sum(w)
        state["w"].fill_(1.0)
