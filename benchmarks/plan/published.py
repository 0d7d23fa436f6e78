"""Published numbers beside those of the planner, from the conditions that their papers state.

Bandwidth for a compute utilization of 95%: Douillard et al. 2025, arXiv 2501.18512, Section 3.1 and
Table 4, and Charles et al. 2025, arXiv 2503.09799, Table 6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import laconic as la
from laconic.advisor.plan.cluster import Cluster, uniform
from laconic.advisor.quorum import predict
from laconic.algorithms.round import Recipe

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
    sites = uniform(WORKERS, WORKERS, bandwidth=rate * 1e9, latency=0.0)
    cluster = Cluster(
        model.parameters,
        sites,
        step_time=model.step,
        dtype="bfloat16",
        spread=0.0,
        backward_share=2 / 3,
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
