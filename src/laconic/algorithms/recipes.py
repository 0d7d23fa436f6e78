"""The table of algorithms: one function each, returning its rounds.

A period of H means rounds after steps H, 2H, 3H, ..., for every recipe. Recipes compose as
Python does: ``slowmo(local_sgd(3), period=48)``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, get_args

from laconic.algorithms.exchanges import (
    Alone,
    FastComponents,
    GatheredMean,
    Leader,
    LowRank,
    Mean,
    Push,
    ShardedMean,
    coded,
)
from laconic.algorithms.named import named
from laconic.algorithms.round import Exchange, OptimizerState, Recipe, Round, is_recipe
from laconic.algorithms.schedules import Schedule, Unless, after, every, until
from laconic.algorithms.topology import Graph
from laconic.algorithms.updates import (
    Average,
    Downpour,
    Eager,
    Elastic,
    LeaderPull,
    Mix,
    NoLoCo,
    OuterStep,
    PushSum,
    Sign,
    SlowMomentum,
)
from laconic.algorithms.updates.outer_step import Merge, OuterFactory
from laconic.buckets import Fragment, parameters
from laconic.codecs import Codec, Int2, TopK, codec_of
from laconic.errors import check_bool, check_choice, check_float, check_int

CodecOption = Codec | str | None
"""What messages travel in: a codec, or the name of one in `laconic.codecs.CODECS`; None: as they
are. What a code leaves out is sent with the next message (error feedback)."""


@named
def ddp(*, codec: CodecOption = None) -> Recipe:
    """Gradients averaged over all ranks during every backward pass.

    Li et al., VLDB 2020, arXiv 2006.15704. Use it where the network is fast: one step of n
    workers is one step on the n times larger batch. ``codec``: what gradients travel in; with
    ``"int4"`` in an eighth of the bytes, see `CodedMean`.
    """
    mean = _mean(codec, relative=False)
    return (Round(every(1), Average(), mean, on="gradients", over="world"),)


@named
def local_sgd(
    period: int,
    *,
    delay: int = 0,
    codec: CodecOption = None,
    optimizer_state: OptimizerState = "keep",
) -> Recipe:
    """``every period steps: x <- mean(x)``. Stich 2018, arXiv 1805.09767.

    ``delay``: steps between sending and folding, the local progress in between being kept, so
    that the message travels while training goes on; above ``period`` the same difference is taken
    off twice before it is seen to be gone, and workers drift apart: warned of. ``codec``: what the
    changes of x since the last round travel in. ``optimizer_state``: what becomes of the local
    optimiser's own state at a round.
    """
    _check_delay(delay, check_int("period", period, 1))
    mean = _mean(codec)
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
    """`ddp` in the first ``start`` steps, `local_sgd` from then on.

    Lin et al. 2018, arXiv 1808.07217 (``period`` 16 or 32, ``start`` at the first lr decay).
    ``codec``: of both.
    """
    gradients = (replace(r, when=until(start, r.when)) for r in ddp(codec=codec))
    averages = local_sgd(period, delay=delay, codec=codec, optimizer_state=optimizer_state)
    return (*gradients, *(replace(r, when=after(start, r.when)) for r in averages))


@named
def hierarchical(group_period: int, period: int, *, codec: CodecOption = None) -> Recipe:
    """``every group_period steps: x <- mean(x)`` inside each group, ``every period`` over all.

    Lin et al. 2018, arXiv 1808.07217, section 5 (hierarchical local SGD). Where both fall due only
    the larger runs. Groups are of ``attach(..., group_size=)`` workers. ``codec``: of the messages
    over all; inside a group, where the network is fast, they travel as they are.
    """
    over_all = every(period)
    inside = Unless(every(check_int("group_period", group_period, 1)), over_all)
    return (
        Round(inside, Average(), Mean(), over="group"),
        Round(over_all, Average(), _mean(codec)),
    )


@named
def sgp(graph: str = "exponential", peers: int = 1, *, delay: int = 0) -> Recipe:
    """Stochastic gradient push: a gossip with ``peers`` out-peers after every step.

    Assran et al., ICML 2019, arXiv 1811.10792; see `PushSum` and, for graphs,
    `laconic.algorithms.topology`. Sends ``peers`` times the model in every step,
    however many workers there are. With a ``delay`` (OSGP) messages are folded that many steps
    later, and travel while training goes on.
    """
    return (Round(every(1), PushSum(), Push(Graph(graph, peers)), delay=delay),)


@named
def d_psgd(graph: str = "ring", *, delay: int = 0) -> Recipe:
    """Decentralised SGD: x mixed with the neighbours' after every step.

    Lian et al., NeurIPS 2017, arXiv 1705.09056; see `Mix`. ``graph`` is used both ways: the ring
    has two neighbours.
    """
    _check_delay(delay, 1)
    return (Round(every(1), Mix(), Push(Graph(graph, both=True)), delay=delay),)


@named
def easgd(
    period: int, beta: float = 0.9, *, pull: float = 0.0, codec: CodecOption = None
) -> Recipe:
    """Elastic averaging every ``period`` steps: workers and a centre attract each other.

    Zhang et al., NeurIPS 2015, arXiv 1412.6651 (period 1 to 64); see `Elastic`. ``beta``, in
    (0, 1]: the centre's share of the way to the workers' mean; each worker goes beta/n of its way
    to the centre. ``pull``, in [0, 1): spread over the period, x goes so much of the way to the
    centre at every step. ``codec``: what the changes of x since the last round travel in.
    """
    when = every(period)
    check_float("beta", beta, 0.0, strict=True, most=1.0)
    check_float("pull", pull, 0.0, 1.0)
    return (Round(when, Elastic(beta, pull / period), _mean(codec)),)


@named
def eamsgd(
    period: int, beta: float = 0.9, *, pull: float = 0.0, codec: CodecOption = None
) -> Recipe:
    """`easgd` for a local optimiser with Nesterov momentum (EAMSGD: the same rounds).

    Zhang et al. 2015, section 2.3: ``torch.optim.SGD(..., momentum=0.9, nesterov=True)``; the
    paper's 0.99 is worse on small problems.
    """
    return easgd(period, beta, pull=pull, codec=codec)


@named
def downpour(period: int, *, codec: CodecOption = None) -> Recipe:
    """``every period steps: a <- a + sum(x_i - a) ; x <- a``; see `Downpour`.

    Dean et al., NeurIPS 2012. A sum and not a mean, as if the workers' steps were one worker's: it
    needs a learning rate n times smaller, and is here to be compared with.
    """
    return (Round(every(period), Downpour(), _mean(codec, sharded=True)),)


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
    """Leader SGD: every ``period`` steps toward the best of all workers.

    Teng et al., NeurIPS 2019, arXiv 1905.10395 (period 4 to 64); see `LeaderPull`.
    ``local_period``: every so many steps also toward the best of the own group (the paper's local
    leaders), where groups are of ``attach(..., group_size=)`` workers; None or 0: no groups.
    ``pull`` and ``local_pull`` are c2 and c1; ``drift`` and ``local_drift``, p2 and p1, are spread
    over the period and pull at every step. The best has the lowest mean of its ``window`` last
    losses, as told to `Synchronizer.report_loss`.
    """
    over_all = every(period)
    pulls = {"pull": pull, "local_pull": local_pull, "drift": drift, "local_drift": local_drift}
    for name, value in pulls.items():
        check_float(name, value, 0.0, 1.0)
    exchange = Leader(check_int("window", window, 1))
    everyone = Round(over_all, LeaderPull(pull, drift / period), exchange)
    inner = 0 if local_period is None else check_int("local_period", local_period, 0)
    if not inner:
        return (everyone,)
    local = LeaderPull(local_pull, local_drift / inner)
    return (Round(every(inner), local, exchange, over="group"), everyone)


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
    """A slow momentum step every ``period`` steps over any base recipe (None: no other rounds).

    Wang et al., ICLR 2020, arXiv 1910.00643, Algorithm 1; see `SlowMomentum`. A base's averaging
    that falls on a slow step is skipped: the slow step averages exactly. ``momentum``, in [0, 1):
    None takes it from the number of workers, as `momentum_for` has it: 0 below 4, 0.2 for 4 to 7,
    0.5 for 8 to 15, 0.6 from 16. ``sharded``: each worker keeps 1/n of the outer state.
    ``average=False``: the no-average variant, each worker's slow step from its own x. ``codec``:
    what the changes of x since the last slow step travel in; a base has its own.
    ``optimizer_state="reset"`` serves Nesterov SGD, ``"keep"`` Adam.
    """
    slow = every(period)
    if base is not None and not is_recipe(base):
        raise ValueError(f"base must be a recipe, as laconic.local_sgd(12), or None, not {base!r}")
    if momentum is not None:
        check_float("momentum", momentum, 0.0, 1.0)
    check_float("lr", lr, 0.0, strict=True)
    sharded, average = check_bool("sharded", sharded), check_bool("average", average)
    if not average and codec is not None:
        raise ValueError("with average=False nothing is sent, and there is nothing to code")
    exchange = Alone() if not average else _mean(codec, sharded=sharded)
    update = SlowMomentum(momentum, lr)
    return (
        *(_skip(r, slow) for r in base or ()),
        Round(slow, update, exchange, optimizer_state=optimizer_state),
    )


@named
def diloco(
    period: int = 500,
    lr: float = 0.7,
    momentum: float = 0.9,
    *,
    outer: OuterFactory | None = None,
    sharded: bool = True,
    delay: int = 0,
    merge: Merge | Literal["eager"] = "mix",
    mix: float = 0.5,
    codec: CodecOption = None,
) -> Recipe:
    """A local optimiser, and an outer Nesterov step every ``period`` steps.

    Douillard et al. 2023, arXiv 2311.08105; see `OuterStep`. The defaults suit hundreds of
    rounds: in a run of fewer than about 100 they overshoot, and ``momentum`` 0.3 to 0.6 serves
    better. ``outer``: any elementwise torch optimiser in place of Nesterov SGD, as
    ``lambda tensors: torch.optim.Adam(tensors, lr=1e-3)``; ``lr`` and ``momentum`` are then
    unused. With a ``delay`` ``merge`` says what becomes of x, and ``mix``, in [0, 1], how much of
    it stays: see `OuterStep`. ``merge="eager"``, for a delay of up to the period: the outer step
    is taken at once, with what the others did a round before (Kale et al. 2025, arXiv 2502.12996):
    see `Eager`; every worker then keeps all outer state. ``codec``: what pseudo-gradients and outer
    steps travel in.
    """
    check_bool("sharded", sharded)
    check_int("period", period, 1)
    if merge == "eager":
        check_float("mix", mix, 0.0, most=1.0)
        return _eager(period, lr, momentum, outer, delay, codec, sharded)
    check_choice("merge", merge, (*get_args(Merge), "eager"))
    update = _outer_step(lr, momentum, outer, merge, mix)
    exchange = _mean(codec, sharded=sharded)
    _check_delay(delay, period)
    return (Round(every(period), update, exchange, delay=delay),)


@named
def streaming_diloco(
    period: int = 16,
    fragments: int = 4,
    delay: int = 2,
    mix: float = 0.5,
    codec: CodecOption = "int4",
    *,
    lr: float = 0.7,
    momentum: float = 0.6,
    outer: OuterFactory | None = None,
    merge: Merge = "mix",
    by: Literal["bytes", "layers"] = "bytes",
) -> Recipe:
    """`diloco` fragment by fragment: each every ``period`` steps, one after the other, so that
    little is under way at any time; folded ``delay`` steps after it was sent, training going on
    meanwhile.

    Douillard et al. 2025, arXiv 2501.18512: Algorithm 2, ``mix`` its alpha. The defaults are what
    `auto` chooses from, after measurements of this repository (``docs/coded.md``); the paper's,
    for long runs: ``streaming_diloco(100, delay=1, codec="e3m0", lr=0.4, momentum=0.9)``.
    Fragment k of K is sent after steps ``(k+1)*period/K, ... + period, ...`` (rounded down).
    ``by``: fragments of about equal bytes, or of whole layers: see `Fragment`. The rest as for
    `diloco`. One fragment, no delay and no codec are DiLoCo.
    """
    update = _outer_step(lr, momentum, outer, merge, mix)
    check_int("period", period, 1)
    if check_int("fragments", fragments, 1) > period:
        raise ValueError(f"fragments must be at most the period, {period}, not {fragments}")
    check_choice("by", by, ("bytes", "layers"))
    _check_delay(delay, period)
    exchange = _mean(codec, sharded=True)
    return tuple(
        Round(
            every(period, offset=(k + 1) * period // fragments),
            update,
            exchange,
            Fragment(k, fragments, by) if fragments > 1 else parameters,
            delay=delay,
        )
        for k in range(fragments)
    )


@named
def sparse_loco(
    period: int = 30,
    k: int = 64,
    chunk: int = 4096,
    *,
    decay: float = 0.95,
    lr: float = 1.0,
    values: CodecOption = None,
) -> Recipe:
    """`diloco` without outer momentum, of which the ``k`` largest elements of each ``chunk`` are
    sent, and the rest is kept for the next round.

    Sarfi et al. 2025, arXiv 2508.15706, Algorithm 1: ``e <- decay*e + (a - x) ; q = Q(e) ;
    e <- e - q ; a <- a - lr*mean(q) ; x <- a``. ``values``: what the k values travel in; None: two
    bits each, with one scale for all of a chunk's. Indices take 12 bits. Chunks are of consecutive
    elements, across tensors. Every worker sends its message to every other.
    """
    values = Int2(block=k) if values is None else codec_of(values)
    sparse = TopK(check_int("k", k, 1), check_int("chunk", chunk, 1), values)
    feedback = check_float("decay", decay, 0.0, most=1.0)
    exchange = GatheredMean(sparse, relative=True, feedback=feedback)
    check_float("lr", lr, 0.0, strict=True)
    return (Round(every(period), OuterStep(lr, 0.0), exchange),)


@named
def power_sgd(rank: int = 4, *, start: int = 0, codec: CodecOption = None) -> Recipe:
    """`ddp` whose gradients travel as matrices of rank ``rank``, those of the first ``start`` steps
    as they are.

    Vogels et al., NeurIPS 2019, arXiv 1905.13727 (``rank`` 1 to 4, no ``start``; the authors'
    later code: 100 steps); see `LowRank`. A layer of m by k weights takes ``rank * (m + k)``
    numbers; what they leave out is sent with the next gradients. ``codec``: what these numbers
    travel in; with ``"int8"`` in a quarter of the bytes.
    """
    check_int("start", start, 0)
    exchange = LowRank(rank, None if codec is None else codec_of(codec))
    low = Round(every(1), Average(), exchange, on="gradients", over="world")
    if not start:
        return (low,)
    dense = (replace(r, when=until(start, r.when)) for r in ddp())
    return (*dense, replace(low, when=after(start, low.when)))


@named
def demo(decay: float = 0.999, k: int = 32, chunk: int = 64) -> Recipe:
    """The sign of the ``k`` largest frequencies of every ``chunk x chunk`` tile of the momentum,
    which is otherwise each worker's own.

    Peng, Quesnelle, Kingma 2024, arXiv 2411.19870, Algorithm 1 with sign; see `FastComponents`
    and `Sign`. ``e <- decay*e + g ; q = topk(DCT(e)) ; e <- e - q ; g <- sign(mean(q))``, all in
    the backward pass: gradients are 1, -1 or 0 after it, for ``torch.optim.SGD(params, lr)``
    without momentum, which then moves every parameter by lr. Do not clip them, use no GradScaler,
    which would divide them by its scale, and accumulate under ``no_sync()`` alone, as signs must
    not be added to gradients.
    """
    exchange = FastComponents(check_float("decay", decay, 0.0, 1.0), k, chunk)
    return (Round(every(1), Sign(), exchange, on="gradients", over="world"),)


@named
def noloco(period: int = 50, lr: float = 0.7, momentum: float = 0.5, gamma: float = 0.7) -> Recipe:
    """`diloco` without any all-reduce: every ``period`` steps an outer step together with one other
    worker, drawn anew each time.

    Kolehmainen et al. 2025, arXiv 2506.10911; see `NoLoCo`. ``gamma``, at least 0, is how strongly
    the two anchors attract each other. Sends twice the model each time, whatever the number of
    workers; of an odd number one steps alone. Workers never quite agree: the consensus is their
    mean.
    """
    check_float("lr", lr, 0.0, strict=True)
    check_float("momentum", momentum, 0.0, 1.0)
    check_float("gamma", gamma, 0.0)
    return (Round(every(period), NoLoCo(lr, momentum, gamma), Push(Graph("random"))),)


def _mean(codec: CodecOption, *, relative: bool = True, sharded: bool = False) -> Exchange:
    """The workers' mean, coded or not."""
    if codec is not None:
        return coded(codec, relative=relative)
    return ShardedMean() if sharded else Mean()


def _outer_step(
    lr: float, momentum: float, outer: OuterFactory | None, merge: Merge, mix: float
) -> OuterStep:
    check_float("momentum", momentum, 0.0, 1.0)
    check_float("lr", lr, 0.0, strict=True)
    check_float("mix", mix, 0.0, most=1.0)
    check_choice("merge", merge, get_args(Merge))
    if outer is not None and not callable(outer):
        raise ValueError(
            "outer must make an optimiser from tensors, as lambda tensors: "
            f"torch.optim.Adam(tensors, lr=1e-3), not {outer!r}"
        )
    return OuterStep(lr, momentum, outer, mix, merge)


def _eager(
    period: int,
    lr: float,
    momentum: float,
    outer: OuterFactory | None,
    delay: int,
    codec: CodecOption,
    sharded: bool,
) -> Recipe:
    check_float("momentum", momentum, 0.0, 1.0)
    check_float("lr", lr, 0.0, strict=True)
    if not sharded:
        raise ValueError("merge='eager' keeps its state on every worker: leave sharded= out")
    if outer is not None:
        raise ValueError("merge='eager' takes Nesterov steps: it cannot be given an outer=")
    if check_int("delay", delay, 1) > period:
        raise ValueError(f"delay must be at most the period, {period}, not {delay}")
    mean = _mean(codec, relative=False)
    return (Round(every(period), Eager(lr, momentum), mean, delay=delay),)


def _check_delay(delay: int, period: int) -> None:
    """Warn where a round is sent before the last one but one was folded."""
    if isinstance(delay, int) and delay > period:
        warnings.warn(
            f"delay={delay} is longer than the period of {period}: differences are taken off again "
            "before the first message is folded, and workers drift apart",
            stacklevel=4,  # the caller of the recipe function, past `named`
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
        streaming_diloco,
        sparse_loco,
        power_sgd,
        demo,
        noloco,
    )
}
"""Recipes by name: what the command line offers."""
