"""x <- (1-c)*x + c*leader, where the leader is the worker with the lowest loss

LSGD: Teng et al., NeurIPS 2019, arXiv 1905.10395, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from laconic.algorithms.update import Clock, Slot, State, Update


@dataclass(frozen=True)
class LeaderPull(Update):
    """Pull x toward one leader, local or global, as in Leader SGD (Teng et al. 2019, Algorithm 1)::

        every step:   x <- (1 - drift)*x + drift*leader      (drift = p/tau, the last leader's x)
        every round:  x <- (1 - pull)*x + pull*leader        (pull = c)

    ``pull`` and ``drift`` are in [0, 1). ``leader`` is the leader's x at the last round. It starts
    as the common initial x.
    """

    pull: float
    drift: float

    # private rather than everywhere: each group of workers has its own leader
    slots: ClassVar[dict[str, Slot]] = {"leader": "private"}

    def init(self, x: Tensor) -> State:
        return {"leader": x} if self.drift else {}

    @property
    def in_every_step(self) -> bool:
        return self.drift > 0

    def after_step(self, x: Tensor, state: State, clock: Clock) -> None:
        x.lerp_(state["leader"].to(x.dtype), self.drift)

    def fold(
        self, x: Tensor, received: Tensor, sent: Tensor | None, state: State, clock: Clock
    ) -> Tensor:
        if self.drift:
            state["leader"].copy_(received)
        return x.lerp_(received, self.pull)
