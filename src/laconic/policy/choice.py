"""The choice of a recipe from measured facts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from laconic.algorithms.auto import Auto
from laconic.algorithms.exchanges import Mean
from laconic.algorithms.round import Recipe, Round
from laconic.algorithms.schedules import every
from laconic.algorithms.updates import Average
from laconic.policy.candidates import Candidate, candidates, lateness, same_but_delay
from laconic.policy.facts import Facts, Net
from laconic.policy.predict import predict, travel
from laconic.units import format_rate, format_share

WARMUP, WINDOW = 3, 8
"""The same after a choice, before it is reviewed."""
GAIN = 0.05
"""The least relative gain for which the recipe is changed, because a change sends a few models over
the network."""
CHANGED_MODELS = 3
"""The models that such a change averages: the parameters and, with AdamW, two tensors of optimizer
state. It must pay off if training goes on for as many steps as it has taken: for at most the time
of a change, a recipe is then worse than the one that somebody who knows the end would choose. At 1
Mbit/s it takes two minutes, and a run of the race changed twice in 19 steps, for gains of 10%, when
other programs used the processors."""
ACROSS = 0.15
"""How much more a recipe must gain if it exchanges parameters in place of gradients, or gradients
in place of parameters. Only the present one was measured; predictions of others miss by up to 15%
(``docs/validation.md``), and an outer step begins anew. Without it, a run of the race at 1 Gbit/s,
with 4 workers on 2 cores, changed seven times in 330 steps."""
TIE = 0.02
"""Among candidates within this relative distance of the best, the first one is chosen, which
differs least from dense gradient averaging."""
SHORT, FEWEST, FEW = 2.5e-3, 10, 3
"""Where messages take less than ``SHORT`` seconds, fewer than `FEWEST` packets that were sent
again, or than `FEW` for each rank, do not count as lost. TCP sends packets again that were only
late, too: over the loopback interface, which loses none, 0 to 2 of the 1,650 of two ranks, and 3 to
6 of the 4,900 of four."""


def choose(
    auto: Auto,
    facts: Facts,
    now: Candidate | None,
    extra: Mapping[str, float],
    stay: float = 0.0,
) -> tuple[str, str]:
    """The text of the best candidate, and the reason. ``now``: the current candidate, which is kept
    unless another one is better by `GAIN` (and `ACROSS`), and by ``stay`` seconds per step.
    ``extra``: measured seconds per step beyond the prediction, by `Candidate.kind`."""
    choices = list(candidates(facts, now))
    if now is not None and all(c.text != now.text for c in choices):  # its delay does not suit
        alike = (c for c in choices if same_but_delay(c.recipe, now.recipe))
        choices += [replace(now, steps=c.steps) for c in alike]
    seconds = {
        c.text: max(expected(c.recipe, facts) + extra.get(c.kind, 0.0), facts.compute)
        for c in choices
    }
    steps = {c.text: c.steps for c in choices}
    score = {text: seconds[text] * steps[text] for text in seconds}
    for c in choices:
        if now is not None and (c.kind == "rounds") != (now.kind == "rounds"):
            score[c.text] *= 1 + ACROSS
    allowed = list(seconds)
    if auto.target is not None:
        allowed = [t for t in allowed if facts.compute >= auto.target * seconds[t]]
        allowed = allowed or [min(seconds, key=seconds.__getitem__)]
    least = min(score[text] for text in allowed)
    best = next(text for text in allowed if score[text] <= (1 + TIE) * least)
    if now is not None and now.text in allowed:
        enough = (1 + GAIN) * least + stay * steps[now.text]
        best = now.text if score[now.text] <= enough else best
    lost = f", and {format_share(facts.loss)} of its packets are lost" if facts.loss else ""
    each = " per rank" if facts.ranks > 1 else ""
    second = ""
    if "outer='muon'" in best:
        second = (
            "; its outer step is a second optimizer: look at the learning rate again, or use "
            "auto(outer=False)"
        )
    reason = (
        f"a step computes for {facts.compute * 1e3:.3g} ms; the network sends "
        f"{format_rate(facts.rate)}{each} and takes {facts.one_way * 1e3:.2g} ms per message{lost}"
        f": {best} takes {seconds[best] * 1e3:.3g} ms per step, "
        f"{facts.compute / seconds[best]:.0%} of the speed without communication, and "
        f"{counted(steps[best])} for the work of one step of ddp(){second}"
    )
    return best, reason


def expected(recipe: Recipe, facts: Facts) -> float:
    """The seconds of a step: as predicted, and with messages that arrive late."""
    return predict(recipe, facts).seconds + lateness(recipe, facts)


def change_seconds(facts: Facts) -> float:
    """The seconds of a change from a recipe under which workers differ."""
    average = Round(every(1), Average(), Mean())
    return CHANGED_MODELS * travel(average, facts)


def counted(steps: float) -> str:
    """So many ``steps``, in words."""
    return "one step" if steps == 1 else f"{round(steps, 2):g} steps"


def lost_share(packets: float, again: float, latency: float, ranks: int) -> float:
    """The share of the ``packets`` of all ``ranks`` that were lost, of which ``again`` were sent
    again; 0 for fewer than TCP sends again on networks that lose none."""
    few = latency < SHORT and again < max(FEWEST, FEW * ranks)
    return 0.0 if few or not packets else again / packets


def nets_of(workers: int, ranks: int, rate: float, latency: float) -> dict[str, Net]:
    """The networks of ``workers`` of several ``ranks`` each, all of which send at ``rate`` to the
    same rank of the other workers at once. What stays inside a worker is free. Empty for one rank.
    """
    if ranks == 1:
        return {}
    outside = (workers - 1) * ranks / (workers * ranks - 1)
    return {"world": Net(rate / outside, latency), "replica": Net(math.inf, 0.0)}


def usual(spans: Sequence[tuple[float, float]], cycle: int) -> tuple[float, float]:
    """The usual seconds of steps, and of steps without their waiting, from the ``spans``: the
    seconds of each step, and those in which it waited. ``cycle``: steps between two rounds.

    Computing is the median of the last steps. Waiting is the mean over whole cycles, because only
    the steps that end a round wait, and a median would miss them. A worker that has just joined has
    no ``spans`` and returns 0, because only the slowest worker's values are used.
    """
    if not spans:
        return 0.0, 0.0
    compute = statistics.median(wall - waiting for wall, waiting in spans[-WINDOW:])
    whole = spans[-(len(spans) // cycle) * cycle :] if len(spans) >= cycle else spans
    waited = sum(waiting for _, waiting in whole) / max(len(whole), cycle)
    return compute + waited, compute
