"""The table of algorithms: one function each, returning its rounds.

A period of H means rounds after steps H, 2H, 3H, ..., for every recipe. Recipes compose as
Python does: ``slowmo(local_sgd(3), period=48)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from laconic.errors import check_bool, check_float
from laconic.exchanges import Alone, Mean, ShardedMean
from laconic.round import OptimizerState, Recipe, Round, is_recipe
from laconic.schedules import Schedule, Unless, after, every, until
from laconic.updates import Average, OuterStep, SlowMomentum
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
    that the message travels while training goes on. ``optimizer_state``: what becomes of the
    local optimiser's own state at a round.
    """
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
    return (Round(every(period), OuterStep(lr, momentum, outer), exchange, delay=delay),)


def _skip(r: Round, skipped: Schedule) -> Round:
    """``r`` without the steps of ``skipped``; gradients are always averaged."""
    return r if r.on == "gradients" else replace(r, when=Unless(r.when, skipped))


RECIPES: dict[str, Callable[..., Recipe]] = {
    recipe.__name__: recipe for recipe in (ddp, local_sgd, post_local_sgd, slowmo, diloco)
}
"""Recipes by name: what the command line offers."""
