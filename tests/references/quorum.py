"""Plain float64 loop for rounds that close with a quorum: no processes, no messages, no buckets.

Time is virtual. Worker i needs seconds[i] for a step, and messages[i] until its message has
arrived, for which it waits. Since nobody comes while all wait, the loop looks at all arrival times
and closes the round that closes first:

    t_q = the time at which the quorum-th worker is there (a worker that has ended is there, too)
    the round closes at min(t_q + grace, the time at which the last one is there that is expected)

Each worker i of the round M brings d_i = base_i - x_i, where base_i is what x_i began with:

    alike:  D = sum over M of d_i / n            steps:  D = sum of s_i*d_i / sum of s_i

and all of M go on from the new a. With a codec Q, of vectors that the parameters of a bucket form
together, d_i is what has come of it, and all go on from the P that has come of a:

    v = x_i - base_i + e_i ; q_i = Q(v) ; e_i <- v - q_i ; d_i = -q_i
    p = Q(a - P) ; P <- P + p

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
    """``own``: a worker arrives after the steps of `pace`, and is expected so many rounds later;
    the first time as without it. ``reset``: of the optimizer's state.
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
    expected: int = 0


@dataclass
class _Runner:
    """``time``: now; ``steps``: taken in all; ``sent``: it waits for a round."""

    worker: Worker
    parts: list[_Part]
    time: float = 0.0
    steps: int = 0
    sent: bool = False
    sending: float = 0.0
    speed: float | None = None
    trace: list[Params] = field(default_factory=list)


@dataclass
class _Outer:
    """The outer state of one fragment. ``held``: contributions in ``late``. ``rounds``: so far.
    ``p``: what the workers have received of a."""

    a: Params
    p: Params
    m: Params
    late: Params
    held: int = 0
    rounds: int = 0


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
    messages: Sequence[float] | None = None,
) -> Result:
    """Worker i takes steps[i] steps; then it waits for the others' end."""
    n, count = len(seconds), len(recipe.fragments)
    messages = messages or [0.0] * n
    x0 = init[0]
    outer = [_Outer(copy(x0), copy(x0), zeros(x0), zeros(x0)) for _ in range(count)]
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
            if due(recipe, w) is not None and not w.sent:
                w.time, w.sent = w.time + messages[i], True
        at = {i: k for i, w in enumerate(all_of) if (k := due(recipe, w)) is not None}
        if not at:
            break
        for i in at:  # those that wait have told how fast they are, even if they come too late
            all_of[i].speed, all_of[i].sending = 1 / seconds[i], messages[i]
        there = sorted(w.time for w in all_of)
        closes = {}
        for k in {*at.values()}:
            first = min(all_of[i].time for i in at if at[i] == k)
            begins = max(there[recipe.quorum - 1], first)  # the grace
            number = outer[k].rounds + 1
            last = [w.time for w in all_of if w.parts[k].expected <= number]
            closes[k] = min(begins + recipe.grace, max([begins, *last]))
        k = min(closes, key=lambda k: (closes[k], k))
        members = [i for i in at if at[i] == k and all_of[i].time <= closes[k]]
        rosters.append((k, tuple(members)))
        outer_step(recipe, k, outer[k], all_of, members, lr)
        outer[k].rounds += 1
        for i in members:
            w, part = all_of[i], all_of[i].parts[k]
            w.time, w.sent = closes[k], False
            part.since, part.base = w.steps, copy(outer[k].p)
            part.pace, later = pace(recipe, w, all_of)
            part.expected = outer[k].rounds + later
            for name in recipe.fragments[k]:
                w.worker.x[name] = outer[k].p[name].copy()
                if recipe.reset:
                    w.worker.state[name] = {}
            w.trace[-1] = copy(w.worker.x)
    moved = []
    for w in all_of:
        moved.append(copy(w.worker.x))
        for k, names in enumerate(recipe.fragments):
            for name in names:
                moved[-1][name] += outer[k].p[name] - w.parts[k].base[name]
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
    ds = [change(recipe, k, all_of[i]) for i in members]
    for name in recipe.fragments[k]:
        delta = 0.0 * a[name]
        for d in ds:
            delta = delta + d[name] / n
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
    if recipe.codec is None:
        outer.p = copy(a)
        return
    for names in recipe.vectors(k):
        p = apart(recipe.codec(together(a, names) - together(outer.p, names)), outer.p, names)
        outer.p.update({name: outer.p[name] + p[name] for name in names})


def change(recipe: Quorum, k: int, w: _Runner) -> Params:
    """d_i of fragment k."""
    part, x = w.parts[k], w.worker.x
    if recipe.codec is None:
        return {name: part.base[name] - x[name] for name in recipe.fragments[k]}
    found: Params = {}
    for names in recipe.vectors(k):
        v = together(x, names) - together(part.base, names) + together(part.e, names)
        q = recipe.codec(v)
        part.e.update(apart(v - q, part.e, names))
        found.update(apart(-q, x, names))
    return found


def together(p: Params, names: Sequence[str]) -> Any:
    return np.concatenate([p[name].ravel() for name in names]) if names else np.zeros(0)


def apart(vector: Any, like: Params, names: Sequence[str]) -> Params:
    ends = np.cumsum([like[name].size for name in names])
    parts = np.split(vector, ends[:-1]) if len(names) else []
    return {name: part.reshape(like[name].shape) for name, part in zip(names, parts, strict=True)}


def pace(recipe: Quorum, w: _Runner, all_of: Sequence[_Runner]) -> tuple[int, int]:
    """How many steps w takes until it arrives again, and how many rounds later. With T the seconds
    in which the fastest worker takes the period, and c the seconds that w's message takes longer
    than the (lower) median: floor((k*T - c) * speed + min(1/4, grace * speed)) steps, at least 1,
    and k = ceil(c / (T/2))
    rounds, at least 1, always 1 if a round needs all workers; all as last seen."""
    seen = [other for other in all_of if other.speed is not None]
    fastest = max(other.speed for other in seen if other.speed is not None)
    usual = sorted(other.sending for other in seen)[(len(seen) - 1) // 2]
    between, c = recipe.period / fastest, max(w.sending - usual, 0.0)
    k = max(-int(-c // (between / 2)), 1) if recipe.quorum < len(all_of) else 1
    speed = w.speed or fastest
    late = min(0.25, recipe.grace * speed)
    return max(int((k * between - c) * speed + late + 1e-6), 1), k


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
