"""Published numbers beside those of the planner, from the conditions that their papers state.

Bandwidth for a compute utilization of 95%: Douillard et al. 2025, arXiv 2501.18512, Section 3.1 and
Table 4, and Charles et al. 2025, arXiv 2503.09799, Table 6. Goodput under failures: Douillard et
al. 2026, arXiv 2604.21428, Table 1.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import laconic as la
from laconic.advisor.plan.cluster import Cluster, Failures, Site, uniform
from laconic.advisor.plan.simulate import simulate_plan
from laconic.algorithms.round import Recipe
from laconic.policy.predict import predict

# -- bandwidth for 95% compute utilization ----

GRID = [10 ** (-1 + 4 * k / 49) for k in range(50)]
"""Gbit/s that the papers tried: 50 rates from 0.1 to 1000, evenly on a logarithmic scale. All of
their numbers are among these."""
TARGET = 0.95
BITS = 16
"""Of a parameter: bfloat16."""
WORKERS = 2
"""Replicas, as in the first paper's training runs; neither paper gives them for the simulation."""


@dataclass(frozen=True)
class Model:
    """``parameters``, ``layers`` and ``step`` seconds as stated; Gbit/s by period (0: data
    parallel) that the first and the second paper report."""

    name: str
    parameters: int
    layers: int
    step: float
    first: dict[int, float]
    second: dict[int, float]


MODELS = (
    Model("1B", 10**9, 24, 0.1, {0: 222.3, 100: 23.3}, {}),
    Model(
        "10B",
        10**10,
        48,
        0.8,
        {0: 268.3, 100: 33.9},
        {0: 222.3, 10: 152.6, 50: 41.0, 100: 23.3, 300: 9.1},
    ),
    Model("100B", 10**11, 108, 4.9, {0: 390.7, 100: 49.4}, {}),
)
PERIODS_SIMULATED = 2
PERIODS = (0, 10, 50, 100, 300)


def layer_by_layer(model: Model, period: int, rate: float) -> float:
    """Return the compute utilization in a schedule by layers, as the first paper describes it.

    A step computes every layer forward, then every layer backward in the opposite order, which
    takes twice as long. Every ``period`` steps (0: in each), the reduction of a layer starts when
    its backward pass ends, if the network is free; of several that wait, the lowest layer's is
    first. A layer's next forward pass waits for its reduction. The result is for periods in the
    middle of a run.
    """
    layers, bits = model.layers, model.parameters * BITS
    forward = model.step / 3 / layers
    reduction = bits / model.layers / (rate * 1e9)
    every = period or 1
    now, free = 0.0, 0.0
    sends: list[float] = []
    ready = [0.0] * layers
    for step in range(every * (PERIODS_SIMULATED + 1)):
        for layer in range(layers):
            now = max(now, ready[layer]) + forward
        ends = []
        for layer in reversed(range(layers)):
            now += 2 * forward
            ends.append((now, layer))
        if step % every == every - 1:
            sends.append(now)
            waiting = sorted(ends)
            while waiting:
                free = max(free, waiting[0][0])
                _, layer = chosen = min((e for e in waiting if e[0] <= free), key=lambda e: e[1])
                waiting.remove(chosen)
                free += reduction
                ready[layer] = free
    return every * PERIODS_SIMULATED * model.step / (sends[-1] - sends[0])


def planned(model: Model, period: int, rate: float) -> float:
    """Return the compute utilization that laconic's planner expects of its own rounds."""
    recipe: Recipe = la.diloco(period) if period else la.ddp()
    sites = uniform(WORKERS, WORKERS, rate=rate * 1e9, latency=0.0)
    cluster = Cluster(
        model.parameters, sites, step=model.step, dtype="bfloat16", spread=0.0, backward=2 / 3
    )
    return model.step / predict(recipe, cluster.facts()).seconds


def least_rate(utilization: Callable[[float], float]) -> float:
    """Return the least rate of the grid with which the target is reached."""
    return next((rate for rate in GRID if utilization(rate) >= TARGET), math.inf)


def bandwidths() -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| model, step | method | 2501.18512 | 2503.09799 | by layers | laconic |"
    yield "|---|---|---|---|---|---|"
    for model in MODELS:
        for period in PERIODS:
            name = f"period {period}" if period else "data parallel"
            theirs = [
                f"{of[period]:.4g}" if period in of else "" for of in (model.first, model.second)
            ]
            layers = least_rate(lambda rate, m=model, p=period: layer_by_layer(m, p, rate))
            ours = least_rate(lambda rate, m=model, p=period: planned(m, p, rate))
            yield (
                f"| {model.name}, {model.step:g} s | {name} | {' | '.join(theirs)} | {layers:.4g} "
                f"| {ours:.4g} |"
            )


# -- goodput under failures ----

YEAR = 365 * 86400.0
CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
TABLE: dict[tuple[int, bool], tuple[int, ...]] = {
    (1, False): (72, 57, 38, 27, 18),
    (1, True): (88, 80, 69, 58, 40),
    (2, True): (94, 88, 80, 70, 54),
    (4, True): (96, 93, 89, 82, 73),
    (8, True): (98, 96, 94, 88, 80),
    (16, True): (99, 98, 96, 93, 86),
}
"""Goodput in percent by the number of learners and whether they are elastic, as published."""
SLICE = 1000
"""Chips of a slice: not stated. It decides what the learners lose while a slice is away, which is
little."""
STEPS = {True: 10.0, False: 1.0}
"""Seconds of a step of elastic learners and others. A pause may come at any time within a step; one
that is not elastic loses the step that it was in."""
HOURS = {True: 30, False: 3}


def goodput(learners: int, elastic: bool, chips: int, repair: float, pause: float) -> float:
    """Return the planner's goodput of ``learners`` with so many ``chips`` in all.

    A learner that is not elastic waits for the ``repair`` of a failed chip. An elastic one pauses
    twice, when it loses a slice and when that is back. Several learners do not wait for each other:
    rounds close with a quorum of one, every 24 steps.
    """
    each = chips // learners
    failures = Failures(
        mtbf=YEAR,
        repair=repair,
        repairs="exponential",
        restart=0.0,
        detection=0.0,
        policy="static",
        checkpoint=1,
        reconfigure=pause,
    )
    cluster = Cluster(
        10**6,
        (Site("all", learners, 1e15),),
        step=STEPS[elastic],
        spread=0.0,
        chips=each,
        slices=max(each // SLICE, 1) if elastic else 1,
        failures=failures,
    )
    recipe = la.ddp() if learners == 1 else la.diloco(24, quorum=1)
    steps = round(HOURS[elastic] * 3600 / STEPS[elastic])
    return simulate_plan(recipe, cluster, steps).goodput


def fitted() -> tuple[float, float]:
    """Return the seconds until a failed chip is back and of a pause, which the paper's published
    text names without values, from its two rows of a single learner: the medians of what each of
    their entries implies, ``(1/goodput - 1) * time between failures``. A failure has two pauses."""

    def implied(row: Sequence[int]) -> float:
        each = [(100 / g - 1) * YEAR / n for g, n in zip(row, CHIPS, strict=True)]
        return statistics.median(each)

    return implied(TABLE[1, False]), implied(TABLE[1, True]) / 2


def goodputs() -> Iterator[str]:
    """Yield the lines of the table."""
    repair, pause = fitted()
    yield f"Repair {repair:.0f} s and pause {pause:.1f} s, from the rows of a single learner."
    yield ""
    heads = " | ".join(f"{n / 1e6:g}M chips" for n in CHIPS)
    yield f"| learners | {heads} |"
    yield "|---" * (len(CHIPS) + 1) + "|"
    errors = []
    for (learners, elastic), row in TABLE.items():
        name = f"{learners}" if elastic else f"{learners}, not elastic"
        cells = []
        for theirs, chips in zip(row, CHIPS, strict=True):
            ours = 100 * goodput(learners, elastic, chips, repair, pause)
            errors.append((learners > 1, abs(ours - theirs)))
            cells.append(f"{theirs} / {ours:.0f}")
        yield f"| {name} | {' | '.join(cells)} |"
    yield ""
    rest = [error for several, error in errors if several]
    yield (
        f"Each cell: published / laconic, in percent. Of the {len(rest)} with several learners, on "
        f"which nothing was fitted, ours differ by {statistics.fmean(rest):.1f} points on average "
        f"and {max(rest):.1f} at most."
    )
