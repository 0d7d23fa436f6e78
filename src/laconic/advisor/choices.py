"""What the advisor compares: recipes, in the order of what they give up, and what is known of the
quality that they reach."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from laconic.algorithms.compile import workers_differ
from laconic.algorithms.exchanges import CodedMean
from laconic.algorithms.exchanges.low_rank import LowRank
from laconic.algorithms.parse import parse_recipe
from laconic.algorithms.recipes import local_sgd, power_sgd
from laconic.algorithms.round import GradientRound, Recipe, Round
from laconic.algorithms.updates import momentum_for
from laconic.auto import GRADIENTS, Auto, candidates, streaming
from laconic.auto import PERIODS as STEPS
from laconic.codecs import CODECS
from laconic.predict import Facts, often

PERIODS = (4, 16, 64, 256)
"""Steps between two rounds of the same tensors, of recipes that `laconic.auto` does not have."""
PLAIN = Facts(16, ((1,),), 4, 1.0, 1e9, 0.0)
"""For reading recipes before anything is measured."""

SAME = "the same mathematics as one large batch (Li et al., VLDB 2020)"
INT8 = "no more steps for the same loss on text (docs/coded.md, benchmarks.factors)"
INT4 = "2% more steps for the same loss on text (docs/coded.md, benchmarks.factors)"
GRADIENT_QUALITY = {"ddp()": SAME, "ddp(codec='int8')": INT8, "ddp(codec='int4')": INT4}
LOCAL = {
    4: "loses some quality per step, less than longer periods do (docs/science.md: 12)",
    16: "Lin et al. 2018 take 16 or 32, after the first decay of the learning rate",
    64: "behind DDP per step, once gradients are noisy (README)",
    256: "longer than Lin et al. 2018 tried: expect to lose quality",
}
SLOWMO = {
    4: "recovers what local SGD loses, in runs of many slow steps (Wang et al., ICLR 2020)",
    16: "Wang et al., ICLR 2020, have averages and slow steps every 12 steps",
    64: "averages are rarer than in Wang et al., ICLR 2020",
    256: "averages are far rarer than in Wang et al., ICLR 2020",
}
SGP = "close to all-reduce (Assran et al., ICML 2019; docs/science.md)"
OSGP = "messages a step late (OSGP, Assran et al., ICML 2019)"
DILOCO = {
    4: "far more often than in any paper",
    16: "more often than in Douillard et al. 2023; wants 100 and more rounds",
    64: "more often than in Douillard et al. 2023; wants 100 and more rounds",
    256: "as synchronous training with 500 steps, in long runs (Douillard et al. 2023)",
}
SPARSE = {
    4: "far more often than in any paper",
    16: "ahead of DiLoCo in long runs (Sarfi et al. 2025)",
    64: "ahead of DiLoCo in long runs (Sarfi et al. 2025)",
    256: "rarer than the default of 30, after Sarfi et al. 2025: expect to lose quality",
}
MEASURED, EXACT = "measured (benchmarks.factors)", "the same mathematics"
KNOWN = (MEASURED, EXACT)
"""Where a recipe's steps are its own from."""
LONGEST = 64
"""The longest period of `laconic.streaming_diloco` that was measured."""
LOW_RANK = 1.47
"""Steps that gradients of low rank take for one of `laconic.ddp`, as measured of rank 4 in Int8."""
LENGTH = 2**16
"""Elements by whose code codecs are compared."""
OWN = "your own: laconic knows nothing of its quality"


@dataclass(frozen=True)
class Choice:
    """A recipe, as it is written; ``period``: steps between two of its rounds, None where every
    step has one; ``quality``: what is known of it, with the source."""

    text: str
    recipe: Recipe
    period: int | None
    quality: str


def choices(facts: Facts, own: Sequence[str] = ()) -> list[Choice]:
    """All that is compared, those that give up least first, and last the user's ``own`` recipes:
    what `laconic.auto` chooses from, and others beside it.

    Raises ``ValueError`` for text that is no recipe."""
    gradients, streams = [], {}
    for candidate in candidates(facts):
        if isinstance(candidate.recipe[0], GradientRound):
            gradients.append(_choice(candidate.text, None, GRADIENT_QUALITY[candidate.text]))
        else:
            period = round(1 / often(candidate.recipe[0]))
            streams[period] = _choice(candidate.text, period, _streaming_quality(period))
    if facts.workers > 2:  # two that gossip send each other what an all-reduce does
        gradients += [_choice("sgp()", None, SGP), _choice("sgp(delay=1)", None, OSGP)]
    found = []
    for period in sorted({*PERIODS, *streams}):
        others = _with_period(period, facts) if period in PERIODS else []
        between = len(others) - 1 if others else 0  # `sparse_loco` gives up more
        stream = [streams[period]] if period in streams else []
        found += [*others[:between], *stream, *others[between:]]
    return gradients + found + [_own(text) for text in own]


def _with_period(period: int, facts: Facts) -> list[Choice]:
    momentum = momentum_for(facts.workers)
    texts = [(f"local_sgd({period})", LOCAL[period])]
    if momentum:  # below four workers slow momentum does not help
        slow = max(4 * period, 48)
        slowmo = f"slowmo(local_sgd({period}), period={slow}, momentum={momentum})"
        texts.append((slowmo, SLOWMO[period]))
    texts += [
        (f"diloco({period})", DILOCO[period]),
        (f"sparse_loco({period})", SPARSE[period]),
    ]
    return [_choice(text, period, quality) for text, quality in texts]


def _streaming_quality(period: int) -> str:
    if period > LONGEST:
        return "as DiLoCo in long runs (Douillard et al. 2025); on text not measured"
    more = f"{STEPS[period] - 1:.0%} more steps for the same loss, on text (benchmarks.factors)"
    return f"{more}; long runs: Douillard et al. 2025" if period == LONGEST else more


def _choice(text: str, period: int | None, quality: str) -> Choice:
    recipe = parse_recipe(text)
    assert isinstance(recipe, tuple), "written here"
    return Choice(text, recipe, period, quality)


def _own(text: str) -> Choice:
    recipe = parse_recipe(text)
    if isinstance(recipe, Auto):
        raise ValueError(f"{text} chooses its recipe in training: there is nothing to predict")
    if any(r.over == "group" for r in recipe):
        raise ValueError(f"{text} has rounds inside groups of workers, which advise does not know")
    return Choice(text, recipe, None, OWN)


def rehearsed(workers: int, own: Sequence[str] = ()) -> list[Recipe]:
    """Recipes with all rounds that `choices` have for so many workers, to be rehearsed before the
    other facts are known."""
    return [c.recipe for c in choices(replace(PLAIN, workers=workers), own)] + [local_sgd(1)]


class Steps(NamedTuple):
    """``factor``: how many steps a recipe takes for one of `laconic.ddp`; ``source``: where that is
    from, one of `KNOWN` or another recipe."""

    factor: float
    source: str


def steps_of(recipe: Recipe) -> Steps:
    """After what ``python -m benchmarks.factors`` measured of gradients in Int8 and Int4 and of
    `laconic.streaming_diloco`, with one task. Others are taken for these: gradients in codes as
    long as Int8's for that, other coded ones for Int4, and a recipe in which workers differ for the
    streaming one of the nearest period, from 4 up, as it loses about what that does: what SlowMo or
    DiLoCo make of the same rounds is not in it. Raises ``ValueError`` for one whose rounds on
    parameters end."""
    if not workers_differ(recipe):
        return _steps_of_gradients(recipe)
    share = max((often(r) for r in recipe if isinstance(r, Round)), default=0.0)
    if not share:
        raise ValueError(
            "a recipe that advise compares has rounds again and again, not for a while"
        )
    period = 1 / share
    nearest = min(STEPS, key=lambda p: abs(math.log2(p / period)))
    if recipe != streaming(nearest, recipe[0].delay, 1.0).recipe:
        return Steps(STEPS[nearest], f"taken for those of streaming_diloco({nearest})")
    if nearest > LONGEST:
        return Steps(STEPS[nearest], f"continued from streaming_diloco({LONGEST})")
    late = recipe[0].delay != 1
    return Steps(STEPS[nearest], "measured with a delay of 1" if late else MEASURED)


def _steps_of_gradients(recipe: Recipe) -> Steps:
    if not any(r.exchange.slots for r in recipe):
        return Steps(1.0, EXACT)
    if any(isinstance(r.exchange, LowRank) for r in recipe):
        same = recipe == power_sgd(4, codec="int8")
        return Steps(
            LOW_RANK, MEASURED if same else "taken for those of power_sgd(4, codec='int8')"
        )
    codecs = [r.exchange.codec for r in recipe if isinstance(r.exchange, CodedMean)]
    shortest = min((codec.nbytes(LENGTH) for codec in codecs), default=0)
    name = "int8" if shortest >= CODECS["int8"].nbytes(LENGTH) else "int4"
    known = bool(codecs) and all(codec == CODECS[name] for codec in codecs)
    source = MEASURED if known else f"taken for those of {name.capitalize()} gradients"
    return Steps(GRADIENTS[name], source)
