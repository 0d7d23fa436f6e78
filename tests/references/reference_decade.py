"""What the further plain-loop references share: finer hooks, a loop that calls them, and SlowMo
over any base. Gossip is in reference_gossip, EASGD in reference_elastic, LSGD in
reference_leader; the problem, the optimizers and the workers are those of reference.

One step t, in this order, each line for all workers before the next line:

    loss_i, g_i at worker i's parameters   what the model holds between two steps: z for push-sum
    g <- mean(g)                           only where the recipe averages gradients
    rebias                                 push-sum: x <- w*z
    the local optimizer's step             moves x; weight decay and AdamW's x*(1 - lr*wd) see x,
                                           momentum and moments see the gradient as taken (at z)
    each_step                              elastic and leader pulls, statistics: every step
    after_step                             the rounds of step t: what is due first folds, then
                                           what is sent leaves
    debias                                 push-sum: z = x/w
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.references.reference import (
    GROUP_OF,
    NAMES,
    Array,
    Data,
    Optimizer,
    Params,
    Rates,
    Recipe,
    StatePolicy,
    Trace,
    Worker,
    copy,
    gradient,
    loss,
    mean,
    treat_state,
)


@dataclass(frozen=True)
class Seen:
    """What step t's forward and backward passes left behind, by worker."""

    losses: list[float]  # of this step's batch, before the local optimizer's step
    grads: list[Params]  # as taken: without weight decay, not averaged
    before: list[Params]  # the parameters at which loss and gradient were taken


class Rounds(Recipe):
    """A recipe with the finer hooks; those of `Recipe` mean what they mean there."""

    averaged = True  # whether the slow step above takes the mean of x, which settling prepares

    def rebias(self, workers: list[Worker]) -> None:
        """Before the local optimizer's step."""

    def each_step(self, t: int, workers: list[Worker], seen: Seen) -> None:
        """After the local optimizer's step, at every step, whatever round is due or skipped."""

    def debias(self, workers: list[Worker]) -> None:
        """After all rounds of the step."""


@dataclass
class Plain(Rounds):
    """One of `reference`'s recipes, which need none of the finer hooks."""

    recipe: Recipe

    def start(self, x0: Params, n: int) -> None:
        self.recipe.start(x0, n)

    def averages_gradients(self, t: int) -> bool:
        return self.recipe.averages_gradients(t)

    def after_step(self, t: int, workers: list[Worker], lr: Rates) -> None:
        self.recipe.after_step(t, workers, lr)

    def settle(self, workers: list[Worker]) -> None:
        self.recipe.settle(workers)

    def consensus(self, workers: list[Worker]) -> Params:
        return self.recipe.consensus(workers)


def lift(recipe: Recipe | None) -> Rounds:
    return recipe if isinstance(recipe, Rounds) else Plain(recipe or Recipe())


def add(p: Params, q: Params) -> Params:
    return {name: p[name] + q[name] for name in NAMES}


def scale(factor: float, p: Params) -> Params:
    return {name: factor * p[name] for name in NAMES}


def toward(x: Params, goal: Params, strength: float) -> Params:
    """x <- (1 - strength)*x + strength*goal."""
    return add(scale(1.0 - strength, x), scale(strength, goal))


@dataclass
class SlowMo(Rounds):
    """every tau:  settle the base
                treat the local optimizers' state: keep, average over workers, or reset
                xbar = mean(x)          average=False: worker i's own x_i, with its own u_i, a_i
                u <- beta*u + (a - xbar)/lr ;  a <- a - alpha*lr*u ;  x <- a
    at lr = 0:  a <- a - alpha*(a - xbar) ;  u unchanged ;  x <- a

    lr is the local lr of the parameter's group at this very step. A base round that falls due at
    a slow step is skipped and counts as not executed (skip_base_round); the base's `each_step`
    (pulls, statistics) and gradient means are never skipped. To settle is: messages in flight
    fold at once, and push-sum's w <- 1, x staying as it is, so that xbar is sum(x)/sum(w), the
    mean that gossip conserves; average=False: x <- x/w first, as each goes on from its own.
    The consensus is the anchor; average=False: the mean of the workers' anchors.
    """

    base: Recipe | None
    period: int = 48
    momentum: float = 0.5
    lr: float = 1.0
    average: bool = True
    optimizer_state: StatePolicy = "keep"
    skip_base_round: bool = True

    def start(self, x0: Params, n: int) -> None:
        self.inner = lift(self.base)
        self.inner.start(x0, n)
        self.inner.averaged = self.average
        self.anchor = [copy(x0) for _ in range(n)]
        self.u = [scale(0.0, x0) for _ in range(n)]

    def averages_gradients(self, t: int) -> bool:
        return self.inner.averages_gradients(t)

    def rebias(self, workers: list[Worker]) -> None:
        self.inner.rebias(workers)

    def each_step(self, t: int, workers: list[Worker], seen: Seen) -> None:
        self.inner.each_step(t, workers, seen)

    def debias(self, workers: list[Worker]) -> None:
        self.inner.debias(workers)

    def after_step(self, t: int, workers: list[Worker], lr: Rates) -> None:
        if t % self.period != 0:
            self.inner.after_step(t, workers, lr)
            return
        if not self.skip_base_round:
            self.inner.after_step(t, workers, lr)
        self.inner.settle(workers)
        treat_state(workers, self.optimizer_state)
        xbar = mean([w.x for w in workers])
        for i, w in enumerate(workers):
            goal = xbar if self.average else w.x
            for name in NAMES:
                self._slow(i, name, goal[name], lr(GROUP_OF[name], t))
            w.x = copy(self.anchor[i])

    def _slow(self, i: int, name: str, xbar: Array, lr: float) -> None:
        a, u = self.anchor[i], self.u[i]
        if lr == 0.0:
            a[name] = a[name] - self.lr * (a[name] - xbar)
        else:
            u[name] = self.momentum * u[name] + (a[name] - xbar) / lr
            a[name] = a[name] - self.lr * lr * u[name]

    def consensus(self, workers: list[Worker]) -> Params:
        return mean(self.anchor)  # equal ones, if average


slowmo = SlowMo


def run(
    recipe: Recipe,
    n: int,
    steps: int,
    optimizer: Sequence[Optimizer],
    lr: Rates,
    data: Data,
    init: Sequence[Params],
    apart: bool = False,
) -> Trace:
    """As reference.run, with the finer hooks. All workers start from init[0], unless `apart`:
    then worker i starts from init[i] (anchors from init[0] even so), which with lr 0 shows
    the mixing alone. The trace holds what the models hold: z for push-sum."""
    workers = [Worker(copy(init[i if apart else 0])) for i in range(n)]
    rounds = lift(recipe)
    rounds.start(copy(init[0]), n)
    trace = Trace()
    for t in range(1, steps + 1):
        seen = Seen(
            losses=[loss(w.x, data[i][t - 1]) for i, w in enumerate(workers)],
            grads=[gradient(w.x, data[i][t - 1]) for i, w in enumerate(workers)],
            before=[copy(w.x) for w in workers],
        )
        grads = [mean(seen.grads)] * n if rounds.averages_gradients(t) else seen.grads
        rounds.rebias(workers)
        for w, g in zip(workers, grads, strict=True):
            w.step(g, optimizer, lr, t)
        rounds.each_step(t, workers, seen)
        rounds.after_step(t, workers, lr)
        rounds.debias(workers)
        trace.record(workers, rounds.consensus(workers))
    return trace
