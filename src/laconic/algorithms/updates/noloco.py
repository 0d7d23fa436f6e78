"""m <- mu*m + eta*mean(a - x) + gamma*(a - mean(a)) ;  a <- a - m ;  x <- a    (means over a pair)

NoLoCo: Kolehmainen et al. 2025, arXiv 2506.10911, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.algorithms.update import Clock, Slot, State, Update


@dataclass(frozen=True)
class NoLoCo(Update):
    """The outer step of NoLoCo between pairs of workers (Kolehmainen et al. 2025)::

        m_i <- mu*m_i + eta*mean(a - x) + gamma*(a_i - mean(a)) ;  a_i <- a_i - m_i ;  x_i <- a_i

    Means are over worker i and its peer. In other graphs they are over worker i and its neighbors.
    A worker without a peer uses its own values alone.

    ``lr`` is eta (> 0) and ``momentum`` is mu (0 <= mu < 1). ``gamma`` (>= 0) pulls the anchors of
    a pair together. Its terms cancel in the sum over a pair, so the mean of a moves as if
    the mean were over all workers. Works for any shape. ``a`` and ``m`` are private to each worker
    and have the unit of x. Messages are (a - x, a): twice as long as x, in float32 or wider. With a
    delay, ``x - a`` is that of when the message was sent, and each worker keeps its progress since.
    """

    lr: float
    momentum: float
    gamma: float

    models = 2
    slots: ClassVar[dict[str, Slot]] = {"anchor": "private", "m": "private"}
    keeps_sent = True

    def init(self, x: Tensor) -> State:
        return {"anchor": x, "m": torch.zeros_like(x)}

    def send(self, x: Tensor, state: State, clock: Clock) -> Tensor:
        a = state["anchor"]
        return torch.cat([a - x, a])

    def fold(
        self, x: Tensor, received: Tensor, sent: Tensor | None, state: State, clock: Clock
    ) -> Tensor:
        assert clock.weight is not None, "a gossip round needs the weight of what arrived"
        a, m, own = state["anchor"], state["m"], 1 - clock.weight
        delta, anchor = received.chunk(2)  # sums over neighbors, times their weights
        y = x if sent is None else sent
        delta = delta.add_(a - y, alpha=own)  # mean(a - y)
        apart = torch.sub(a, anchor.add_(a, alpha=own))  # a - mean(a)
        m.mul_(self.momentum).add_(delta, alpha=self.lr).add_(apart, alpha=self.gamma)
        a.sub_(m)
        return a if sent is None else a + (x - sent)
