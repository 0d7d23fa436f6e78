"""The problem that the plain-loop references solve in float64, and the loop that trains on it.

Every worker lives in one Python list and communication is a loop over that list: there are no
processes, buckets, shards or flat buffers, so nothing here can go wrong the way a library can.

The problem: y = W2 tanh(W1 x + b1) + b2 for each row x of a batch, loss = mean((y - t)^2) over
all elements. Weights are (out, in), the layout of torch.nn.Linear, so that Sequential(Linear,
Tanh, Linear) with MSELoss is this model, its parameters in the order of NAMES. Steps are counted
from 1, groups from 0. One step t, in this order, each line for all workers before the next line:

    loss_i, g_i at worker i's parameters   what the model holds between two steps: z for push-sum
    g <- gradients(g)                      averaged, coded, ...: only where a recipe says so
    rebias                                 push-sum: x <- w*z
    the local optimizer's step             moves x; weight decay and AdamW's x*(1 - lr*wd) see x,
                                           momentum and moments see the gradient as taken (at z)
    each_step                              elastic and leader pulls, statistics: every step
    after_step                             the rounds of step t: what is due first folds, then
                                           what is sent leaves
    debias                                 push-sum: z = x/w
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]  # float64, but inside codecs
Params: TypeAlias = dict[str, Array]  # in the order of NAMES
State: TypeAlias = dict[str, Array]  # one parameter's optimizer state
Batch: TypeAlias = tuple[Array, Array]  # inputs (batch, 5), targets (batch, 11)
Data: TypeAlias = list[list[Batch]]  # data[worker][step - 1]
Rates: TypeAlias = Callable[[int, int], float]  # lr(group, step)
StatePolicy: TypeAlias = Literal["keep", "average", "reset"]

# Odd sizes: no tensor divides by 2, 3 or 4, so an even split into slices must pad.
INPUTS, HIDDEN, OUTPUTS = 5, 7, 11
NAMES = ("w1", "b1", "w2", "b2")
GROUPS = (("w1", "w2"), ("b1", "b2"))  # weights | biases
GROUP_OF = {name: group for group, names in enumerate(GROUPS) for name in names}
FLAT = tuple(name for names in GROUPS for name in names)  # in the order of the optimizer
LAYERS = (("w1", "b1"), ("w2", "b2"))


SHAPES: dict[str, tuple[int, ...]] = {
    "w1": (HIDDEN, INPUTS),
    "b1": (HIDDEN,),
    "w2": (OUTPUTS, HIDDEN),
    "b2": (OUTPUTS,),
}


def make_data(n: int, steps: int, seed: int, batch: int = 4) -> Data:
    """Batches that differ by worker and by step; each worker has its own teacher and inputs."""
    data: Data = []
    for worker in range(n):
        own = np.random.default_rng([seed, worker, 0])
        center = own.standard_normal(INPUTS)
        teacher = own.standard_normal((OUTPUTS, INPUTS))
        data.append([])
        for step in range(1, steps + 1):
            rng = np.random.default_rng([seed, worker, step])
            x = center + rng.standard_normal((batch, INPUTS))
            t = np.sin(x @ teacher.T) + 0.1 * rng.standard_normal((batch, OUTPUTS))
            data[worker].append((x, t))
    return data


def join(data: Data, size: int) -> Data:
    """The batches of workers of ``size`` ranks each, one after the other."""

    def whole(parts: Sequence[Batch]) -> Batch:
        return np.concatenate([x for x, _ in parts]), np.concatenate([t for _, t in parts])

    groups = [data[first : first + size] for first in range(0, len(data), size)]
    return [[whole(parts) for parts in zip(*ranks, strict=True)] for ranks in groups]


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


# ---------------------------------------------------------------- arithmetic
def copy(p: Params) -> Params:
    return {name: value.copy() for name, value in p.items()}


def add(p: Params, q: Params) -> Params:
    return {name: p[name] + q[name] for name in p}


def minus(p: Params, q: Params) -> Params:
    return {name: p[name] - q[name] for name in p}


def scale(factor: float, p: Params) -> Params:
    return {name: factor * value for name, value in p.items()}


def mean(many: Sequence[Params]) -> Params:
    total = scale(0.0, many[0])
    for one in many:
        total = add(total, one)
    return {name: value / len(many) for name, value in total.items()}


def toward(x: Params, goal: Params, strength: float) -> Params:
    """x <- (1 - strength)*x + strength*goal."""
    return add(scale(1.0 - strength, x), scale(strength, goal))


def some(p: Params, names: Iterable[str]) -> Params:
    return {name: p[name] for name in names}


def treat_state(workers: Sequence[Worker], policy: StatePolicy) -> None:
    """keep: nothing ; average: s <- mean(s) for every entry, the step count too ; reset: s <- {}"""
    for name in NAMES:
        if policy == "average":
            shared = mean([w.state[name] for w in workers])
            for w in workers:
                w.state[name] = copy(shared)
        elif policy == "reset":
            for w in workers:
                w.state[name] = {}


# ---------------------------------------------------------------- running
@dataclass(frozen=True)
class Seen:
    """What step t's forward and backward passes left behind, by worker."""

    losses: list[float]  # of this step's batch, before the local optimizer's step
    grads: list[Params]  # as taken: without weight decay, not averaged
    before: list[Params]  # the parameters at which loss and gradient were taken


class Recipe:
    """No communication at all; the consensus is mean(x)."""

    averaged = True  # whether the slow step above takes the mean of x, which settling prepares

    def start(self, x0: Params, n: int) -> None:
        """Forget an earlier run: `run` calls this first, so one recipe may be run many times."""

    def gradients(self, t: int, grads: list[Params]) -> list[Params]:
        return grads

    def rebias(self, workers: list[Worker]) -> None:
        """Before the local optimizer's step."""

    def each_step(self, t: int, workers: list[Worker], seen: Seen) -> None:
        """After the local optimizer's step, at every step, whatever round is due or skipped."""

    def after_step(self, t: int, workers: list[Worker], lr: Rates) -> None:
        """The rounds of step t, after the local optimizer's step t."""

    def debias(self, workers: list[Worker]) -> None:
        """After all rounds of the step."""

    def settle(self, workers: list[Worker]) -> None:
        """Fold everything still in flight, early."""

    def consensus(self, workers: list[Worker]) -> Params:
        return mean([w.x for w in workers])


@dataclass
class Trace:
    """What every step left behind, entry t - 1 being the state after all rounds of step t."""

    workers: list[list[Params]] = field(default_factory=list)  # [t - 1][worker]
    consensus: list[Params] = field(default_factory=list)  # [t - 1]

    def record(self, workers: Sequence[Worker], consensus: Params) -> None:
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
    """`optimizer` holds one rule per parameter group; all workers start from init[0]. The trace
    holds what the models hold: z for push-sum."""
    workers = [Worker(copy(init[0])) for _ in range(n)]
    recipe.start(copy(init[0]), n)
    trace = Trace()
    for t in range(1, steps + 1):
        seen = Seen(
            losses=[loss(w.x, data[i][t - 1]) for i, w in enumerate(workers)],
            grads=[gradient(w.x, data[i][t - 1]) for i, w in enumerate(workers)],
            before=[copy(w.x) for w in workers],
        )
        grads = recipe.gradients(t, seen.grads)
        recipe.rebias(workers)
        for w, g in zip(workers, grads, strict=True):
            w.step(g, optimizer, lr, t)
        recipe.each_step(t, workers, seen)
        recipe.after_step(t, workers, lr)
        recipe.debias(workers)
        trace.record(workers, recipe.consensus(workers))
    return trace
