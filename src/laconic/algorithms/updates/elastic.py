"""x <- x - (beta/n)*(x - a) ;  a <- (1-beta)*a + beta*mean(x before)

EASGD: Zhang, Choromanska, LeCun, NeurIPS 2015, arXiv 1412.6651, equations 5 and 6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from laconic.algorithms.update import Clock, Slot, State, Update


@dataclass(frozen=True)
class Elastic(Update):
    """Elastic averaging (Zhang et al. 2015, equations 5 and 6), after the local step::

        x <- x - (beta/n)*(x - a) ;  a <- (1-beta)*a + beta*mean(x before the pull)

    The center ``a`` gains what the workers lose: the changes of x sum to minus the change of a.
    ``beta`` is in (0, 1]. ``pull``, in [0, 1), is the fraction of the distance to the center that
    x moves at every step, before any round that is due: ``x <- (1 - pull)*x + pull*a``.
    """

    beta: float
    pull: float

    slots: ClassVar[dict[str, Slot]] = {"anchor": "everywhere"}
    anchor = "anchor"

    def init(self, x: Tensor) -> State:
        return {"anchor": x}

    @property
    def in_every_step(self) -> bool:
        return self.pull > 0

    def after_step(self, x: Tensor, state: State, clock: Clock) -> None:
        x.lerp_(state["anchor"].to(x.dtype), self.pull)

    def fold(
        self, x: Tensor, received: Tensor, sent: Tensor | None, state: State, clock: Clock
    ) -> Tensor:
        a = state["anchor"]
        x = x.lerp_(a.to(x.dtype), self.beta / clock.workers)  # x <- x - (beta/n)*(x - a)
        a.lerp_(received.to(a.dtype), self.beta)  # a <- (1-beta)*a + beta*mean(x)
        return x
