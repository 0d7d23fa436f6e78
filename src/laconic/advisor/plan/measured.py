"""A cluster as a real run has measured it: from the records of ``attach(..., metrics=FILE)``."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from laconic.advisor.plan.cluster import Cluster
from laconic.units import format_rate, format_seconds

ENOUGH_BYTES = 1e5
"""A call's rate counts if at least so many bytes were sent between two records: shorter messages
take their latency."""


@dataclass(frozen=True)
class Measured:
    """A run by its records: its ``recipe``; ``step``: seconds of computing of a step, and
    ``spread``: see `Cluster`; ``rate``: bit/s of the messages of rank 0, None if it has sent too
    little."""

    recipe: str
    step: float
    spread: float
    rate: float | None

    def __str__(self) -> str:
        rate = "" if self.rate is None else f"; messages at {format_rate(self.rate)}"
        return (
            f"measured: {self.recipe}, a step computes for {format_seconds(self.step)}, spread "
            f"{self.spread:.0%}{rate}"
        )


def calibrated(cluster: Cluster, path: Path) -> tuple[Cluster, Measured]:
    """Return ``cluster`` with what the records in ``path`` say about step times, their spread, and
    the network, and the measured run. A measured rate is one that all limits on the way allow, so
    uplinks do not count beside it. Raises ``ValueError`` if the records say too little."""
    measured = read_records(path)
    sites = tuple(replace(site, step=None) for site in cluster.sites)
    if measured.rate is not None:
        sites = tuple(replace(site, rate=measured.rate, uplink=None) for site in sites)
    return replace(cluster, sites=sites, step=measured.step, spread=measured.spread), measured


def read_records(path: Path) -> Measured:
    """Return the last run in the records of ``path``."""
    start, *records = _last_run(path)
    steps = [r for r in records if r.get("steps") and r.get("seconds")]
    own = [r["seconds"] * (1 - (r.get("waiting") or 0.0)) for r in steps]
    if not sum(own) > 0:
        raise ValueError(f"{path} has no time of computing: let the run take some steps first")
    step = sum(own) / sum(r["steps"] for r in steps)
    # the mean of k independent steps varies by the k-th root of one step's
    each = [
        abs(t / r["steps"] / step - 1) * math.sqrt(r["steps"])
        for t, r in zip(own, steps, strict=True)
    ]
    spread = statistics.median(each) / 0.6745 if len(each) > 1 else 0.0
    return Measured(start.get("recipe") or "", step, spread, _rate(steps))


def _last_run(path: Path) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    *lines, _ = path.read_bytes().split(b"\n")  # a run may be writing the last line
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            begins = record["event"] == "start"
        except (ValueError, TypeError, KeyError):
            raise ValueError(
                f"{path}, line {number}: not a record of laconic.attach(..., metrics=)"
            ) from None
        found = [record] if begins else [*found, record]
    if not found or found[0]["event"] != "start":
        raise ValueError(f"{path} has no start of a run")
    return found


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
