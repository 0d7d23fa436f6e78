"""g <- sign(mean(g))

signSGD: Bernstein et al., ICML 2018, arXiv 1802.04434. With the exchange of
`laconic.algorithms.exchanges.demo`: DeMo, Peng, Quesnelle, Kingma 2024, arXiv 2411.19870.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from laconic.algorithms.update import Clock, State, Update


@dataclass(frozen=True)
class Sign(Update):
    """Replace every element of the mean gradient by its sign: 1, -1, or 0.

    For rounds on gradients. SGD then moves each parameter by its learning rate. Works for any
    shape; no state; no unit.
    """

    replaces = True

    def combine(self, mean: Tensor, state: State, clock: Clock) -> Tensor:
        return mean.sign_()
