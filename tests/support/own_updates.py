"""Updates as a user may write them, with what the shipped recipes do not use, and the same as plain
loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from laconic.algorithms.update import Clock, Slot, State, Update
from laconic.parts import parameters

from tests.references import problem
from tests.references.problem import Params, Rates, Worker


@dataclass(frozen=True)
class Coarse(Update):
    """q = round(x + e, 1/4) ;  e <- x + e - q ;  x <- mean(q)"""

    slots: ClassVar[dict[str, Slot]] = {"e": "private"}

    def init(self, x: Tensor) -> State:
        return {"e": torch.zeros_like(x)}

    def send(self, x: Tensor, state: State, clock: Clock) -> Tensor:
        wanted = x + state["e"]
        q = (wanted * 4).round() / 4
        state["e"].copy_(wanted - q)
        return q


@dataclass
class CoarseLoop(problem.Recipe):
    """The same, over a list of workers."""

    period: int

    def start(self, x0: Params, n: int) -> None:
        self.e = [problem.scale(0.0, x0) for _ in range(n)]

    def after_step(self, t: int, workers: list[Worker], lr: Rates) -> None:
        if t % self.period:
            return
        wanted = [problem.add(w.x, e) for w, e in zip(workers, self.e, strict=True)]
        q = [{k: np.round(v * 4) / 4 for k, v in x.items()} for x in wanted]
        self.e = [problem.minus(x, y) for x, y in zip(wanted, q, strict=True)]
        for w in workers:
            w.x = problem.mean(q)


@dataclass(frozen=True)
class Homemade(Update):
    """s <- s + x, sent is x + 0.01*s ;  result = mean*(1 - 0.01*k), k the rounds executed before;
    x <- result. Delayed, it forgets the steps since."""

    slots: ClassVar[dict[str, Slot]] = {"sum": "private", "last": "private"}

    def init(self, x: Tensor) -> State:
        return {"sum": torch.zeros_like(x), "last": torch.tensor(0.0)}

    def send(self, x: Tensor, state: State, clock: Clock) -> Tensor:
        state["sum"] += x
        state["last"].fill_(clock.worker)
        return x + 0.01 * state["sum"]

    def combine(self, mean: Tensor, state: State, clock: Clock) -> Tensor:
        return mean * (1.0 - 0.01 * clock.executed)

    def fold(
        self, x: Tensor, received: Tensor, sent: Tensor | None, state: State, clock: Clock
    ) -> Tensor:
        return received


@dataclass
class HomemadeLoop(problem.Recipe):
    """The same, over a list of workers."""

    period: int
    delay: int

    def start(self, x0: Params, n: int) -> None:
        self.s = [problem.scale(0.0, x0) for _ in range(n)]
        self.k, self.flight = 0, list[tuple[int, Params]]()

    def after_step(self, t: int, workers: list[Worker], lr: Rates) -> None:
        self._fold(t, workers)
        if t % self.period == 0:
            self.s = [problem.add(s, w.x) for s, w in zip(self.s, workers, strict=True)]
            mean = problem.mean([w.x for w in workers])
            sent = problem.add(mean, problem.scale(0.01, problem.mean(self.s)))
            result = problem.scale(1.0 - 0.01 * self.k, sent)
            self.k += 1
            self.flight.append((t + self.delay, result))
            self._fold(t, workers)

    def _fold(self, t: int, workers: list[Worker]) -> None:
        while self.flight and self.flight[0][0] <= t:
            _, result = self.flight.pop(0)
            for w in workers:
                w.x = problem.copy(result)


def half(which: int) -> Callable[..., list[dict[str, Tensor]]]:
    """A selector: the first or the second parameter of each group."""

    def select(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
        groups = parameters(model, optimizer)
        return [{k: p for k, p in group.items() if int(k) % 2 == which} for group in groups]

    return select
