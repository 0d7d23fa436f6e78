"""What several recipes share: the codec option, outer steps, checks of their arguments."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import get_args

from laconic.algorithms.exchange import Exchange
from laconic.algorithms.exchanges import CodedQuorumMean, Mean, QuorumMean, ShardedMean, coded
from laconic.algorithms.exchanges.quorum import Pace, Weigh
from laconic.algorithms.round import AnyRound, GradientRound, Recipe, Round
from laconic.algorithms.schedules import Schedule, Unless, every
from laconic.algorithms.updates import Eager, OuterStep
from laconic.algorithms.updates.outer_step import Merge, OuterFactory
from laconic.codecs import Codec, codec_of
from laconic.errors import check_choice, check_float, check_int

CodecOption = Codec | str | None
"""How messages are coded: a codec, the name of one in `laconic.codecs.CODECS`, or None for no
coding. The next message sends what a code leaves out (error feedback)."""


def mean_over_workers(
    codec: CodecOption, *, relative: bool = True, sharded: bool = False
) -> Exchange:
    """Return the mean over workers, coded or not."""
    if codec is not None:
        return coded(codec, relative=relative)
    return ShardedMean() if sharded else Mean()


def quorum_mean(
    quorum: int | None,
    grace: float,
    pace: Pace,
    weigh: Weigh,
    codec: CodecOption,
    delay: int,
    optimizer_state: str = "keep",
) -> QuorumMean | None:
    """Return the mean over the workers that have arrived, or None if a round waits for all."""
    exchange = QuorumMean(quorum, grace, pace, weigh)  # checks them
    if quorum is None and pace == "equal":
        if grace or weigh != "alike":
            raise ValueError(
                "grace= and weigh= are for rounds that do not wait for all workers at equal pace: "
                "give quorum= or pace='own'"
            )
        return None
    refused = {"delay=0": bool(delay)}
    refused["optimizer_state='keep' or 'reset'"] = optimizer_state == "average"
    needed = [option for option, given in refused.items() if given]
    if needed:
        raise ValueError(
            "rounds with quorum= or pace='own' fold results at once, and average parameters only: "
            f"use {', '.join(needed)}"
        )
    if codec is None:
        return exchange
    return CodedQuorumMean(quorum, grace, pace, weigh, codec=codec_of(codec))


def outer_step(
    lr: float, momentum: float, outer: OuterFactory | None, merge: Merge, mix: float
) -> OuterStep:
    check_float("momentum", momentum, 0.0, 1.0)
    check_float("lr", lr, 0.0, strict=True)
    check_float("mix", mix, 0.0, most=1.0)
    check_choice("merge", merge, get_args(Merge))
    if outer is not None and not callable(outer):
        raise ValueError(
            "outer must be a function that makes an optimizer from tensors, such as "
            f"lambda tensors: torch.optim.Adam(tensors, lr=1e-3), not {outer!r}"
        )
    return OuterStep(lr, momentum, outer, mix, merge)


def eager(
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
        raise ValueError("merge='eager' stores all state on every worker: omit sharded=")
    if outer is not None:
        raise ValueError("merge='eager' supports only Nesterov SGD as outer optimizer: omit outer=")
    if check_int("delay", delay, 1) > period:
        raise ValueError(f"delay must be at most the period, {period}, not {delay}")
    mean = mean_over_workers(codec, relative=False)
    return (Round(every(period), Eager(lr, momentum), mean, delay=delay),)


def check_delay(delay: int, period: int) -> None:
    """Warn if a round is sent before the round before the last was folded in."""
    if isinstance(delay, int) and delay > period:
        warnings.warn(
            f"delay={delay} is longer than the period of {period}, so workers drift apart: a "
            f"difference is subtracted again before the first message is folded in. Use a delay of "
            f"at most {period}",
            stacklevel=4,  # the caller of the recipe function, past `named`
        )


def skip(r: AnyRound, skipped: Schedule) -> AnyRound:
    """Return ``r`` without the steps of ``skipped``. Rounds on gradients never skip a step."""
    return r if isinstance(r, GradientRound) else replace(r, when=Unless(r.when, skipped))
