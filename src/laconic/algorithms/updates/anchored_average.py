"""a <- mean ;  x <- a

Local SGD, Stich 2018, arXiv 1805.09767, where workers contribute at different times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from laconic.algorithms.update import Clock, Slot, State, Update


@dataclass(frozen=True)
class AnchoredAverage(Update):
    """Local SGD that remembers its last average ``a``, from which late workers' steps count: see
    `QuorumMean`. If all workers contribute to every round, this is `Average`, bit for bit. Works
    for any shape."""

    slots: ClassVar[dict[str, Slot]] = {"anchor": "owner"}
    anchor = "anchor"
    replaces = True

    def init(self, x: Tensor) -> State:
        return {"anchor": x}

    def combine(self, mean: Tensor, state: State, clock: Clock) -> Tensor:
        return state["anchor"].copy_(mean)
