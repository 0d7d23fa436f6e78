"""The DiLoCo family: local optimizers, with an outer step on the workers' pseudo-gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, get_args

from laconic.algorithms.exchange import Exchange
from laconic.algorithms.exchanges import Alone, QuorumMean
from laconic.algorithms.exchanges.quorum import Pace
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
from laconic.algorithms.round import OptimizerState, Recipe, Round, workers_differ
from laconic.algorithms.schedules import Every, every
from laconic.algorithms.update import Update
from laconic.algorithms.updates import DelayedNesterov, MuonStep, OuterStep, OwnStep
from laconic.algorithms.updates.outer_step import Merge, OuterFactory
from laconic.codecs import codec_of
from laconic.errors import check_bool, check_choice, check_float, check_int
from laconic.parts import Fragment, parameters

MIX = 0.5
"""The fraction of x that remains with ``merge="mix"``, by default."""
Outer = OuterFactory | Literal["muon"]
"""An outer optimizer in place of Nesterov SGD: a function that makes one from tensors, or
``"muon"`` (`MuonStep`)."""
OUTER_STEPS: Mapping[object, type[OuterStep]] = {"muon": MuonStep, None: OuterStep}
"""The outer steps, by the value of ``outer=`` that asks for them."""


@named
def diloco(
    period: int = 500,
    lr: float = 0.7,
    momentum: float = 0.9,
    *,
    outer: Outer | None = None,
    sharded: bool = True,
    delay: int = 0,
    merge: Merge = "mix",
    mix: float = 0.5,
    codec: CodecOption = None,
    quorum: int | None = None,
    grace: float = 0.0,
    pace: Pace = "equal",
) -> Recipe:
    """A local optimizer, with an outer Nesterov step every ``period`` steps.

    Douillard et al. 2023, arXiv 2311.08105; see `OuterStep`. The defaults suit hundreds of rounds.
    In a run of fewer than about 100 rounds they overshoot; use a ``momentum`` of 0.3 to 0.6.

    Args:
        period: steps between two rounds, at least 1.
        lr: the outer learning rate, above 0.
        momentum: of the outer steps, in [0, 1).
        outer: an elementwise torch optimizer to use instead of Nesterov SGD, such as ``lambda
            tensors: torch.optim.Adam(tensors, lr=1e-3)``, which has an lr and momentum of its
            own. ``"muon"``: the steps of matrices have Muon's direction, see `MuonStep`; every
            worker then stores all outer state. None: Nesterov SGD.
        sharded: whether each worker stores 1/n of the outer state. False: all of it.
        delay: steps between sending a message and folding in the result. Training continues
            meanwhile. 0: training waits.
        merge: how x and the delayed new anchor are combined: ``"mix"`` or ``"loscar"``; see
            `OuterStep`.
        mix: the fraction of x that remains with ``merge="mix"``, in [0, 1].
        codec: how pseudo-gradients and outer steps are coded: a name such as ``"int8"`` or
            ``"int4"``, or a codec of `laconic.codecs`. None: not coded.
        quorum: how many workers must have arrived before a round may close. None: all.
        grace: seconds for which a round then still waits for the other workers.
        pace: ``"equal"``: every worker takes ``period`` steps between its rounds. ``"own"``: as
            many as it can while the fastest worker takes ``period``.

    With a ``quorum``, a worker that comes later takes part in the next round, with all steps that
    it has taken. Momentum is then delayed (`DelayedNesterov`), unless ``outer`` is given. With
    ``pace="own"`` and no ``quorum``, rounds wait for all workers (dynamic local updates).
    `QuorumMean` has the weights. Every worker stores the outer state.
    Douillard et al. 2026, arXiv 2604.21428; Liu et al. 2024, arXiv 2401.09135.

    Examples:
        >>> sync = laconic.attach(model, optimizer, laconic.diloco(100, momentum=0.6))
    """
    check_int("period", period, 1)
    check_merge(merge, mix, delay)
    step = outer_update(outer, lr, momentum, (0.7, 0.9), merge, mix)
    update, exchange = with_quorum(
        step, codec, QuorumMean(quorum, grace, pace), delay, sharded=sharded
    )
    decided = {"codec": codec is not None, "quorum": isinstance(exchange, QuorumMean)}
    check_sharded(sharded, outer=step.sends == "change", **decided)
    check_delay(delay, period)
    return (Round(every(period), update, exchange, delay=delay),)


@named
def streaming_diloco(
    period: int = 16,
    fragments: int = 4,
    delay: int = 2,
    mix: float | None = None,
    codec: CodecOption = "int4",
    *,
    lr: float | None = None,
    momentum: float = 0.6,
    outer: Outer | None = None,
    merge: Merge | None = None,
    by: Literal["bytes", "layers"] | None = None,
    quorum: int | None = None,
    grace: float = 0.0,
    pace: Pace = "equal",
) -> Recipe:
    """`diloco` by fragments: each is sent every ``period`` steps, at its own offset.

    Little is therefore in flight at any time. Each fragment is folded in ``delay`` steps after it
    was sent, while training continues.

    Douillard et al. 2025, arXiv 2501.18512, Algorithm 2; ``mix`` is its alpha. The defaults are
    those of `auto`, and follow measurements in this repository (``docs/coded.md``). The paper's
    settings, for long runs, are ``streaming_diloco(100, delay=1, lr=0.4, momentum=0.9)``, with
    another code of four bits. Fragment k of K is sent after steps ``(k+1)*period/K, ... + period,
    ...``
    (rounded down). With one fragment, no delay, and no codec this is DiLoCo.

    Args:
        period: steps between two rounds of a fragment, at least 1.
        fragments: how many fragments, at most ``period``.
        delay: steps between sending a fragment and folding in the result. Training continues
            meanwhile.
        mix: the fraction of x that remains with ``merge="mix"``, in [0, 1]. None: 0.5.
        codec: how pseudo-gradients and outer steps are coded: a name such as ``"int8"`` or
            ``"int4"``, or a codec of `laconic.codecs`. None: not coded.
        lr: the outer learning rate, above 0. None: 0.7, with ``outer="muon"`` 1.0.
        momentum: of the outer steps, in [0, 1).
        outer: an elementwise torch optimizer to use instead of Nesterov SGD, such as ``lambda
            tensors: torch.optim.Adam(tensors, lr=1e-3)``, which has an lr and momentum of its
            own. ``"muon"``: the steps of matrices have Muon's direction, see `MuonStep`. None:
            Nesterov SGD. ``"muon"`` needs ``by="layers"``.
        merge: how x and the delayed new anchor are combined: ``"mix"`` or ``"loscar"``; see
            `OuterStep`. None: ``"mix"``, with ``outer="muon"`` and without a ``mix`` ``"loscar"``
            (``docs/evidence.md``).
        by: ``"bytes"``: fragments of about equal bytes. ``"layers"``: of whole layers. See
            `Fragment`. None: ``"layers"`` where whole tensors are needed, else ``"bytes"``.
        quorum: how many workers must have arrived before a round may close. None: all. It needs
            ``delay=0``.
        grace: seconds for which a round then still waits for the other workers.
        pace: ``"equal"``: every worker takes ``period`` steps between its rounds. ``"own"``: as
            many as it can while the fastest worker takes ``period``. ``"own"`` needs ``delay=0``.

    Examples:
        >>> sync = laconic.attach(model, optimizer, laconic.streaming_diloco(16))
    """
    check_merge("mix" if merge is None else merge, MIX if mix is None else mix, delay)
    check_effect("with fragments=1", by=by is not None and fragments == 1)
    step = outer_update(outer, lr, momentum, (None, 0.6), merge, mix)
    by = ("layers" if step.scope == "tensors" else "bytes") if by is None else by
    check_int("period", period, 1)
    if check_int("fragments", fragments, 1) > period:
        raise ValueError(f"fragments must be at most the period, {period}, not {fragments}")
    check_choice("by", by, ("bytes", "layers"))
    check_delay(delay, period)
    update, exchange = with_quorum(
        step, codec, QuorumMean(quorum, grace, pace), delay, sharded=True
    )
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
def outer_step(
    base: Recipe,
    period: int = 8,
    lr: float | None = None,
    momentum: float = 0.6,
    *,
    outer: Outer | None = None,
    average: bool = True,
    sharded: bool = True,
    codec: CodecOption = None,
    optimizer_state: OptimizerState = "keep",
) -> Recipe:
    """Take an outer step every ``period`` steps over any base recipe.

    The outer step of `diloco`, Douillard et al. 2023, arXiv 2311.08105: ``D = mean(a - x) ; a <-
    outer(a, D) ; x <- a``. Where the base averages gradients in every step (`ddp`, `power_sgd`),
    workers are equal: then nothing is sent, every worker takes the same outer step, and its state
    is stored on every worker. With one worker this is an optimizer around yours (SNOO, Kallusky et
    al. 2025, arXiv 2510.15830). Elsewhere the base's averaging is skipped when an outer step is
    due, and the outer step averages. With ``average=False`` it does not: each worker takes its own
    outer step (`OwnStep`), and the base goes on as ever. That is for bases that rarely
    communicate, such as ``streaming_diloco(32, delay=8)``.

    An outer step changes how far a step goes: with a momentum of mu, and where steps agree, ``lr /
    (1 - mu)`` times as far. Tune the learning rate of the local optimizer again.

    Args:
        base: a recipe. Without one, this is `diloco`.
        period: steps between two outer steps, at least 1.
        lr: the outer learning rate, above 0. None: 0.7, with ``outer="muon"`` 1.0.
        momentum: of the outer steps, in [0, 1).
        outer: an elementwise torch optimizer to use instead of Nesterov SGD, such as ``lambda
            tensors: torch.optim.Adam(tensors, lr=1e-3)``, which has an lr and momentum of its
            own. ``"muon"``: the steps of matrices have Muon's direction, see `MuonStep`; every
            worker then stores all outer state. None: Nesterov SGD.
        average: whether the outer step averages x. False: each worker's outer step is about its own
            steps, which takes Nesterov SGD or ``"muon"``. Only for a base that lets workers differ.
        sharded: whether each worker stores 1/n of the outer state. False: all of it. Only for a
            base that lets workers differ.
        codec: how pseudo-gradients and outer steps are coded: a name such as ``"int8"`` or
            ``"int4"``, or a codec of `laconic.codecs`. None: not coded. Only for a base that lets
            workers differ; a base has its own codec.
        optimizer_state: what an outer step does with the local optimizer's state: ``"keep"``,
            ``"average"``, or ``"reset"``.

    Examples:
        >>> recipe = laconic.outer_step(laconic.ddp(codec="int4"), 8, outer="muon")
        >>> sync = laconic.attach(model, optimizer, recipe)
    """
    slow = Every(check_int("period", period, 1))
    check_base(base)
    check_bool("average", average)
    update = outer_update(outer, lr, momentum, (None, 0.6))
    if not average and workers_differ(base):
        check_effect("with average=False", sharded=not sharded, codec=codec is not None)
        check_effect("with average=False", optimizer_state=optimizer_state == "average")
        if any(isinstance(r.exchange, QuorumMean) for r in base):
            raise ValueError("average=False needs a base without quorum= and pace='own'")
        if callable(outer):
            raise ValueError("with average=False, outer must be None or 'muon', not a function")
        own = OwnStep(update.lr, momentum, muon=update.scope == "tensors")
        return (Round(slow, own, Alone(), optimizer_state=optimizer_state), *base)
    check_sharded(sharded, outer=update.sends == "change", codec=codec is not None)
    exchange = mean_over_workers(codec, relative=update.sends == "model", sharded=sharded)
    last = Round(slow, update, exchange, optimizer_state=optimizer_state)
    given = {"sharded": not sharded, "codec": codec is not None, "average": not average}
    return over_base(base, slow, last, **given)


def outer_update(
    outer: Outer | None,
    lr: float | None,
    momentum: float,
    usual: tuple[float | None, float],
    merge: Merge | None = "mix",
    mix: float | None = MIX,
) -> OuterStep:
    """Return the outer step. ``usual``: the defaults of ``lr`` and of ``momentum``. None as ``lr``,
    ``merge`` or ``mix``: what suits ``outer``."""
    made = None
    if callable(outer):
        made, kind = outer, OuterStep
        given = {"lr": lr != usual[0], "momentum": momentum != usual[1]}
        check_effect("with a function as outer=", **given)
    elif outer in [*OUTER_STEPS]:  # which also takes what has no hash
        kind = OUTER_STEPS[outer]
    else:
        raise ValueError(
            f"outer must be {', '.join(map(repr, OUTER_STEPS))}, or a function that makes an "
            "optimizer from tensors, such as lambda tensors: torch.optim.Adam(tensors, lr=1e-3), "
            f"not {outer!r}"
        )
    lr = kind.usual_lr if lr is None else lr
    check_float("momentum", momentum, 0.0, 1.0)
    check_float("lr", lr, 0.0, strict=True)
    merge = merge or (kind.usual_merge if mix is None else "mix")
    return kind(lr, momentum, made, MIX if mix is None else mix, merge)


def check_merge(merge: Merge, mix: float, delay: int) -> None:
    """Check how x and the new anchor are combined; raise ``ValueError`` for what has no effect."""
    check_choice("merge", merge, get_args(Merge))
    check_float("mix", mix, 0.0, most=1.0)
    given = {"merge": merge != "mix", "mix": mix != MIX}
    if not delay:
        check_effect("without delay=", **given)
    check_effect(f"with merge={merge!r}", mix=merge != "mix" and given["mix"])


def with_quorum(
    update: OuterStep, codec: CodecOption, some: QuorumMean, delay: int, *, sharded: bool
) -> tuple[Update, Exchange]:
    """Return the update and the exchange of outer steps: over all workers, or, by ``some``, over
    those that have arrived."""
    if some.workers is None and some.pace == "equal":
        if some.grace:
            raise ValueError(
                "grace= is for rounds that do not wait for all workers at equal pace: give quorum= "
                "or pace='own'"
            )
        relative = update.sends == "model"
        return update, mean_over_workers(codec, relative=relative, sharded=sharded)
    if delay:
        raise ValueError("rounds with quorum= or pace='own' fold results at once: use delay=0")
    if not update.combines_only:
        raise ValueError(
            f"{type(update).__name__} waits for all workers: leave out quorum= and pace=, or use "
            "another outer="
        )
    own = update if update.outer else DelayedNesterov(update.lr, update.momentum)
    return own, some if codec is None else replace(some, codec=codec_of(codec))
