"""What several recipes share: the codec option, rounds over a base, checks of their arguments."""

from __future__ import annotations

import warnings
from dataclasses import replace

from laconic.algorithms.exchange import Exchange
from laconic.algorithms.exchanges import CodedMean, Identical, Mean, ShardedMean
from laconic.algorithms.round import (
    AnyRound,
    GradientRound,
    Recipe,
    Round,
    is_recipe,
    workers_differ,
)
from laconic.algorithms.schedules import After, Every, Unless
from laconic.codecs import Codec, codec_of
from laconic.errors import check_bool

CodecOption = Codec | str | None
"""How messages are coded: a codec, the name of one in `laconic.codecs.CODECS`, or None for no
coding. The next message sends what a code leaves out (error feedback)."""


def mean_over_workers(
    codec: CodecOption, *, relative: bool = True, sharded: bool = False
) -> Exchange:
    """Return the average over workers, coded or not. ``relative``: of models, not of changes; only
    their outer state can be ``sharded``."""
    if codec is not None:
        return CodedMean(codec_of(codec), relative)
    return ShardedMean() if sharded and relative else Mean()


def check_effect(why: str, **given: bool) -> None:
    """Raise ``ValueError`` if any of these options is ``given``: it has no effect, and ``why``."""
    names = [f"{name}=" for name, is_given in given.items() if is_given]
    if names:
        has = "has" if len(names) == 1 else "have"
        raise ValueError(f"{' and '.join(names)} {has} no effect {why}: leave out {names[0]}")


def check_sharded(sharded: bool, **others: bool) -> None:
    """Raise ``ValueError`` if ``sharded`` is False beside ``others`` that decide where outer state
    is stored."""
    check_bool("sharded", sharded)
    for name, given in others.items():
        check_effect(f"with {name}=", sharded=given and not sharded)


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


def over_base(base: Recipe, slow: Every, last: Round, **given: bool) -> Recipe:
    """Return ``base`` with the outer step ``last`` over it, due as ``slow``. If the base keeps
    workers equal, nothing is sent and every rank takes the whole step itself: the ranks of a worker
    do not divide it. Raises ``ValueError`` if an option is then ``given`` that has no effect."""
    if not workers_differ(base):
        given["optimizer_state"] = last.optimizer_state == "average"
        check_effect("over a base that keeps workers equal", **given)
        last = replace(last, exchange=Identical(), over="world")
    return (*(skip(r, slow) for r in base), last)


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
