"""x <- mean(y) + (x - y)    (without a delay y = x: x <- mean(x))

Local SGD: Stich 2018, arXiv 1805.09767, Algorithm 1. With a delay, each worker keeps the local
progress ``x - y`` that it made while the message was in flight. For gradients: Li et al., VLDB
2020, arXiv 2006.15704.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.algorithms.update import Clock, State, Update


@dataclass(frozen=True)
class Average(Update):
    """``x <- mean(y) + (x - y)``, where ``y`` is the ``x`` that was sent ``delay`` steps ago.

    Local SGD (Stich 2018, Algorithm 1). A round never changes the mean of x over workers. Works
    for any shape, has no state, and keeps the dtype of x.
    """

    replaces = True

    keeps_sent = True

    def fold(
        self, x: Tensor, received: Tensor, sent: Tensor | None, state: State, clock: Clock
    ) -> Tensor:
        return received if sent is None else received + (x - sent)


@dataclass(frozen=True)
class RoundedAverage(Update):
    """``x <- mean(q(y)) + (x - q(y))``, where q rounds to ``dtype``, the dtype of messages.

    Local SGD for half-precision models with float32 master weights: messages take half the bytes.
    ``y`` is the ``x`` that was sent. Each worker keeps its rounding error (error feedback, Seide et
    al., Interspeech 2014), and with a delay its progress since, so a round never changes the sum of
    x over workers. Works for any shape; no state.
    """

    dtype: torch.dtype

    keeps_sent = True

    def send(self, x: Tensor, state: State, clock: Clock) -> Tensor:
        return x.to(self.dtype)

    def fold(
        self, x: Tensor, received: Tensor, sent: Tensor | None, state: State, clock: Clock
    ) -> Tensor:
        y = x if sent is None else sent
        return (x - y.to(self.dtype)).add_(received)  # rounding error and progress + mean


@dataclass(frozen=True)
class Replace(Update):
    """``x <- mean(y)``, for running statistics, which are themselves means.

    With a delay, a worker's changes since ``y`` are lost. Adding them back could make a variance
    negative. Works for any shape; no state.
    """

    replaces = True

    def fold(
        self, x: Tensor, received: Tensor, sent: Tensor | None, state: State, clock: Clock
    ) -> Tensor:
        return received
