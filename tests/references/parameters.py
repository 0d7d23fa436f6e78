"""Plain-loop references of recipes that average, attract or follow: local SGD and its kin, elastic
averaging, DOWNPOUR, leaders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tests.references.coded import Codec, CodedMean
from tests.references.problem import (
    FLAT,
    NAMES,
    Params,
    Rates,
    Recipe,
    Seen,
    StatePolicy,
    Worker,
    add,
    copy,
    mean,
    minus,
    toward,
    treat_state,
)


class Mixing(Recipe):
    """What a message brings is added to x `delay` steps after it was sent, before the next one
    leaves: x <- x + (received - y), y being x as it was sent. So the steps in between are kept."""

    delay: int

    def start(self, x0: Params, n: int) -> None:
        self.flight: list[tuple[int, list[Params]]] = []  # (step it is due, what to add)

    def send(self, t: int, workers: list[Worker]) -> Sequence[Params] | None:
        """What each worker receives in the round of step t, if there is one."""
        raise NotImplementedError

    def after_step(self, t: int, workers: list[Worker], lr: Rates) -> None:
        self._fold(workers, t)
        received = self.send(t, workers)
        if received is not None:
            change = [minus(r, w.x) for r, w in zip(received, workers, strict=True)]
            self.flight.append((t + self.delay, change))
        if self.delay == 0:
            self._fold(workers, t)

    def settle(self, workers: list[Worker]) -> None:
        self._fold(workers, math.inf)

    def _fold(self, workers: list[Worker], until: float) -> None:
        while self.flight and self.flight[0][0] <= until:
            for w, change in zip(workers, self.flight.pop(0)[1], strict=True):
                w.x = add(w.x, change)


@dataclass
class LocalSGD(Mixing):
    """every H: x <- mean(x), the optimizers' state treated as it is sent.

    Post-local: g <- mean(g) in steps 1..begin, then rounds after multiples of H beyond begin."""

    period: int
    delay: int = 0
    optimizer_state: StatePolicy = "keep"
    begin: int = 0
    codec: Codec | None = None

    def start(self, x0: Params, n: int) -> None:
        super().start(x0, n)
        self.mean = CodedMean(self.codec, [FLAT], x0, n)

    def gradients(self, t: int, grads: list[Params]) -> list[Params]:
        return [mean(grads)] * len(grads) if t <= self.begin else grads

    def send(self, t: int, workers: list[Worker]) -> Sequence[Params] | None:
        if t <= self.begin or t % self.period:
            return None
        treat_state(workers, self.optimizer_state)
        return [self.mean([w.x for w in workers])] * len(workers)


def post_local_sgd(start: int, period: int, delay: int = 0) -> LocalSGD:
    return LocalSGD(period, delay, begin=start)


@dataclass
class Hierarchical(Mixing):
    """every `group_period`: x <- mean(x) over the group ; every `period`: over all workers.
    Both due: over all only. Worker i is in group i // group_size."""

    group_period: int
    period: int
    group_size: int
    delay: int = 0

    def send(self, t: int, workers: list[Worker]) -> Sequence[Params] | None:
        n = len(workers)
        size = n if t % self.period == 0 else self.group_size
        if t % self.period and t % self.group_period:
            return None
        firsts = [i - i % size for i in range(n)]
        return [mean([w.x for w in workers[first : first + size]]) for first in firsts]


# ---------------------------------------------------------------- a center
@dataclass
class EASGD(Recipe):
    """every step, after the local optimizer's: x <- (1 - p/tau)*x + (p/tau)*a   (local pull p)
    every tau, after that:                     xbar = mean(x)
                                               x_i <- x_i - (beta/n)*(x_i - a)   (the old a)
                                               a <- (1 - beta)*a + beta*xbar

    EAMSGD is this with Nesterov SGD as the local optimizer. The center `a` is the consensus."""

    period: int
    beta: float = 0.9
    pull: float = 0.0
    codec: Codec | None = None

    def start(self, x0: Params, n: int) -> None:
        self.anchor = copy(x0)
        self.mean = CodedMean(self.codec, [FLAT], x0, n)

    def each_step(self, t: int, workers: list[Worker], seen: Seen) -> None:
        for w in workers:
            w.x = toward(w.x, self.anchor, self.pull / self.period)

    def after_step(self, t: int, workers: list[Worker], lr: Rates) -> None:
        if t % self.period:
            return
        xbar = self.mean([w.x for w in workers])
        for w in workers:
            w.x = toward(w.x, self.anchor, self.beta / len(workers))
        self.anchor = toward(self.anchor, xbar, self.beta)

    def consensus(self, workers: list[Worker]) -> Params:
        return copy(self.anchor)


@dataclass
class LSGD(Recipe):
    """every step, after the local optimizer's:
                  x <- (1 - p2/tau_g)*x + (p2/tau_g)*x_global
                  x <- (1 - p1/tau_l)*x + (p1/tau_l)*x_local
    every tau_l:  leader = argmin of the score in the group ; x <- (1-c1)*x + c1*leader
    every tau_g:  leader = argmin of the score over all     ; x <- (1-c2)*x + c2*leader
    Both due: local first, so that the global leader gives x as the local round left it (a leader
    itself does not move in its own round). c2, c1, p2, p1 = pull, local_pull, drift, local_drift.

    x_global and x_local are the parameters that the last leader had at the last such round, fixed
    until the next one; before the first, x0. Pulls at a step with a round use the old ones.
    Worker i is in group i // group_size. group_size None: no local leaders, no local pull, and
    local_period is not looked at. local_period None: max(1, tau_g // 4).

    Scores, the smallest leads, a tie goes to the lowest rank, one score for the whole model:
    loss:      the mean of the last `window` losses, or of all while there are fewer; the loss of
               this step's batch, taken before the step, counts in this step's rounds.
    gradient:  s <- 0.9*s + 0.1*sum((x_prev - x)*g), s = 0 at first, every step; x_prev is where
               g was taken, x is after the local step and (score_includes_pulls) the pulls; g is
               the gradient as taken. A round's own movement is in no score."""

    period: int
    local_period: int | None = None
    pull: float = 0.1
    local_pull: float = 0.1
    drift: float = 0.1
    local_drift: float = 0.1
    window: int = 10
    group_size: int | None = None
    score: Literal["loss", "gradient"] = "loss"
    score_includes_pulls: bool = True

    def start(self, x0: Params, n: int) -> None:
        self.tau_l = self.local_period or max(1, self.period // 4)
        self.losses: list[list[float]] = [[] for _ in range(n)]
        self.s = [0.0] * n
        self.x_global = copy(x0)
        self.x_local = [copy(x0) for _ in range(n)]

    def each_step(self, t: int, workers: list[Worker], seen: Seen) -> None:
        if not self.score_includes_pulls:
            self._decrease(workers, seen)
        for i, w in enumerate(workers):
            w.x = toward(w.x, self.x_global, self.drift / self.period)
            if self.group_size is not None:
                w.x = toward(w.x, self.x_local[i], self.local_drift / self.tau_l)
        if self.score_includes_pulls:
            self._decrease(workers, seen)
        for mine, loss in zip(self.losses, seen.losses, strict=True):
            mine.append(loss)

    def _decrease(self, workers: list[Worker], seen: Seen) -> None:
        for i, w in enumerate(workers):
            moved = minus(seen.before[i], w.x)
            total = sum(float((moved[name] * seen.grads[i][name]).sum()) for name in NAMES)
            self.s[i] = 0.9 * self.s[i] + 0.1 * total

    def score_of(self, i: int) -> float:
        if self.score == "gradient":
            return self.s[i]
        last = self.losses[i][-self.window :]
        return sum(last) / len(last)

    def after_step(self, t: int, workers: list[Worker], lr: Rates) -> None:
        n = len(workers)
        if self.group_size is not None and t % self.tau_l == 0:
            for first in range(0, n, self.group_size):
                group = range(first, first + self.group_size)
                leading = copy(workers[min(group, key=self.score_of)].x)
                for i in group:
                    workers[i].x = toward(workers[i].x, leading, self.local_pull)
                    self.x_local[i] = leading
        if t % self.period == 0:
            self.x_global = copy(workers[min(range(n), key=self.score_of)].x)
            for w in workers:
                w.x = toward(w.x, self.x_global, self.pull)


# The names a user writes; fields above are their arguments, in order.
local_sgd, hierarchical = LocalSGD, Hierarchical
easgd, lsgd = EASGD, LSGD
