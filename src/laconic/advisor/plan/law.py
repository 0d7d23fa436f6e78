"""The loss that a published scaling law expects.

    L(N, M) = A * N**alpha * M**beta             DiLoCo: N parameters, M workers
    L(N) = A * N**alpha                          data-parallel training

Charles et al. 2025, "Communication-Efficient Language Model Training Scales Reliably and Robustly:
Scaling Laws for DiLoCo", arXiv 2503.09799, Tables 7 and 10. The fits are to the best loss on C4
over learning rates and batch sizes, with 20 tokens per parameter, H = 30, and Nesterov momentum of
0.9 outside, for N from 35 million to 2.4 billion and M = 1, 2, 4, 8. The paper also trained 4 and
10 billion parameters with M = 1, 2, 4.

Against all losses in the paper's Tables 4 and 5 the error of both fits is at most 1.8% up to 4
billion parameters, so `ERROR` is 2%. At 10 billion it is 3.3 to 4.6%, so that is outside. From
H = 30 to 100, the loss of streaming DiLoCo rises by up to 1% (Douillard et al. 2025, arXiv
2501.18512, Table 5): the range of longer periods is higher by `LONGER`. None of this is about other
data, other tokenizers, or settings that were not tuned.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from laconic.advisor.plan.fields import text_of
from laconic.algorithms.diloco_recipes import diloco
from laconic.algorithms.recipes import ddp
from laconic.algorithms.round import Recipe, workers_differ
from laconic.algorithms.schedules import Every, every
from laconic.algorithms.updates import OuterStep
from laconic.policy.predict import often

JOINT = 19.226, -0.0985, 0.0116
"""A, alpha, and beta of Table 10."""
DATA_PARALLEL = 18.129, -0.0953
"""A and alpha of Table 7."""
PARAMETERS = 35e6, 4e9
WORKERS = 1, 8
TUNED, FEWER = 2.4e9, 4
"""Above so many parameters, the paper has no more than so many workers."""
DILOCO = "diloco(period, lr=..., momentum=0.9)"
TOKENS = 20.0
"""Tokens per parameter."""
MOMENTUM = 0.9
NEAR = 0.1
"""How far the number of tokens may be from that, relatively."""
PERIODS = 30, 100
ERROR, LONGER = 0.02, 0.01
"""See the top of the file."""
OUTER_LR = {1: 0.4, 2: 0.6, 4: 0.6, 8: 0.8}
"""The best outer learning rate by number of workers, for 335 million parameters or more (Figure
7)."""
OUTER_LRS = 0.4, 1.0
"""The outer learning rates for which there is a number. The fits are to the best one, and the paper
does not give the loss at others far from it."""


@dataclass(frozen=True)
class Expected:
    """A ``loss`` in nats, from ``low`` to ``high``, or None where nothing is known. ``why``: what
    it is based on, or what it lacks. ``outer_lr``: the best one for this number of workers."""

    loss: float | None
    low: float | None
    high: float | None
    why: str
    outer_lr: float | None = None


def expected(recipe: Recipe, parameters: int, workers: int, tokens: float | None) -> Expected:
    """Return the loss of a run of ``recipe`` at its end, after ``tokens`` tokens of all workers, if
    the run is in the law's domain."""
    outside = _outside(recipe, parameters, workers, tokens)
    if outside:
        return Expected(None, None, None, f"no law for this run: {'; '.join(outside)}")
    if not workers_differ(recipe):
        a, alpha = DATA_PARALLEL
        return _within(a * parameters**alpha, 0.0, "data-parallel training", None)
    a, alpha, beta = JOINT
    near = min(OUTER_LR, key=lambda m: abs(math.log2(m / workers)))
    longer = LONGER if 1 / often(recipe[0]) > PERIODS[0] else 0.0
    loss = a * parameters**alpha * workers**beta
    return _within(loss, longer, "DiLoCo", OUTER_LR[near])


def _within(loss: float, longer: float, what: str, outer_lr: float | None) -> Expected:
    why = f"{what} on C4 with tuned settings, arXiv 2503.09799; other data have other losses"
    return Expected(loss, loss * (1 - ERROR), loss * (1 + ERROR + longer), why, outer_lr)


def _outside(recipe: Recipe, parameters: int, workers: int, tokens: float | None) -> list[str]:
    """Return why a run is not in the law's domain."""
    found = []
    if not PARAMETERS[0] <= parameters <= PARAMETERS[1]:
        found.append(f"it is for {PARAMETERS[0]:.3g} to {PARAMETERS[1]:.3g} parameters")
    if tokens is None:
        found.append("it needs the number of tokens (tokens: in the cluster, or --tokens)")
    elif abs(tokens / parameters / TOKENS - 1) > NEAR:
        found.append(
            f"it is for {TOKENS:g} tokens per parameter, and this run has {tokens / parameters:.3g}"
        )
    if not workers_differ(recipe):
        if recipe != ddp():
            found.append("it is for ddp() without a codec")
        return found
    if not WORKERS[0] <= workers <= WORKERS[1]:
        found.append(f"it is for {WORKERS[0]} to {WORKERS[1]} workers")
    elif parameters > TUNED and workers > FEWER:
        found.append(f"above {TUNED:.3g} parameters, it is for at most {FEWER} workers")
    return found + _unlike_diloco(recipe)


def _unlike_diloco(recipe: Recipe) -> list[str]:
    """Return how a recipe differs from `DILOCO`. Rounds are data, so they are compared as such."""
    first = recipe[0]
    if not isinstance(first.when, Every) or not isinstance(first.update, OuterStep):
        return [f"it is for {DILOCO}"]
    period, lr, momentum = first.when.period, first.update.lr, first.update.momentum
    usual = replace(first, when=every(500), update=replace(first.update, lr=0.7, momentum=0.9))
    if (usual, *recipe[1:]) not in (diloco(), diloco(sharded=False)):
        return [f"it is for {DILOCO}, with no other options"]
    found = []
    if momentum != MOMENTUM:
        found.append(f"it is for an outer momentum of {MOMENTUM:g}, and this run has {momentum:g}")
    if not OUTER_LRS[0] <= lr <= OUTER_LRS[1]:
        found.append(
            f"it is for outer learning rates of {OUTER_LRS[0]:g} to {OUTER_LRS[1]:g}, and this run "
            f"has {lr:g}"
        )
    if not PERIODS[0] <= period <= PERIODS[1]:
        found.append(
            f"it is for periods of {PERIODS[0]} to {PERIODS[1]}, and this run has {period}"
        )
    return found


# -- a run's own curve ----

LEAST_POINTS, MOST_TIMES = 10, 10.0
"""The points that a curve must have, and how many times its length it is continued at most."""
WINDOWS = 0.1, 0.25, 0.5
"""The curve is fitted from these parts of its length on."""
LEAST_IN_WINDOW = 3
"""The points that the last of them must have."""


def read_curve(path: Path) -> list[tuple[float, float]]:
    """Return the points ``(step, loss)`` of a file with lines ``step,loss``. A line of names may
    come first. Raises ``ValueError`` for other files."""
    points = []
    for number, line in enumerate(text_of(path).splitlines(), 1):
        try:
            step, loss = (float(part) for part in line.split(","))
        except ValueError:
            if number == 1 or not line.strip():
                continue
            raise ValueError(f"{path}, line {number}: not step,loss: {line!r}") from None
        if not 0 < step < math.inf or not 0 < loss < math.inf:
            raise ValueError(
                f"{path}, line {number}: step and loss must be positive and finite, not {line!r}"
            )
        points.append((step, loss))
    if len(points) < LEAST_POINTS or len({step for step, _ in points}) < len(points):
        raise ValueError(
            f"{path} must have at least {LEAST_POINTS} different steps, not {len(points)} points"
        )
    points.sort()
    if not _fits(points):
        raise ValueError(
            f"{path} must have at least {LEAST_IN_WINDOW} points from step {points[-1][0] / 2:g} "
            "on, half of its last step: the curve is continued from these"
        )
    return points


def _fits(points: Sequence[tuple[float, float]]) -> bool:
    """Return whether the last of the `WINDOWS` has enough of the sorted ``points``."""
    return points[-LEAST_IN_WINDOW][0] >= WINDOWS[-1] * points[-1][0]


def continued(points: Sequence[tuple[float, float]], steps: int) -> Expected:
    """Return the loss after ``steps`` steps of the run whose pilot had these ``points``.

    ``L = b * step**-c`` and ``L = a - b * log(step)`` are fitted to the points in each of
    `WINDOWS`. The loss is the median of all; the range is theirs, and twice the scatter around
    them."""
    last = points[-1][0]
    if steps > MOST_TIMES * last:
        why = (
            f"no curve for this run: the pilot has {last:,.0f} steps, and is continued to "
            f"{MOST_TIMES:g} times as many at most"
        )
        return Expected(None, None, None, why)
    found, scatter = [], 0.0
    for window in WINDOWS:
        used = [(math.log(s), loss) for s, loss in points if s >= window * last]
        for power in (True, False):
            y = [math.log(loss) if power else loss for _, loss in used]
            x = [at for at, _ in used]
            slope, base = statistics.linear_regression(x, y)
            end = base + slope * math.log(steps)
            found.append(math.exp(end) if power else end)
            fitted = [base + slope * at for at in x]
            rest = [
                loss - (math.exp(f) if power else f)
                for (_, loss), f in zip(used, fitted, strict=True)
            ]
            scatter = max(scatter, statistics.pstdev(rest))
    low, high = min(found) - 2 * scatter, max(found) + 2 * scatter
    why = f"continued from a pilot of {last:,.0f} steps"
    return Expected(statistics.median(found), max(low, 0.0), high, why)
