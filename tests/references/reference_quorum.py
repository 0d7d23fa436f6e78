"""Plain float64 loop for rounds that close with a quorum: no processes, no messages, no buckets.

Time is virtual. Worker i needs seconds[i] for a step, and waits where it arrives. Since nobody
comes while all wait, the loop looks at all arrival times and closes the round that closes first:

    t_q = the time at which the quorum-th worker is there (a worker that has ended is there, too)
    the round closes at min(t_q + grace, the time at which the last one is there)

Each worker i of the round M brings d_i = base_i - x_i, where base_i is what x_i began with:

    alike:  D = sum over M of d_i / n            steps:  D = sum of s_i*d_i / sum of s_i

and all of M go on from the new a. Update rules:

    average:   a <- a - D
    nesterov:  m <- mu*m + D ;  a <- a - eta*(D + mu*m)
    delayed:   B <- B + D ; a <- a - eta*D ; with n contributions in B: m <- mu*m + B,
               a <- a - eta*mu*m, B <- 0
    slow:      u <- beta*u + D/lr ;  a <- a - alpha*lr*u, lr of the first worker of M
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from reference import (
    GROUP_OF,
    NAMES,
    Data,
    Optimizer,
    Params,
    Rates,
    Worker,
    copy,
    gradient,
    mean,
)

Rule = Literal["average", "nesterov", "delayed", "slow"]


@dataclass(frozen=True)
class Quorum:
    """``own``: a worker arrives after max(floor(period * its speed / the fastest speed), 1) steps,
    both as last seen; the first time after the period. ``reset``: of the optimizer's state."""

    period: int
    quorum: int
    grace: float = 0.0
    own: bool = False
    weigh: Literal["alike", "steps"] = "alike"
    rule: Rule = "average"
    lr: float = 1.0
    momentum: float = 0.0
    reset: bool = False


@dataclass
class _Runner:
    """``time``: now; ``steps``: taken in all; ``since``: when x began with ``base``."""

    worker: Worker
    base: Params
    pace: int
    time: float = 0.0
    steps: int = 0
    since: int = 0
    speed: float | None = None
    trace: list[Params] = field(default_factory=list)


@dataclass
class Result:
    """``traces``: x of each worker after each of its steps; ``final``: the consensus at the end;
    ``rosters``: who took part in each round; ``delivered``: the coefficient of each delivered
    difference in the sum of all D, with its worker and the steps that it holds."""

    traces: list[list[Params]]
    final: Params
    rosters: list[tuple[int, ...]]
    delivered: list[tuple[int, range, float]]


def run(
    recipe: Quorum,
    seconds: Sequence[float],
    steps: Sequence[int],
    optimizer: Sequence[Optimizer],
    lr: Rates,
    data: Data,
    init: Sequence[Params],
) -> Result:
    """Worker i takes steps[i] steps; then it waits for the others' end."""
    n = len(seconds)
    a, m, late = copy(init[0]), zeros(init[0]), zeros(init[0])
    held = 0
    all_of = [_Runner(Worker(copy(a)), copy(a), recipe.period) for _ in range(n)]
    rosters: list[tuple[int, ...]] = []
    delivered: list[tuple[int, range, float]] = []

    for i, w in enumerate(all_of):  # after their first step all workers compare their gradients
        advance(w, i, seconds[i], optimizer, lr, data)
    together = max(w.time for w in all_of)
    for w in all_of:
        w.time = together

    while True:
        for i, w in enumerate(all_of):
            while w.steps < steps[i] and not due(recipe, w):
                advance(w, i, seconds[i], optimizer, lr, data)
        waiting = [i for i, w in enumerate(all_of) if due(recipe, w)]
        if not waiting:
            break
        there = sorted(w.time for w in all_of)
        first = min(all_of[i].time for i in waiting)
        close = max(min(there[recipe.quorum - 1] + recipe.grace, there[-1]), first)
        if there[recipe.quorum - 1] < first:  # the grace begins with a worker that brings something
            close = min(first + recipe.grace, max(there[-1], first))
        members = [i for i in waiting if all_of[i].time <= close]
        rosters.append(tuple(members))

        shares = [all_of[i].steps - all_of[i].since for i in members]
        delta = zeros(a)
        for i, s in zip(members, shares, strict=True):
            w = all_of[i]
            c = s / sum(shares) if recipe.weigh == "steps" else 1 / n
            delivered.append((i, range(w.since + 1, w.steps + 1), c))
            for k in NAMES:
                delta[k] += c * (w.base[k] - w.worker.x[k])
        # those that wait have told how fast they are, even if they come too late
        for i in waiting:
            all_of[i].speed = 1 / seconds[i]
        held += len(members)
        for k in NAMES:
            if recipe.rule == "average":
                a[k] = a[k] - delta[k]
            elif recipe.rule == "nesterov":
                m[k] = recipe.momentum * m[k] + delta[k]
                a[k] = a[k] - recipe.lr * (delta[k] + recipe.momentum * m[k])
            elif recipe.rule == "slow":
                rate = lr(GROUP_OF[k], all_of[members[0]].steps)
                m[k] = recipe.momentum * m[k] + delta[k] / rate
                a[k] = a[k] - recipe.lr * rate * m[k]
            else:
                late[k] = late[k] + delta[k]
                a[k] = a[k] - recipe.lr * delta[k]
                if held >= n:
                    m[k] = recipe.momentum * m[k] + late[k]
                    a[k] = a[k] - recipe.lr * recipe.momentum * m[k]
                    late[k] = 0 * late[k]
        held = held if held < n else 0
        fastest = max(w.speed for w in all_of if w.speed is not None)
        for i in members:
            w = all_of[i]
            w.worker.x, w.base = copy(a), copy(a)
            w.time, w.since = close, w.steps
            w.pace = max(int(recipe.period * (w.speed or fastest) / fastest + 1e-6), 1)
            w.trace[-1] = copy(a)
            if recipe.reset:
                w.worker.state = {name: {} for name in NAMES}
    moved = [{k: w.worker.x[k] + (a[k] - w.base[k]) for k in NAMES} for w in all_of]
    return Result([w.trace for w in all_of], mean(moved), rosters, delivered)


def zeros(p: Params) -> Params:
    return {name: 0.0 * value for name, value in p.items()}


def due(recipe: Quorum, w: _Runner) -> bool:
    """Whether this worker waits for a round: in one, `since` becomes the step."""
    if w.since == w.steps:
        return False
    return w.steps >= w.since + w.pace if recipe.own else w.steps % recipe.period == 0


def advance(
    w: _Runner, i: int, seconds: float, optimizer: Sequence[Optimizer], lr: Rates, data: Data
) -> None:
    """One step of the local optimizer."""
    g = gradient(w.worker.x, data[i][w.steps])
    w.steps += 1
    w.worker.step(g, optimizer, lr, w.steps)
    w.time += seconds
    w.trace.append(copy(w.worker.x))
