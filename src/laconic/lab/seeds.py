"""Several runs of one recipe that differ in their seed: their mean, and how far they spread."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean
from typing import TypeVar

from laconic.lab.result import (
    SECONDS,
    STEPS,
    Axis,
    Point,
    Result,
    Row,
    interpolated,
    number,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """The runs of one recipe. ``mean``: a row of their means; its curve is taken at equal shares
    of the runs' length, ``low`` and ``high`` are the least and the greatest loss there."""

    mean: Row
    runs: tuple[Row, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]


def groups(result: Result) -> list[Group]:
    """The rows by recipe and source, in the order in which they first appear."""
    together: dict[tuple[str, str], list[Row]] = {}
    for row in result.rows:
        together.setdefault((row.recipe, row.source), []).append(row)
    by_steps = bool(number(result, "steps")) and not number(result, "seconds")
    return [_group(tuple(runs), STEPS if by_steps else SECONDS) for runs in together.values()]


def averaged(result: Result) -> Result:
    """The result with one row for each recipe: the mean of its runs."""
    return replace(result, rows=tuple(group.mean for group in groups(result)))


def _group(runs: tuple[Row, ...], along: Axis) -> Group:
    if len(runs) == 1:
        losses = tuple(point.loss for point in runs[0].curve)
        return Group(runs[0], runs, losses, losses)
    failed = next((row for row in runs if row.status != "ok"), None)
    points, low, high = _curve([row for row in runs if row.status == "ok" and row.curve], along)
    interfaces = [row.interface_bytes_per_step for row in runs]
    counted = [each for each in interfaces if each is not None]
    mean = replace(
        runs[0],
        status=failed.status if failed else "ok",
        error=f"seed {failed.seed}: {failed.error}" if failed else None,
        steps=round(fmean(row.steps for row in runs)),
        seconds=fmean(row.seconds for row in runs),
        seconds_per_step=fmean(row.seconds_per_step for row in runs),
        loss=points[-1].loss if points else None,
        ledger_bytes_per_step=fmean(row.ledger_bytes_per_step for row in runs),
        interface_bytes_per_step=fmean(counted) if counted else None,
        waiting=fmean(row.waiting for row in runs),
        curve=tuple(points),
        notes=tuple(dict.fromkeys(note for row in runs for note in row.notes)),
    )
    return Group(mean, runs, tuple(low), tuple(high))


def _curve(
    runs: list[Row], along: Axis
) -> tuple[list[Point], list[float | None], list[float | None]]:
    """The runs' mean, and the least and greatest loss, wherever one of them was validated."""
    if not runs:
        return [], [], []
    shares = {
        round(along(point) / (along(row.curve[-1]) or 1), 6) for row in runs for point in row.curve
    }
    points, low, high = [], [], []
    for share in sorted(shares):
        there = [_at(row, along, share) for row in runs]
        losses = _known([point.loss for point in there])
        distances = _known([point.distance for point in there])
        points.append(
            Point(
                round(fmean(point.step for point in there)),
                fmean(point.seconds for point in there),
                fmean(point.megabytes for point in there),
                fmean(losses) if losses else None,
                fmean(distances) if distances else None,
            )
        )
        low.append(min(losses) if losses else None)
        high.append(max(losses) if losses else None)
    return points, low, high


def _known(values: list[float | None]) -> list[float]:
    """All of them, or nothing where one is missing."""
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else []


def _at(row: Row, along: Axis, share: float) -> Point:
    """The row's curve at a share of its length, linear between validations."""
    position = share * along(row.curve[-1])

    def value(figure: str) -> float | None:
        pairs = [(along(p), getattr(p, figure)) for p in row.curve]
        known = [(at, float(v)) for at, v in pairs if v is not None]
        return interpolated(known, min(position, known[-1][0]) if known else position)

    step, seconds, megabytes = (value(name) or 0.0 for name in ("step", "seconds", "megabytes"))
    return Point(round(step), seconds, megabytes, value("loss"), value("distance"))
