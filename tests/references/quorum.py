"""Plain float64 loop for rounds that close with a quorum: no processes, no messages, no buckets.

Time is virtual. Worker i needs seconds[i] for a step. Since nobody comes while all wait, the loop
looks at all arrival times and closes the round that closes first:

    t_q = the time at which the quorum-th worker is there (a worker that has ended is there, too)
    the round closes at min(t_q + grace, the time at which the last one is there)

Each worker i of the round M brings d_i = base_i - x_i, where base_i is what x_i began with:

    alike:  D = sum over M of d_i / n            steps:  D = sum of s_i*d_i / sum of s_i

and all of M go on from the new a. With a codec Q, of vectors that the parameters of a bucket form
together, D is what has come of it, and also those outside of M send what was left out before
(d_i = 0):

    v = e_i - d_i ; q_i = Q(v) ; e_i <- v - q_i ; w = o + sum over all of q_i / n
    p = Q(w) ; o <- w - p ; D = -p

Update rules:

    average:   a <- a - D
    nesterov:  m <- mu*m + D ;  a <- a - eta*(D + mu*m)
    delayed:   B <- B + D ; a <- a - eta*D ; with n contributions in B: m <- mu*m + B,
               a <- a - eta*mu*m, B <- 0
    slow:      u <- beta*u + D/lr ;  a <- a - alpha*lr*u, lr of the first worker of M
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from tests.references.coded import Codec
from tests.references.problem import (
    GROUP_OF,
    GROUPS,
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
    """``own``: a worker arrives after the steps of `pace`; the first time as without it.
    ``reset``: of the optimizer's state.
    ``fragments``: the tensors of each fragment; fragment k of K is due after steps
    (k+1)*period//K, ... + period, and everything below is done for each fragment by itself."""

    period: int
    quorum: int
    grace: float = 0.0
    own: bool = False
    rule: Rule = "average"
    lr: float = 1.0
    momentum: float = 0.0
    reset: bool = False
    fragments: tuple[tuple[str, ...], ...] = (NAMES,)
    codec: Codec | None = None

    def vectors(self, k: int) -> list[list[str]]:
        """The names of the parameters that are coded together: those of a fragment, group by group;
        under "slow" every group by itself."""
        groups = [[name for name in group if name in self.fragments[k]] for group in GROUPS]
        return groups if self.rule == "slow" else [[name for group in groups for name in group]]

    def first(self, k: int) -> int:
        """The step after which fragment k is due first."""
        return (k + 1) * self.period // len(self.fragments)


@dataclass
class _Part:
    """One fragment on one worker. ``since``: the step after which x began with ``base``. ``e``:
    what its messages have left out."""

    base: Params
    e: Params
    pace: int
    since: int = 0


@dataclass
class _Runner:
    """``time``: now; ``steps``: taken in all."""

    worker: Worker
    parts: list[_Part]
    time: float = 0.0
    steps: int = 0
    speed: float | None = None
    trace: list[Params] = field(default_factory=list)


@dataclass
class _Outer:
    """The outer state of one fragment. ``held``: contributions in ``late``. ``o``: what the codes
    of the means have left out."""

    a: Params
    o: Params
    m: Params
    late: Params
    held: int = 0


@dataclass
class Result:
    """``traces``: x of each worker after each of its steps; ``final``: the consensus at the end;
    ``rosters``: the fragment of each round, and who took part."""

    traces: list[list[Params]]
    final: Params
    rosters: list[tuple[int, tuple[int, ...]]]


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
    n, count = len(seconds), len(recipe.fragments)
    x0 = init[0]
    outer = [_Outer(copy(x0), zeros(x0), zeros(x0), zeros(x0)) for _ in range(count)]
    all_of = [
        _Runner(
            Worker(copy(x0)), [_Part(copy(x0), zeros(x0), recipe.first(k)) for k in range(count)]
        )
        for _ in range(n)
    ]
    rosters: list[tuple[int, tuple[int, ...]]] = []

    for i, w in enumerate(all_of):  # after their first step all workers compare their gradients
        advance(w, i, seconds[i], optimizer, lr, data)
    together = max(w.time for w in all_of)
    for w in all_of:
        w.time = together

    while True:
        for i, w in enumerate(all_of):
            while w.steps < steps[i] and due(recipe, w) is None:
                advance(w, i, seconds[i], optimizer, lr, data)
        at = {i: k for i, w in enumerate(all_of) if (k := due(recipe, w)) is not None}
        if not at:
            break
        for i in at:  # those that wait have told how fast they are, even if they come too late
            all_of[i].speed = 1 / seconds[i]
        there = sorted(w.time for w in all_of)
        closes = {}
        for k in {*at.values()}:
            first = min(all_of[i].time for i in at if at[i] == k)
            begins = max(there[recipe.quorum - 1], first)  # the grace
            closes[k] = min(begins + recipe.grace, there[-1])
        k = min(closes, key=lambda k: (closes[k], k))
        members = [i for i in at if at[i] == k and all_of[i].time <= closes[k]]
        rosters.append((k, tuple(members)))
        outer_step(recipe, k, outer[k], all_of, members, lr)
        for i in members:
            w, part = all_of[i], all_of[i].parts[k]
            w.time = closes[k]
            part.since, part.base = w.steps, copy(outer[k].a)
            part.pace = pace(recipe, w, all_of)
            for name in recipe.fragments[k]:
                w.worker.x[name] = outer[k].a[name].copy()
                if recipe.reset:
                    w.worker.state[name] = {}
            w.trace[-1] = copy(w.worker.x)
    moved = []
    for w in all_of:
        moved.append(copy(w.worker.x))
        for k, names in enumerate(recipe.fragments):
            for name in names:
                moved[-1][name] += outer[k].a[name] - w.parts[k].base[name]
    return Result([w.trace for w in all_of], mean(moved), rosters)


def outer_step(
    recipe: Quorum,
    k: int,
    outer: _Outer,
    all_of: Sequence[_Runner],
    members: Sequence[int],
    lr: Rates,
) -> None:
    """The formulas at the top, for fragment k."""
    n, a, m, late = len(all_of), outer.a, outer.m, outer.late
    outer.held += len(members)
    deltas = change(recipe, k, outer, all_of, members)
    for name in recipe.fragments[k]:
        delta = deltas[name]
        if recipe.rule == "average":
            a[name] = a[name] - delta
        elif recipe.rule == "nesterov":
            m[name] = recipe.momentum * m[name] + delta
            a[name] = a[name] - recipe.lr * (delta + recipe.momentum * m[name])
        elif recipe.rule == "slow":
            rate = lr(GROUP_OF[name], all_of[members[0]].steps)
            m[name] = recipe.momentum * m[name] + delta / rate
            a[name] = a[name] - recipe.lr * rate * m[name]
        else:
            late[name] = late[name] + delta
            a[name] = a[name] - recipe.lr * delta
            if outer.held >= n:
                m[name] = recipe.momentum * m[name] + late[name]
                a[name] = a[name] - recipe.lr * recipe.momentum * m[name]
                late[name] = 0.0 * late[name]
    outer.held = outer.held if outer.held < n else 0


def change(
    recipe: Quorum, k: int, outer: _Outer, all_of: Sequence[_Runner], members: Sequence[int]
) -> Params:
    """D of fragment k."""
    found: Params = {}
    for names in recipe.vectors(k):
        ds = [
            (together(w.parts[k].base, names) - together(w.worker.x, names)) * (i in members)
            for i, w in enumerate(all_of)
        ]
        delta = sum(ds) / len(all_of)
        if recipe.codec is not None and names:
            w = together(outer.o, names)
            for each, d in zip(all_of, ds, strict=True):
                v = together(each.parts[k].e, names) - d
                q = recipe.codec(v)
                each.parts[k].e.update(apart(v - q, outer.a, names))
                w = w + q / len(all_of)
            delta = -recipe.codec(w)
            outer.o.update(apart(w + delta, outer.a, names))
        found.update(apart(delta, outer.a, names))
    return found


def together(p: Params, names: Sequence[str]) -> Any:
    return np.concatenate([p[name].ravel() for name in names]) if names else np.zeros(0)


def apart(vector: Any, like: Params, names: Sequence[str]) -> Params:
    ends = np.cumsum([like[name].size for name in names])
    parts = np.split(vector, ends[:-1]) if len(names) else []
    return {name: part.reshape(like[name].shape) for name, part in zip(names, parts, strict=True)}


def pace(recipe: Quorum, w: _Runner, all_of: Sequence[_Runner]) -> int:
    """How many steps w takes until it arrives again: as many as it can while the fastest worker
    takes the period, and min(1/4, grace * speed) more; at least 1; all as last seen."""
    fastest = max(other.speed for other in all_of if other.speed is not None)
    speed = w.speed or fastest
    late = min(0.25, recipe.grace * speed)
    return max(int(recipe.period / fastest * speed + late + 1e-6), 1)


def zeros(p: Params) -> Params:
    return {name: 0.0 * value for name, value in p.items()}


def due(recipe: Quorum, w: _Runner) -> int | None:
    """The fragment that this worker waits for, the first of several."""
    for k, part in enumerate(w.parts):
        if part.since == w.steps:
            continue
        if recipe.own and w.steps >= part.since + part.pace:
            return k
        if not recipe.own and w.steps % recipe.period == recipe.first(k) % recipe.period:
            return k
    return None


def advance(
    w: _Runner, i: int, seconds: float, optimizer: Sequence[Optimizer], lr: Rates, data: Data
) -> None:
    """One step of the local optimizer."""
    g = gradient(w.worker.x, data[i][w.steps])
    w.steps += 1
    w.worker.step(g, optimizer, lr, w.steps)
    w.time += seconds
    w.trace.append(copy(w.worker.x))
