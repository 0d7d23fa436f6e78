"""One worker is three times slower, and one link ten times: the comparison of `benchmarks.quorum`
between processes on emulated hosts.

    python -m benchmarks.quorum_lab FILE                    runs five seeds, and prints the table
    python -m benchmarks.quorum_lab FILE --seeds 0 1        some seeds, added to those in FILE
    python -m benchmarks.quorum_lab FILE --seeds            the table of FILE

Four hosts train an MLP on scikit-learn's digits for equal real time. Rank 3 computes three times as
long as the others, and rank 2's host sends at a tenth of the others' rate. Computing is emulated by
sleeping: a step takes 20, 20, 20 and 60 ms. The row "equal workers" has steps of 24 ms and equal
links, so as many steps per second in all. The other rows have the slow link. Two settings of the
optimizers: "default" is DiLoCo's outer learning rate 0.7 and momentum 0.9 with an inner rate of
0.08, "tuned" the best ones for equal workers in `benchmarks.quorum`. Ratios to equal workers are of
the same seed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import laconic as la
from benchmarks.quorum import (
    COMMON,
    DEFAULT,
    EQUAL,
    PERIOD,
    SLOW,
    SLOW_LINK,
    WORKERS,
    Trainer,
    naive,
)
from laconic.lab.emulation.cluster import Cluster, Network, launch

STEP = 0.02
FAST_RATE, SLOW_RATE = 100e6, 10e6
SETTINGS = {"default": DEFAULT, "tuned": COMMON}
REFERENCE = "equal workers, DiLoCo"
GRACE = 0.02
SYNCHRONOUS = partial(la.diloco, PERIOD)
OWN_PACE = partial(la.diloco, PERIOD, quorum=WORKERS - 1, grace=GRACE, pace="own")
METHODS: dict[str, Callable[[float, float], la.Recipe]] = {
    REFERENCE: SYNCHRONOUS,
    "synchronous DiLoCo": SYNCHRONOUS,
    "naive asynchronous": naive,
    "delayed Nesterov": partial(la.diloco, PERIOD, quorum=1),
    "delayed Nesterov, own pace": OWN_PACE,
    "own pace, int8": partial(OWN_PACE, codec="int8"),
    "own pace, int4": partial(OWN_PACE, codec="int4"),
}

Run = dict[str, Any]
"""``method``, ``setting``, ``seed``, ``loss``, ``rounds``; by rank ``steps`` and ``waiting``, the
share of the time."""


def train(method: str, setting: str, seed: int, seconds: float, width: int, rank: int) -> Run:
    """Train for so many seconds. Returns this rank's part of the run."""
    inner, lr, momentum = SETTINGS[setting]
    steps_of = EQUAL if method == REFERENCE else SLOW
    recipe, mine = METHODS[method](lr, momentum), STEP * steps_of[rank]
    trainer = Trainer(recipe, inner, seed, rank, width)
    sync = trainer.sync
    together = METHODS[method] is SYNCHRONOUS
    sync.mean(0.0)  # start together
    start, count, last, check = time.monotonic(), 0, math.inf, 2 * PERIOD
    while count < last and (spent := (time.monotonic() - start) / seconds) < 1 + together:
        end = time.monotonic() + mine
        trainer.step(min(spent, 1.0), lambda end=end: time.sleep(max(end - time.monotonic(), 0.0)))
        count += 1
        if together and count == check:  # all take as many steps: those that fit
            last = int(count * seconds / sync.mean(time.monotonic() - start))
            check = count + max((last - count) // 2 // PERIOD, 1) * PERIOD
    rounds = len(sync.closings) if sync.closings else count // PERIOD
    waiting = sync.stats().seconds_waiting / seconds
    loss = trainer.finish()
    sync.detach()
    return {"method": method, "setting": setting, "seed": seed, "loss": loss, "steps": count,
            "rounds": rounds, "waiting": waiting}  # fmt: skip


def work(tasks: Sequence[tuple[str, str, int]], seconds: float, width: int) -> None:
    """Carry out the tasks (method, setting, seed) as one rank. Prints a line for each."""
    torch.set_num_threads(1)
    la.init()
    rank = torch.distributed.get_rank()
    for task in tasks:
        print(json.dumps(train(*task, seconds, width, rank)), flush=True)


def measure(
    tasks: Sequence[tuple[str, str, int]], seconds: float, width: int, *, slow_link: bool
) -> list[Run]:
    """Carry out the tasks on emulated hosts."""
    if not tasks:
        return []
    single: dict[int, float | None] = {SLOW_LINK: SLOW_RATE} if slow_link else {}
    spec = json.dumps({"tasks": tasks, "seconds": seconds, "width": width})
    argv = [sys.executable, "-m", "benchmarks.quorum_lab", "--worker", spec]
    with Cluster(Network(WORKERS, FAST_RATE, single={"bandwidth": single})) as cluster:
        job = launch(cluster, argv)
        failed = [o for o in job.wait(timeout=60 + 2 * seconds * len(tasks)) if o.failed]
        if failed:
            raise SystemExit(f"{failed[0]}: {failed[0].stderr}")
        ranks = [[*map(json.loads, job.stdout(r).splitlines())] for r in range(WORKERS)]
    by_rank = ("steps", "waiting")
    return [
        {**runs[0], **{name: [r[name] for r in runs] for name in by_rank}}
        for runs in zip(*ranks, strict=True)
    ]


def table(runs: Sequence[Run]) -> list[str]:
    """The lines of the table: losses, ratios to the reference by seed, steps and rounds."""
    lines = [
        f"{'':28}{'setting':9}{'loss':19}{'ratio to equal':21}{'steps by rank':21}"
        f"{'waiting by rank':21}rounds"
    ]
    by = {(r["setting"], r["method"], r["seed"]): r for r in runs}
    for setting in SETTINGS:
        for method in METHODS:
            mine = [r for key, r in sorted(by.items()) if key[:2] == (setting, method)]
            if not mine:
                continue
            reference = [by.get((setting, REFERENCE, r["seed"])) for r in mine]
            ratios = [
                r["loss"] / ref["loss"] for r, ref in zip(mine, reference, strict=True) if ref
            ]
            steps = [f"{s:.0f}" for s in _means(r["steps"] for r in mine)]
            waiting = [f"{w:.0%}" for w in _means(r["waiting"] for r in mine)]
            lines.append(
                f"{method:28}{setting:9}{_text([r['loss'] for r in mine], 4):19}"
                f"{_text(ratios, 3):21}{', '.join(steps):21}{', '.join(waiting):21}"
                f"{statistics.fmean(r['rounds'] for r in mine):.0f}"
            )
    return lines


def _means(lists: Iterable[Sequence[float]]) -> list[float]:
    return [statistics.fmean(values) for values in zip(*lists, strict=True)]


def _text(values: Sequence[float], digits: int) -> str:
    if not values:
        return "-"
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.fmean(values):.{digits}f} +- {error:.{digits}f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", help="holds the runs, as JSON")
    parser.add_argument("--seeds", type=int, nargs="*", default=range(5))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seconds", type=float, default=6.0, help="of each run")
    parser.add_argument("--width", type=int, default=128, help="of the hidden layer")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker is not None:
        work(**given.worker)
        return
    if given.file is None:
        parser.error("give the file that holds the runs")
    runs: list[Run] = json.loads(given.file.read_text()) if given.file.exists() else []
    for seed in given.seeds:
        tasks = [(m, setting, seed) for setting in given.settings for m in given.only]
        for slow_link in (False, True):
            some = [task for task in tasks if (task[0] != REFERENCE) == slow_link]
            runs += measure(some, given.seconds, given.width, slow_link=slow_link)
        given.file.write_text(json.dumps(runs, indent=1) + "\n")
    print("\n".join(table(runs)))


if __name__ == "__main__":
    main()
