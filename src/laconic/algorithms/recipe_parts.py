"""What several recipes share: the codec option, outer steps, checks of their arguments."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, get_args

from laconic.algorithms.exchange import Exchange
from laconic.algorithms.exchanges import CodedMean, Identical, Mean, QuorumMean, ShardedMean
from laconic.algorithms.exchanges.quorum import Pace
from laconic.algorithms.round import AnyRound, GradientRound, OptimizerState, Round, is_recipe
from laconic.algorithms.schedules import After, Every, Unless
from laconic.algorithms.update import Update
from laconic.algorithms.updates import DelayedNesterov, MuonStep, OuterStep
from laconic.algorithms.updates.outer_step import Merge, OuterFactory
from laconic.codecs import Codec, codec_of
from laconic.errors import check_bool, check_choice, check_float

CodecOption = Codec | str | None
"""How messages are coded: a codec, the name of one in `laconic.codecs.CODECS`, or None for no
coding. The next message sends what a code leaves out (error feedback)."""
MIX = 0.5
"""The fraction of x that remains with ``merge="mix"``, by default."""
Outer = OuterFactory | Literal["muon"]
"""An outer optimizer in place of Nesterov SGD: a function that makes one from tensors, or
``"muon"`` (`MuonStep`)."""
OUTER_STEPS: Mapping[object, type[OuterStep]] = {"muon": MuonStep, None: OuterStep}
"""The outer steps, by the value of ``outer=`` that asks for them."""


def mean_over_workers(
    codec: CodecOption, *, relative: bool = True, sharded: bool = False
) -> Exchange:
    """Return the average over workers, coded or not."""
    if codec is not None:
        return CodedMean(codec_of(codec), relative)
    return ShardedMean() if sharded else Mean()


def check_effect(why: str, **given: bool) -> None:
    """Raise ``ValueError`` if any of these options is ``given``: it has no effect, and ``why``."""
    names = [f"{name}=" for name, is_given in given.items() if is_given]
    if names:
        has = "has" if len(names) == 1 else "have"
        raise ValueError(f"{' and '.join(names)} {has} no effect {why}: leave out {names[0]}")


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


def check_sharded(sharded: bool, **others: bool) -> None:
    """Raise ``ValueError`` if ``sharded`` is False beside ``others`` that decide where outer state
    is stored."""
    check_bool("sharded", sharded)
    for name, given in others.items():
        check_effect(f"with {name}=", sharded=given and not sharded)


def pseudo_gradients(update: OuterStep, codec: CodecOption, *, sharded: bool) -> Exchange:
    """Return the exchange for the pseudo-gradients of ``update``."""
    relative = update.sends == "model"
    return mean_over_workers(codec, relative=relative, sharded=sharded and relative)


def with_quorum(
    update: OuterStep,
    codec: CodecOption,
    quorum: int | None,
    grace: float,
    pace: Pace,
    delay: int,
    *,
    sharded: bool,
) -> tuple[Update, Exchange]:
    """Return the update and the exchange of outer steps: over all workers, or over those that have
    arrived."""
    some = QuorumMean(quorum, grace, pace)  # checks them
    if quorum is None and pace == "equal":
        if grace:
            raise ValueError(
                "grace= is for rounds that do not wait for all workers at equal pace: give quorum= "
                "or pace='own'"
            )
        return update, pseudo_gradients(update, codec, sharded=sharded)
    if delay:
        raise ValueError("rounds with quorum= or pace='own' fold results at once: use delay=0")
    if not update.combines_only:
        raise ValueError(
            f"{type(update).__name__} waits for all workers: leave out quorum= and pace=, or use "
            "another outer="
        )
    own = update if update.outer else DelayedNesterov(update.lr, update.momentum)
    return own, some if codec is None else replace(some, codec=codec_of(codec))


def identical(
    sharded: bool, codec: CodecOption, optimizer_state: OptimizerState, *, average: bool = True
) -> Exchange:
    """Return the exchange of an outer step over a base that keeps workers equal."""
    given = {"sharded": not sharded, "codec": codec is not None, "average": not average}
    given["optimizer_state"] = optimizer_state == "average"
    check_effect("over a base that keeps workers equal", **given)
    return Identical()


def outermost(
    when: Every, update: Update, exchange: Exchange, optimizer_state: OptimizerState
) -> Round:
    """Return the round of an outer step over a base. If the base keeps workers equal, nothing is
    sent and every rank takes the whole step itself: the ranks of a worker do not divide it."""
    over = "world" if exchange.identical else "workers"
    return Round(when, update, exchange, over=over, optimizer_state=optimizer_state)


def check_delay(delay: int, period: int) -> None:
    """Warn if a round is sent before the round before the last was folded in."""
    if isinstance(delay, int) and delay > period:
        warnings.warn(
            f"delay={delay} is longer than the period of {period}, so workers drift apart: a "
            f"difference is subtracted again before the first message is folded in. Use a delay of "
            f"at most {period}",
            stacklevel=4,  # the caller of the recipe function, past `named`
        )


def check_base(base: object) -> None:
    """Raise ``ValueError`` unless ``base`` is a recipe."""
    if not is_recipe(base):
        raise ValueError(f"base must be a recipe, such as laconic.local_sgd(12), not {base!r}")


def skip(r: AnyRound, slow: Every) -> AnyRound:
    """Return ``r`` without the steps of ``slow``. Rounds on gradients never skip a step."""
    if isinstance(r, GradientRound):
        return r
    when, period = r.when.schedule if isinstance(r.when, After) else r.when, slow.period
    if (
        isinstance(when, Every)
        and when.period > period
        and not (when.period % period or when.offset % period)
    ):
        raise ValueError(
            f"{r.name} of the base is due every {when.period} steps, and always replaced by a slow "
            f"step, every {period}: use a longer period for slow steps, or base=None"
        )
    return replace(r, when=Unless(r.when, slow))
