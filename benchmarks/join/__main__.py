"""What a newcomer costs the other workers of an elastic run, at 100 Mbit/s.

    python -m benchmarks.join [RECIPE ...] [--joins 12]
    python -m benchmarks.join RECIPE --workers 4 --joins 8 --at-once
    python -m benchmarks.join RECIPE --latency 80ms --strangers 2000 [--minutes 10]

Three workers train on a host each. A fourth joins, trains for some periods, and leaves on SIGTERM;
then the next one comes. With ``--at-once`` all newcomers come at once, from a host each. With
``--strangers`` nobody joins: so many connections per second come from another host, without keys,
to all ports of the workers and of the coordinator. Newcomers have imported torch and done a step
before the run begins. The processors are shared by all hosts, so a step computes little and sleeps
for the rest of the time that it takes on a processor of its own (``--seconds``, ``--crops``).

While a newcomer catches up, each step of the others is compared with the mean of the steps at the
same place of a period in the seconds before the newcomer came. All have the same number of workers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.chaos.network import within
from laconic.elastic import COORDINATOR_VARIABLE
from laconic.lab.emulation.cluster import Cluster, Network, job_environment, rank_variables
from laconic.lab.emulation.injection import COORDINATOR_PORT
from laconic.links.addresses import PORTS
from laconic.units import parse_time

PERIODS = {"local_sgd(8)": 8, "diloco(24)": 24, "streaming_diloco(16)": 16, "ddp(codec='int4')": 1}
OUT = Path("laconic-join")
BEFORE, AFTER = 4, 3
"""Whole periods before and after a join. Those before take `SECONDS` at least."""
SECONDS = 5.0
PATIENCE = 120.0
RATIO_BOUND, PERIODS_BOUND = 1.10, 2.0
LISTENING = range(29500, 29502)
"""The ports of each worker, where strangers call them."""

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
    """Some workers under a recipe, and newcomers that wait."""

    def __init__(self, recipe: str, period: int, options: argparse.Namespace) -> None:
        self.period, self._options, self._workers = period, options, options.workers
        self._every = range(0 if options.strangers else options.joins)
        """The numbers of the newcomers."""
        self.directory = OUT / recipe.partition("(")[0]
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        self._recipe, self._stack = recipe, ExitStack()
        self._newcomers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Run:
        hosts = self._workers + max(len(self._every) * self._options.at_once, 1)
        network = Cluster(Network(hosts, latency=self._options.latency))
        self._cluster = cluster = self._stack.enter_context(network)
        where = f"{cluster.addresses[0]}:{COORDINATOR_PORT}"
        env = {**job_environment(cluster, {}), COORDINATOR_VARIABLE: where}
        if self._options.strangers:
            env[PORTS] = f"{LISTENING[0]}-{LISTENING[-1]}"
        self._env, output = env, (self.directory / "output").open("wb")
        self._output = self._stack.enter_context(output).fileno()
        self._start(0, "-m", "laconic", "coordinator", "--address", where)
        for number in self._every:
            os.mkfifo(self.directory / f"newcomer{number}.go")
            host = self._workers + number * self._options.at_once
            self._newcomers.append(self._start_worker(host, f"newcomer{number}"))
        self._wait(lambda: all(of(self.newcomer(number), "ready") for number in self._every))
        for host in range(self._workers):
            self._start_worker(host, f"worker{host}")
        return self

    def _start(self, host: int, *argv: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start a Python program on a host."""
        command, env, out = [sys.executable, *argv], {**self._env, **variables}, self._output
        return self._cluster.start(host, command, env=env, stdout=out, stderr=out)

    def _start_worker(self, host: int, name: str) -> subprocess.Popen[bytes]:
        options = self._options.seconds, self._options.crops, self._workers
        argv = "-m", "benchmarks.join.worker", self._recipe, str(self.directory.resolve()), name
        variables = rank_variables(host, host, 1, len(self._cluster.addresses))
        return self._start(host, *argv, *map(str, options), **variables)

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

    def _recorded(self, name: str, what: str) -> list[Event]:
        """What a worker's trace has of a kind."""
        (trace,) = (self.directory / f"{name}.trace").glob("*.jsonl")
        events = [json.loads(line) for line in trace.read_text().splitlines()]
        return [event for event in events if what in event]

    def lost(self) -> int:
        """How many workers were lost or have left so far."""
        views = [set(event["workers"]) for event in self._recorded("worker0", "unit")]
        return len(set().union(*views)) - len(views[-1])

    def join_at_once(self) -> str:
        """Let all newcomers join. Return the times and what else there is to say."""
        self._train(BEFORE, SECONDS)
        for number in self._every:
            (self.directory / f"newcomer{number}.go").write_bytes(b"")
        self._wait(lambda: all(of(self.newcomer(n), "step")[9:] for n in self._every))
        each = [(self.newcomer(n), self._recorded(f"newcomer{n}", "donor")) for n in self._every]
        donors = {donor[-1]["donor"] for _, donor in each}
        at = [[of(events, e)[0]["time"] for e in ("attach", "attached")] for events, _ in each]
        seconds = [f"{end - begin:.1f}" for begin, end in at]
        said = f"joined within {', '.join(seconds)} s, from {len(donors)} donors"
        return f"{said}; {self.lost()} workers were lost"

    def endure(self) -> str:
        """Let strangers call. Return what came of it."""
        seconds, hosts = 60 * self._options.minutes, self._cluster.addresses
        self._train(BEFORE)
        first, middle = self._train(0, seconds), time.monotonic()
        at = [(hosts[0], COORDINATOR_PORT), *itertools.product(hosts[:-1], LISTENING)]
        with within(self._cluster.entry(self._workers).net):
            rate = call_without_keys(at, self._options.strangers, seconds)
        steps = [step for worker in range(self._workers) for step in self.steps(worker)]
        before = [_took(s) for s in steps if s["step"] > first and s["end"] < middle]
        meanwhile = [_took(s) for s in steps if middle <= s["begin"]]
        ratio = statistics.fmean(meanwhile) / statistics.fmean(before)
        said = f"{rate:.0f} connections per second: a step takes {ratio:.3f} times as long"
        return f"{said}; {self.lost()} workers were lost"

    def costs(self, number: int, first: int) -> Join:
        """Return the costs of a join. From the step ``first`` on there were three workers."""
        events, period = self.newcomer(number), self.period
        asked, attached = of(events, "attach")[0]["time"], of(events, "attached")[0]
        begin = self._recorded(f"newcomer{number}", "donor")[0]["step"] + 1
        end = attached["step"] + 1
        done = max(s["step"] for s in self.steps(0) if s["end"] <= asked)
        steps = [step for worker in range(self._workers) for step in self.steps(worker)]
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
            extra=extra / self._workers,
            period=sum(before.values()),
            bytes=attached["bytes"],
        )

    def _means(self, steps: Sequence[Event], value: Callable[[Event], float]) -> dict[int, float]:
        """Return the mean of a value over ``steps``, by their place in a period."""
        found: dict[int, list[float]] = {}
        for step in steps:
            found.setdefault(step["step"] % self.period, []).append(value(step))
        return {place: statistics.fmean(values) for place, values in found.items()}


def call_without_keys(places: Iterable[tuple[str, int]], rate: float, seconds: float) -> float:
    """Make so many connections per second, to these ``places`` in turn. Each is held for a second,
    and sends nothing. Returns how many were made per second. Strangers have processors of their
    own, so this process yields those that it shares with the workers."""
    os.nice(19)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    held, made, begun = deque[socket.socket](), 0, time.monotonic()
    at = itertools.cycle(places)
    while (now := time.monotonic() - begun) < seconds:
        while made < rate * now:
            if len(held) >= rate:
                held.popleft().close()
            held.append(socket.socket())
            held[-1].setblocking(False)
            held[-1].connect_ex(next(at))
            made += 1
        time.sleep(0.005)
    return made / seconds


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
    top.add_argument("--workers", type=int, default=3, help="default: %(default)s")
    top.add_argument("--latency", type=parse_time, default=0.0, help="a round trip")
    top.add_argument("--at-once", action="store_true", help="all newcomers come at once")
    top.add_argument("--strangers", type=float, metavar="RATE", help="connections per second")
    top.add_argument("--minutes", type=float, default=1.0, help="that these take")
    top.add_argument("--seed", type=int, default=1, help="of the times of the joins")
    return top


def main() -> int:
    options = parser().parse_args()
    unknown = [recipe for recipe in options.recipes if recipe not in PERIODS]
    if unknown:
        raise SystemExit(f"no recipe {unknown[0]!r}: choose from {', '.join(PERIODS)}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(143))
    table = Table(title=f"A newcomer's cost to {options.workers} workers at 100 Mbit/s")
    for column in (
        "recipe", "state", "period, s", "others' steps", "quartiles", "joins",
        "periods", "seconds", "first period",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column == "recipe" else "right")
    for recipe in options.recipes:
        chance = random.Random(options.seed)
        with Run(recipe, PERIODS[recipe], options) as run:
            if options.at_once or options.strangers:
                print(recipe, run.endure() if options.strangers else run.join_at_once(), flush=True)
                continue
            joins = [run.join(number, chance.random()) for number in range(options.joins)]
        for join in joins:
            print(recipe, join, flush=True)
        add_row(table, recipe, joins)
    table.caption = (
        "Others' steps: their time while the newcomer catches up, relative to before (at most "
        f"{RATIO_BOUND:.2f}). Periods and seconds: from attach until it takes part, median / max "
        f"(at most {PERIODS_BOUND:g} periods). First period: the others' additional time in it."
    )
    if table.rows:
        Console(width=None if sys.stdout.isatty() else 140).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
