"""Compare the recipes of a race.

Losses are always compared twice: at equal time, which is what a user waits for, and after equal
steps, which shows the cost of an algorithm.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from laconic.lab.race.result import (
    SECONDS,
    STEPS,
    Axis,
    Point,
    Result,
    Row,
    _finite,
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

    That is its first validation if it had less there already, and None if it never did.
    """
    pairs = line(row, axis)
    if pairs and pairs[0][1] <= loss:
        return pairs[0][0]
    for (left, before), (right, after) in pairwise(pairs):
        if after <= loss < before:
            return left + (right - left) * (before - loss) / (before - after)
    return None


def limit(result: Result) -> Axis:
    """Return what the race gives to each recipe: seconds, or steps."""
    by_steps = bool(number(result, "steps")) and not number(result, "seconds")
    return STEPS if by_steps else SECONDS


def finished(result: Result) -> list[Row]:
    """Return the rows that finished with a curve, including those for reference."""
    return [row for row in result.rows if row.status == "ok" and line(row, STEPS)]


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


@dataclass(frozen=True)
class Group:
    """The runs of one recipe, one per seed.

    ``curve`` is the mean of the runs that finished, at equal fractions of their length. ``low`` and
    ``high`` are the least and the largest loss at its points.
    """

    runs: tuple[Row, ...]
    curve: tuple[Point, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]

    @property
    def first(self) -> Row:
        """The first run."""
        return self.runs[0]

    @property
    def name(self) -> str:
        """The recipe."""
        return self.first.recipe

    @property
    def lost(self) -> list[Row]:
        """The runs that did not finish."""
        return [row for row in self.runs if row.status != "ok"]

    @property
    def status(self) -> str:
        """How the runs ended: "ok", or how the first that was lost did."""
        return self.lost[0].status if self.lost else "ok"


def groups(result: Result) -> list[Group]:
    """Return the recipes' groups, in order of first appearance."""
    runs: dict[tuple[str, bool], list[Row]] = {}
    for row in result.rows:
        runs.setdefault((row.recipe, row.peer), []).append(row)
    return [_group(tuple(rows), limit(result)) for rows in runs.values()]


def _group(runs: tuple[Row, ...], along: Axis) -> Group:
    used = runs if len(runs) == 1 else [row for row in runs if row.status == "ok" and row.curve]
    points, low, high = list[Point](), list[float | None](), list[float | None]()
    for spot in used[0].curve if used else ():
        share = along(spot) / (along(used[0].curve[-1]) or 1)
        each = [_at(row, along, share) if len(used) > 1 else spot for row in used]
        losses = [point.loss for point in each]
        known = [loss for loss in losses if loss is not None]
        points.append(_point(partial(_mean, each)))
        low.append(min(known) if len(known) == len(each) else None)
        high.append(max(known) if len(known) == len(each) else None)
    return Group(runs, tuple(points), tuple(low), tuple(high))


def _point(value: Callable[[str], float | None]) -> Point:
    """Return a point from its figures by their names."""
    step, seconds, megabytes = (value(name) or 0.0 for name in ("step", "seconds", "megabytes"))
    return Point(round(step), seconds, megabytes, value("loss"), value("distance"))


def _mean(points: Sequence[Point], figure: str) -> float | None:
    """Return the mean of a figure, or None if a point lacks it."""
    found = summary(getattr(point, figure) for point in points)
    return None if found is None else found.mean


def _at(row: Row, along: Axis, share: float) -> Point:
    """Return the row's curve at a fraction of its length, linear between validations."""
    position = share * along(row.curve[-1])

    def value(figure: str) -> float | None:
        known = [(along(p), float(v)) for p in row.curve if (v := getattr(p, figure)) is not None]
        return interpolated(known, min(position, known[-1][0]) if known else position)

    return _point(value)


def competing(result: Result) -> list[Group]:
    """Return the recipes that compete: those that communicate, and whose runs all finished."""
    done = finished(result)
    return [
        group
        for group in groups(result)
        if not group.first.reference and all(row in done for row in group.runs)
    ]


def standing(result: Result, axis: Axis) -> list[tuple[Group, Summary]]:
    """Return the recipes that compete, with their losses along ``axis``, the lowest first."""
    found = [(group, compared_runs(result, group, axis)) for group in competing(result)]
    known = [(group, losses) for group, losses in found if losses is not None]
    return sorted(known, key=lambda pair: pair[1].mean)


def compared_runs(result: Result, group: Group, axis: Axis) -> Summary | None:
    """Summarize the losses of a recipe's runs where rows are compared along ``axis``."""
    return summary(compared(result, row, axis) for row in group.runs)


def losses(result: Result, axis: Axis) -> dict[str, float]:
    """Return the mean loss of each recipe that finished, where rows are compared along ``axis``."""
    done = finished(result)
    found = {
        group.name: summary(compared(result, row, axis) for row in group.runs if row in done)
        for group in groups(result)
    }
    return {name: loss.mean for name, loss in found.items() if loss is not None}


def seconds_to_ddp(result: Result, row: Row) -> float | None:
    """Return after how many seconds a run first had the final loss of DDP, or None."""
    for group, loss in standing(result, limit(result)):
        if group.name.partition("(")[0] == "ddp":
            return reached(row, SECONDS, loss.mean)
    return None
