"""Compare the rows of a race.

Losses are always compared twice: at equal time, which is what a user waits for, and after equal
steps, which shows the cost of an algorithm.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from laconic.lab.race.result import (
    SECONDS,
    STEPS,
    Axis,
    Result,
    Row,
    _finite,
    grouped,
    line,
    number,
)

LATE = 1.05
"""A row that ends at most this many times later than planned still counts as in time."""


def interpolated(pairs: Sequence[tuple[float, float]], position: float) -> float | None:
    """Interpolate (position, value) pairs linearly at ``position``. None outside their range."""
    if pairs and position == pairs[-1][0]:
        return pairs[-1][1]
    for (left, before), (right, after) in pairwise(pairs):
        if left <= position < right:
            return before + (after - before) * (position - left) / (right - left)
    return None


def loss_at(row: Row, axis: Axis, position: float) -> float | None:
    """Return the row's loss at ``position``, linear between validations. None outside its curve."""
    return interpolated(line(row, axis), position)


def reached(row: Row, axis: Axis, loss: float) -> float | None:
    """Return where along `axis` the row first reached ``loss``, linear between validations.

    None if it never did.
    """
    pairs = line(row, axis)
    for (left, before), (right, after) in pairwise(pairs):
        if after <= loss < before:
            return left + (right - left) * (before - loss) / (before - after)
    return None


def competing(result: Result) -> list[Row]:
    """Return the rows that compete: recipes that communicate and whose runs all finished."""
    return [row for runs in grouped(result.rows) if _compete(runs) for row in runs]


def _compete(runs: Sequence[Row]) -> bool:
    return not runs[0].reference and all(map(_finished, runs))


def finished(result: Result) -> list[Row]:
    """Return the rows that finished with a curve, including those for reference."""
    return [row for row in result.rows if _finished(row)]


def _finished(row: Row) -> bool:
    return row.status == "ok" and bool(line(row, STEPS))


def common(result: Result, axis: Axis) -> float | None:
    """Return where along `axis` the rows are compared. None if no row finished.

    Along time this is the time given to each row. Along steps, and in a race over a number of
    steps, it is the position that all rows reached. A row for reference that stopped far short of
    the others does not count.
    """
    budget = number(result, "seconds")
    if axis is SECONDS and budget is not None and finished(result):
        return budget
    competitors: list[float] = []
    baseline: list[float] = []
    for row in finished(result):
        ends = baseline if row.reference else competitors
        ends.append(line(row, axis)[-1][0])
    if not competitors:
        return min(baseline, default=None)
    return min(competitors + [end for end in baseline if end > 0.9 * min(competitors)])


def compared(result: Result, row: Row, axis: Axis) -> float | None:
    """Return the row's loss at the position where rows are compared along `axis`, or None.

    A row that ended before its time was up counts with its final loss. So does a row that ended
    slightly late because its last step was planned to end in time.
    """
    position, pairs = common(result, axis), line(row, axis)
    if position is None or not pairs:
        return None
    end = pairs[-1][0]
    if axis is SECONDS and number(result, "seconds") is not None and end <= LATE * position:
        position = end
    return loss_at(row, axis, position)


@dataclass(frozen=True)
class Summary:
    """The mean of `n` values and their spread, the sample standard deviation.

    It is sqrt(sum((value - mean)^2) / (n - 1)), and 0 for a single value.
    """

    mean: float
    spread: float
    n: int


def summary(values: Iterable[float | None]) -> Summary | None:
    """Summarize ``values``. None if there are none, or if one is missing or not finite."""
    figures = [_finite(value) for value in values]
    known = [value for value in figures if value is not None]
    if not known or len(known) < len(figures):
        return None
    spread = statistics.stdev(known) if len(known) > 1 else 0.0
    return Summary(statistics.fmean(known), spread, len(known))


def compared_runs(result: Result, runs: Iterable[Row], axis: Axis) -> Summary | None:
    """Summarize the losses of a recipe's runs where rows are compared along `axis`."""
    return summary(compared(result, row, axis) for row in runs)


def _losses(result: Result, axis: Axis) -> dict[str, float]:
    losses = {
        runs[0].recipe: compared_runs(result, runs, axis) for runs in grouped(finished(result))
    }
    return {name: loss.mean for name, loss in losses.items() if loss is not None}


def equal_steps(result: Result) -> dict[str, float]:
    """Return each recipe's mean validation loss at the largest step that all recipes reached."""
    return _losses(result, STEPS)


def equal_time(result: Result) -> dict[str, float]:
    """Return each recipe's mean validation loss when the time given to each is up.

    In a race over a number of steps, the time is that at which the first recipe ended.
    """
    return _losses(result, SECONDS)
