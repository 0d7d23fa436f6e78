"""Average several runs of one recipe that differ in their seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from laconic.lab.race.comparison import interpolated, summary
from laconic.lab.race.result import SECONDS, STEPS, Axis, Point, Result, Row, grouped, number


@dataclass(frozen=True)
class Group:
    """The runs of one recipe.

    ``mean`` is a row of means; a value is NaN or None if a run lacks it. Its curve averages the
    runs that finished, at equal fractions of their length. ``low`` and ``high`` are the minimum and
    maximum loss at its points. To compare two groups, compare their runs
    (`laconic.lab.race.result.compared_runs`).
    """

    mean: Row
    runs: tuple[Row, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]

    @property
    def name(self) -> str:
        """The display name."""
        return self.mean.recipe


def groups(result: Result) -> list[Group]:
    """Return the recipes' groups in order of first appearance."""
    by_steps = bool(number(result, "steps")) and not number(result, "seconds")
    return [_group(runs, STEPS if by_steps else SECONDS) for runs in grouped(result.rows)]


def _group(runs: tuple[Row, ...], along: Axis) -> Group:
    if len(runs) == 1:
        losses = tuple(point.loss for point in runs[0].curve)
        return Group(runs[0], runs, losses, losses)
    lost = [row for row in runs if row.status != "ok"]
    points, low, high = _curve([row for row in runs if row.status == "ok" and row.curve], along)
    mean = replace(
        runs[0],
        status=lost[0].status if lost else "ok",
        error=lost[0].error if lost else None,
        steps=round(fmean(row.steps for row in runs)),
        seconds=_mean([row.seconds for row in runs]),
        seconds_per_step=_mean([row.seconds_per_step for row in runs]),
        loss=points[-1].loss if points else None,
        ledger_bytes_per_step=_mean([row.ledger_bytes_per_step for row in runs]),
        interface_bytes_per_step=_mean([row.interface_bytes_per_step for row in runs]),
        waiting=_mean([row.waiting for row in runs]),
        curve=tuple(points),
        notes=tuple(dict.fromkeys(note for row in runs for note in row.notes)),
    )
    return Group(mean, runs, tuple(low), tuple(high))


def _mean(values: Sequence[float | None]) -> float:
    """Return the mean, or NaN if a value is missing."""
    found = summary(values)
    return math.nan if found is None else found.mean


def _curve(
    runs: list[Row], along: Axis
) -> tuple[list[Point], list[float | None], list[float | None]]:
    """Return the mean curve and the minimum and maximum loss at each validation of any run."""
    if not runs:
        return [], [], []
    shares = {
        round(along(point) / (along(row.curve[-1]) or 1), 6) for row in runs for point in row.curve
    }
    points, low, high = [], [], []
    for share in sorted(shares):
        points_there = [_at(row, along, share) for row in runs]
        losses = _known([point.loss for point in points_there])
        distances = [point.distance for point in points_there]
        points.append(
            Point(
                round(fmean(point.step for point in points_there)),
                fmean(point.seconds for point in points_there),
                fmean(point.megabytes for point in points_there),
                _mean(losses),
                _mean(distances),
            )
        )
        low.append(min(losses) if losses else None)
        high.append(max(losses) if losses else None)
    return points, low, high


def _known(values: list[float | None]) -> list[float]:
    """Return all values, or an empty list if one is missing."""
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else []


def _at(row: Row, along: Axis, share: float) -> Point:
    """Return the row's curve at a fraction of its length, linear between validations."""
    position = share * along(row.curve[-1])

    def value(figure: str) -> float | None:
        pairs = [(along(p), getattr(p, figure)) for p in row.curve]
        known = [(at, float(v)) for at, v in pairs if v is not None]
        return interpolated(known, min(position, known[-1][0]) if known else position)

    step, seconds, megabytes = (value(name) or 0.0 for name in ("step", "seconds", "megabytes"))
    return Point(round(step), seconds, megabytes, value("loss"), value("distance"))
