"""Plans beside real runs on emulated hosts, in 24 settings: unequal links, stragglers, and kills.

Every plan follows from the description of the setting: nothing is fitted to what was measured. A
killed host's time is known from the lab; the plan is told when it was killed.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.plan.worker import PARAMETERS
from benchmarks.study import Journal, table
from laconic.advisor.plan.cluster import Cluster, Failures, Site
from laconic.advisor.plan.simulate import recipe_of, simulate_plan
from laconic.algorithms.parse import parse_recipe
from laconic.lab.race.runner import machine
from laconic.policy.predict import often

HOSTS = 4
STEP = 0.06
PAYLOAD = 8948 / 9014
"""The share of what is sent that is no protocol header: the lab's packets have 9,000 bytes."""
DOWNLOAD = 10e9
"""The lab shapes what a host sends, not what it receives."""
SECONDS = 12.0
"""What a run is planned to take, at most `MOST` steps."""
LONG = 22.0
"""The same with a kill."""
MOST = 400
KILL, RESTART = 9.0, 3.0
"""Seconds from the start of the lab until a host is killed, and until its program starts again."""
STARTS = 4.0
"""Seconds that a program takes to import torch and to find the others, on a host that starts."""
GONE = 0.1
"""Seconds until the others notice a process that was killed (docs/elastic.md)."""
LONG_RUN = 1000
"""Steps of a plan for a run that ends by time: its seconds per step do not depend on them."""
SEEDS = 5
MEDIAN, WORST = 0.05, 0.2


@dataclass(frozen=True)
class Setting:
    """Hosts that each send at ``rate`` bit/s, or their own of ``rates``, ``latency`` seconds of a
    round trip; steps that take ``slow`` times as long on a host, with a ``spread``; and the hosts
    to ``kill``."""

    name: str
    recipe: str
    rate: float
    latency: float = 0.0
    rates: dict[int, float] = field(default_factory=dict)
    slow: dict[int, float] = field(default_factory=dict)
    spread: float = 0.05
    kill: tuple[int, ...] = ()

    @property
    def period(self) -> int:
        """Steps after which all rounds of the recipe have run."""
        recipe = parse_recipe(self.recipe)
        assert isinstance(recipe, tuple), "one of the settings"
        return max(round(1 / often(r)) for r in recipe)

    @property
    def warmup(self) -> int:
        """Steps before those that are measured."""
        return 2 * self.period

    @property
    def own_pace(self) -> bool:
        """Whether workers take different numbers of steps, so that the run ends by time."""
        return "quorum" in self.recipe


def settings() -> list[Setting]:
    """Return all settings."""
    recipes = (
        "ddp()",
        "local_sgd(8)",
        "diloco(16)",
        "streaming_diloco(16, 4, 2)",
        "sgp()",
    )
    quorum = "diloco(16, quorum=3, grace=0.05, pace='own')"
    found = []
    for recipe in (*recipes, quorum):
        found += [
            Setting("far apart", recipe, 50e6, latency=0.02),
            Setting("a slow link", recipe, 50e6, rates={2: 12.5e6}),
            Setting("stragglers", recipe, 100e6, slow={1: 2.0}, spread=0.3),
        ]
    found += [Setting("a kill", recipe, 50e6, kill=(1,)) for recipe in recipes]
    found.append(
        Setting("a slow link and stragglers", quorum, 50e6, rates={2: 12.5e6}, slow={1: 2.0})
    )
    return found


def cluster(setting: Setting, at: Sequence[tuple[int, float]] = ()) -> Cluster:
    """Describe a setting. Each host is a site of its own, so that its rate can differ."""
    sites = tuple(
        Site(
            f"host{host}",
            1,
            setting.rates.get(host, setting.rate) * PAYLOAD,
            step_time=STEP * setting.slow.get(host, 1.0),
            download=DOWNLOAD,
        )
        for host in range(HOSTS)
    )
    failures = Failures(repair=RESTART, restart=STARTS, detection=GONE, min_workers=2, at=tuple(at))
    return Cluster(
        PARAMETERS,
        sites,
        step_time=STEP,
        spread=setting.spread,
        latency=setting.latency,
        failures=failures,
    )


def length(setting: Setting) -> int:
    """Return how many steps to take: whole periods, for `SECONDS`."""
    each = planned(setting, 96)
    goal = LONG if setting.kill else SECONDS
    periods = max(round(min(goal / each, MOST) / setting.period), 2)
    return periods * setting.period


def planned(
    setting: Setting, steps: int, at: Sequence[tuple[int, float]] = (), seed: int = 0
) -> float:
    """Return the seconds per step of a plan of as many ``steps``, after the warmup. ``at``: hosts
    that fail, and how many seconds after the warmup."""
    known = cluster(setting)
    recipe = recipe_of(setting.recipe, known)
    warm = simulate_plan(recipe, known, setting.warmup, seed).seconds
    failing = cluster(setting, [(host, warm + seconds) for host, seconds in at])
    whole = simulate_plan(recipe, failing, setting.warmup + steps, seed).seconds
    return (whole - warm) / steps


def command(setting: Setting, steps: int, directory: Path) -> list[str]:
    """Return the lab's command line."""
    spec = {
        "recipe": setting.recipe,
        "hosts": HOSTS,
        "step": STEP,
        "slow": {str(host): factor for host, factor in setting.slow.items()},
        "spread": setting.spread,
        "seed": 1,
        "warmup": setting.warmup,
        "steps": 10**6 if setting.own_pace else steps,
        "seconds": SECONDS if setting.own_pace else 0.0,
    }
    lab = [sys.executable, "-m", "laconic", "lab", "--hosts", str(HOSTS)]
    lab += ["--bandwidth", f"{setting.rate:.0f}bit", "--out", str(directory)]
    for host, rate in setting.rates.items():
        lab += ["--bandwidth", f"{host}={rate:.0f}bit"]
    if setting.latency:
        lab += ["--latency", f"{1000 * setting.latency:g}ms"]
    for host in setting.kill:
        lab += ["--kill", f"{host}@{KILL}s", "--repair", f"{RESTART}s"]
    return [*lab, "--", sys.executable, "-m", "benchmarks.plan.worker", json.dumps(spec)]


@dataclass(frozen=True)
class Ran:
    """A run of the setting with a ``number``. ``killed``: hosts, and seconds after the warmup;
    ``measured``: seconds per step."""

    number: int
    name: str
    recipe: str
    steps: int
    killed: list[tuple[int, float]]
    measured: float
    machine: dict[str, str]

    @property
    def identity(self) -> int:
        return self.number

    def document(self) -> dict[str, Any]:
        """Return the line of the journal."""
        return asdict(self)

    def planned(self) -> float:
        """Return the seconds per step that are planned for it."""
        setting = settings()[self.number]
        steps, at = (LONG_RUN, []) if setting.own_pace else (self.steps, self.killed)
        return statistics.fmean(planned(setting, steps, at, seed) for seed in range(SEEDS))


def run(number: int, setting: Setting) -> Ran:
    """Run a setting."""
    steps = length(setting)
    directory = Path("laconic-plan", "runs", str(number))
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    done = subprocess.run(
        command(setting, steps, directory),
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    lines = [
        line.partition("result ")[2] for line in done.stdout.splitlines() if "result {" in line
    ]
    results = [json.loads(line) for line in lines]
    if not results:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise ValueError(f"setting {number} gave no result: {' '.join(last)}")
    begin = max(result["begin"] for result in results)
    at = []
    if setting.kill:
        happened = json.loads((directory / "rates.json").read_text())["faults"]
        at = [
            (int(fault["host"].removeprefix("host")), fault["time"] - begin)
            for fault in happened
            if fault["what"] == "killed"
        ]
    seconds = max(result["end"] for result in results) - begin
    taken = sum(result["steps"] for result in results) / len(results)
    measured = seconds / (taken if setting.own_pace else steps)
    here = {key: machine()[key] for key in ("processor", "cores")}
    return Ran(number, setting.name, setting.recipe, steps, at, measured, here)


def report(ran: Sequence[Ran]) -> str:
    """Return the table of the runs."""
    head = ("setting", "recipe", "seconds per step", "planned", "error")
    rows, errors = [], []
    for each in sorted(ran, key=lambda each: each.number):
        plan = each.planned()
        error = plan / each.measured - 1
        errors.append(abs(error))
        figures = f"{each.measured:.4f}", f"{plan:.4f}", f"{error:+.1%}"
        rows.append((each.name, f"`{each.recipe}`", *figures))
    return (
        f"{table(head, rows, left=len(head))}\n\n"
        f"{len(errors)} of {len(settings())} settings: the median error is "
        f"{statistics.median(errors):.1%} (bound {MEDIAN:.0%}), the largest {max(errors):.1%} "
        f"(bound {WORST:.0%})."
    )


def main(path: Path, only: Sequence[int] | None, *, show: bool) -> int:
    """Run the settings that the journal lacks, and print the table; with ``show``, only print."""
    journal = Journal(path, lambda fields: Ran(**fields))
    done = {ran.number for ran in journal.load()}
    with journal.opened() as append:
        for number, setting in enumerate(() if show else settings()):
            if number in only if only is not None else number not in done:
                print(f"{number}: {setting.name}, {setting.recipe}: ", end="", flush=True)
                ran = run(number, setting)
                append(ran)
                print(f"{ran.measured:.4f} s, planned {ran.planned():.4f} per step", flush=True)
    print(report(journal.load()))
    return 0
