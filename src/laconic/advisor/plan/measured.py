"""A cluster as a real run has measured it: from the records of ``attach(..., metrics=FILE)``."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from laconic.advisor.plan.cluster import Cluster
from laconic.advisor.plan.report import Planned
from laconic.algorithms.parse import parse_recipe
from laconic.units import format_rate, format_seconds, three_digits

ENOUGH_BYTES = 1e5
"""A call's rate counts if at least so many bytes were sent between two records: shorter messages
take their latency."""
POINTS = (0.25, 0.5, 0.75, 1.0)
"""Parts of the run at which the timelines are compared."""


@dataclass(frozen=True)
class Measured:
    """A run by its records. ``recipe``; ``workers`` at its start; ``step``: seconds of computing of
    a step, and ``spread``: see `Cluster`; ``rate``: bit/s of the messages of rank 0, None if it has
    sent too little; ``lost``: workers; ``mtbf``: of a worker, None if none was lost; ``away``:
    seconds until another one took its place, None if that never happened. ``marks``: points
    ``(seconds, step, workers)``. ``notes``: what a plan assumes because of it, in lines."""

    recipe: str
    workers: int
    step: float
    spread: float
    rate: float | None
    lost: int
    mtbf: float | None
    away: float | None
    marks: tuple[tuple[float, float, int], ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        rate = "" if self.rate is None else f"; messages at {format_rate(self.rate)}"
        lost = f"; {self.lost} workers lost" if self.lost else ""
        return (
            f"measured: {self.recipe} on {self.workers} workers, a step computes for "
            f"{format_seconds(self.step)}, spread {self.spread:.0%}{rate}{lost}"
        )

    def comparison(self, rows: Sequence[Planned]) -> Iterator[str]:
        """Yield lines with the measured timeline beside the planned one of the same recipe, or why
        there is none."""
        yield str(self)
        workers = rows[0].results[0].workers
        planned = next((row for row in rows if self._is_of(row)), None)
        if workers != self.workers:
            yield f"no timelines: {self.workers} workers were measured, and {workers} are planned"
            return
        if planned is None:
            texts = ", ".join(row.text for row in rows)
            yield f"no timelines: {self.recipe or 'no recipe'} was measured, and not {texts}"
            return
        last = self.marks[-1][1] - self.marks[0][1]
        known = [(0.0, 0.0), *((at, step) for at, step, _ in planned.results[0].marks)]
        yield f"{'step':>10}  {'measured':>10}  {'planned':>10}  difference"
        for part in POINTS:
            step = part * last
            took = _time_of(step, [(t, s - self.marks[0][1]) for t, s, _ in self.marks])
            would = _time_of(step, known)
            if took is None or would is None or not took:
                continue
            yield (
                f"{round(step):>10,}  {three_digits(took):>8} s  {three_digits(would):>8} s  "
                f"{would / took - 1:+.1%}"
            )

    def _is_of(self, row: Planned) -> bool:
        try:
            return row.recipe == parse_recipe(self.recipe)
        except ValueError:  # a recipe of the user's own
            return row.text == self.recipe


def _time_of(step: float, points: Sequence[tuple[float, float]]) -> float | None:
    """Return when ``step`` was reached, linear between ``points`` of time and step."""
    for (t0, s0), (t1, s1) in itertools.pairwise(points):
        if s0 <= step <= s1 and s1 > s0:
            return t0 + (t1 - t0) * (step - s0) / (s1 - s0)
    return None


def calibrated(cluster: Cluster, path: Path) -> tuple[Cluster, Measured]:
    """Return ``cluster`` with what the records in ``path`` say about step times, their spread,
    failures and the network, and the measured run. A measured rate is one that all limits on the
    way allow, so limits that workers share do not count beside it. Raises ``ValueError`` if the
    records say too little."""
    measured = read_records(path)
    sites = tuple(replace(site, step=None) for site in cluster.sites)
    links = cluster.links
    if measured.rate is not None:
        shared = any(s.uplink is not None for s in sites) or any(k.rate is not None for k in links)
        sites = tuple(replace(site, rate=measured.rate, uplink=None) for site in sites)
        links = tuple(replace(link, rate=None) for link in links)
        if shared:
            note = (
                f"the measured rate, {format_rate(measured.rate)} per worker, includes what "
                "workers share: the uplinks of sites and the rates of links are left out"
            )
            measured = replace(measured, notes=(note,))
    failures = cluster.failures
    if measured.mtbf is not None:
        failures = replace(failures, mtbf=measured.mtbf * cluster.chips)
        if measured.away is not None:
            failures = replace(failures, repair=measured.away, restart=0.0)
    changed = replace(
        cluster,
        sites=sites,
        links=links,
        step=measured.step,
        spread=measured.spread,
        failures=failures,
    )
    return changed, measured


def read_records(path: Path) -> Measured:
    """Return the last run in the records of ``path``."""
    records = _last_run(path)
    start = records[0]
    steps = [r for r in records[1:] if r.get("steps") and r.get("seconds")]
    if not steps:
        raise ValueError(f"{path} has no records of steps: let the run take some first")
    count = sum(r["steps"] for r in steps)
    own = [max(r["seconds"] * (1 - (r.get("waiting") or 0.0)), 0.0) for r in steps]
    step = sum(own) / count
    if not step:
        raise ValueError(
            f"{path} has no time of computing: waiting is 1 in all records of steps, so nothing is "
            "left of their seconds"
        )
    # the mean of k independent steps varies by the k-th root of one step's
    each = [
        (t / r["steps"] / step - 1) * math.sqrt(r["steps"]) for t, r in zip(own, steps, strict=True)
    ]
    spread = statistics.median(abs(x) for x in each) / 0.6745 if len(each) > 1 else 0.0
    workers, views = _workers(records)
    lost = max((r.get("workers_lost") or 0 for r in records), default=0)
    begin = start["time"]
    alive = _alive_seconds(views, begin, records[-1]["time"])
    return Measured(
        recipe=start.get("recipe") or "",
        workers=workers,
        step=step,
        spread=spread,
        rate=_rate(steps),
        lost=lost,
        mtbf=alive / lost if lost and alive > 0 else None,
        away=_away(views),
        marks=tuple(_marks(records, views, begin)),
    )


def _last_run(path: Path) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    *lines, rest = path.read_bytes().split(b"\n")
    for number, line in enumerate([*lines, rest], 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            if number > len(lines):  # the run was killed while it wrote this line, or still writes
                break
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("event"), str):
            raise ValueError(
                f"{path}, line {number}: not a record of laconic.attach(..., metrics=)"
            )
        _check(record, f"{path}, line {number}")
        if record["event"] == "start":
            found = []
        found.append(record)
    if not found or found[0]["event"] != "start":
        raise ValueError(f"{path} has no start of a run")
    return found


def _check(record: Mapping[str, Any], where: str) -> None:
    """Raise ``ValueError`` for a field that is missing or is not what it must be. Other fields may
    be null, or not there."""
    needed = {"time"} | ({"workers"} if record["event"] == "view" else set())
    for name in ("time", "step", "steps", "seconds", "waiting", "workers", "workers_lost"):
        _check_number(record, name, where, needed=name in needed)
    if not isinstance(record.get("recipe") or "", str):
        raise ValueError(f"{where}: recipe must be text, not {record['recipe']!r}")
    calls = record.get("calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"{where}: calls must be a list with the fields of each, not {calls!r}")
    for k, call in enumerate(calls):
        for name in ("bytes", "seconds"):
            _check_number(call, name, f"{where}: calls[{k}]", needed=True)


def _check_number(of: Mapping[str, Any], name: str, where: str, *, needed: bool) -> None:
    value = of.get(name)
    if value is None:
        if needed:
            raise ValueError(f"{where}: {name} is missing")
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value < math.inf:
        raise ValueError(f"{where}: {name} must be a number from 0 up, not {value!r}")


def _workers(records: Sequence[Mapping[str, Any]]) -> tuple[int, list[tuple[float, int]]]:
    """Return how many workers the run began with, and the times at which that changed."""
    views = [(r["time"], int(r["workers"])) for r in records if r["event"] == "view"]
    first = int(records[0].get("workers") or 0) or (views[0][1] if views else 1)
    return first, [(records[0]["time"], first), *views]


def _alive_seconds(views: Sequence[tuple[float, int]], begin: float, end: float) -> float:
    ends = [at for at, _ in views[1:]] + [end]
    return sum(n * (until - at) for (at, n), until in zip(views, ends, strict=True))


def _away(views: Sequence[tuple[float, int]]) -> float | None:
    """Return the mean seconds from a loss to the next worker that comes."""
    lost: list[float] = []
    times = []
    for (_, before), (at, after) in itertools.pairwise(views):
        if after < before:
            lost += [at] * (before - after)
        for _ in range(after - before):
            if lost:
                times.append(at - lost.pop(0))
    return statistics.fmean(times) if times else None


def _rate(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the bit/s of messages. A call's seconds include those of waiting for slower ranks, so
    the upper quartile counts."""
    rates = sorted(
        8 * call["bytes"] / call["seconds"]
        for record in steps
        for call in record.get("calls") or ()
        if call["bytes"] >= ENOUGH_BYTES and call["seconds"] > 0
    )
    return rates[3 * (len(rates) - 1) // 4] if rates else None


def _marks(
    records: Sequence[Mapping[str, Any]], views: Sequence[tuple[float, int]], begin: float
) -> Iterator[tuple[float, float, int]]:
    for record in records:
        if record.get("step") is not None:
            at = record["time"]
            n = [views[0][1], *(count for since, count in views if since <= at)][-1]
            yield at - begin, float(record["step"]), n
