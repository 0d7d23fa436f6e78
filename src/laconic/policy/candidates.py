"""What `auto` and ``laconic advise`` choose from."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.algorithms.parse import parse_recipe
from laconic.algorithms.round import Recipe, Round, first_sent, fragments_of
from laconic.algorithms.updates.muon_step import operations, orthogonal
from laconic.device import synchronize
from laconic.parts import Fragment
from laconic.policy.facts import Facts
from laconic.policy.predict import load_of, often, travel


@dataclass(frozen=True)
class Candidate:
    """A recipe, its text, and how many steps it takes for one of `laconic.ddp`."""

    text: str
    recipe: Recipe
    steps: float

    @property
    def kind(self) -> str:
        """The kind of candidates for which a measurement of this one is also valid. All with rounds
        on parameters alone are of one kind: their time beyond the prediction is mostly the
        machine's speed while no rank waits, and a change among them sends models over the network.
        """
        if isinstance(self.recipe[0], Round):
            return "rounds"
        return "coded gradients" if self.recipe[0].exchange.slots else "gradients"


GRADIENTS = {"ddp()": 1.0, "ddp(codec='int8')": 1.0, "ddp(codec='int4')": 1.02}
"""Averages of gradients and their measured steps. bfloat16 is not here, since it sends twice as
much as Int8, which takes no more steps."""
OUTER = {8: 0.75, 4: 0.7}
"""Periods of an outer step in Muon's direction over gradients, and its steps for one without. With
a period of 8, 0.60 was measured in 480 steps, and 0.70 in 704; with 4, 0.93 of that. Longer runs
gain less by it (``docs/evidence.md``), so it counts as 0.75. See `takes_muon`."""
LOCAL = {2: 1.3}
"""Periods of `laconic.local_sgd` with Int4 and a delay, and their steps, measured with a delay of
2. It sends more than `laconic.streaming_diloco`, and hides it as well: the choice where the rate
would do for gradients, but the latency does not."""
PERIODS = {4: 1.37, 8: 1.43, 16: 1.5, 32: 1.58, 64: 1.66, 128: 1.74, 256: 1.82, 512: 1.9}
"""Periods of `laconic.streaming_diloco` with Int4 and their steps: measured with a delay of 1 for
periods up to 64, of which a run of 480 steps has a few, and extrapolated by 0.08 per doubling."""
MUON = {8: 0.91, 12: 0.98, 16: 1.06, 20: 1.14, 24: 1.2, 28: 1.26, 32: 1.31, 40: 1.39, 48: 1.45}
MUON |= {64: 1.55, 128: 1.7, 256: 1.8, 512: 1.9}
"""The same with ``outer="muon"``: measured with a delay of 2 for powers of two up to 64. Those
between them are interpolated, so that a network too slow for one period does not wait for one half
as long again; longer ones are extrapolated."""
OWN = {8: 0.97, 12: 1.0, 16: 1.02, 20: 1.08, 24: 1.12, 28: 1.15, 32: 1.18, 40: 1.21, 48: 1.25}
OWN |= {64: 1.31, 128: 1.43, 256: 1.57, 512: 1.7}
"""The same where each worker takes outer steps of its own in Muon's direction, every 4 steps. With
a delay of a quarter of the period, 0.78, 0.82, 0.94, 1.05 and 1.14 were measured for periods of 8,
16, 32, 64 and 128. They count 1.25 times as much, as those of `OUTER` do, since longer runs gain
less."""
LOCAL_SGD = "local_sgd({}, delay={}, codec='int4')"
STREAMING = "streaming_diloco({}, delay={})"
TURNED = "streaming_diloco({}, delay={}, outer='muon')"
OWN_STEPS = (
    "outer_step(streaming_diloco({}, delay={}, merge='loscar'), 4, outer='muon', average=False)"
)
DELAYED = {LOCAL_SGD: LOCAL, OWN_STEPS: OWN, TURNED: MUON, STREAMING: PERIODS}
"""The candidates with a delay: the text of their recipes, of a period and a delay, and their steps
by period."""
SHORTEST = 8
"""The least period to choose. Period 4 takes 4% fewer steps, but loses more than that by a message
in every step, which `predict` does not include if processors are few: at 10 Mbit/s with 4 emulated
hosts on 2 cores a step took 0.200 s with period 4, 0.181 s with 8 and 0.170 s with 16
(``docs/coded.md``)."""
SLOW = 0.1
"""The least seconds that coded gradients take per step for a run to start without them."""
START_DELAY = 2
"""The delay of a run that starts with a period of `SHORTEST`."""
SMALL, FRAGMENTS = 192, 4
"""The side of the matrix by which `turning` is measured; the fragments of `streaming_diloco`."""
HALF = 0.5
"""Steps from when a message is due until the last rank sends it."""


def candidates(facts: Facts, now: Candidate | None = None) -> Iterator[Candidate]:
    """The candidates, those that sacrifice least first. The present one, ``now``, keeps its delay
    while that hides its messages and half a step."""
    for text, steps in GRADIENTS.items():
        yield spelled(text, steps)
    for period, share in OUTER.items() if facts.muon else ():
        for text, steps in GRADIENTS.items():
            yield spelled(f"outer_step({text}, {period}, outer='muon')", share * steps)
    for text, periods in delayed(facts).items():
        for period, steps in periods.items():
            delay, seconds = delay_for(period, facts, text)
            candidate = spelled(text.format(period, delay), steps)
            if now is not None and same_but_delay(now.recipe, candidate.recipe):
                present = first_sent(now.recipe).delay
                if seconds <= (present - HALF) * facts.compute and present <= 2 * delay:
                    candidate = spelled(text.format(period, present), steps)
            yield candidate


def same_but_delay(recipe: Recipe, other: Recipe) -> bool:
    """Whether two recipes with rounds on parameters differ at most in their delay."""
    one, two = ([replace(r, delay=0) for r in x if isinstance(r, Round)] for x in (recipe, other))
    return one == two and len(one) == len(recipe)


def lateness(recipe: Recipe, facts: Facts) -> float:
    """The seconds per step that messages of ``recipe`` arrive too late beyond what `predict` says,
    because the last rank sends half a step after the first."""
    found = 0.0
    for r in recipe:
        if r.delay:
            least, spare = travel(r, facts), r.delay * facts.compute
            half = HALF * facts.compute
            found += often(r) * min(max(least - spare + half, 0.0), half)
    return found


def delay_for(period: int, facts: Facts, text: str) -> tuple[int, float]:
    """The delay, in steps, and the seconds that a message takes under the recipe with this ``text``
    of `DELAYED`. The delay is 1.25 times these seconds, plus half a step since the last rank sends
    late, at most the period. The margin is needed: with a message that took 0.6 of its delay of one
    step all ranks waited 13% of the time, at 10 Mbit/s on 4 emulated hosts."""
    r = first_sent(spelled(text.format(period, 1), 1.0).recipe)
    uneven = facts.largest * fragments_of(r) if text == TURNED else 0.0
    seconds = travel(r, facts) * max(1.0, uneven)
    return min(math.ceil(1.25 * seconds / facts.compute + HALF), period), seconds


@lru_cache(maxsize=256)
def spelled(text: str, steps: float) -> Candidate:
    """The candidate whose recipe has this ``text``."""
    recipe = parse_recipe(text)
    assert isinstance(recipe, tuple), "never auto"
    return Candidate(text, recipe, steps)


def delayed(facts: Facts) -> dict[str, dict[int, float]]:
    """The candidates of `DELAYED` to choose from, for `laconic.auto` and ``laconic advise``."""
    text = (OWN_STEPS if facts.own else TURNED) if facts.muon else STREAMING
    longer = {period: steps for period, steps in DELAYED[text].items() if period >= SHORTEST}
    return {LOCAL_SGD: LOCAL, text: longer}


def takes_muon(optimizer: Optimizer | None, shapes: Sequence[Sequence[int]]) -> bool:
    """Whether outer steps in Muon's direction are to be chosen, for tensors of these ``shapes``,
    all of them whole. They are where they had lower losses (``docs/evidence.md``): with optimizers
    of Adam's kind (whose groups have ``betas``) and SGD (``dampening``), but not with Muon itself,
    and where most elements are in matrices."""
    if optimizer is None:
        return False
    if not all("betas" in group or "dampening" in group for group in optimizer.param_groups):
        return False
    elements = sum(map(math.prod, shapes))
    matrices = sum(math.prod(s) for s in shapes if len(s) == 2 and min(s) > 1)
    return matrices > elements / 2


def takes_own(optimizer: Optimizer | None) -> bool:
    """Whether each worker may take outer steps of its own where `takes_muon`: with an optimizer of
    Adam's kind. With SGD, at the learning rates that suit it alone, they raised the loss
    (``docs/evidence.md``)."""
    return optimizer is not None and all("betas" in group for group in optimizer.param_groups)


def turning(shapes: Sequence[Sequence[int]], device: torch.device) -> float:
    """Estimate the seconds that it takes to turn all steps of these ``shapes`` into Muon's
    direction, from the time of a small matrix."""
    small = torch.ones(SMALL, SMALL, device=device).tril_()
    seconds = []
    for _ in range(3):
        synchronize(device)
        start = time.perf_counter()
        orthogonal(small)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds) * sum(map(operations, shapes)) / operations(small.shape)


def largest_fragment(model: nn.Module, groups: Sequence[Sequence[Tensor]]) -> float:
    """The share of the parameters, by group, in the largest fragment of `TURNED`."""
    sizes = [
        sum(s.stop - s.start for group in fragment.segments(model, groups) for s in group)
        for fragment in (Fragment(k, FRAGMENTS, "layers") for k in range(FRAGMENTS))
    ]
    return max(sizes) / max(sum(sizes), 1)


def start(workers: int, facts: Facts | None = None) -> Candidate:
    """The recipe until the first choice: cheap enough on any network, at almost no loss of quality.
    A single worker, with nothing to choose, has no codec.

    Coded gradients, from which a change costs least. Where the network in ``facts`` makes every
    step wait for them, mostly for latencies (`SLOW`), parameters every other step with a delay:
    what is chosen on such networks for all but the longest steps; or, where Muon's direction is
    possible, every `SHORTEST` steps. `SLOW` was measured with buckets
    that follow one another; where they overlap, gradients wait less, but not so little that the
    choice would be another one.
    """
    text = "ddp(codec='int4')" if workers > 1 else "ddp()"
    coded = spelled(text, GRADIENTS[text])
    if facts is None or facts.workers == 1:
        return coded
    facts = replace(facts, overlapping=False)
    load = load_of(coded.recipe[0], facts)
    if load.network <= max(SLOW, 2 * load.sending):
        return coded
    if facts.muon:
        text = OWN_STEPS if facts.own else TURNED
        return spelled(text.format(SHORTEST, START_DELAY), DELAYED[text][SHORTEST])
    period = min(LOCAL)
    return spelled(LOCAL_SGD.format(period, period), LOCAL[period])
