"""g <- sign(mean(g))

signSGD: Bernstein et al., ICML 2018, arXiv 1802.04434; of what
`laconic.algorithms.exchanges.demo` brings: DeMo, Peng, Quesnelle, Kingma 2024, arXiv 2411.19870.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from laconic.algorithms.round import Clock, State, Update


@dataclass(frozen=True)
class Sign(Update):
    """For rounds on gradients: every element of the mean becomes 1, -1, or 0 where it is 0. SGD
    then moves each parameter by its learning rate. Any shape; no state; no unit."""

    replaces = True

    def combine(self, mean: Tensor, state: State, clock: Clock) -> Tensor:
        return mean.sign_()
