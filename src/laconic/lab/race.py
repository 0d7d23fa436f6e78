"""A race: the same model trained under one recipe after another on the hosts of a cluster."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from laconic.errors import check_choice, check_int
from laconic.lab import timeline as timelines
from laconic.lab import workloads
from laconic.lab.cluster import (
    Cluster,
    Loopback,
    NamespacesUnavailable,
    check_hosts,
    check_rate,
    launch,
)
from laconic.lab.jobs import Job, Outcome
from laconic.lab.result import NO_COMMUNICATION, Point, Result, Rounds, Row
from laconic.lab.worker import Spec
from laconic.parse import parse_recipe
from laconic.updates import OuterStep

Event = dict[str, Any]
Watch = Callable[[str, Event], None]
"""Told (recipe, event) while a row runs; events are those of `laconic.lab.worker`, and a last one
``{"event": "done", "row": Row}``."""

FEW_ROUNDS = 100
"""Outer rounds below which DiLoCo's usual momentum of 0.9 overshoots."""
DIVERGED = 3.0
"""A loss this many times the one before the first step counts as diverged."""
RANK_TIMEOUT = 60.0
"""Seconds after which a rank that does not answer fails its row."""


@dataclass(frozen=True)
class Settings:
    """What to race, and where. Exactly one of ``seconds`` and ``steps`` is set. ``bandwidth`` in
    bit/s of each host, ``latency`` in seconds added to each message."""

    recipes: tuple[str, ...]
    hosts: int = 4
    per_host: int = 1
    bandwidth: float = 100e6
    latency: float = 0.0
    workload: str = "text"
    data: str | None = None
    seconds: float | None = 30.0
    steps: int | None = None
    seed: int = 0
    validations: int = 8

    def check(self) -> None:
        """Raise ``ValueError`` for anything that would fail later, before anything is started."""
        if not self.recipes:
            raise ValueError("give at least one recipe, like 'local_sgd(12)'")
        for text in self.recipes:
            parse_recipe(text)
        check_int("hosts", self.hosts, 1)
        check_hosts(self.hosts)
        check_rate(self.bandwidth)
        check_int("per-host", self.per_host, 1)
        if self.steps is not None:
            check_int("steps", self.steps, 1)
        if (self.seconds is None) == (self.steps is None):
            raise ValueError("give either seconds or steps")
        if self.seconds is not None and not 1 <= self.seconds < math.inf:
            raise ValueError(f"seconds must be a finite number of at least 1, not {self.seconds:g}")
        check_choice("workload", self.workload, ("digits", "text"))
        data = None if self.data is None else Path(self.data)
        workload = workloads.load(self.workload, data=data)
        workload.batches(self.hosts * self.per_host - 1, self.hosts * self.per_host, self.seed)


@contextmanager
def network(settings: Settings) -> Iterator[tuple[Cluster | Loopback, str | None]]:
    """The emulated hosts; or, where the system permits none, this machine and the reason."""
    reason = None
    cluster: Cluster | Loopback
    try:
        cluster = Cluster(settings.hosts, bandwidth=settings.bandwidth)
    except NamespacesUnavailable as error:
        cluster, reason = Loopback(settings.hosts), str(error)
    with cluster:
        yield cluster, reason


def run(settings: Settings, command: str, watch: Watch) -> Iterator[Result]:
    """Race all recipes, one after the other, after a row without communication; yields the
    result so far after every row. A row that fails says so and the others go on."""
    settings.check()
    rows: list[Row] = []
    parameters = 0
    with network(settings) as (cluster, reason):
        for text in ("", *settings.recipes):
            row, size = _row(settings, cluster, text, watch)
            rows.append(row)
            parameters = size or parameters
            yield Result(
                rows=tuple(rows),
                settings=_described(settings, parameters, reason),
                machine=_machine(),
                versions={"python": platform.python_version(), "torch": torch.__version__},
                command=command,
            )


def _described(settings: Settings, parameters: int, reason: str | None) -> dict[str, object]:
    described: dict[str, object] = {
        name: getattr(settings, name)
        for name in (
            "workload", "data", "hosts", "per_host", "bandwidth", "latency", "seconds", "steps",
            "seed",
        )
    }  # fmt: skip
    described["parameters"] = parameters
    described["network"] = "emulated" if reason is None else "throttled"
    described["reason"] = reason
    return described


def _machine() -> dict[str, str]:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    return {"system": platform.platform(), "cores": str(cores), "processor": _processor()}


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if "model name" in line]
        return names[0] if names else platform.machine()
    except OSError:
        return platform.machine()


def _row(
    settings: Settings, cluster: Cluster | Loopback, text: str, watch: Watch
) -> tuple[Row, int]:
    """One recipe's run, and the model's parameters."""
    name = text or NO_COMMUNICATION
    spec = Spec(
        recipe=text,
        workload=settings.workload,
        data=settings.data,
        seconds=settings.seconds,
        steps=settings.steps,
        seed=settings.seed,
        validations=settings.validations,
        # emulated hosts have slow cards; elsewhere the link is slowed down, ranks sharing a card
        bandwidth=None if cluster.emulated else settings.bandwidth / settings.per_host,
        latency=settings.latency,
        interface=cluster.interface if cluster.emulated else None,
        timeout=RANK_TIMEOUT,
    )
    watch(name, {"event": "launched"})
    argv = [sys.executable, "-m", "laconic.lab.worker", spec.to_json()]
    # the user's current directory may hold modules named like those of the standard library
    job = launch(cluster, argv, per_host=settings.per_host, env={"PYTHONSAFEPATH": "1"})
    last: Event = {}
    for event in _events(job):
        watch(name, event)
        last = event if event["event"] in ("step", "end") else last
    outcomes = job.wait(timeout=RANK_TIMEOUT)
    row = replace(_read(name, last, outcomes, settings), seed=settings.seed)
    if row.status != "failed":
        records = [_said(job, rank, "timeline") for rank in range(len(outcomes))]
        timeline = timelines.on_one_clock(
            [r["ran"] for r in records], [r["spans"] for r in records]
        )
        row = replace(row, timeline=timeline, rounds=_rounds(job, settings))
    watch(name, {"event": "done", "row": row})
    return row, int(last.get("parameters", 0))


def _said(job: Job, rank: int, event: str) -> Event:
    """The rank's last event of that kind."""
    lines = [line for line in job.stdout(rank).splitlines() if line.startswith("{")]
    return next(e for e in map(json.loads, reversed(lines)) if e["event"] == event)


def _rounds(job: Job, settings: Settings) -> tuple[Rounds, ...]:
    """What each host sent when."""
    rounds = (Rounds(**fields) for fields in _said(job, 0, "rounds")["rounds"])
    return tuple(replace(r, bytes=r.bytes * settings.per_host) for r in rounds)


def _events(job: Job) -> Iterator[Event]:
    """What rank 0 says, as it says it, until the job has ended or failed."""
    seen, ended = 0, False
    while not ended:
        ended = job.settled(timeout=0.2)
        lines = job.stdout(0).split("\n")
        for line in lines[seen:-1]:
            if line.startswith("{"):
                yield json.loads(line)
        seen = len(lines) - 1


def _read(name: str, last: Event, outcomes: list[Outcome], settings: Settings) -> Row:
    """A row from rank 0's last words and how the ranks ended."""
    failed = [outcome for outcome in outcomes if outcome.failed]
    if failed or last.get("event") != "end":
        first = next((o for o in failed if o.signal), failed[0] if failed else None)
        return Row(
            name, "failed", _reason(first), last.get("step", 0), 0.0, math.nan, None, math.nan,
            None, math.nan, (),
        )  # fmt: skip
    steps, each = last["steps"], settings.per_host
    curve = tuple(
        Point(s, seconds, mb * each, *figures) for s, seconds, mb, *figures in last["curve"]
    )
    lost = curve[-1].loss is None
    diverged = lost or (curve[0].loss or 0) * DIVERGED < (curve[-1].loss or 0)
    row = Row(
        recipe=name,
        status="diverged" if diverged else "ok",
        error=f"the loss is {'not a number' if lost else curve[-1].loss} after step {steps}"
        if diverged
        else None,
        steps=steps,
        seconds=last["seconds"],
        seconds_per_step=last["seconds"] / steps,
        loss=curve[-1].loss,
        ledger_bytes_per_step=last["sent"] * each / steps,
        interface_bytes_per_step=last["frames"] / steps,
        waiting=last["waiting"],
        curve=curve,
    )
    return replace(row, notes=_advice(name, steps))


def _reason(outcome: Outcome | None) -> str:
    if outcome is None:
        return "the run ended without a result"
    words = outcome.stderr.strip().splitlines()[-1:] if outcome.signal is None else []
    return ": ".join([str(outcome), *words])


def _advice(name: str, steps: int) -> tuple[str, ...]:
    """What a reader must know of a recipe in a run this short."""
    if name == NO_COMMUNICATION:
        return ()
    recipe = parse_recipe(name)
    last = [r for r in recipe if r.on == "params"][-1:]
    if last and not any(last[0].when(step) for step in range(1, steps + 1)):
        return ("the run ended before its first round: give it more time",)
    for r in recipe:
        if isinstance(r.update, OuterStep) and r.update.outer is None and r.update.momentum > 0.6:
            rounds = sum(r.when(step) for step in range(1, steps + 1))
            if rounds < FEW_ROUNDS:
                return (
                    f"{rounds} outer rounds; below about {FEW_ROUNDS} an outer momentum of "
                    f"{r.update.momentum:g} overshoots, try 0.3 to 0.6",
                )
    return ()
