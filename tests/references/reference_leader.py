"""Plain-loop reference of LSGD, leader SGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tests.references.reference import NAMES, Params, Rates, Worker, copy, mean
from tests.references.reference_decade import Rounds, Seen, toward


@dataclass
class LSGD(Rounds):
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
               the gradient as taken. A round's own movement is in no score.

    Consensus: mean(x) over all workers; `group_consensus` the mean over one's own group."""

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
        assert n % (self.group_size or n) == 0
        self.tau_l = self.local_period or max(1, self.period // 4)
        self.losses: list[list[float]] = [[] for _ in range(n)]
        self.s = [0.0] * n
        self.x_global = copy(x0)
        self.x_local = [copy(x0) for _ in range(n)]
        self.leaders: list[tuple[int, str, int]] = []  # (step, "local" or "global", rank)

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
            total = 0.0
            for name in NAMES:
                moved = seen.before[i][name] - w.x[name]
                total += float((moved * seen.grads[i][name]).sum())
            self.s[i] = 0.9 * self.s[i] + 0.1 * total

    def leader(self, candidates: range) -> int:
        best = candidates[0]
        for i in candidates:
            if self.score_of(i) < self.score_of(best):
                best = i
        return best

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
                leader = self.leader(group)
                self.leaders.append((t, "local", leader))
                leading = copy(workers[leader].x)
                for i in group:
                    workers[i].x = toward(workers[i].x, leading, self.local_pull)
                    self.x_local[i] = copy(leading)
        if t % self.period == 0:
            leader = self.leader(range(n))
            self.leaders.append((t, "global", leader))
            self.x_global = copy(workers[leader].x)
            for w in workers:
                w.x = toward(w.x, self.x_global, self.pull)

    def consensus(self, workers: list[Worker]) -> Params:
        return mean([w.x for w in workers])

    def group_consensus(self, workers: list[Worker], rank: int) -> Params:
        size = self.group_size or len(workers)
        first = rank - rank % size
        return mean([w.x for w in workers[first : first + size]])


lsgd = LSGD
