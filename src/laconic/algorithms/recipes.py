"""The algorithms: one function each, which returns the algorithm's rounds.

In every recipe, a period of H means rounds after steps H, 2H, 3H, and so on. Recipes compose by
nesting calls: ``slowmo(local_sgd(3), period=48)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from laconic.algorithms.diloco_recipes import diloco, outer_step, streaming_diloco
from laconic.algorithms.exchange import Exchange
from laconic.algorithms.exchanges import Alone, Leader, LowRank, Mean, Push
from laconic.algorithms.named import named
from laconic.algorithms.recipe_parts import (
    CodecOption,
    check_base,
    check_delay,
    check_effect,
    check_sharded,
    mean_over_workers,
    over_base,
)
from laconic.algorithms.round import GradientRound, OptimizerState, Recipe, Round
from laconic.algorithms.schedules import Every, Unless, after, every, until
from laconic.algorithms.topology import Graph
from laconic.algorithms.updates import Average, Elastic, LeaderPull, Mix, PushSum, SlowMomentum
from laconic.codecs import codec_of
from laconic.errors import check_bool, check_float, check_int


@named
def ddp(*, codec: CodecOption = None) -> Recipe:
    """Average gradients over all ranks during every backward pass.

    Li et al., VLDB 2020, arXiv 2006.15704. Use it on fast networks: one step of n workers equals
    one step on an n times larger batch.

    Args:
        codec: how gradients are coded: a name such as ``"int8"`` or ``"int4"``, or a codec of
            `laconic.codecs`. None: not coded. ``"int4"`` takes an eighth of the bytes; see
            `CodedMean`.

    Examples:
        >>> sync = laconic.attach(model, optimizer, laconic.ddp(codec="int4"))
    """
    mean = mean_over_workers(codec, relative=False)
    return (GradientRound(every(1), Average(), mean, over="world"),)


@named
def local_sgd(
    period: int,
    *,
    delay: int = 0,
    codec: CodecOption = None,
    optimizer_state: OptimizerState = "keep",
) -> Recipe:
    """Average the parameters every ``period`` steps: ``x <- mean(x)``.

    Stich 2018, arXiv 1805.09767. With a ``delay``, each worker keeps the progress that it makes in
    the meantime. A delay longer than ``period`` triggers a warning, because workers drift apart:
    the same difference is subtracted again before the first message is folded in.

    Args:
        period: steps between two rounds, at least 1.
        delay: steps between sending a message and folding in the result. Training continues
            meanwhile. 0: training waits.
        codec: how the changes in x since the last round are coded: a name such as ``"int8"`` or
            ``"int4"``, or a codec of `laconic.codecs`. None: not coded.
        optimizer_state: what a round does with the local optimizer's state: ``"keep"``,
            ``"average"``, or ``"reset"``.

    Examples:
        >>> sync = laconic.attach(model, optimizer, laconic.local_sgd(8, delay=2))
    """
    check_delay(delay, check_int("period", period, 1))
    mean = mean_over_workers(codec)
    return (Round(every(period), Average(), mean, delay=delay, optimizer_state=optimizer_state),)


@named
def post_local_sgd(
    start: int,
    period: int,
    *,
    delay: int = 0,
    codec: CodecOption = None,
    optimizer_state: OptimizerState = "keep",
) -> Recipe:
    """Use `ddp` for the first ``start`` steps and `local_sgd` after that.

    Lin et al. 2018, arXiv 1808.07217 (``period`` 16 or 32, ``start`` at the first lr decay).

    Args:
        start: steps with `ddp`, at least 0.
        period: steps between two rounds, at least 1.
        delay: steps between sending a message and folding in the result. Training continues
            meanwhile. 0: training waits.
        codec: how gradients, and later the changes in x, are coded: a name such as ``"int8"`` or
            ``"int4"``, or a codec of `laconic.codecs`. None: not coded. Gradients of step ``start``
            are not coded, and include all that codes have left out before.
        optimizer_state: what a round does with the local optimizer's state: ``"keep"``,
            ``"average"``, or ``"reset"``.

    Examples:
        >>> sync = laconic.attach(model, optimizer, laconic.post_local_sgd(1000, 16))
    """
    averages = local_sgd(period, delay=delay, codec=codec, optimizer_state=optimizer_state)
    return _followed(ddp(codec=codec), check_int("start", start, 0), averages)


def _followed(first: Recipe, start: int, then: Recipe) -> Recipe:
    """Return a recipe that is ``first`` in the first ``start`` steps, and ``then`` after them."""
    return (
        *(replace(r, when=until(start, r.when)) for r in first),
        *(replace(r, when=after(start, r.when)) for r in then),
    )


@named
def hierarchical(group_period: int, period: int, *, codec: CodecOption = None) -> Recipe:
    """Average inside each group every ``group_period`` steps and over all every ``period`` steps.

    Lin et al. 2018, arXiv 1808.07217, section 5 (hierarchical local SGD). If both are due, only the
    average over all workers runs. Messages inside a group, where the network is fast, are not
    coded.

    Args:
        group_period: steps between two averages inside a group, at least 1. ``attach(...,
            group_size=)`` sets the size of a group.
        period: steps between two averages over all workers, at least 1.
        codec: how messages over all workers are coded: a name such as ``"int8"`` or ``"int4"``, or
            a codec of `laconic.codecs`. None: not coded.

    Examples:
        >>> recipe = laconic.hierarchical(4, 16)
        >>> sync = laconic.attach(model, optimizer, recipe, group_size=1)  # with more workers: more
    """
    over_all = every(period)
    if check_int("group_period", group_period, 1) % period == 0:
        raise ValueError(
            f"group_period={group_period} is a multiple of period={period}, so that every average "
            "inside a group gives way to one over all workers: use a shorter group_period, or "
            f"local_sgd({period})"
        )
    inside = Unless(every(group_period), over_all)
    return (
        Round(inside, Average(), Mean(), over="group"),
        Round(over_all, Average(), mean_over_workers(codec)),
    )


@named
def sgp(graph: str = "exponential", peers: int = 1, *, delay: int = 0) -> Recipe:
    """Stochastic gradient push: gossip with ``peers`` out-peers after every step.

    Assran et al., ICML 2019, arXiv 1811.10792; see `PushSum`. Sends ``peers`` times the model in
    every step, to at most all others.

    Args:
        graph: who sends to whom: a name in `laconic.algorithms.topology`, such as ``"exponential"``
            or ``"ring"``.
        peers: how many workers each one sends to, at least 1. ``"ring"`` has at most 2;
            ``"complete"`` and ``"random"`` have a number of their own.
        delay: steps after which a message is folded in (OSGP). Training continues meanwhile. 0:
            training waits.

    Examples:
        >>> sync = laconic.attach(model, optimizer, laconic.sgp(peers=2))
    """
    exchange = Push(Graph(graph, peers))  # checks them
    check_effect(f"with graph={graph!r}", peers=graph in ("complete", "random") and peers != 1)
    if graph == "ring" and peers > 2:
        raise ValueError(f"peers must be 1 or 2 with graph='ring', not {peers}")
    return (Round(every(1), PushSum(), exchange, delay=delay),)


@named
def d_psgd(graph: str = "ring", *, delay: int = 0) -> Recipe:
    """Decentralized SGD: mix x with the neighbors' x after every step.

    Lian et al., NeurIPS 2017, arXiv 1705.09056; see `Mix`. Each edge of the graph is used in both
    directions, so a worker in the ring has two neighbors.

    Args:
        graph: who sends to whom: a name in `laconic.algorithms.topology`.
        delay: steps between sending a message and folding in the result. Training continues
            meanwhile. 0: training waits.

    Examples:
        >>> sync = laconic.attach(model, optimizer, laconic.d_psgd("ring"))
    """
    check_delay(delay, 1)
    return (Round(every(1), Mix(), Push(Graph(graph, both=True)), delay=delay),)


@named
def slowmo(
    base: Recipe | None,
    period: int = 48,
    momentum: float | None = None,
    lr: float = 1.0,
    *,
    sharded: bool = True,
    average: bool = True,
    codec: CodecOption = None,
    optimizer_state: OptimizerState = "keep",
) -> Recipe:
    """Take a slow momentum step every ``period`` steps over any base recipe.

    Wang et al., ICLR 2020, arXiv 1910.00643, Algorithm 1; see `SlowMomentum`. When a slow step is
    due, the base's averaging is skipped, because the slow step averages exactly.

    Args:
        base: a recipe, or None for no other rounds.
        period: steps between two slow steps, at least 1.
        momentum: of the slow steps, in [0, 1). None: by the number of workers, as `momentum_for`
            says: 0 below 4, 0.2 for 4 to 7, 0.5 for 8 to 15, 0.6 for 16 or more.
        lr: the slow learning rate, above 0.
        sharded: whether each worker stores 1/n of the outer state. False: all of it.
        average: whether the slow step averages x. False: the no-average variant, in which each
            worker's slow step uses its own x.
        codec: how the changes in x since the last slow step are coded: a name such as ``"int8"`` or
            ``"int4"``, or a codec of `laconic.codecs`. None: not coded. A base has its own codec.
        optimizer_state: what a round does with the local optimizer's state: ``"keep"``,
            ``"average"``, or ``"reset"``. Use ``"reset"`` for Nesterov SGD and ``"keep"`` for Adam.

    Examples:
        >>> sync = laconic.attach(model, optimizer, laconic.slowmo(laconic.local_sgd(3), period=48))
    """
    slow = Every(check_int("period", period, 1))
    if base is not None:
        check_base(base)
    if momentum is not None:
        check_float("momentum", momentum, 0.0, 1.0)
    check_float("lr", lr, 0.0, strict=True)
    check_bool("average", average)
    if not average and codec is not None:
        raise ValueError("average=False sends nothing, so there is nothing to code: omit codec=")
    check_sharded(sharded, average=not average, codec=codec is not None)
    exchange: Exchange = Alone() if not average else mean_over_workers(codec, sharded=sharded)
    given = {"sharded": not sharded, "codec": codec is not None, "average": not average}
    last = Round(slow, SlowMomentum(momentum, lr), exchange, optimizer_state=optimizer_state)
    return over_base(base or (), slow, last, **given)


@named
def easgd(
    period: int, beta: float = 0.9, *, pull: float = 0.0, codec: CodecOption = None
) -> Recipe:
    """Elastic averaging: every ``period`` steps, workers and a center attract each other.

    Zhang et al., NeurIPS 2015, arXiv 1412.6651 (period 1 to 64); see `Elastic`. With Nesterov
    momentum in the local optimizer this is EAMSGD, section 2.3 of the paper.

    Args:
        period: steps between two rounds, at least 1.
        beta: the fraction of the distance to the workers' mean that the center moves in a round, in
            (0, 1]. Each worker moves beta/n of its distance to the center.
        pull: the fraction of the distance to the center that x moves over one period, in equal
            parts at every step, in [0, 1).
        codec: how the changes in x since the last round are coded: a name such as ``"int8"`` or
            ``"int4"``, or a codec of `laconic.codecs`. None: not coded.

    Examples:
        >>> sync = laconic.attach(model, optimizer, laconic.easgd(16))
    """
    when = every(period)
    check_float("beta", beta, 0.0, strict=True, most=1.0)
    check_float("pull", pull, 0.0, 1.0)
    return (Round(when, Elastic(beta, pull / period), mean_over_workers(codec)),)


@named
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
    """Leader SGD: every ``period`` steps, move toward the best of all workers.

    Teng et al., NeurIPS 2019, arXiv 1905.10395 (period 4 to 64); see `LeaderPull`. The best worker
    has the lowest mean over its last ``window`` losses passed to `Synchronizer.report_loss`.

    Args:
        period: steps between two rounds, at least 1.
        local_period: steps between two moves toward the best worker of the own group (the paper's
            local leaders), at least 1. ``attach(..., group_size=)`` sets the size of a group. None
            or 0: there are no groups.
        pull: the fraction of the distance to the best of all workers that x moves in a round, in
            [0, 1): the paper's c2.
        local_pull: the same in a round inside a group: c1.
        drift: the fraction of the distance to the last known best of all that x moves over one
            period, in equal parts at every step, in [0, 1): p2.
        local_drift: the same inside a group: p1.
        window: how many losses count, at least 1.

    Examples:
        >>> sync = laconic.attach(model, optimizer, laconic.lsgd(16))
        >>> sync.report_loss(0.5)  # this step's training loss, in every step
    """
    over_all = every(period)
    pulls = {"pull": pull, "local_pull": local_pull, "drift": drift, "local_drift": local_drift}
    for name, value in pulls.items():
        check_float(name, value, 0.0, 1.0)
    exchange = Leader(check_int("window", window, 1))
    everyone = Round(over_all, LeaderPull(pull, drift / period), exchange)
    inner = 0 if local_period is None else check_int("local_period", local_period, 0)
    if not inner:
        names = "local_pull", "local_drift"
        check_effect("without local_period=", **{name: pulls[name] != 0.1 for name in names})
        return (everyone,)
    local = LeaderPull(local_pull, local_drift / inner)
    return (Round(every(inner), local, exchange, over="group"), everyone)


@named
def power_sgd(rank: int = 4, *, start: int = 0, codec: CodecOption = None) -> Recipe:
    """`ddp` with gradients sent as matrices of rank ``rank``.

    Vogels et al., NeurIPS 2019, arXiv 1905.13727 (``rank`` 1 to 4, no ``start``; the authors' later
    code: 100 steps); see `LowRank`. A layer of m by k weights takes ``rank * (m + k)`` numbers. The
    next step sends what they leave out.

    Args:
        rank: of the matrices, at least 1.
        start: steps that send full gradients first, at least 0.
        codec: how these numbers are coded: a name such as ``"int8"`` or ``"int4"``, or a codec of
            `laconic.codecs`. None: not coded. ``"int8"`` takes a quarter of the bytes.

    Examples:
        >>> sync = laconic.attach(model, optimizer, laconic.power_sgd(4, codec="int8"))
    """
    check_int("start", start, 0)
    exchange = LowRank(rank, None if codec is None else codec_of(codec))
    low = GradientRound(every(1), Average(), exchange, over="world")
    return _followed(ddp(), start, (low,)) if start else (low,)


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
        lsgd,
        diloco,
        streaming_diloco,
        outer_step,
        power_sgd,
    )
}
"""All recipes by name, for the command line."""
WITH_GROUPS = "hierarchical(4, 16) or lsgd(16, local_period=4)"
"""Examples of recipes with rounds inside groups of workers."""
