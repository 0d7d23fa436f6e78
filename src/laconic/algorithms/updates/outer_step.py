"""Delta = a - mean(y) ;  a <- outer(a, Delta) ;  x <- merge(x, a)    (without a delay: x <- a)

DiLoCo: Douillard et al. 2023, arXiv 2311.08105, Algorithm 1. The delayed merge: Douillard et al.
2025, arXiv 2501.18512, Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.algorithms.update import Clock, Slot, State, Update

OuterFactory = Callable[[list[Tensor]], Optimizer]
Merge = Literal["mix", "loscar"]


@dataclass(frozen=True)
class OuterStep(Update):
    """The outer step of DiLoCo (Douillard et al. 2023, Algorithm 1).

    The outer optimizer receives the pseudo-gradient ``Delta = mean(a - x)``. By default it is
    torch's Nesterov SGD::

        m <- mu*m + Delta ;  a <- a - eta*(Delta + mu*m) ;  x <- a

    ``lr`` is eta (> 0) and ``momentum`` is mu (0 <= mu < 1). ``outer`` makes any other torch
    optimizer from a list of flat tensors. That optimizer must be elementwise (SGD, Adam, and so
    on, but not LAMB or Muon), because it receives buckets or slices of them.

    With a delay, the step is computed from y. Because x has moved on since, ``merge`` selects how
    x and the new anchor are combined::

        "mix":     x <- mix*x + (1-mix)*a      (Streaming DiLoCo's alpha)
        "loscar":  x <- a + (x - y)            (keeps the local progress)

    With lr=1 and momentum=0, a is the mean of y and "loscar" is LOSCAR itself (arXiv 2605.20866).
    """

    lr: float
    momentum: float
    outer: OuterFactory | None = None
    mix: float = 0.5
    merge: Merge = "mix"

    slots: ClassVar[dict[str, Slot]] = {"anchor": "owner", "m": "owner"}
    anchor = "anchor"
    replaces = True
    usual_lr: ClassVar[float] = 0.7
    """Where a recipe is given no ``lr``."""
    usual_merge: ClassVar[Merge] = "mix"
    """Where `streaming_diloco` is given neither ``merge`` nor ``mix``."""

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
        delta = torch.sub(a, mean, out=mean)  # Delta = a - mean(x), reusing the memory of mean
        if self.outer is not None:
            self._step_with(self.outer, delta, state)
        elif not self.momentum:
            a.sub_(delta, alpha=self.lr)
        else:
            m = state["m"].mul_(self.momentum).add_(delta)  # m <- mu*m + Delta
            a.sub_(delta.add_(m, alpha=self.momentum), alpha=self.lr)  # a <- a - eta*(Delta + mu*m)
        return a

    def _step_with(self, outer: OuterFactory, delta: Tensor, state: State) -> None:
        """Take one step of a torch optimizer whose state lives in ``state``.

        The state is therefore sharded, saved, and restored like that of any update.
        """
        a = state["anchor"]
        optimizer = outer([a])
        saved = {name.removeprefix("outer."): v for name, v in state.items() if name != "anchor"}
        if saved:
            optimizer.state[a].update(saved)
        a.grad = delta
        settings = _number_entries(optimizer.param_groups[0])
        optimizer.step()
        a.grad = None
        changed = settings.items() ^ _number_entries(optimizer.param_groups[0]).items()
        if changed or _number_entries(optimizer.state[a]):
            names = sorted({name for name, _ in changed} | set(_number_entries(optimizer.state[a])))
            raise ValueError(
                f"the optimizer from outer= stores {names} as Python numbers, but only tensors are "
                "carried over between rounds: use an optimizer whose state is all tensors, such as "
                "those in torch.optim"
            )
        for name, value in optimizer.state[a].items():
            if isinstance(value, Tensor):
                state[f"outer.{name}"] = value

    def fold(
        self, x: Tensor, received: Tensor, sent: Tensor | None, state: State, clock: Clock
    ) -> Tensor:
        if self.merge == "loscar":
            assert sent is not None, 'merge="loscar" needs y in a delayed round'
            return x.sub_(sent).add_(received)
        return x.mul_(self.mix).add_(received, alpha=1 - self.mix)


def _number_entries(entries: Mapping[Any, object]) -> dict[str, float]:
    """Return the entries of an optimizer's state or settings that are Python numbers."""
    return {str(name): value for name, value in entries.items() if isinstance(value, (int, float))}
