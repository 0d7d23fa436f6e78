"""x_i <- sum_j W_ij x_j, W symmetric and doubly stochastic    (late: x <- x + (W y - y))

D-PSGD: Lian et al., NeurIPS 2017, arXiv 1705.09056, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from laconic.algorithms.round import Clock, State, Update


@dataclass(frozen=True)
class Mix(Update):
    """Gossip with neighbours (Lian et al. 2017, Algorithm 1, mixing after the step)::

        x_i <- sum over j of W_ij x_j         W_ij = 1/(1 + max(degree_i, degree_j)) for neighbours

    and the rest of each row on the diagonal, so that W is symmetric and doubly stochastic: the
    mean over workers never changes. With a delay the local progress made while the messages
    travelled, x - y, is kept. No state.
    """

    keeps_sent = True

    def fold(
        self, x: Tensor, received: Tensor, sent: Tensor | None, state: State, clock: Clock
    ) -> Tensor:
        y = x if sent is None else sent
        assert clock.weight is not None, "what arrives tells how much of it there is"
        mixed = received.add_(y, alpha=1 - clock.weight)  # weight: sum of W_ij over neighbours
        return mixed if sent is None else mixed.add_(x).sub_(sent)
