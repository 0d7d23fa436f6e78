"""The table of algorithms: one function each, returning its rounds.

A period of H means rounds after steps H, 2H, 3H, ..., for every recipe. Recipes compose as
Python does: ``slowmo(local_sgd(3), period=48)``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

from laconic.errors import check_bool, check_float, check_int
from laconic.exchanges import Alone, Leader, Mean, Push, ShardedMean
from laconic.round import OptimizerState, Recipe, Round, is_recipe
from laconic.schedules import Schedule, Unless, after, every, until
from laconic.topology import Graph
from laconic.updates import (
    Average,
    Downpour,
    Elastic,
    LeaderPull,
    Mix,
    OuterStep,
    PushSum,
    SlowMomentum,
)
from laconic.updates.outer_step import OuterFactory


def ddp() -> Recipe:
    """Gradients averaged over all ranks during every backward pass.

    Li et al., VLDB 2020, arXiv 2006.15704. Use it where the network is fast: one step of n
    workers is one step on the n times larger batch.
    """
    return (Round(every(1), Average(), Mean(), on="gradients", over="world"),)


def local_sgd(period: int, *, delay: int = 0, optimizer_state: OptimizerState = "keep") -> Recipe:
    """``every period steps: x <- mean(x)``. Stich 2018, arXiv 1805.09767.

    ``delay``: steps between sending and folding, the local progress in between being kept, so
    that the message travels while training goes on; above ``period`` the same difference is taken
    off twice before it is seen to be gone, and workers drift apart: warned of. ``optimizer_state``:
    what becomes of the local optimiser's own state at a round.
    """
    _check_delay(delay, check_int("period", period, 1))
    return (Round(every(period), Average(), Mean(), delay=delay, optimizer_state=optimizer_state),)


def post_local_sgd(
    start: int, period: int, *, delay: int = 0, optimizer_state: OptimizerState = "keep"
) -> Recipe:
    """`ddp` in the first ``start`` steps, `local_sgd` from then on.

    Lin et al. 2018, arXiv 1808.07217 (``period`` 16 or 32, ``start`` at the first lr decay).
    """
    gradients = Round(until(start, every(1)), Average(), Mean(), on="gradients", over="world")
    averages = local_sgd(period, delay=delay, optimizer_state=optimizer_state)
    return (gradients, *(replace(r, when=after(start, r.when)) for r in averages))


def hierarchical(group_period: int, period: int) -> Recipe:
    """``every group_period steps: x <- mean(x)`` inside each group, ``every period`` over all.

    Lin et al. 2018, arXiv 1808.07217, section 5 (hierarchical local SGD). Where both fall due only
    the larger runs. Groups are of ``attach(..., group_size=)`` workers.
    """
    over_all = every(period)
    inside = Unless(every(check_int("group_period", group_period, 1)), over_all)
    return (
        Round(inside, Average(), Mean(), over="group"),
        Round(over_all, Average(), Mean()),
    )


def sgp(graph: str = "exponential", peers: int = 1, *, delay: int = 0) -> Recipe:
    """Stochastic gradient push: a gossip with ``peers`` out-peers after every step.

    Assran et al., ICML 2019, arXiv 1811.10792; see `PushSum` and, for graphs, `laconic.topology`.
    Sends ``peers`` times the model in every step, however many workers there are. With a ``delay``
    (OSGP) messages are folded that many steps later, and travel while training goes on.
    """
    return (Round(every(1), PushSum(), Push(Graph(graph, peers)), delay=delay),)


def d_psgd(graph: str = "ring", *, delay: int = 0) -> Recipe:
    """Decentralised SGD: x mixed with the neighbours' after every step.

    Lian et al., NeurIPS 2017, arXiv 1705.09056; see `Mix`. ``graph`` is used both ways: the ring
    has two neighbours.
    """
    _check_delay(delay, 1)
    return (Round(every(1), Mix(), Push(Graph(graph, both=True)), delay=delay),)


def easgd(period: int, beta: float = 0.9, *, pull: float = 0.0) -> Recipe:
    """Elastic averaging every ``period`` steps: workers and a centre attract each other.

    Zhang et al., NeurIPS 2015, arXiv 1412.6651 (period 1 to 64); see `Elastic`. ``beta``, in
    (0, 1]: the centre's share of the way to the workers' mean; each worker goes beta/n of its way
    to the centre. ``pull``, in [0, 1): spread over the period, x goes so much of the way to the
    centre at every step.
    """
    when = every(period)
    check_float("beta", beta, 0.0, strict=True, most=1.0)
    check_float("pull", pull, 0.0, 1.0)
    return (Round(when, Elastic(beta, pull / period), Mean()),)


def eamsgd(period: int, beta: float = 0.9, *, pull: float = 0.0) -> Recipe:
    """`easgd` for a local optimiser with Nesterov momentum (EAMSGD: the same rounds).

    Zhang et al. 2015, section 2.3: ``torch.optim.SGD(..., momentum=0.9, nesterov=True)``; the
    paper's 0.99 is worse on small problems.
    """
    return easgd(period, beta, pull=pull)


def downpour(period: int) -> Recipe:
    """``every period steps: a <- a + sum(x_i - a) ; x <- a``; see `Downpour`.

    Dean et al., NeurIPS 2012. A sum and not a mean, as if the workers' steps were one worker's: it
    needs a learning rate n times smaller, and is here to be compared with.
    """
    return (Round(every(period), Downpour(), ShardedMean()),)


def lsgd(
    period: int,
    *,
    local_period: int | None = None,
    pull: float = 0.1,
    local_pull: float = 0.1,
    drift: float = 0.1,
    local_drift: float = 0.1,
    window: int = 10,
) -> Recipe:
    """Leader SGD: every ``period`` steps toward the best of all workers, every ``local_period``
    (None: a quarter of it; 0: never) toward the best of the own group.

    Teng et al., NeurIPS 2019, arXiv 1905.10395 (period 4 to 64); see `LeaderPull`. ``pull`` and
    ``local_pull`` are c2 and c1; ``drift`` and ``local_drift``, p2 and p1, are spread over the
    period and pull at every step. The best has the lowest mean of its ``window`` last losses, as
    told to `Synchronizer.report_loss`. Groups are of ``attach(..., group_size=)`` workers.
    """
    over_all = every(period)
    pulls = {"pull": pull, "local_pull": local_pull, "drift": drift, "local_drift": local_drift}
    for name, value in pulls.items():
        check_float(name, value, 0.0, 1.0)
    exchange = Leader(check_int("window", window, 1))
    inner = max(period // 4, 1) if local_period is None else local_period
    check_int("local_period", inner, 0)
    local = [
        Round(every(inner), LeaderPull(local_pull, local_drift / inner), exchange, over="group")
        for _ in range(1 if inner else 0)
    ]
    return (*local, Round(over_all, LeaderPull(pull, drift / period), exchange))


def slowmo(
    base: Recipe | None,
    period: int = 48,
    momentum: float = 0.5,
    lr: float = 1.0,
    *,
    sharded: bool = True,
    average: bool = True,
    optimizer_state: OptimizerState = "keep",
) -> Recipe:
    """A slow momentum step every ``period`` steps over any base recipe (None: no other rounds).

    Wang et al., ICLR 2020, arXiv 1910.00643, Algorithm 1; see `SlowMomentum`. A base's averaging
    that falls on a slow step is skipped: the slow step averages exactly. ``momentum`` grows with
    the workers: 0 below 4, 0.2 for 4, 0.5 for 8, 0.6 for 16. ``sharded``: each worker keeps 1/n
    of the outer state. ``average=False``: the no-average variant, each worker's slow step from
    its own x. ``optimizer_state="reset"`` serves Nesterov SGD, ``"keep"`` Adam.
    """
    slow = every(period)
    if base is not None and not is_recipe(base):
        raise ValueError(f"base must be a recipe, as laconic.local_sgd(12), or None, not {base!r}")
    check_float("momentum", momentum, 0.0, 1.0)
    check_float("lr", lr, 0.0, strict=True)
    sharded, average = check_bool("sharded", sharded), check_bool("average", average)
    exchange = Alone() if not average else ShardedMean() if sharded else Mean()
    update = SlowMomentum(momentum, lr)
    return (
        *(_skip(r, slow) for r in base or ()),
        Round(slow, update, exchange, optimizer_state=optimizer_state),
    )


def diloco(
    period: int = 500,
    lr: float = 0.7,
    momentum: float = 0.9,
    *,
    outer: OuterFactory | None = None,
    sharded: bool = True,
    delay: int = 0,
) -> Recipe:
    """A local optimiser, and an outer Nesterov step every ``period`` steps.

    Douillard et al. 2023, arXiv 2311.08105; see `OuterStep`. The defaults suit hundreds of
    rounds: in a run of fewer than about 100 they overshoot, and ``momentum`` 0.3 to 0.6 serves
    better. ``outer``: any elementwise torch optimiser in place of Nesterov SGD, as
    ``lambda tensors: torch.optim.Adam(tensors, lr=1e-3)``; ``lr`` and ``momentum`` are then
    unused. With a ``delay`` x becomes half itself, half the anchor.
    """
    check_float("momentum", momentum, 0.0, 1.0)
    check_float("lr", lr, 0.0, strict=True)
    if outer is not None and not callable(outer):
        raise ValueError(
            "outer must make an optimiser from tensors, as lambda tensors: "
            f"torch.optim.Adam(tensors, lr=1e-3), not {outer!r}"
        )
    exchange = ShardedMean() if check_bool("sharded", sharded) else Mean()
    check_int("period", period, 1)
    _check_delay(delay, period)
    return (Round(every(period), OuterStep(lr, momentum, outer), exchange, delay=delay),)


def _check_delay(delay: int, period: int) -> None:
    """Warn where a round is sent before the last one but one was folded."""
    if isinstance(delay, int) and delay > period:
        warnings.warn(
            f"delay={delay} is longer than the period of {period}: differences are taken off again "
            "before the first message is folded, and workers drift apart",
            stacklevel=3,
        )


def _skip(r: Round, skipped: Schedule) -> Round:
    """``r`` without the steps of ``skipped``; gradients are always averaged."""
    return r if r.on == "gradients" else replace(r, when=Unless(r.when, skipped))


RECIPES: dict[str, Callable[..., Recipe]] = {
    recipe.__name__: recipe
    for recipe in (
        ddp,
        local_sgd,
        post_local_sgd,
        hierarchical,
        sgp,
        d_psgd,
        slowmo,
        easgd,
        eamsgd,
        downpour,
        lsgd,
        diloco,
    )
}
"""Recipes by name: what the command line offers."""
