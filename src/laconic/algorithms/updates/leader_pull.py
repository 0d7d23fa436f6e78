"""x <- (1-c)*x + c*leader, the leader being the worker with the least loss

LSGD: Teng et al., NeurIPS 2019, arXiv 1905.10395, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from laconic.algorithms.round import Clock, Slot, State, Update


@dataclass(frozen=True)
class LeaderPull(Update):
    """The pulls of leader SGD toward one leader, local or global (Teng et al. 2019, Algorithm 1)::

        every step:   x <- (1 - drift)*x + drift*leader      (drift = p/tau, the latest leader's x)
        every round:  x <- (1 - pull)*x + pull*leader        (pull = c)

    ``pull`` and ``drift`` in [0, 1). ``leader`` is the x that the leader had at the last round; at
    the beginning the common start.
    """

    pull: float
    drift: float

    slots: ClassVar[dict[str, Slot]] = {"leader": "private"}  # one for each set of workers

    def init(self, x: Tensor) -> State:
        return {"leader": x} if self.drift else {}

    @property
    def pulls(self) -> bool:
        return self.drift > 0

    def after_step(self, x: Tensor, state: State, clock: Clock) -> None:
        x.lerp_(state["leader"].to(x.dtype), self.drift)

    def fold(
        self, x: Tensor, received: Tensor, sent: Tensor | None, state: State, clock: Clock
    ) -> Tensor:
        if self.drift:
            state["leader"].copy_(received)
        return x.lerp_(received, self.pull)
