"""x <- mean(y) + (x - y)    (without a delay y = x: x <- mean(x))

Local SGD: Stich 2018, arXiv 1805.09767, Algorithm 1. With a delay the local progress made while
the message travelled, x - y, is kept. On gradients: Li et al., VLDB 2020, arXiv 2006.15704.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.algorithms.round import Clock, State, Update


@dataclass(frozen=True)
class Average(Update):
    """``x <- mean(y) + (x - y)``, with ``y`` the ``x`` that was sent ``delay`` steps ago.

    Local SGD (Stich 2018, Algorithm 1); the mean of x over workers never changes by a round.
    Any shape; no state; x keeps its dtype.
    """

    replaces = True

    keeps_sent = True

    def fold(
        self, x: Tensor, received: Tensor, sent: Tensor | None, state: State, clock: Clock
    ) -> Tensor:
        return received if sent is None else received + (x - sent)


@dataclass(frozen=True)
class RoundedAverage(Update):
    """``x <- mean(q(x)) + (x - q(x))``, q rounding to ``dtype``, in which messages travel.

    Local SGD for half-precision models with master weights in float32: half the bytes, and what
    rounding cuts off stays with the worker (Seide et al., Interspeech 2014, error feedback), so
    that the sum over workers of x never changes by a round. Any shape; no state; no delay.
    """

    dtype: torch.dtype

    def send(self, x: Tensor, state: State, clock: Clock) -> Tensor:
        return x.to(self.dtype)

    def fold(
        self, x: Tensor, received: Tensor, sent: Tensor | None, state: State, clock: Clock
    ) -> Tensor:
        assert sent is None, "there is no delay"
        return (x - x.to(self.dtype)).add_(received)  # what was cut off, and the mean


@dataclass(frozen=True)
class Replace(Update):
    """``x <- mean(y)``, for running statistics, which are means themselves: what they took in while
    the message travelled may be lost, but variances must not turn negative. Any shape; no state."""

    replaces = True
