"""Run a race: train the same model under one recipe after another on the hosts of a cluster."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from laconic.algorithms.auto import Auto
from laconic.algorithms.compile import check_quorum, has_quorum, in_groups
from laconic.algorithms.parse import parse_recipe
from laconic.algorithms.recipes import WITH_GROUPS
from laconic.algorithms.round import Recipe
from laconic.errors import check_float, check_int
from laconic.lab.emulation.cluster import Cluster, Loopback, emulate, launch
from laconic.lab.emulation.jobs import Job, Outcome
from laconic.lab.emulation.network import Network, check_host
from laconic.lab.race import rivals, user_files
from laconic.lab.race.notes import advice, quorum_notes
from laconic.lab.race.result import (
    FREE_NETWORK,
    NO_COMMUNICATION,
    Point,
    Result,
    Row,
    Status,
)
from laconic.lab.race.worker import NOT_FINITE, TIMEOUT, Spec

Event = dict[str, Any]
Watch = Callable[[str, Event], None]
"""Called with (recipe, event) while a row runs. Events are those of `worker`, and finally
``{"event": "done", "row": Row}``."""

DIVERGED = 3.0
"""A loss this many times the initial loss counts as diverged."""
UNTHROTTLED = "it needs emulated hosts: a throttled link slows only laconic's own messages"
"""Why another library has no row without emulated hosts."""
NO_THROTTLED_QUORUM = (
    "it needs emulated hosts: rounds with a quorum do not run over a throttled link"
)
"""Why a recipe has no row without emulated hosts."""


@dataclass(frozen=True)
class Settings:
    """What to race, and where.

    Exactly one of ``seconds`` and ``steps`` is set. ``slow_hosts`` gives the factor by which single
    hosts compute more slowly. Every recipe and every one of the ``rivals`` (other libraries) runs
    once per seed, after a row without communication unless ``baseline`` is False. The ``free``
    recipes run last, without a network, as processes of this machine. ``rules`` is a file with the
    user's own recipes. ``group_size`` is the number of adjacent workers per group, for recipes with
    rounds inside groups. ``lr_scale`` multiplies the learning rates of the workload.
    """

    recipes: tuple[str, ...]
    rivals: tuple[str, ...] = ()
    free: tuple[str, ...] = ()
    rules: str | None = None
    network: Network = field(default_factory=Network)
    per_host: int = 1
    group_size: int | None = None
    slow_hosts: Mapping[int, float] = field(default_factory=dict)
    workload: str = "text"
    lr_scale: float = 1.0
    data: str | None = None
    seconds: float | None = 30.0
    steps: int | None = None
    seeds: tuple[int, ...] = (0,)
    validations: int = 8
    baseline: bool = True

    @property
    def workers(self) -> int:
        """The number of processes."""
        return self.network.hosts * self.per_host

    def check(self) -> None:
        """Raise ``ValueError`` for anything that would fail later. Starts nothing."""
        if not (self.recipes or self.rivals or self.free or self.baseline):
            raise ValueError("give at least one recipe, like 'local_sgd(12)'")
        rules = self.user_recipes()
        recipes = {text: parse_recipe(text, rules) for text in (*self.recipes, *self.free)}
        for text in self.rivals:
            rivals.find(text)
        for text in (names := self.names()):
            if names.count(text) > 1:
                raise ValueError(f"{text} is given twice; --repeat runs everything several times")
        self.network.check()
        for host, factor in self.slow_hosts.items():
            check_host(host, self.network.hosts)
            check_float("the factor of a slow host", factor, 1.0)
        check_float("lr-scale", self.lr_scale, 0.0, strict=True)
        check_int("per-host", self.per_host, 1)
        self._check_groups(recipes)
        quorums = [text for text, recipe in recipes.items() if _has_quorum(recipe)]
        for text in quorums:
            compiled = recipes[text]
            assert not isinstance(compiled, Auto), "it has no quorum"
            check_quorum(compiled, self.workers, plain=True)
        if self.steps is not None and quorums:
            raise ValueError(
                f"workers take different numbers of steps under {quorums[0]}: give --seconds "
                "instead of --steps"
            )
        if self.steps is not None:
            check_int("steps", self.steps, 1)
        if (self.seconds is None) == (self.steps is None):
            raise ValueError("give either seconds or steps")
        if self.seconds is not None and not 1 <= self.seconds < math.inf:
            raise ValueError(f"seconds must be a finite number of at least 1, not {self.seconds:g}")
        for seed in self.seeds:
            check_int("seed", seed, 0)
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must differ from each other: {self.seeds}")
        self._check_workload()

    def names(self) -> tuple[str, ...]:
        """Return the rows' names in their order, without that of the row without communication."""
        return (*self.recipes, *self.rivals, *(text + FREE_NETWORK for text in self.free))

    def user_recipes(self) -> dict[str, Callable[..., Recipe]]:
        """Return the recipes of the rules file."""
        return {} if self.rules is None else user_files.rules(Path(self.rules))

    def _check_groups(self, recipes: Mapping[str, Recipe | Auto]) -> None:
        workers = self.workers
        if self.group_size is not None:
            check_int("group-size", self.group_size, 1)
            if workers % self.group_size:
                raise ValueError(
                    f"group-size must divide the number of workers, which is {workers}, not "
                    f"{self.group_size}"
                )
            if recipes and not any(isinstance(r, tuple) and in_groups(r) for r in recipes.values()):
                raise ValueError(
                    "--group-size is for recipes with rounds inside groups of workers, such as "
                    f"{WITH_GROUPS}, and none of these has any: remove it"
                )
            return
        for text, recipe in recipes.items():
            if not isinstance(recipe, Auto) and in_groups(recipe):
                raise ValueError(
                    f"{text} has rounds inside groups of workers: give the number of workers per "
                    "group, such as --group-size 2"
                )

    def _check_workload(self) -> None:
        workload = user_files.load_workload(self.workload, self.data)
        if user_files.is_workload(self.workload):
            user_files.try_out(workload, self.workers, self.seeds[0])
        else:
            workload.batches(self.workers - 1, self.workers, self.seeds[0])


def run(settings: Settings, command: str, watch: Watch) -> Iterator[Result]:
    """Race all recipes and other libraries, and yield the result so far after every row.

    The row without communication comes first. All rows of one seed run before the next seed, so
    that a machine that slows down affects all recipes equally. A row that fails reports it, and the
    others continue. `Settings.check` must have accepted ``settings``.
    """
    rows: list[Row] = []
    parameters = 0
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    missing: dict[str, str] = {}
    for text in settings.rivals:
        rival = rivals.find(text)
        if (installed := rival.version()) is None:
            missing[text] = f"not installed: run make peers, or pip install {rival.package}"
        else:
            versions[rival.name] = installed
    names = (*[NO_COMMUNICATION] * settings.baseline, *settings.names())
    network, unlimited = settings.network, Network(settings.network.hosts, bandwidth=None)
    with emulate(network) as (cluster, reason), Loopback(unlimited) as free:
        if not cluster.emulated:
            known, rules = settings.recipes, settings.user_recipes()
            quorums = [text for text in known if _has_quorum(parse_recipe(text, rules))]
            missing = dict.fromkeys(settings.rivals, UNTHROTTLED)
            missing |= dict.fromkeys(quorums, NO_THROTTLED_QUORUM)
        for seed in settings.seeds:
            for name in names:
                if name in missing:
                    if seed != settings.seeds[0]:
                        continue
                    row, size = _no_row(name, "absent", missing[name]), 0
                    watch(name, {"event": "done", "row": row})
                else:
                    row, size = _row(settings, cluster, free, name, seed, watch)
                rows.append(replace(row, seed=seed, peer=name in settings.rivals))
                parameters = size or parameters
                yield Result(
                    rows=tuple(rows),
                    settings={
                        **_described(settings, parameters, reason),
                        "congestion_control": cluster.congestion_control,
                    },
                    machine=machine(),
                    versions=versions,
                    command=command,
                )


def _described(settings: Settings, parameters: int, reason: str | None) -> dict[str, object]:
    described: dict[str, object] = {
        name: getattr(settings, name)
        for name in (
            "workload", "lr_scale", "data", "rules", "per_host", "group_size", "slow_hosts",
            "seconds", "steps", "seeds",
        )
    }  # fmt: skip
    described |= settings.network.document()
    described["seed"] = settings.seeds[0]
    described["parameters"] = parameters
    described["network"] = "emulated" if reason is None else "throttled"
    described["reason"] = reason
    return described


def machine() -> dict[str, str]:
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
    settings: Settings,
    cluster: Cluster | Loopback,
    free: Loopback,
    name: str,
    seed: int,
    watch: Watch,
) -> tuple[Row, int]:
    """Run one row. Return the row and the model's parameter count."""
    text = "" if name == NO_COMMUNICATION else name.removesuffix(FREE_NETWORK)
    peer = name in settings.rivals
    cluster = free if name.endswith(FREE_NETWORK) else cluster
    spec = Spec(
        recipe=text,
        peer=peer,
        rules=settings.rules,
        group_size=settings.group_size,
        workload=settings.workload,
        lr_scale=settings.lr_scale,
        data=settings.data,
        seconds=settings.seconds,
        steps=settings.steps,
        seed=seed,
        validations=settings.validations,
        paces=[settings.slow_hosts.get(host, 1.0) for host in range(settings.network.hosts)],
        interface=cluster.interface if cluster.emulated else None,
    )
    watch(name, {"event": "launched"})
    argv = [sys.executable, "-m", "laconic.lab.race.worker", spec.to_json()]
    # The user's current directory may contain modules named like those of the standard library.
    job = launch(cluster, argv, per_host=settings.per_host, env={"PYTHONSAFEPATH": "1"})
    last: Event = {}
    for event in _events(job):
        watch(name, event)
        last = event if event["event"] in ("step", "end") else last
    outcomes = job.wait(timeout=TIMEOUT)
    row = _row_from(name, peer, last, outcomes, settings)
    watch(name, {"event": "done", "row": row})
    return row, int(last.get("parameters", 0))


def _events(job: Job) -> Iterator[Event]:
    """Yield rank 0's events as they come, until the job has ended or failed."""
    seen, ended = 0, False
    while not ended:
        ended = job.settled(timeout=0.2)
        lines = job.stdout(0).split("\n")
        for line in lines[seen:-1]:
            if line.startswith("{"):
                yield json.loads(line)
        seen = len(lines) - 1


def _row_from(
    name: str, peer: bool, last: Event, outcomes: list[Outcome], settings: Settings
) -> Row:
    """Return a row from rank 0's last event and the ranks' outcomes."""
    failed = [outcome for outcome in outcomes if outcome.failed]
    if failed or last.get("event") != "end":
        first = next((o for o in failed if o.signal), failed[0] if failed else None)
        diverged = first is not None and first.exit_code == NOT_FINITE
        status: Status = "diverged" if diverged else "failed"
        return _no_row(name, status, _reason(first), last.get("step", 0))
    steps = last["steps"]
    curve = tuple(Point(*point) for point in last["curve"])
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
        ledger_bytes_per_step=last["sent"] / steps,
        interface_bytes_per_step=last["frames"] / steps,
        waiting=last["waiting"],
        curve=curve,
        worker_steps=tuple(map(round, last["worker_steps"])),
    )
    if name == NO_COMMUNICATION:
        return row
    text = name.removesuffix(FREE_NETWORK)
    recipe = rivals.find(name).rounds if peer else parse_recipe(text, settings.user_recipes())
    if isinstance(recipe, Auto):
        return replace(row, notes=tuple(last["choices"]))
    if _has_quorum(recipe):
        return replace(row, notes=quorum_notes(row.worker_steps, last["rosters"]))
    return replace(row, notes=advice(recipe, steps))


def _has_quorum(recipe: Recipe | Auto) -> bool:
    return not isinstance(recipe, Auto) and has_quorum(recipe)


def _no_row(name: str, status: Status, why: str, steps: int = 0) -> Row:
    return Row(name, status, why, steps, 0.0, math.nan, None, math.nan, None, math.nan, ())


def _reason(outcome: Outcome | None) -> str:
    if outcome is None:
        return "the run ended without a result"
    words = outcome.stderr.strip().splitlines()[-1:] if outcome.signal is None else []
    return ": ".join([str(outcome), *words])
