"""The recipes that the advisor compares, and what is known about their quality."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from laconic.algorithms.auto import Auto
from laconic.algorithms.compile import check_quorum
from laconic.algorithms.exchanges import CodedMean, QuorumMean
from laconic.algorithms.exchanges.low_rank import LowRank
from laconic.algorithms.parse import parse_recipe
from laconic.algorithms.recipes import local_sgd, power_sgd
from laconic.algorithms.round import GradientRound, Recipe, Round, first_sent, workers_differ
from laconic.algorithms.updates import OwnStep, momentum_for
from laconic.codecs import CODECS
from laconic.policy.candidates import (
    DELAYED,
    GRADIENTS,
    LOCAL_SGD,
    OUTER,
    OWN_STEPS,
    STREAMING,
    TURNED,
    candidates,
)
from laconic.policy.facts import Facts
from laconic.policy.predict import often

PERIODS = (4, 16, 64, 256)
"""Steps between two rounds of the same tensors, for recipes that `laconic.auto` does not use."""
PLAIN = Facts(16, ((1,),), 4, 1.0, 1e9, 0.0)
"""Stand-in facts for parsing recipes before anything is measured."""

QUALITY = {
    "ddp()": "the same mathematics as one large batch (Li et al., VLDB 2020)",
    "ddp(codec='int8')": "no more steps for the same loss on text (docs/coded.md)",
    "ddp(codec='int4')": "2% more steps for the same loss on text (docs/coded.md)",
    "outer_step": "a second optimizer: fewer steps in ten cases of 512 (docs/evidence.md)",
    "power_sgd": "gradients of low rank (Vogels et al., NeurIPS 2019)",
    "sgp()": "close to all-reduce (Assran et al., ICML 2019; docs/science.md)",
    "sgp(delay=1)": "messages a step late (OSGP, Assran et al., ICML 2019)",
    "local_sgd": "behind DDP per step, once gradients are noisy (docs/choose.md); "
    "Lin et al. 2018 use periods of 16 or 32",
    "slowmo": "recovers what local SGD loses in runs of many slow steps (Wang et al., ICLR 2020)",
    "diloco": "as good as synchronous training in long runs, with 100 and more rounds "
    "(Douillard et al. 2023); the steps here are those of short runs",
    "streaming_diloco": "like DiLoCo in long runs (Douillard et al. 2025)",
}
"""What the literature, or this repository, says about a recipe, by its text or name."""
OWN_PACE = (
    "as equal workers of the same speed together, on digits (docs/quorum.md); workers take "
    "different numbers of steps: end the loop by time or by data"
)
OWN_OUTER = (
    "outer steps of each worker's own: fewer steps on text and images with AdamW, more with SGD "
    "(docs/evidence.md)"
)
MEASURED, EXACT = "measured (benchmarks.factors)", "the same mathematics"
KNOWN = (MEASURED, EXACT)
"""Sources of steps that were determined for the recipe itself."""
LONGEST = 64
"""The longest period of `laconic.streaming_diloco` that was measured; with own outer steps, twice
as long."""
TIMED = {LOCAL_SGD: 2, OWN_STEPS: 0, TURNED: 2, STREAMING: 1}
"""The candidates of `laconic.auto` with a delay, and the delay with which each was measured; those
of `OWN_STEPS` had several."""
LOW_RANK = 1.47
"""Steps that gradients of low rank need per step of `laconic.ddp`, measured for rank 4 in Int8."""
LENGTH = 2**16
"""Number of elements whose encoded size is used to compare codecs."""
OWN = "your own: laconic has no information about its quality"
OUTER_SOURCE = (
    "a cautious number: 0.56 and 0.60 of the steps were measured in runs of 480, and no gain on "
    "text in one of 3,072"
)
OWN_SOURCE = "a cautious number: 1.25 times what was measured in runs of 480 steps"
UNKNOWN = "unknown: counted as 1"
"""The source of the steps of a recipe about which nothing is known."""
UNMEASURED = "a recipe with these options was not measured"
FAMILIES = ("ddp", "power_sgd", "sgp", "local_sgd", "slowmo", "diloco", "streaming_diloco")
"""The recipes whose steps are assumed from others. Nothing is assumed of the rest."""
MEASURED_ELEMENTS, MEASURED_WORKERS, MEASURED_STEPS = 865_280, 4, 480
"""What all steps were measured with, by ``python -m benchmarks.factors``: the text model's
parameters, the workers, and the length of a run."""


@dataclass(frozen=True)
class Choice:
    """A recipe with its text. ``quality``: what is known about it, with the source. ``own``:
    whether the user asked for it."""

    text: str
    recipe: Recipe
    quality: str
    own: bool = False


def choices(facts: Facts, recipes: Sequence[str] = ()) -> list[Choice]:
    """Return the recipes to compare, those that give up least first.

    They are those of `laconic.auto`, some others, and at the end those of the user's own
    ``recipes`` that are not among them. Raises ``ValueError`` for text that is not a recipe.
    """
    gradients, streams = [], {}
    for candidate in candidates(facts):
        first = first_sent(candidate.recipe)
        period = None if isinstance(first, GradientRound) else round(1 / often(first))
        choice = _choice(candidate.text)
        if period is None or candidate.text.startswith("local_sgd"):
            gradients.append(choice)
        else:
            streams[period] = choice
    if facts.workers > 2:  # with two workers, gossip sends what an all-reduce does
        gradients += [_choice("sgp()"), _choice("sgp(delay=1)")]
    found = []
    for period in sorted({*PERIODS, *streams}):
        others = _with_period(period, facts) if period in PERIODS else []
        stream = [streams[period]] if period in streams else []
        found += others + stream
        if facts.computes or facts.rates:
            found += _at_own_pace(period, facts) if period in PERIODS else []
    table = {choice.text: choice for choice in gradients + found}
    for text in recipes:
        known = table.get(text.strip())
        own = _user_choice(text, facts, table) if known is None else replace(known, own=True)
        table[own.text] = own
    return list(table.values())


def _with_period(period: int, facts: Facts) -> list[Choice]:
    momentum = momentum_for(facts.workers)
    slow = f"slowmo(local_sgd({period}), period={max(4 * period, 48)}, momentum={momentum})"
    texts = [
        f"local_sgd({period})",
        *([slow] if momentum else []),  # below four workers it does not help
        f"diloco({period})",
    ]
    return [_choice(text) for text in texts]


def _at_own_pace(period: int, facts: Facts) -> list[Choice]:
    """DiLoCo at each worker's own pace, dense and coded, which also does not wait for the last
    worker if there are more than two. Equal workers would arrive within the ``grace``: two steps of
    the slowest."""
    options = "pace='own'"
    if facts.workers > 2:
        slowest = max(facts.computes, default=facts.compute)
        options = f"quorum={facts.workers - 1}, grace={2 * slowest:.1g}, {options}"
    texts = [f"diloco({period}, {options})", f"diloco({period}, {options}, codec='int4')"]
    return [_choice(text) for text in texts]


def more_steps(steps: float) -> str:
    """Return how many more or fewer steps a recipe needs than `laconic.ddp`, which needs one."""
    if steps < 1:
        return f"{1 - steps:.0%} fewer steps"
    return "no more steps" if steps == 1 else f"{steps - 1:.0%} more steps"


def _choice(text: str) -> Choice:
    recipe = parse_recipe(text)
    assert isinstance(recipe, tuple), "a recipe of this module"
    return Choice(text, recipe, _quality(text, recipe))


def _quality(text: str, recipe: Recipe) -> str:
    """Return what is known about a recipe."""
    name = text.strip().removeprefix("laconic.").partition("(")[0].strip()
    if name not in FAMILIES and not (name == "outer_step" and _turned(recipe)):
        return OWN
    if any(isinstance(r.update, OwnStep) for r in recipe):
        return OWN_OUTER
    if any(isinstance(r.exchange, QuorumMean) and r.exchange.pace == "own" for r in recipe):
        return OWN_PACE
    return QUALITY.get(text) or QUALITY.get(name, UNMEASURED)


def _user_choice(text: str, facts: Facts, table: Mapping[str, Choice]) -> Choice:
    recipe = parse_recipe(text)
    if isinstance(recipe, Auto):
        raise ValueError(f"{text} chooses its recipe during training: there is nothing to predict")
    if any(r.over == "group" for r in recipe):
        raise ValueError(
            f"{text} has rounds inside groups of workers, which advise does not support"
        )
    check_quorum(recipe, facts.workers, plain=facts.ranks == 1)
    same = (c.quality for c in table.values() if c.recipe == recipe and not c.own)
    return Choice(text, recipe, next(same, _quality(text, recipe)), own=True)


def rehearsed(workers: int, recipes: Sequence[str] = ()) -> list[Recipe]:
    """Return recipes with all rounds that `choices` may have for this number of workers.

    Their rounds are timed before the other facts are known.
    """
    unequal = (1.0,) * (workers - 1) + (2.0,)
    facts = [
        replace(PLAIN, workers=workers, computes=unequal, muon=muon, own=own)
        for muon, own in ((False, False), (True, False), (True, True))
    ]
    known = {choice.text: choice.recipe for f in facts for choice in choices(f, recipes)}
    return [*known.values(), local_sgd(1)]


class Steps(NamedTuple):
    """The steps a recipe needs per step of `laconic.ddp`, and where that is from.

    ``source`` is one of `KNOWN`, or says what the steps are taken from.
    """

    factor: float
    source: str


def steps_of(recipe: Recipe) -> Steps:
    """Return the steps that ``recipe`` needs per step of `laconic.ddp`.

    The values were measured by ``python -m benchmarks.factors`` with one task, for gradients in
    Int8 and Int4, also with outer steps, and for `laconic.streaming_diloco`. Other recipes use the
    closest of these: gradients with codes at least as long as Int8's use Int8's value, other
    encoded gradients Int4's. A recipe in which workers differ uses that of the streaming recipe
    with the nearest period, from 4 up, because it loses about as much; any gain from SlowMo or
    DiLoCo is not included.

    Raises ``ValueError`` for a recipe whose parameter rounds end.
    """
    if not workers_differ(recipe):
        base = _steps_of_gradients(tuple(r for r in recipe if isinstance(r, GradientRound)))
        outer = [r for r in recipe if isinstance(r, Round)]
        if not outer:
            return base
        if not _turned(recipe):
            return Steps(base.factor, "assumed equal to the base without slow steps")
        nearest = min(OUTER, key=lambda period: abs(math.log2(period * often(outer[-1]))))
        return Steps(OUTER[nearest] * base.factor, OUTER_SOURCE)
    sent = [r for r in recipe if isinstance(r, Round) and r.exchange.communicates]
    share = max(map(often, sent), default=0.0)
    if not share:
        raise ValueError("advise compares only recipes whose rounds continue through the run")
    period = 1 / share
    for text, delay in TIMED.items():
        factor = DELAYED[text].get(round(period)) if sent[0].delay else None
        if factor is None or recipe != parse_recipe(text.format(round(period), sent[0].delay)):
            continue
        longest = 2 * LONGEST if text == OWN_STEPS else LONGEST
        if period > longest:
            return Steps(factor, f"extrapolated from a period of {longest}")
        if text in (OWN_STEPS, TURNED) and math.log2(period) % 1:
            return Steps(factor, "interpolated between measured periods")
        if text == OWN_STEPS:
            return Steps(factor, OWN_SOURCE)
        return Steps(factor, MEASURED if sent[0].delay == delay else f"taken from delay={delay}")
    steps, like = DELAYED[STREAMING], "streaming_diloco({0})"
    if any(isinstance(r.update, OwnStep) and r.update.muon for r in recipe):
        steps, like = DELAYED[OWN_STEPS], "outer_step(streaming_diloco({0}, ...), average=False)"
    elif _turned(recipe):
        steps, like = DELAYED[TURNED], "streaming_diloco({0}, outer='muon')"
    nearest = min(steps, key=lambda p: abs(math.log2(p / period)))
    return Steps(steps[nearest], f"assumed equal to {like.format(nearest)}")


def _turned(recipe: Recipe) -> bool:
    """Whether it has outer steps in Muon's direction."""
    return any(isinstance(r, Round) and r.update.scope == "tensors" for r in recipe)


def _steps_of_gradients(recipe: Recipe) -> Steps:
    if not any(r.exchange.slots for r in recipe):
        return Steps(1.0, EXACT)
    if any(isinstance(r.exchange, LowRank) for r in recipe):
        same = recipe == power_sgd(4, codec="int8")
        source = MEASURED if same else "assumed equal to power_sgd(4, codec='int8')"
        return Steps(LOW_RANK, source)
    codecs = [r.exchange.codec for r in recipe if isinstance(r.exchange, CodedMean)]
    shortest = min((codec.nbytes(LENGTH) for codec in codecs), default=0)
    name = "int8" if shortest >= CODECS["int8"].nbytes(LENGTH) else "int4"
    known = bool(codecs) and all(codec == CODECS[name] for codec in codecs)
    source = MEASURED if known else f"assumed equal to {name.capitalize()} gradients"
    return Steps(GRADIENTS[f"ddp(codec={name!r})"], source)
