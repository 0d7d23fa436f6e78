"""x <- mean(y) + (x - y)    (without a delay y = x: x <- mean(x))

Local SGD: Stich 2018, arXiv 1805.09767, Algorithm 1. With a delay the local progress made while
the message travelled, x - y, is kept. On gradients: Li et al., VLDB 2020, arXiv 2006.15704.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from laconic.round import Clock, State, Update


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
class Replace(Update):
    """``x <- mean(y)``, for running statistics, which are means themselves: what they took in while
    the message travelled may be lost, but variances must not turn negative. Any shape; no state."""

    replaces = True
