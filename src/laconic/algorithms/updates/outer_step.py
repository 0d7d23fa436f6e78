"""Delta = a - mean(y) ;  a <- outer(a, Delta) ;  x <- merge(x, a)    (without a delay: x <- a)

DiLoCo: Douillard et al. 2023, arXiv 2311.08105, Algorithm 1; the delayed merge: Douillard et al.
2025, arXiv 2501.18512, Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.algorithms.round import Clock, Slot, State, Update

OuterFactory = Callable[[list[Tensor]], Optimizer]
Merge = Literal["mix", "average", "loscar"]


@dataclass(frozen=True)
class OuterStep(Update):
    """The outer step of DiLoCo (Douillard et al. 2023, Algorithm 1): the pseudo-gradient
    ``Delta = mean(a - x)`` handed to an outer optimiser, by default torch's Nesterov SGD::

        m <- mu*m + Delta ;  a <- a - eta*(Delta + mu*m) ;  x <- a

    ``lr`` is eta (> 0), ``momentum`` is mu (0 <= mu < 1). ``outer`` makes any other torch
    optimiser from a list of flat tensors; it must be elementwise (SGD, Adam, ...: not LAMB or
    Muon), because it sees buckets, or slices of them.

    With a delay the step is computed from y, and ``merge`` says what becomes of x, which has moved
    on since::

        "mix":      x <- mix*x + (1-mix)*a      (Streaming DiLoCo's alpha)
        "average":  x <- (x + a)/2
        "loscar":   x <- a + (x - y)            (the local progress is kept)

    The last is LOSCAR's own (arXiv 2605.20866) at lr=1 and momentum=0, where a is the mean of y.
    """

    lr: float
    momentum: float
    outer: OuterFactory | None = None
    mix: float = 0.5
    merge: Merge = "mix"

    slots: ClassVar[dict[str, Slot]] = {"anchor": "owner", "m": "owner"}
    anchor = "anchor"
    replaces = True

    @property
    def keeps_sent(self) -> bool:
        return self.merge == "loscar"

    def init(self, x: Tensor) -> State:
        state = {"anchor": x}
        if self.outer is None and self.momentum:
            state["m"] = torch.zeros_like(x)
        return state

    def combine(self, mean: Tensor, state: State, clock: Clock) -> Tensor:
        a = state["anchor"]
        delta = torch.sub(a, mean, out=mean)  # Delta = a - mean(x), in the room of the mean
        if self.outer is not None:
            self._step_with(self.outer, delta, state)
        elif not self.momentum:
            a.sub_(delta, alpha=self.lr)
        else:
            m = state["m"].mul_(self.momentum).add_(delta)  # m <- mu*m + Delta
            a.sub_(delta.add_(m, alpha=self.momentum), alpha=self.lr)  # a <- a - eta*(Delta + mu*m)
        return a

    def _step_with(self, outer: OuterFactory, delta: Tensor, state: State) -> None:
        """One step of a torch optimiser whose state lives in ``state``, so that it is sharded,
        saved and restored like any other."""
        a = state["anchor"]
        optimizer = outer([a])
        kept = {name.removeprefix("outer."): v for name, v in state.items() if name != "anchor"}
        if kept:
            optimizer.state[a].update(kept)
        a.grad = delta
        settings = _numbers(optimizer.param_groups[0])
        optimizer.step()
        a.grad = None
        lost = settings.items() ^ _numbers(optimizer.param_groups[0]).items()
        if lost or _numbers(optimizer.state[a]):
            names = sorted({name for name, _ in lost} | set(_numbers(optimizer.state[a])))
            raise ValueError(
                f"outer= keeps {names} as numbers, and only its tensors are kept from one round to "
                "the next: take an optimiser that keeps nothing else, as those of torch.optim"
            )
        for name, value in optimizer.state[a].items():
            if isinstance(value, Tensor):
                state[f"outer.{name}"] = value

    def fold(
        self, x: Tensor, received: Tensor, sent: Tensor | None, state: State, clock: Clock
    ) -> Tensor:
        if self.merge == "loscar":
            assert sent is not None, "a delayed round whose update keeps y"
            return x.sub_(sent).add_(received)
        mix = 0.5 if self.merge == "average" else self.mix
        return x.mul_(mix).add_(received, alpha=1 - mix)


def _numbers(kept: Mapping[Any, object]) -> dict[str, float]:
    """What an optimiser keeps, or is set to, that is a number."""
    return {str(name): value for name, value in kept.items() if isinstance(value, (int, float))}
