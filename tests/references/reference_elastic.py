"""Plain-loop references of the elastic recipes: EASGD, EAMSGD, DOWNPOUR.

The anchor `a` starts as the common x0 and is the consensus."""

from __future__ import annotations

from dataclasses import dataclass

from tests.references.reference import NAMES, Params, Rates, Worker, copy, mean
from tests.references.reference_decade import Rounds, Seen, add, scale, toward


@dataclass
class EASGD(Rounds):
    """every step, after the local optimizer's: x <- (1 - p/tau)*x + (p/tau)*a   (local pull p)
    every tau, after that:                     xbar = mean(x)
                                               x_i <- x_i - (beta/n)*(x_i - a)   (the old a)
                                               a <- (1 - beta)*a + beta*xbar

    With p > 0 the round sees, and its conservation sum_i dx_i = -da holds for, x as the local
    pull left it; the local pull itself is taken from nobody. EAMSGD is this with Nesterov SGD as
    the local optimizer, which is the caller's to give."""

    period: int
    beta: float = 0.9
    pull: float = 0.0

    def start(self, x0: Params, n: int) -> None:
        self.anchor = copy(x0)

    def each_step(self, t: int, workers: list[Worker], seen: Seen) -> None:
        for w in workers:
            w.x = toward(w.x, self.anchor, self.pull / self.period)

    def after_step(self, t: int, workers: list[Worker], lr: Rates) -> None:
        if t % self.period != 0:
            return
        n, a = len(workers), self.anchor
        xbar = mean([w.x for w in workers])
        for w in workers:
            for name in NAMES:
                w.x[name] = w.x[name] - (self.beta / n) * (w.x[name] - a[name])
        self.anchor = toward(a, xbar, self.beta)

    def consensus(self, workers: list[Worker]) -> Params:
        return copy(self.anchor)


@dataclass
class Downpour(Rounds):
    """every tau: a <- a + sum_i (x_i - a) ; x <- a. A sum, not a mean; every term has the old a."""

    period: int

    def start(self, x0: Params, n: int) -> None:
        self.anchor = copy(x0)

    def after_step(self, t: int, workers: list[Worker], lr: Rates) -> None:
        if t % self.period != 0:
            return
        old = copy(self.anchor)
        for w in workers:
            self.anchor = add(self.anchor, add(w.x, scale(-1.0, old)))
        for w in workers:
            w.x = copy(self.anchor)

    def consensus(self, workers: list[Worker]) -> Params:
        return copy(self.anchor)


easgd, eamsgd, downpour = EASGD, EASGD, Downpour
