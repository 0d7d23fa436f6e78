"""Plain-loop references of outer steps: SlowMo, the DiLoCo family, and a few closed forms that some
of them become."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tests.references.coded import Codec, CodedMean
from tests.references.problem import (
    FLAT,
    GROUP_OF,
    GROUPS,
    NAMES,
    AdamW,
    Array,
    Data,
    Optimizer,
    Params,
    Rates,
    Recipe,
    Seen,
    State,
    StatePolicy,
    Trace,
    Worker,
    add,
    copy,
    gradient,
    mean,
    minus,
    scale,
    some,
    toward,
    treat_state,
)


class Over(Recipe):
    """Something over the recipe `inner`, which goes on as ever but where it says otherwise."""

    inner: Recipe

    def gradients(self, t: int, grads: list[Params]) -> list[Params]:
        return self.inner.gradients(t, grads)

    def rebias(self, workers: list[Worker]) -> None:
        self.inner.rebias(workers)

    def each_step(self, t: int, workers: list[Worker], seen: Seen) -> None:
        self.inner.each_step(t, workers, seen)

    def debias(self, workers: list[Worker]) -> None:
        self.inner.debias(workers)


@dataclass
class SlowMo(Over):
    """every tau:  settle the base
                treat the local optimizers' state: keep, average over workers, or reset
                xbar = mean(x)          average=False: worker i's own x_i, with its own u_i, a_i
                u <- beta*u + (a - xbar)/lr ;  a <- a - alpha*lr*u ;  x <- a
    at lr = 0:  a <- a - alpha*(a - xbar) ;  u unchanged ;  x <- a

    lr is the local lr of the parameter's group at this very step, beta `momentum`, alpha `lr`. A
    base round that falls due at a slow step is skipped and counts as not executed; the base's
    `each_step` and gradient means are never skipped. To settle is: messages in flight fold at
    once, and push-sum's w <- 1, x staying as it is, so that xbar is sum(x)/sum(w), the mean that
    gossip conserves; average=False: x <- x/w first, as each goes on from its own."""

    base: Recipe | None
    period: int = 48
    momentum: float = 0.5
    lr: float = 1.0
    average: bool = True
    optimizer_state: StatePolicy = "keep"
    codec: Codec | None = None

    def start(self, x0: Params, n: int) -> None:
        self.inner = self.base or Recipe()
        self.inner.start(x0, n)
        self.inner.averaged = self.average
        self.anchor = [copy(x0) for _ in range(n)]
        self.u = [scale(0.0, x0) for _ in range(n)]
        self.mean = CodedMean(self.codec, GROUPS, x0, n)

    def after_step(self, t: int, workers: list[Worker], lr: Rates) -> None:
        if t % self.period:
            self.inner.after_step(t, workers, lr)
            return
        self.inner.settle(workers)
        treat_state(workers, self.optimizer_state)
        if not self.average:
            for i, w in enumerate(workers):
                w.x = copy(self._slow(i, w.x, t, lr))
            return

        received = self.mean([w.x for w in workers], lambda xbar: self._slow(0, xbar, t, lr))
        for w in workers:
            w.x = copy(received)

    def _slow(self, i: int, xbar: Params, t: int, lr: Rates) -> Params:
        a, u = self.anchor[i], self.u[i]
        for name, d in minus(a, xbar).items():
            rate = lr(GROUP_OF[name], t)
            if rate == 0.0:
                a[name] = a[name] - self.lr * d
            else:
                u[name] = self.momentum * u[name] + d / rate
                a[name] = a[name] - self.lr * rate * u[name]
        return a

    def consensus(self, workers: list[Worker]) -> Params:
        return copy(self.anchor[0]) if self.average else mean(self.anchor)


# ---------------------------------------------------------------- the DiLoCo family
@dataclass
class DiLoCo(Recipe):
    """every H:  D = combine(a - x_i) ;  m <- mu*m + D ;  a <- a - eta*turn(D + mu*m) ;  x <- a
    Delayed: the above at step t, but x stays, and y is the x of step t; at t + delay:
        mix:    x <- mix*x + (1 - mix)*a
        loscar: x <- a + (x - y)

    a as of step t. D is the mean of a - x_i. `outer`: another outer optimizer, and its lr. Fragment
    k of K does all of it by itself, at steps t with t mod H = (k+1)*H//K mod H. Coded, the new a
    travels relative to the one that was received last. The consensus is a."""

    period: int = 500
    lr: float = 0.7
    momentum: float = 0.9
    delay: int = 0
    mix: float = 0.5
    merge: Literal["mix", "loscar"] = "mix"
    outer: tuple[Optimizer, float] | None = None
    muon: bool = False
    codec: Codec | None = None
    fragments: Sequence[Sequence[str]] = (NAMES,)

    def start(self, x0: Params, n: int) -> None:
        assert self.delay <= self.period or len(self.fragments) == 1
        self.anchor, self.m = copy(x0), scale(0.0, x0)
        self.outer_state: dict[str, State] = {name: {} for name in NAMES}
        self.means = [
            CodedMean(self.codec, [in_order(part)], some(x0, part), n) for part in self.fragments
        ]
        self.flight: list[tuple[int, Params, list[Params]]] = []
        # (step it is due, the anchor it brings, the workers' y)

    def after_step(self, t: int, workers: list[Worker], lr: Rates) -> None:
        self._fold(t, workers)
        count = len(self.fragments)
        for k, (part, average) in enumerate(zip(self.fragments, self.means, strict=True)):
            if t % self.period != (k + 1) * self.period // count % self.period:
                continue
            y = [some(w.x, part) for w in workers]
            received = average(y, lambda xbar: self._outer(minus(some(self.anchor, xbar), xbar)))
            self.flight.append((t + self.delay, received, y))
        if self.delay == 0:
            self._fold(t, workers)

    def _outer(self, delta: Params) -> Params:
        a, m = self.anchor, self.m
        for name, d in delta.items():
            if self.outer is not None:
                rule, rate = self.outer
                a[name] = rule.step(a[name], d, self.outer_state[name], rate)
                continue
            m[name] = self.momentum * m[name] + d
            step = d + self.momentum * m[name]
            a[name] = a[name] - self.lr * (muon_direction(step) if self.muon else step)
        return some(a, delta)

    def _fold(self, t: int, workers: list[Worker]) -> None:
        while self.flight and self.flight[0][0] == t:
            _, anchor, sent = self.flight.pop(0)
            for w, y in zip(workers, sent, strict=True):
                x = some(w.x, y)
                if self.delay == 0:
                    w.x.update(copy(anchor))
                elif self.merge == "loscar":
                    w.x.update(add(anchor, minus(x, y)))
                else:
                    w.x.update(toward(x, anchor, 1.0 - self.mix))

    def consensus(self, workers: list[Worker]) -> Params:
        return copy(self.anchor)


@dataclass
class OuterStep(Over):
    """every H:  settle the base ;  treat the local optimizers' state ;  DiLoCo's outer step `outer`

    A base round that falls due then is skipped, as under `SlowMo`."""

    inner: Recipe
    outer: DiLoCo
    optimizer_state: StatePolicy = "keep"

    def start(self, x0: Params, n: int) -> None:
        self.inner.start(x0, n)
        self.outer.start(x0, n)

    def after_step(self, t: int, workers: list[Worker], lr: Rates) -> None:
        if t % self.outer.period:
            self.inner.after_step(t, workers, lr)
            return
        self.inner.settle(workers)
        treat_state(workers, self.optimizer_state)
        self.outer.after_step(t, workers, lr)

    def consensus(self, workers: list[Worker]) -> Params:
        return self.outer.consensus(workers)


@dataclass
class OwnStep(Over):
    """every step:  d_i <- d_i + (x_i before the local optimizer's step) - (x_i after it)
    every H:  treat the local optimizer's state
              m_i <- mu*m_i + d_i ;  x_i <- x_i + d_i - eta*turn(d_i + mu*m_i) ;  d_i <- 0

    Nothing is sent. The base's rounds of the step follow, and are never skipped."""

    inner: Recipe
    period: int
    lr: float
    momentum: float
    muon: bool = False
    optimizer_state: StatePolicy = "keep"

    def start(self, x0: Params, n: int) -> None:
        self.inner.start(x0, n)
        self.d = [scale(0.0, x0) for _ in range(n)]
        self.m = [scale(0.0, x0) for _ in range(n)]

    def rebias(self, workers: list[Worker]) -> None:
        self.d = [add(d, w.x) for d, w in zip(self.d, workers, strict=True)]
        self.inner.rebias(workers)

    def each_step(self, t: int, workers: list[Worker], seen: Seen) -> None:
        self.inner.each_step(t, workers, seen)
        self.d = [minus(d, w.x) for d, w in zip(self.d, workers, strict=True)]

    def after_step(self, t: int, workers: list[Worker], lr: Rates) -> None:
        if t % self.period == 0:
            treat_state(workers, self.optimizer_state)
            for i, w in enumerate(workers):
                d = self.d[i]
                self.m[i] = add(scale(self.momentum, self.m[i]), d)
                step = add(d, scale(self.momentum, self.m[i]))
                if self.muon:
                    step = {name: muon_direction(s) for name, s in step.items()}
                w.x = minus(add(w.x, d), scale(self.lr, step))
                self.d[i] = scale(0.0, d)
        self.inner.after_step(t, workers, lr)

    def consensus(self, workers: list[Worker]) -> Params:
        return self.inner.consensus(workers)


def in_order(names: Sequence[str]) -> list[str]:
    return [name for name in FLAT if name in names]


def adam_outer(lr: float) -> tuple[Optimizer, float]:
    """torch.optim.Adam, which is AdamW without weight decay."""
    return AdamW(weight_decay=0.0), lr


def length(v: Array) -> float:
    return float(np.sqrt(np.sum(v * v)))


POLYNOMIALS = (
    (14.9373, -146.249, 486.661, -625.53, 272.151),
    (6.75962, -16.3497, 13.8421, -4.55616, 0.508882),
    (4.18824, -8.77688, 7.94461, -2.95883, 0.38272),
)
MARGIN = 1.01  # on squares of singular values


def near_one(sigma: Array) -> Array:
    """What becomes of singular values: relative to a little more than (sum sigma^8)^(1/8), which is
    at least the largest, by one odd polynomial after the other."""
    sigma = sigma / (math.sqrt(MARGIN) * np.sum(sigma**8) ** (1 / 8))
    for coefficients in POLYNOMIALS:
        sigma = np.asarray(sum(c * sigma ** (2 * k + 1) for k, c in enumerate(coefficients)))
    return sigma


def muon_direction(s: Array) -> Array:
    """s = U sigma V^T -> o = U near_one(sigma) V^T, as long as s; s itself where it is 0 and for
    what is not a matrix of more than one row and more than one column."""
    if s.ndim != 2 or min(s.shape) < 2 or length(s) == 0.0:
        return s
    left, sigma, right = np.linalg.svd(s, full_matrices=False)
    o = left @ np.diag(near_one(sigma)) @ right
    return np.asarray(o * length(s) / length(o))


# ---------------------------------------------------------------- closed forms
def blocks(
    outer: Callable[[Params, Params], Params],
    period: int,
    n: int,
    steps: int,
    optimizer: Sequence[Optimizer],
    lr: Rates,
    data: Data,
    init: Sequence[Params],
) -> Trace:
    """every H: a <- outer(a, mean(x)) ; x <- a."""
    a, trace = copy(init[0]), Trace()
    workers = [Worker(copy(a)) for _ in range(n)]
    for t in range(1, steps + 1):
        for i, w in enumerate(workers):
            w.step(gradient(w.x, data[i][t - 1]), optimizer, lr, t)
        if t % period == 0:
            a = outer(a, mean([w.x for w in workers]))
            for w in workers:
                w.x = copy(a)
        trace.record(workers, a)
    return trace


def lookahead(alpha: float) -> Callable[[Params, Params], Params]:
    """slow <- slow + alpha*(fast - slow) ; fast <- slow. (SlowMo: n = 1, beta = 0.)"""
    return lambda slow, fast: toward(slow, fast, alpha)


def heavy_ball(mu: float, eta: float) -> Callable[[Params, Params], Params]:
    """v <- mu*v + (a - xbar) ; a <- a - eta*v: outer heavy-ball SGD. With D = -eta*v it is block
    momentum (BMUF). (SlowMo over None at a constant lr.)"""
    v: list[Params] = []

    def outer(a: Params, xbar: Params) -> Params:
        d = minus(a, xbar)
        v[:] = [add(scale(mu, v[0]), d) if v else d]
        return minus(a, scale(eta, v[0]))

    return outer


def large_batch_momentum(
    beta: float, alpha: float, n: int, steps: int, lr: Rates, data: Data, init: Sequence[Params]
) -> Trace:
    """v <- beta*v + g(all workers' rows as one batch) ; x <- x - alpha*lr*v. (SlowMo: tau = 1,
    base None, plain SGD, lr never 0.)"""
    worker, trace, v = Worker(copy(init[0])), Trace(), scale(0.0, init[0])
    for t in range(1, steps + 1):
        g = gradient(worker.x, tuple(np.concatenate(p) for p in zip(*(own[t - 1] for own in data))))  # type: ignore[arg-type]  # noqa: B905
        v = add(scale(beta, v), g)
        worker.x = {k: x - alpha * lr(GROUP_OF[k], t) * v[k] for k, x in worker.x.items()}
        trace.record([worker] * n, worker.x)
    return trace


# The names a user writes; fields above are their arguments, in order.
slowmo, diloco = SlowMo, DiLoCo
