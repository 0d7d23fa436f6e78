"""x_i <- sum_j W_ij x_j, W symmetric and doubly stochastic    (delayed: x <- x + (W y - y))

D-PSGD: Lian et al., NeurIPS 2017, arXiv 1705.09056, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from laconic.algorithms.update import Clock, State, Update


@dataclass(frozen=True)
class Mix(Update):
    """Gossip with neighbors (Lian et al. 2017, Algorithm 1, mixing after the step)::

        x_i <- sum over j of W_ij x_j         W_ij = 1/(1 + max(degree_i, degree_j)) for neighbors

    The diagonal holds the rest of each row, so W is symmetric and doubly stochastic, and a round
    never changes the mean over workers. With a delay, each worker keeps the local progress
    ``x - y`` that it made while the messages were in flight. No state.
    """

    keeps_sent = True

    def fold(
        self, x: Tensor, received: Tensor, sent: Tensor | None, state: State, clock: Clock
    ) -> Tensor:
        y = x if sent is None else sent
        assert clock.weight is not None, "a gossip round needs the weight of what arrived"
        mixed = received.add_(y, alpha=1 - clock.weight)  # weight: sum of W_ij over neighbors
        return mixed if sent is None else mixed.add_(x).sub_(sent)
