"""Plain-loop references of training with coded (lossy) rounds: the coded mean, recipes.

As in `problem`, every worker lives in one Python list, communication is a loop over that list.

Where float32 enters. All arithmetic is in the `dtype` given to `run` (float64 by default), but
for a codec's `q`, which takes and returns float32: what it is given is rounded to float32 first.
With dtype=np.float32 everything is float32, each formula evaluated from left to right and sums
taken in the order of the ranks, so that a run in float32 can be compared step by step. A value
that lies within rounding of the border between two levels may still fall on the other side, and
then that element is off by one whole level; at a few hundred elements that is rare.

Symbols: x a worker's parameters, m a message, v what is coded of it, e the residual (what worker
i still owes), r the reference (what all workers last agreed upon), o the lag (what a slice's
owner still owes), a the anchor, n workers, t the step, counted from 1. Parameters are a list of
arrays, in the order of the optimizer's one parameter group; a vector is a flat array.

    run(algorithm, n, steps, x0, gradient, lr, momentum=0.0, dtype=np.float64) -> Trace

`gradient(i, t, x)` is worker i's gradient at step t and parameters x. One step t:

    g_i <- gradient(i, t, x_i)
    g   <- algorithm.gradients(t, g, lr(t))             DDP; else as they are
    SGD, for each worker:  b <- momentum*b + g ;  x <- x - lr(t)*b
    algorithm.after_step(t, workers, lr(t))             rounds: first what is due folds, then the
                                                        new message leaves
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tests.references.coded import Codec, topk

Array: TypeAlias = npt.NDArray[Any]  # of the run's dtype
Params: TypeAlias = list[Array]
Gradient: TypeAlias = Callable[[int, int, Params], Params]  # (worker, step, x)
Rates: TypeAlias = Callable[[int], float]  # lr(step)
Combine: TypeAlias = Callable[[Array, slice], Array]  # (mean on a slice, which slice) -> result


# ---------------------------------------------------------------- the coded mean
def unchanged(mean: Array, own: slice) -> Array:
    return mean


class CodedMean:
    """The coded mean of n workers' vectors of `start`'s length, padded with zeros to a multiple
    of n*unit. Slice j, the j-th of n equal contiguous stretches, is owned by worker j.

        v_i = (m_i - r) + b*e_i ;  sent_i = q(v_i) ;  e_i = v_i - sent_i       b = 0: e_i stays 0
        the owner of a slice:   mean = r + b*o + (1/n)*sum_i sent_i
                                result = combine(mean)
                                w = result - r ;  back = q(w) ;  o = w - back     b = 0: o stays 0
        everyone:               received = r + back ;  relative: r <- received

    relative: r starts as `start`; else it is 0 and stays so. `combine` sees padded coordinates
    too, so outer state lives on vectors of length `size` (see `pad`).
    """

    def __init__(
        self, codec: Codec, n: int, start: Array, *, relative: bool, feedback: float = 1.0
    ) -> None:
        self.codec, self.n, self.relative, self.b = codec, n, relative, feedback
        self.length = start.size
        self.size = -(-start.size // (n * codec.unit)) * n * codec.unit
        self.r = self.pad(start if relative else np.zeros_like(start))
        self.e = [np.zeros_like(self.r) for _ in range(n)]
        self.o = np.zeros_like(self.r)

    def pad(self, v: Array) -> Array:
        return np.concatenate([v, np.zeros(self.size - self.length, v.dtype)])

    def send(self, m: Sequence[Array]) -> list[Array]:
        sent = []
        for i in range(self.n):
            v = (self.pad(m[i]) - self.r) + self.b * self.e[i]
            sent.append(self.codec(v))
            if self.b:
                self.e[i] = v - sent[i]
        return sent

    def average(self, sent: list[Array], own: slice) -> Array:
        total = np.zeros_like(self.r[own])
        for i in range(self.n):
            total = total + sent[i][own]
        return (1.0 / self.n) * total

    def round(self, m: Sequence[Array], combine: Combine = unchanged) -> Array:
        """One round: every worker's message (of `start`'s length) -> what everyone received."""
        sent = self.send(m)
        slices, each = [], self.size // self.n
        for owner in range(self.n):
            own = slice(owner * each, (owner + 1) * each)
            mean = self.r[own] + self.b * self.o[own] + self.average(sent, own)
            w = combine(mean, own) - self.r[own]
            back = self.codec(w)
            if self.b:
                self.o[own] = w - back
            slices.append(self.r[own] + back)
        return self.agree(np.concatenate(slices))

    def agree(self, received: Array) -> Array:
        if self.relative:
            self.r = received
        return received[: self.length].copy()


class GatheredMean(CodedMean):
    """Every worker's sent_i goes to all, and the way back is neither needed nor coded:

    v_i, sent_i, e_i  as in the coded mean
    everyone          mean = r + (1/n)*sum_i sent_i ;  received = combine(mean)
                      relative: r <- received
    """

    def round(self, m: Sequence[Array], combine: Combine = unchanged) -> Array:
        whole = slice(0, self.size)
        return self.agree(combine(self.r + self.average(self.send(m), whole), whole))


# ---------------------------------------------------------------- workers and the loop
def flat(params: Params) -> Array:
    return np.concatenate([p.reshape(-1) for p in params])


def unflat(v: Array, like: Params) -> Params:
    ends = np.cumsum([p.size for p in like])
    return [
        v[end - p.size : end].reshape(p.shape).copy() for end, p in zip(ends, like, strict=True)
    ]


def mean_of(many: Sequence[Array]) -> Array:
    total = np.zeros_like(many[0])
    for one in many:
        total = total + one
    return (1.0 / len(many)) * total


@dataclass
class Worker:
    """x, and plain SGD's momentum:  b <- momentum*b + g ;  x <- x - lr*b"""

    x: Params
    b: Params

    def step(self, g: Params, lr: float, momentum: float) -> None:
        for k in range(len(self.x)):
            self.b[k] = momentum * self.b[k] + g[k]
            self.x[k] = self.x[k] - lr * self.b[k]

    @property
    def vector(self) -> Array:
        return flat(self.x)

    @vector.setter
    def vector(self, v: Array) -> None:
        self.x = unflat(v, self.x)


class Algorithm:
    """No communication; the consensus is the mean of x."""

    def start(self, x0: Params, n: int) -> None:
        """Create all state anew; x0 has the run's dtype, which the state takes over."""

    def gradients(self, t: int, grads: list[Params], lr: float) -> list[Params]:
        return grads

    def after_step(self, t: int, workers: list[Worker], lr: float) -> None:
        """The rounds of step t."""

    def settle(self, workers: list[Worker]) -> None:
        """Fold what is in flight, early."""

    def consensus(self, workers: list[Worker]) -> Array:
        return mean_of([w.vector for w in workers])


@dataclass
class Trace:
    """What every step left behind, entry t - 1 being the state after all rounds of step t."""

    workers: list[list[Params]] = field(default_factory=list)  # [t - 1][worker][parameter]
    consensus: list[Array] = field(default_factory=list)  # [t - 1], flat


def run(
    algorithm: Algorithm,
    n: int,
    steps: int,
    x0: Params,
    gradient: Gradient,
    lr: Rates,
    momentum: float = 0.0,
    dtype: npt.DTypeLike = np.float64,
) -> Trace:
    x0 = [np.asarray(p, dtype) for p in x0]
    workers = [Worker([p.copy() for p in x0], [0 * p for p in x0]) for _ in range(n)]
    algorithm.start([p.copy() for p in x0], n)
    trace = Trace()
    for t in range(1, steps + 1):
        rate = float(lr(t))
        grads = [gradient(i, t, [p.copy() for p in w.x]) for i, w in enumerate(workers)]
        grads = [[np.asarray(g, dtype) for g in own] for own in grads]
        for w, g in zip(workers, algorithm.gradients(t, grads, rate), strict=True):
            w.step(g, rate, momentum)
        algorithm.after_step(t, workers, rate)
        trace.workers.append([[p.copy() for p in w.x] for w in workers])
        trace.consensus.append(algorithm.consensus(workers).copy())
    return trace


# ---------------------------------------------------------------- gradients
@dataclass
class DDP(Algorithm):
    """every step: g <- coded mean(g), r = 0. One bucket: the parameters in reverse order."""

    codec: Codec
    feedback: float = 1.0

    def start(self, x0: Params, n: int) -> None:
        bucket = flat(x0[::-1])
        self.mean = CodedMean(self.codec, n, bucket, relative=False, feedback=self.feedback)

    def gradients(self, t: int, grads: list[Params], lr: float) -> list[Params]:
        received = self.mean.round([flat(g[::-1]) for g in grads])
        return [unflat(received, g[::-1])[::-1] for g in grads]


# ---------------------------------------------------------------- parameters
@dataclass
class LocalSGD(Algorithm):
    """every H: x <- received.  Delayed: y = x as sent at t; at t + delay: x <- received + (x - y)

    What a round leaves behind (r, e, o) is as of its sending; so delay <= H."""

    period: int
    codec: Codec
    delay: int = 0
    feedback: float = 1.0

    def start(self, x0: Params, n: int) -> None:
        assert self.delay <= self.period
        self.mean = CodedMean(self.codec, n, flat(x0), relative=True, feedback=self.feedback)
        self.flight: list[tuple[int, Array, list[Array]]] = []  # (due step, received, every y)

    def after_step(self, t: int, workers: list[Worker], lr: float) -> None:
        while self.flight and self.flight[0][0] == t:
            self.fold(workers)
        if t % self.period == 0:
            ys = [w.vector for w in workers]
            self.flight.append((t + self.delay, self.mean.round(ys), ys))
            if self.delay == 0:
                self.fold(workers)

    def fold(self, workers: list[Worker]) -> None:
        _, received, ys = self.flight.pop(0)
        for w, y in zip(workers, ys, strict=True):
            w.vector = received + (w.vector - y)

    def settle(self, workers: list[Worker]) -> None:
        while self.flight:
            self.fold(workers)


@dataclass
class SlowMo(Algorithm):
    """every tau, on the owner:  u <- beta*u + (a - mean)/lr ;  a <- a - alpha*lr*u ;  result = a
                     at lr = 0:  a <- a - alpha*(a - mean) ;  u unchanged ;  result = a
                    everyone:    x <- received

    beta `momentum`, alpha `lr`, lr the local rate at this step. At a slow step the base's round is
    skipped, its messages in flight fold before. The two rounds have references, residuals and lags
    of their own: the base's r stays what the base last agreed upon. The consensus is a."""

    base: LocalSGD
    period: int
    codec: Codec
    momentum: float = 0.5
    lr: float = 1.0
    feedback: float = 1.0

    def start(self, x0: Params, n: int) -> None:
        self.base.start(x0, n)
        self.mean = CodedMean(self.codec, n, flat(x0), relative=True, feedback=self.feedback)
        self.a = self.mean.pad(flat(x0))
        self.u = np.zeros_like(self.a)

    def after_step(self, t: int, workers: list[Worker], lr: float) -> None:
        if t % self.period != 0:
            self.base.after_step(t, workers, lr)
            return
        self.base.settle(workers)

        def slow_step(mean: Array, own: slice) -> Array:
            a, u = self.a, self.u
            if lr == 0.0:
                a[own] = a[own] - self.lr * (a[own] - mean)
            else:
                u[own] = self.momentum * u[own] + (a[own] - mean) / lr
                a[own] = a[own] - self.lr * lr * u[own]
            return a[own]

        received = self.mean.round([w.vector for w in workers], slow_step)
        for w in workers:
            w.vector = received

    def consensus(self, workers: list[Worker]) -> Array:
        return self.a[: self.mean.length]


class OuterNesterov:
    """Delta = a - mean ;  m <- mu*m + Delta ;  a <- a - eta*(Delta + mu*m) ;  result = a"""

    def __init__(self, start: Array, lr: float, momentum: float) -> None:
        self.a, self.m = start.copy(), np.zeros_like(start)
        self.eta, self.mu = lr, momentum

    def __call__(self, mean: Array, own: slice) -> Array:
        delta = self.a[own] - mean
        self.m[own] = self.mu * self.m[own] + delta
        self.a[own] = self.a[own] - self.eta * (delta + self.mu * self.m[own])
        return self.a[own]


@dataclass
class DiLoCo(Algorithm):
    """every H: the coded mean with the outer step on the owner (see OuterNesterov) ;  x <- received
    Delayed: at t + delay: x <- mix*x + (1 - mix)*received

    mix None: 0.5 with a delay, else 0. What a round leaves behind (a, m, r, e, o) is as of its
    sending; so delay <= H. The consensus is a."""

    period: int
    codec: Codec
    lr: float = 0.7
    momentum: float = 0.9
    delay: int = 0
    mix: float | None = None
    feedback: float = 1.0

    def start(self, x0: Params, n: int) -> None:
        assert self.delay <= self.period
        self.alpha = (0.5 if self.delay else 0.0) if self.mix is None else self.mix
        self.mean = CodedMean(self.codec, n, flat(x0), relative=True, feedback=self.feedback)
        self.outer = OuterNesterov(self.mean.pad(flat(x0)), self.lr, self.momentum)
        self.flight: list[tuple[int, Array]] = []  # (due step, received)

    def after_step(self, t: int, workers: list[Worker], lr: float) -> None:
        self.fold(t, workers)
        if t % self.period == 0:
            received = self.mean.round([w.vector for w in workers], self.outer)
            self.flight.append((t + self.delay, received))
        if self.delay == 0:
            self.fold(t, workers)

    def fold(self, t: int, workers: list[Worker]) -> None:
        while self.flight and self.flight[0][0] == t:
            _, received = self.flight.pop(0)
            for w in workers:
                w.vector = self.alpha * w.vector + (1.0 - self.alpha) * received

    def consensus(self, workers: list[Worker]) -> Array:
        return self.outer.a[: self.mean.length]


@dataclass
class StreamingDiLoCo(Algorithm):
    """Fragment k of K, after the steps t with t mod H = (k+1)*H//K mod H, and all of it of this
    fragment alone (anchor a, momentum m, r, e, o):

        at t:           the coded mean with the outer step on the owner
        at t + delay:   x <- mix*x + (1 - mix)*received

    a, m, r, e, o are as of the sending; so delay <= H. mix None: 0.5 with a delay, else 0.
    The consensus is the fragments' anchors."""

    period: int
    fragments: int
    codec: Codec
    lr: float = 0.7
    momentum: float = 0.9
    delay: int = 0
    mix: float | None = None
    feedback: float = 1.0

    def start(self, x0: Params, n: int) -> None:
        assert self.delay <= self.period
        self.alpha = (0.5 if self.delay else 0.0) if self.mix is None else self.mix
        self.parts = split([p.size for p in x0], self.fragments)
        self.mean, self.outer = {}, {}
        for k, part in enumerate(self.parts):
            if part:
                begin = flat([x0[p] for p in part])
                self.mean[k] = CodedMean(
                    self.codec, n, begin, relative=True, feedback=self.feedback
                )
                self.outer[k] = OuterNesterov(self.mean[k].pad(begin), self.lr, self.momentum)
        self.flight: list[tuple[int, int, Array]] = []  # (due step, fragment, received)

    def after_step(self, t: int, workers: list[Worker], lr: float) -> None:
        self.fold(t, workers)
        for k in self.mean:
            if t % self.period == (k + 1) * self.period // self.fragments % self.period:
                ys = [flat([w.x[p] for p in self.parts[k]]) for w in workers]
                self.flight.append((t + self.delay, k, self.mean[k].round(ys, self.outer[k])))
        if self.delay == 0:
            self.fold(t, workers)

    def fold(self, t: int, workers: list[Worker]) -> None:
        while self.flight and self.flight[0][0] == t:
            _, k, received = self.flight.pop(0)
            part = self.parts[k]
            for w in workers:
                back = unflat(received, [w.x[p] for p in part])
                for p, value in zip(part, back, strict=True):
                    w.x[p] = self.alpha * w.x[p] + (1.0 - self.alpha) * value

    def consensus(self, workers: list[Worker]) -> Array:
        return np.concatenate([self.outer[k].a[: mean.length] for k, mean in self.mean.items()])


def split(sizes: Sequence[int], fragments: int) -> list[list[int]]:
    """Contiguous runs of whole tensors: the tensor at [s, s + size) of T elements belongs to
    fragment floor(K*(s + size/2)/T), at most K - 1. A fragment may be empty."""
    parts: list[list[int]] = [[] for _ in range(fragments)]
    total, s = sum(sizes), 0
    for p, size in enumerate(sizes):
        parts[min(fragments * (2 * s + size) // (2 * total), fragments - 1)].append(p)
        s += size
    return parts


@dataclass
class EASGD(Algorithm):
    """every tau:

    xbar = coded mean(x)
    x_i <- x_i - (beta/n)*(x_i - a)    (the old a)
    a <- (1 - beta)*a + beta*xbar      the same on all workers; the consensus
    """

    period: int
    codec: Codec
    beta: float = 0.9
    feedback: float = 1.0

    def start(self, x0: Params, n: int) -> None:
        self.mean = CodedMean(self.codec, n, flat(x0), relative=True, feedback=self.feedback)
        self.a = flat(x0)

    def after_step(self, t: int, workers: list[Worker], lr: float) -> None:
        if t % self.period != 0:
            return
        xbar = self.mean.round([w.vector for w in workers])
        for w in workers:
            w.vector = w.vector - (self.beta / len(workers)) * (w.vector - self.a)
        self.a = (1.0 - self.beta) * self.a + self.beta * xbar

    def consensus(self, workers: list[Worker]) -> Array:
        return self.a


@dataclass
class SparseLoCo(Algorithm):
    """every H:  v_i = b*e_i + (x_i - r) ;  sent_i = topk(v_i) ;  e_i = v_i - sent_i
              mean = r + (1/n)*sum_i sent_i ;  a <- a - alpha*(a - mean)
              x, r <- a

    Sarfi et al. 2025 (2508.15706), with d = x - r in place of their pseudo-gradient r - x: e and
    sent change sign, x and a do not. The chunks are stretches of the flat vector of all
    parameters. The consensus is a."""

    period: int
    k: int
    chunk: int
    values: Codec
    feedback: float = 0.95
    lr: float = 1.0

    def start(self, x0: Params, n: int) -> None:
        codec = topk(self.k, self.chunk, self.values)
        self.mean = GatheredMean(codec, n, flat(x0), relative=True, feedback=self.feedback)
        self.a = self.mean.pad(flat(x0))

    def after_step(self, t: int, workers: list[Worker], lr: float) -> None:
        if t % self.period != 0:
            return

        def outer(mean: Array, own: slice) -> Array:
            self.a = self.a - self.lr * (self.a - mean)
            return self.a

        received = self.mean.round([w.vector for w in workers], outer)
        for w in workers:
            w.vector = received

    def consensus(self, workers: list[Worker]) -> Array:
        return self.a[: self.mean.length]
