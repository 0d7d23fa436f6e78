"""What a newcomer costs the other workers of an elastic run, at 100 Mbit/s.

    python -m benchmarks.join [RECIPE ...] [--joins 12]

Three workers train on a host each. A fourth joins, trains for some periods, and leaves on SIGTERM;
then the next one comes. Newcomers have imported torch and done a step before the run begins. The
processors are shared by all hosts, so a step computes little and sleeps for the rest of the time
that it takes on a processor of its own (``--seconds``, ``--crops``).

While a newcomer catches up, each step of the others is compared with the mean of the steps at the
same place of a period in the seconds before the newcomer came. All have the same number of workers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.join.worker import WORKERS
from laconic.elastic import COORDINATOR_VARIABLE
from laconic.lab.emulation.cluster import Cluster, Network, job_environment, rank_variables
from laconic.lab.emulation.injection import COORDINATOR_PORT

PERIODS = {"local_sgd(8)": 8, "diloco(24)": 24, "streaming_diloco(16)": 16, "ddp(codec='int4')": 1}
OUT = Path("laconic-join")
BEFORE, AFTER = 4, 3
"""Whole periods before and after a join. Those before take `SECONDS` at least."""
SECONDS = 5.0
PATIENCE = 120.0
RATIO_BOUND, PERIODS_BOUND = 1.10, 2.0

Event = Mapping[str, Any]


def read(path: Path) -> list[Event]:
    """Return the events of a process so far."""
    if not path.exists():
        return []
    *whole, _ = path.read_text().split("\n")
    return [json.loads(line) for line in whole]


def of(events: Sequence[Event], name: str) -> list[Event]:
    """Return the events with this name."""
    return [event for event in events if event["event"] == name]


@dataclass(frozen=True)
class Join:
    """What one newcomer cost. ``steps``: how many steps of the others passed from when its donor
    began to send the state until it took part. ``ratio``: the time of these steps relative to
    before; None where there was none. ``periods``, ``seconds``: from its call of ``attach`` until
    it took part. ``extra``: how many seconds longer the others' first period with it was than those
    that followed. ``period``: seconds of a period before."""

    steps: int
    ratio: float | None
    periods: float
    seconds: float
    extra: float
    period: float
    bytes: int


class Run:
    """Three workers under a recipe, and newcomers that wait."""

    def __init__(self, recipe: str, period: int, options: argparse.Namespace) -> None:
        self.period, self._options = period, options
        self.directory = OUT / recipe.partition("(")[0]
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        self._recipe, self._stack = recipe, ExitStack()
        self._newcomers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Run:
        cluster = self._stack.enter_context(Cluster(Network(WORKERS + 1)))
        where = f"{cluster.addresses[0]}:{COORDINATOR_PORT}"
        env = {**job_environment(cluster, {}), COORDINATOR_VARIABLE: where}
        coordinator = [sys.executable, "-m", "laconic", "coordinator", "--address", where]
        output = self._stack.enter_context((self.directory / "output").open("wb"))
        cluster.start(0, coordinator, env=env, stdout=output.fileno(), stderr=output.fileno())

        def start(host: int, name: str) -> subprocess.Popen[bytes]:
            options = [str(self._options.seconds), str(self._options.crops)]
            argv = [sys.executable, "-m", "benchmarks.join.worker", self._recipe]
            argv += [str(self.directory.resolve()), name, *options]
            variables = {**env, **rank_variables(host, host, 1, WORKERS + 1)}
            ends = output.fileno(), output.fileno()
            return cluster.start(host, argv, env=variables, stdout=ends[0], stderr=ends[1])

        for number in range(self._options.joins):
            os.mkfifo(self.directory / f"newcomer{number}.go")
            self._newcomers.append(start(WORKERS, f"newcomer{number}"))
        every = range(self._options.joins)
        self._wait(lambda: all(of(self.newcomer(number), "ready") for number in every))
        for host in range(WORKERS):
            start(host, f"worker{host}")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def newcomer(self, number: int) -> list[Event]:
        return read(self.directory / f"newcomer{number}.jsonl")

    def _wait(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > end:
                raise SystemExit(f"it takes too long: see {self.directory / 'output'}")
            time.sleep(0.02)

    def steps(self, worker: int) -> list[Event]:
        return of(read(self.directory / f"worker{worker}.jsonl"), "step")

    def _train(self, periods: float, seconds: float = 0.0) -> int:
        """Wait for so many periods, and so many seconds. Return the step that it began after."""
        self._wait(lambda: self.steps(0))
        first = int(self.steps(0)[-1]["step"])
        time.sleep(seconds)
        self._wait(lambda: self.steps(0)[-1]["step"] >= first + periods * self.period)
        return first

    def join(self, number: int, phase: float) -> Join:
        """Let a newcomer join, in the ``phase`` of a period, and leave."""
        first = self._train(BEFORE + phase, SECONDS) + 1  # after the round that the last one left
        (self.directory / f"newcomer{number}.go").write_bytes(b"")
        more = AFTER * self.period + 1
        self._wait(lambda: len(of(self.newcomer(number), "step")) > more)
        process = self._newcomers[number]
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(PATIENCE)
        joined = self.costs(number, first)
        self._train(2)
        return joined

    def costs(self, number: int, first: int) -> Join:
        """Return the costs of a join. From the step ``first`` on there were three workers."""
        events, period = self.newcomer(number), self.period
        asked, attached = of(events, "attach")[0]["time"], of(events, "attached")[0]
        (trace,) = (self.directory / f"newcomer{number}.trace").glob("*.jsonl")
        lines = [json.loads(line) for line in trace.read_text().splitlines()]
        begin = next(line["step"] for line in lines if "donor" in line) + 1
        end = attached["step"] + 1
        done = max(s["step"] for s in self.steps(0) if s["end"] <= asked)
        steps = [step for worker in range(WORKERS) for step in self.steps(worker)]
        whole = (done - first + 1) // period * period
        before = self._means([s for s in steps if first <= s["step"] < first + whole], _took)
        meanwhile = [s for s in steps if begin <= s["step"] < end]
        usual = sum(before[s["step"] % period] for s in meanwhile)
        later = [s for s in steps if end + period <= s["step"] < end + AFTER * period]
        usual_later = self._means(later, _took)
        begun = [s for s in steps if end <= s["step"] < end + period]
        extra = sum(_took(s) - usual_later[s["step"] % period] for s in begun)
        return Join(
            steps=end - begin,
            ratio=sum(map(_took, meanwhile)) / usual if meanwhile else None,
            periods=(end - done) / period,
            seconds=attached["time"] - asked,
            extra=extra / WORKERS,
            period=sum(before.values()),
            bytes=attached["bytes"],
        )

    def _means(self, steps: Sequence[Event], value: Callable[[Event], float]) -> dict[int, float]:
        """Return the mean of a value over ``steps``, by their place in a period."""
        found: dict[int, list[float]] = {}
        for step in steps:
            found.setdefault(step["step"] % self.period, []).append(value(step))
        return {place: statistics.fmean(values) for place, values in found.items()}


def _took(step: Event) -> float:
    return float(step["end"] - step["begin"])


def add_row(table: Table, recipe: str, joins: Sequence[Join]) -> None:
    ratios = [join.ratio for join in joins if join.ratio is not None]
    low, median, high = statistics.quantiles(ratios, n=4)
    periods = [join.periods for join in joins]
    seconds = [join.seconds for join in joins]
    period = statistics.median(join.period for join in joins)
    extra = statistics.median(join.extra for join in joins)
    table.add_row(
        recipe,
        f"{joins[0].bytes / 1e6:.1f} MB",
        f"{period:.2f}",
        f"{median:.3f}",
        f"{low:.3f} - {high:.3f}",
        str(len(ratios)),
        f"{statistics.median(periods):.1f} / {max(periods):.1f}",
        f"{statistics.median(seconds):.1f} / {max(seconds):.1f}",
        f"{extra * 1e3:.0f} ms",
    )


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="benchmarks.join",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("recipes", nargs="*", metavar="RECIPE", default=list(PERIODS))
    top.add_argument("--joins", type=int, default=12, help="default: %(default)s")
    top.add_argument(
        "--seconds", type=float, default=0.07, help="that a step computes (default: %(default)g)"
    )
    top.add_argument(
        "--crops", type=int, default=2, help="that it does compute; 16: all (default: %(default)s)"
    )
    top.add_argument("--seed", type=int, default=1, help="of the times of the joins")
    return top


def main() -> int:
    options = parser().parse_args()
    unknown = [recipe for recipe in options.recipes if recipe not in PERIODS]
    if unknown:
        raise SystemExit(f"no recipe {unknown[0]!r}: choose from {', '.join(PERIODS)}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(143))
    table = Table(title="A newcomer's cost to three workers at 100 Mbit/s")
    for column in (
        "recipe", "state", "period, s", "others' steps", "quartiles", "joins",
        "periods", "seconds", "first period",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column == "recipe" else "right")
    for recipe in options.recipes:
        chance = random.Random(options.seed)
        with Run(recipe, PERIODS[recipe], options) as run:
            joins = [run.join(number, chance.random()) for number in range(options.joins)]
        for join in joins:
            print(recipe, join, flush=True)
        add_row(table, recipe, joins)
    table.caption = (
        "Others' steps: their time while the newcomer catches up, relative to before (at most "
        f"{RATIO_BOUND:.2f}). Periods and seconds: from attach until it takes part, median / max "
        f"(at most {PERIODS_BOUND:g} periods). First period: the others' additional time in it."
    )
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
