"""Plain-loop float64 references of the recipes, written so that a reader sees the formulas.

Every worker lives in one Python list and communication is a loop over that list: there are no
processes, buckets, shards or flat buffers, so nothing here can go wrong the way a library can.

The problem: y = W2 tanh(W1 x + b1) + b2 for each row x of a batch, loss = mean((y - t)^2) over
all batch * OUTPUT elements. Weights are (out, in), the layout of torch.nn.Linear, so that
Sequential(Linear(INPUT, HIDDEN), Tanh(), Linear(HIDDEN, OUTPUT)) with MSELoss() is this model,
its parameters in the order of NAMES. Steps are counted from 1, groups from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]
Params: TypeAlias = dict[str, Array]  # in the order of NAMES
State: TypeAlias = dict[str, Array]  # one parameter's optimizer state
Batch: TypeAlias = tuple[Array, Array]  # inputs (batch, INPUT), targets (batch, OUTPUT)
Data: TypeAlias = list[list[Batch]]  # data[worker][step - 1]
Rates: TypeAlias = Callable[[int, int], float]  # lr(group, step)
StatePolicy: TypeAlias = Literal["keep", "average", "reset"]

# Odd sizes: no tensor divides by 2, 3 or 4, so an even split into slices must pad.
INPUT, HIDDEN, OUTPUT = 5, 7, 11
SHAPES: dict[str, tuple[int, ...]] = {
    "w1": (HIDDEN, INPUT),
    "b1": (HIDDEN,),
    "w2": (OUTPUT, HIDDEN),
    "b2": (OUTPUT,),
}
NAMES = tuple(SHAPES)
GROUPS = (("w1", "w2"), ("b1", "b2"))  # weights | biases
GROUP_OF = {name: group for group, names in enumerate(GROUPS) for name in names}


# ---------------------------------------------------------------- the problem
def make_data(n: int, steps: int, seed: int, batch: int = 4) -> Data:
    """Batches that differ by worker and by step; each worker has its own teacher and inputs."""
    data: Data = []
    for worker in range(n):
        own = np.random.default_rng([seed, worker, 0])
        center = own.standard_normal(INPUT)
        teacher = own.standard_normal((OUTPUT, INPUT))
        data.append([])
        for step in range(1, steps + 1):
            rng = np.random.default_rng([seed, worker, step])
            x = center + rng.standard_normal((batch, INPUT))
            t = np.sin(x @ teacher.T) + 0.1 * rng.standard_normal((batch, OUTPUT))
            data[worker].append((x, t))
    return data


def initial(n: int, seed: int) -> list[Params]:
    """Different parameters on every worker; `run` starts them all from worker 0's."""
    found = []
    for worker in range(n):
        rng = np.random.default_rng([seed, worker])
        found.append({name: 0.5 * rng.standard_normal(shape) for name, shape in SHAPES.items()})
    return found


def loss(p: Params, batch: Batch) -> float:
    x, t = batch
    y = np.tanh(x @ p["w1"].T + p["b1"]) @ p["w2"].T + p["b2"]
    return float(np.mean((y - t) ** 2))


def gradient(p: Params, batch: Batch) -> Params:
    x, t = batch
    h = np.tanh(x @ p["w1"].T + p["b1"])
    y = h @ p["w2"].T + p["b2"]
    dy = 2.0 * (y - t) / y.size
    dz = (dy @ p["w2"]) * (1.0 - h**2)
    return {"w1": dz.T @ x, "b1": dz.sum(axis=0), "w2": dy.T @ h, "b2": dy.sum(axis=0)}


# ---------------------------------------------------------------- optimizers, as in torch.optim
@dataclass(frozen=True)
class SGD:
    """g <- g + wd*x ; m <- mu*m + g (first m = g) ; x <- x - lr*(m, or g + mu*m if Nesterov)."""

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def step(self, x: Array, g: Array, state: State, lr: float) -> Array:
        g = g + self.weight_decay * x
        if self.momentum == 0.0:
            return x - lr * g
        m = self.momentum * state["momentum_buffer"] + g if state else g
        state["momentum_buffer"] = m
        return x - lr * (g + self.momentum * m if self.nesterov else m)


@dataclass(frozen=True)
class AdamW:
    """x <- x*(1 - lr*wd) ; m <- b1*m + (1-b1)*g ; v <- b2*v + (1-b2)*g^2 ;
    x <- x - lr * m/(1-b1^k) / (sqrt(v/(1-b2^k)) + eps), k counting this optimizer's steps."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    def step(self, x: Array, g: Array, state: State, lr: float) -> Array:
        b1, b2 = self.betas
        if not state:
            state.update(step=np.zeros(()), exp_avg=0.0 * x, exp_avg_sq=0.0 * x)
        k = state["step"] = np.asarray(state["step"] + 1.0)
        m = state["exp_avg"] = b1 * state["exp_avg"] + (1.0 - b1) * g
        v = state["exp_avg_sq"] = b2 * state["exp_avg_sq"] + (1.0 - b2) * g**2
        x = x * (1.0 - lr * self.weight_decay)
        return x - lr * (m / (1.0 - b1**k)) / (np.sqrt(v / (1.0 - b2**k)) + self.eps)


Optimizer: TypeAlias = SGD | AdamW


@dataclass
class Worker:
    """One worker's parameters and its local optimizer's state, by parameter name."""

    x: Params
    state: dict[str, State] = field(default_factory=lambda: {name: {} for name in NAMES})

    def step(self, g: Params, optimizer: Sequence[Optimizer], lr: Rates, t: int) -> None:
        for name in NAMES:
            group = GROUP_OF[name]
            rule = optimizer[group]
            self.x[name] = rule.step(self.x[name], g[name], self.state[name], lr(group, t))


# ---------------------------------------------------------------- helpers
def copy(p: Params) -> Params:
    return {name: value.copy() for name, value in p.items()}


def mean(many: Sequence[Params]) -> Params:
    out = {name: np.zeros_like(value) for name, value in many[0].items()}
    for one in many:
        for name in out:
            out[name] += one[name]
    return {name: value / len(many) for name, value in out.items()}


def treat_state(workers: list[Worker], policy: StatePolicy) -> None:
    """keep: nothing ; average: s <- mean(s) for every entry, the step count too ; reset: s <- {}"""
    for name in NAMES:
        if policy == "average":
            shared = mean([w.state[name] for w in workers])
            for w in workers:
                w.state[name] = copy(shared)
        elif policy == "reset":
            for w in workers:
                w.state[name] = {}


# ---------------------------------------------------------------- recipes
class Recipe:
    """No communication at all; the consensus is mean(x)."""

    def start(self, x0: Params, n: int) -> None:
        """Forget an earlier run: `run` calls this first, so one recipe may be run many times."""

    def averages_gradients(self, t: int) -> bool:
        return False

    def after_step(self, t: int, workers: list[Worker], lr: Rates) -> None:
        """The rounds of step t, after the local optimizer's step t."""

    def settle(self, workers: list[Worker]) -> None:
        """Fold everything still in flight, early."""

    def consensus(self, workers: list[Worker]) -> Params:
        return mean([w.x for w in workers])


class DDP(Recipe):
    """every step: g <- mean(g), before the local optimizer."""

    def averages_gradients(self, t: int) -> bool:
        return True


@dataclass
class LocalSGD(Recipe):
    """every H: x <- mean(x). Delayed: y = x when sent at t; at t + delay: x <- x + (mean(y) - y).

    Post-local: g <- mean(g) in steps 1..begin, then rounds after multiples of H beyond begin."""

    period: int
    delay: int = 0
    optimizer_state: StatePolicy = "keep"
    begin: int = 0

    def start(self, x0: Params, n: int) -> None:
        self.flight: list[tuple[int, list[Params]]] = []  # (step it is due, y of every worker)

    def averages_gradients(self, t: int) -> bool:
        return t <= self.begin

    def after_step(self, t: int, workers: list[Worker], lr: Rates) -> None:
        # What is due comes in before the new message leaves, so that y contains it.
        while self.flight and self.flight[0][0] == t:
            self._fold(workers, self.flight.pop(0)[1])
        if t > self.begin and t % self.period == 0:
            treat_state(workers, self.optimizer_state)
            if self.delay == 0:
                xbar = mean([w.x for w in workers])
                for w in workers:
                    w.x = copy(xbar)
            else:
                self.flight.append((t + self.delay, [copy(w.x) for w in workers]))

    def settle(self, workers: list[Worker]) -> None:
        while self.flight:
            self._fold(workers, self.flight.pop(0)[1])

    def _fold(self, workers: list[Worker], ys: list[Params]) -> None:
        ybar = mean(ys)
        for w, y in zip(workers, ys, strict=True):
            for name in NAMES:
                w.x[name] = w.x[name] + (ybar[name] - y[name])


@dataclass
class SlowMo(Recipe):
    """every tau:  xbar = mean(x)   (average=False: worker i's own x_i, with its own u_i and a_i)
                u <- beta*u + (a - xbar)/lr ;  a <- a - alpha*lr*u ;  x <- a
    at lr = 0:  a <- a - alpha*(a - xbar) ;  u unchanged ;  x <- a

    lr is the local lr of the parameter's group at this very step, beta `momentum`, alpha `lr`.
    A base round due at a slow step is skipped (skip_base_round), its gradient mean never."""

    base: Recipe | None
    period: int = 48
    momentum: float = 0.5
    lr: float = 1.0
    optimizer_state: StatePolicy = "keep"
    average: bool = True
    skip_base_round: bool = True

    def start(self, x0: Params, n: int) -> None:
        self.inner = Recipe() if self.base is None else self.base
        self.inner.start(x0, n)
        # One copy a worker: with average=True they stay equal, without they part.
        self.anchor = [copy(x0) for _ in range(n)]
        self.u = [{name: np.zeros_like(x0[name]) for name in NAMES} for _ in range(n)]

    def averages_gradients(self, t: int) -> bool:
        return self.inner.averages_gradients(t)

    def after_step(self, t: int, workers: list[Worker], lr: Rates) -> None:
        slow = t % self.period == 0
        if not slow or not self.skip_base_round:
            self.inner.after_step(t, workers, lr)
        if not slow:
            return
        self.inner.settle(workers)
        treat_state(workers, self.optimizer_state)
        xbar = mean([w.x for w in workers])
        for w, a, u in zip(workers, self.anchor, self.u, strict=True):
            for name in NAMES:
                rate = lr(GROUP_OF[name], t)
                d = a[name] - (xbar[name] if self.average else w.x[name])
                if rate == 0.0:
                    a[name] = a[name] - self.lr * d
                else:
                    u[name] = self.momentum * u[name] + d / rate
                    a[name] = a[name] - self.lr * rate * u[name]
            w.x = copy(a)

    def consensus(self, workers: list[Worker]) -> Params:
        return copy(self.anchor[0]) if self.average else mean(self.anchor)


@dataclass
class DiLoCo(Recipe):
    """every H: Delta = mean(a - x) ; a <- outer(a, Delta) ; x <- a
    outer, as torch's Nesterov SGD: m <- mu*m + Delta ; a <- a - eta*(Delta + mu*m)
    Delayed: the above at step t, but x stays; at t + delay: x <- 0.5*x + 0.5*a, a as of step t."""

    period: int = 500
    lr: float = 0.7
    momentum: float = 0.9
    delay: int = 0
    outer: tuple[Optimizer, float] | None = None  # another outer optimizer and its lr

    def start(self, x0: Params, n: int) -> None:
        self.anchor = copy(x0)
        self.m = {name: np.zeros_like(x0[name]) for name in NAMES}
        self.outer_state: dict[str, State] = {name: {} for name in NAMES}
        self.flight: list[tuple[int, Params]] = []  # (step it is due, the anchor it brings)

    def after_step(self, t: int, workers: list[Worker], lr: Rates) -> None:
        while self.flight and self.flight[0][0] == t:
            anchor = self.flight.pop(0)[1]
            for w in workers:
                w.x = {name: 0.5 * w.x[name] + 0.5 * anchor[name] for name in NAMES}
        if t % self.period != 0:
            return
        a = self.anchor
        delta = mean([{name: a[name] - w.x[name] for name in NAMES} for w in workers])
        for name in NAMES:
            if self.outer is not None:
                rule, rate = self.outer
                a[name] = rule.step(a[name], delta[name], self.outer_state[name], rate)
            else:
                self.m[name] = self.momentum * self.m[name] + delta[name]
                a[name] = a[name] - self.lr * (delta[name] + self.momentum * self.m[name])
        if self.delay > 0:
            self.flight.append((t + self.delay, copy(a)))
        else:
            for w in workers:
                w.x = copy(a)

    def consensus(self, workers: list[Worker]) -> Params:
        return copy(self.anchor)


def post_local_sgd(
    start: int, period: int, delay: int = 0, optimizer_state: StatePolicy = "keep"
) -> LocalSGD:
    return LocalSGD(period, delay, optimizer_state, begin=start)


def adam_outer(
    lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
) -> tuple[Optimizer, float]:
    """torch.optim.Adam, which is AdamW without weight decay."""
    return AdamW(betas, eps, weight_decay=0.0), lr


# The names a user writes; fields above are their arguments, in order.
ddp, local_sgd, slowmo, diloco = DDP, LocalSGD, SlowMo, DiLoCo


# ---------------------------------------------------------------- running
@dataclass
class Trace:
    """What every step left behind, entry t - 1 being the state after all rounds of step t."""

    workers: list[list[Params]] = field(default_factory=list)  # [t - 1][worker]
    consensus: list[Params] = field(default_factory=list)  # [t - 1]

    def record(self, workers: list[Worker], consensus: Params) -> None:
        self.workers.append([copy(w.x) for w in workers])
        self.consensus.append(copy(consensus))


def run(
    recipe: Recipe,
    n: int,
    steps: int,
    optimizer: Sequence[Optimizer],
    lr: Rates,
    data: Data,
    init: Sequence[Params],
) -> Trace:
    """`optimizer` holds one rule per parameter group; all workers start from init[0]."""
    workers = [Worker(copy(init[0])) for _ in range(n)]
    recipe.start(copy(init[0]), n)
    trace = Trace()
    for t in range(1, steps + 1):
        grads = [gradient(w.x, data[i][t - 1]) for i, w in enumerate(workers)]
        if recipe.averages_gradients(t):
            grads = [mean(grads)] * n
        for w, g in zip(workers, grads, strict=True):
            w.step(g, optimizer, lr, t)
        recipe.after_step(t, workers, lr)
        trace.record(workers, recipe.consensus(workers))
    return trace


# ---------------------------------------------------------------- special cases, for identities
def lookahead(
    period: int,
    alpha: float,
    steps: int,
    optimizer: Sequence[Optimizer],
    lr: Rates,
    data: Data,
    init: Sequence[Params],
) -> Trace:
    """every k: slow <- slow + alpha*(fast - slow) ; fast <- slow. (SlowMo: n = 1, beta = 0.)"""
    slow, fast, trace = copy(init[0]), Worker(copy(init[0])), Trace()
    for t in range(1, steps + 1):
        fast.step(gradient(fast.x, data[0][t - 1]), optimizer, lr, t)
        if t % period == 0:
            slow = {name: slow[name] + alpha * (fast.x[name] - slow[name]) for name in NAMES}
            fast.x = copy(slow)
        trace.record([fast], slow)
    return trace


def large_batch_momentum(
    n: int,
    steps: int,
    beta: float,
    alpha: float,
    lr: Rates,
    data: Data,
    init: Sequence[Params],
    weight_decay: float = 0.0,
) -> Trace:
    """v <- beta*v + g(all workers' rows as one batch) ; x <- x - alpha*lr*v. (SlowMo: tau = 1,
    base None, plain SGD with this weight decay, lr never 0.)"""
    worker, trace = Worker(copy(init[0])), Trace()
    v = {name: np.zeros_like(worker.x[name]) for name in NAMES}
    for t in range(1, steps + 1):
        parts = [data[i][t - 1] for i in range(n)]
        batch = (np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts]))
        g = gradient(worker.x, batch)
        for name in NAMES:
            v[name] = beta * v[name] + g[name] + weight_decay * worker.x[name]
            worker.x[name] = worker.x[name] - alpha * lr(GROUP_OF[name], t) * v[name]
        trace.record([worker] * n, worker.x)
    return trace


def _blocks(
    n: int,
    steps: int,
    period: int,
    optimizer: Sequence[Optimizer],
    lr: Rates,
    data: Data,
    init: Sequence[Params],
    outer: Callable[[str, Array, Array], Array],
) -> Trace:
    """every H: model <- outer(name, model, mean(x)) ; x <- model."""
    model, trace = copy(init[0]), Trace()
    workers = [Worker(copy(model)) for _ in range(n)]
    for t in range(1, steps + 1):
        for i, w in enumerate(workers):
            w.step(gradient(w.x, data[i][t - 1]), optimizer, lr, t)
        if t % period == 0:
            for name in NAMES:
                xbar = np.mean([w.x[name] for w in workers], axis=0)
                model[name] = outer(name, model[name], xbar)
                for w in workers:
                    w.x[name] = model[name].copy()
        trace.record(workers, model)
    return trace


def heavy_ball_outer(
    n: int,
    steps: int,
    period: int,
    momentum: float,
    outer_lr: float,
    optimizer: Sequence[Optimizer],
    lr: Rates,
    data: Data,
    init: Sequence[Params],
) -> Trace:
    """every H: v <- mu*v + (a - xbar) ; a <- a - eta*v. (SlowMo over None with constant lr.)"""
    v = {name: np.zeros(shape) for name, shape in SHAPES.items()}

    def outer(name: str, a: Array, xbar: Array) -> Array:
        v[name] = momentum * v[name] + (a - xbar)
        return a - outer_lr * v[name]

    return _blocks(n, steps, period, optimizer, lr, data, init, outer)


def bmuf(
    n: int,
    steps: int,
    period: int,
    block_momentum: float,
    block_lr: float,
    optimizer: Sequence[Optimizer],
    lr: Rates,
    data: Data,
    init: Sequence[Params],
) -> Trace:
    """every H: G = xbar - W ; D <- eta*D + zeta*G ; W <- W + D: classical block momentum, the
    blocks starting from W. (SlowMo over None with beta > 0 and constant lr.)"""
    step = {name: np.zeros(shape) for name, shape in SHAPES.items()}

    def outer(name: str, model: Array, xbar: Array) -> Array:
        step[name] = block_momentum * step[name] + block_lr * (xbar - model)
        return model + step[name]

    return _blocks(n, steps, period, optimizer, lr, data, init, outer)


def max_difference(one: Trace, other: Trace, consensus: bool = True) -> float:
    """Largest absolute difference between two traces over steps, workers and parameters.
    consensus=False compares the workers only: an anchor lags behind the mean of x."""
    worst = 0.0
    for mine, yours in zip(one.workers, other.workers, strict=True):
        for p, q in zip(mine, yours, strict=True):
            worst = max([worst, *(float(np.max(np.abs(p[k] - q[k]))) for k in NAMES)])
    if consensus:
        for p, q in zip(one.consensus, other.consensus, strict=True):
            worst = max([worst, *(float(np.max(np.abs(p[k] - q[k]))) for k in NAMES)])
    return worst


# ---------------------------------------------------------------- self-check
