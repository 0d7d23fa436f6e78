"""Plain-loop references of DES-LOC, of DiLoCo with a radial-directional average, and of DiLoCo
with a Muon-like outer step. The problem, the optimizers, the workers and `run` are those of
reference.

Every tensor is treated on its own. Symbols: x_i worker i's tensor, a the anchor (common, at first
x0), n workers, t the step, counted from 1, H the period; ||v|| = sqrt(sum(v^2)), for a matrix the
Frobenius norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tests.references.reference import NAMES, Array, Params, Rates, Recipe, Worker, copy, mean

FIRST, SECOND = ("exp_avg", "momentum_buffer"), ("exp_avg_sq",)  # a moment's names in the state


def average(many: Sequence[Array]) -> Array:
    total = np.zeros_like(many[0])
    for one in many:
        total = total + one
    return total / len(many)


def length(v: Array) -> float:
    return float(np.sqrt(np.sum(v * v)))


# ---------------------------------------------------------------- periods of their own
@dataclass
class DesLoc(Recipe):
    """t % period == 0: x <- mean(x)
    t % first == 0:  m <- mean(m), the first moment (Adam's) or the momentum buffer (SGD's)
    t % second == 0: v <- mean(v), the second moment

    Iacob et al. 2025 (2505.22549). Each worker's step count stays; what an optimizer does not
    have is not averaged. The consensus is mean(x)."""

    period: int
    first: int
    second: int

    def after_step(self, t: int, workers: list[Worker], lr: Rates) -> None:
        if t % self.period == 0:
            xbar = mean([w.x for w in workers])
            for w in workers:
                w.x = copy(xbar)
        if t % self.first == 0:
            self._average(FIRST, workers)
        if t % self.second == 0:
            self._average(SECOND, workers)

    def _average(self, entries: Sequence[str], workers: list[Worker]) -> None:
        for name in NAMES:
            for entry in entries:
                if all(entry in w.state[name] for w in workers):
                    shared = average([w.state[name][entry] for w in workers])
                    for w in workers:
                        w.state[name][entry] = shared.copy()


# ---------------------------------------------------------------- outer steps
@dataclass
class Outer(Recipe):
    """every H:  d_i = a - x_i ;  D = combine(d) ;  m <- mu*m + D ;  s = turn(D + mu*m)
              a <- a - eta*s ;  x <- a
    Delayed: the above at step t, but x stays; at t + delay: x <- mix*x + (1 - mix)*a, a as of
    step t; or with keep: x <- a + (x - y), y the x of step t.

    As reference.DiLoCo, which is this with D = mean(d), s = D + mu*m, mix 0.5. What is due folds
    before d is taken; settling folds nothing; the consensus is a."""

    period: int
    lr: float
    momentum: float
    delay: int = 0
    mix: float = 0.5
    keep: bool = False

    def start(self, x0: Params, n: int) -> None:
        assert self.delay <= self.period
        self.anchor = copy(x0)
        self.m = {name: np.zeros_like(x0[name]) for name in NAMES}
        self.flight: list[tuple[int, Params, list[Params]]] = []
        # (step it is due, the anchor it brings, the workers' y)

    def combine(self, d: Sequence[Array]) -> Array:
        return average(d)

    def turn(self, s: Array) -> Array:
        return s

    def after_step(self, t: int, workers: list[Worker], lr: Rates) -> None:
        while self.flight and self.flight[0][0] == t:
            self._fold(workers, *self.flight.pop(0)[1:])
        if t % self.period != 0:
            return
        a, m = self.anchor, self.m
        for name in NAMES:
            delta = self.combine([a[name] - w.x[name] for w in workers])
            m[name] = self.momentum * m[name] + delta
            a[name] = a[name] - self.lr * self.turn(delta + self.momentum * m[name])
        if self.delay > 0:
            self.flight.append((t + self.delay, copy(a), [copy(w.x) for w in workers]))
        else:
            for w in workers:
                w.x = copy(a)

    def _fold(self, workers: list[Worker], anchor: Params, sent: list[Params]) -> None:
        for w, y in zip(workers, sent, strict=True):
            for name in NAMES:
                if self.keep:
                    w.x[name] = anchor[name] + (w.x[name] - y[name])
                else:
                    w.x[name] = self.mix * w.x[name] + (1.0 - self.mix) * anchor[name]

    def consensus(self, workers: list[Worker]) -> Params:
        return copy(self.anchor)


def radial_directional(d: Sequence[Array]) -> Array:
    """r_i = ||d_i|| ;  u_i = d_i/r_i, 0 if r_i = 0 ;  u = mean(u_i) ;  D = mean(r_i)*u/||u||,
    0 if ||u|| = 0."""
    radii = [length(one) for one in d]
    units = [one / r if r > 0.0 else 0.0 * one for one, r in zip(d, radii, strict=True)]
    u, radius = average(units), sum(radii) / len(radii)
    return radius * u / length(u) if length(u) > 0.0 else 0.0 * u


@dataclass
class RadialDiLoCo(Outer):
    """DiLoCo, where D is the radial-directional average of the pseudo-gradients d_i = a - x_i:
    their mean length, in the mean of their directions.

    Douillard et al. 2026 (2604.21428)."""

    def combine(self, d: Sequence[Array]) -> Array:
        return radial_directional(d)


POLYNOMIALS = (
    (14.9373, -146.249, 486.661, -625.53, 272.151),
    (6.75962, -16.3497, 13.8421, -4.55616, 0.508882),
    (4.18824, -8.77688, 7.94461, -2.95883, 0.38272),
)


MARGIN = 1.01
"""On squares of singular values."""


def odd(coefficients: Sequence[float], sigma: Array) -> Array:
    """p_0*sigma + p_1*sigma^3 + p_2*sigma^5 + ..."""
    total = np.zeros_like(sigma)
    for k, p in enumerate(coefficients):
        total = total + p * sigma ** (2 * k + 1)
    return total


def near_one(sigma: Array) -> Array:
    """What becomes of singular values: relative to a little more than (sum sigma^8)^(1/8), which is
    at least the largest, by one polynomial after the other."""
    sigma = sigma / (math.sqrt(MARGIN) * np.sum(sigma**8) ** (1 / 8))
    for coefficients in POLYNOMIALS:
        sigma = odd(coefficients, sigma)
    return sigma


def polar(s: Array) -> Array:
    """U near_one(sigma) V^T, for s = U sigma V^T other than 0."""
    left, sigma, right = np.linalg.svd(s, full_matrices=False)
    return left @ np.diag(near_one(sigma)) @ right


def muon_direction(s: Array) -> Array:
    """o = polar(s) ;  o*||s||/||o||, a step as long as s; s itself where either length is 0 and
    for what is not a matrix of more than one row and more than one column."""
    if s.ndim != 2 or min(s.shape) < 2 or length(s) == 0.0:
        return s
    o = polar(s)
    return o * length(s) / length(o) if length(o) > 0.0 else s


@dataclass
class MuLoCo(Outer):
    """DiLoCo, whose outer step s = D + mu*m turns into Muon's direction and keeps its length."""

    def turn(self, s: Array) -> Array:
        return muon_direction(s)


# The names a user writes; fields above are their arguments, in order.
des_loc, diloco_rda, muloco = DesLoc, RadialDiLoCo, MuLoCo
