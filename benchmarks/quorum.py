"""One worker is three times slower: what rounds that do not wait for it gain, in virtual time.

    python -m benchmarks.quorum           tunes each method, then compares fresh seeds
    python -m benchmarks.quorum --quick   a small grid and two seeds
    python -m benchmarks.quorum --fixed   without tuning: default and common settings

Four workers train an MLP 64-128-10 on scikit-learn's digits, in the simulator, for the same virtual
time. A step takes 1, 1, 1, and 3 seconds; messages take no time. The row "equal workers" has four
workers of 1.2 seconds, so the same number of steps per second in all. Learning rates decay with the
time, so that every method ends at the same rate. Three figures for each method, means and their
standard errors over fresh seeds:

    default   DiLoCo's outer learning rate 0.7 and momentum 0.9, inner rate 0.08
    common    the settings that are best for equal workers
    tuned     the settings that are best for this method, on other seeds

Losses are also divided by that of equal workers with the same seed and column.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pool
from pathlib import Path

import torch
from torch import Tensor, nn

import laconic as la
from benchmarks.study import digits
from laconic.algorithms.exchanges import QuorumMean
from laconic.algorithms.updates import OuterStep

WORKERS, PERIOD, BATCH = 4, 12, 8
SLOW, EQUAL = (1.0, 1.0, 1.0, 3.0), (1.2, 1.2, 1.2, 1.2)
TUNING, FRESH = range(100, 103), range(20)

Outer = Callable[[float, float], la.Recipe]


def naive(lr: float, momentum: float) -> la.Recipe:
    """Every contribution is an outer Nesterov step of its own, as soon as it arrives."""
    return (la.Round(la.every(PERIOD), OuterStep(lr, momentum), QuorumMean(1)),)


@dataclass(frozen=True)
class Method:
    """``outer`` makes the recipe from an outer learning rate and momentum."""

    outer: Outer
    seconds: Sequence[float] = SLOW


def own_pace(codec: str | None = None) -> Method:
    """Delayed Nesterov at each worker's own pace."""
    options = {"pace": "own", "quorum": 3, "grace": 1, "codec": codec}
    return Method(partial(la.diloco, PERIOD, **options))


METHODS: dict[str, Method] = {
    "equal workers, DiLoCo": Method(partial(la.diloco, PERIOD, quorum=WORKERS), EQUAL),
    "synchronous DiLoCo": Method(partial(la.diloco, PERIOD, quorum=WORKERS)),
    "naive asynchronous": Method(naive),
    "delayed Nesterov": Method(partial(la.diloco, PERIOD, quorum=1)),
    "delayed Nesterov, quorum 3": Method(partial(la.diloco, PERIOD, quorum=3)),
    "delayed Nesterov, own pace": own_pace(),
    "own pace, int8": own_pace("int8"),
    "own pace, int4": own_pace("int4"),
}
GRID = {"inner": (0.08, 0.16, 0.32), "lr": (0.7, 1.0, 1.3), "momentum": (0.0, 0.3, 0.6)}
DEFAULT, COMMON = (0.08, 0.7, 0.9), (0.16, 1.0, 0.3)
"""Inner rate, outer rate, outer momentum. The second is what tuning equal workers has found."""


class Trainer:
    """A worker's model, optimizer and batches. ``inner``: the peak of its learning rate."""

    def __init__(
        self, recipe: la.Recipe, inner: float, seed: int, rank: int, width: int = 128
    ) -> None:
        self._x, self._y = digits()
        torch.manual_seed(seed)
        self._model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
        self._optimizer = torch.optim.SGD(
            self._model.parameters(), inner, momentum=0.9, nesterov=True
        )
        self.sync = la.attach(self._model, self._optimizer, recipe)
        self._inner = inner
        self._batches = torch.Generator().manual_seed(1000 * seed + rank)

    def step(self, spent: float, pause: Callable[[], None] = lambda: None) -> None:
        """Take a step when this share of the time is spent. ``pause`` is called before its round,
        if it has one."""
        warm = min(20 * spent + 0.05, 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = self._inner * warm * (1 + math.cos(math.pi * spent)) / 2
        chosen = torch.randint(len(self._x), (BATCH,), generator=self._batches)
        self._optimizer.zero_grad()
        self._loss(self._x[chosen], self._y[chosen]).backward()
        pause()
        self._optimizer.step()

    def finish(self) -> float:
        """End training. Returns the loss of the consensus on all images."""
        self.sync.finish()
        with torch.no_grad():
            return float(self._loss(self._x, self._y))

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self._model(x), y)


def worker(recipe: la.Recipe, inner: float, seconds: float, seed: int, rank: int) -> float:
    """Train for so many virtual seconds. Returns the loss of the consensus on all images."""
    trainer = Trainer(recipe, inner, seed, rank)
    while (spent := trainer.sync.seconds / seconds) < 1:
        trainer.step(spent)
    return trainer.finish()


Settings = tuple[float, float, float]
Task = tuple[str, float, float, float, float, int]


def run(task: Task) -> float:
    """The loss of a method with these rates on a seed; infinity where it diverges."""
    name, inner, lr, momentum, seconds, seed = task
    torch.set_num_threads(1)
    method = METHODS[name]
    recipe = method.outer(lr, momentum)
    losses = la.simulate(
        partial(worker, recipe, inner, seconds, seed),
        workers=WORKERS,
        step_seconds=method.seconds,
    )
    return losses[0] if math.isfinite(losses[0]) else math.inf


def _text(losses: Sequence[float]) -> str:
    error = statistics.stdev(losses) / math.sqrt(len(losses))
    return f"{statistics.fmean(losses):.4f} +- {error:.4f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--seconds", type=float, default=300.0, help="virtual, for each run")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--file", type=Path, help="write the results there, as JSON")
    given = parser.parse_args(arguments)
    grid = {k: v[1:2] for k, v in GRID.items()} if given.quick else GRID
    tuning, fresh = (TUNING[:1], FRESH[:2]) if given.quick else (TUNING, FRESH)
    start, found = time.time(), {}
    common: Settings | None = COMMON if given.fixed else None
    reference: dict[str, list[float]] = {}
    with Pool(given.processes) as pool:

        def losses(
            name: str, tried: Sequence[Settings], seeds: Sequence[int]
        ) -> dict[Settings, list[float]]:
            tasks = [(name, *s, given.seconds, n) for s in tried for n in seeds]
            ran = pool.map(run, tasks, chunksize=1)
            return {s: ran[i * len(seeds) :][: len(seeds)] for i, s in enumerate(tried)}

        for name in given.only:
            settings = [] if given.fixed else [*itertools.product(*grid.values())]
            tried = {
                s: statistics.fmean(each) for s, each in losses(name, settings, tuning).items()
            }
            best = min(tried, key=tried.__getitem__, default=None)
            common = common or best
            chosen = {"default": DEFAULT, "common": common, "tuned": best}
            known = {k: s for k, s in chosen.items() if s is not None}
            each = losses(name, list({*known.values()}), fresh)
            ran = {k: each[s] for k, s in known.items()}
            reference = reference or ran
            found[name] = {**ran, "settings": best, "grid": {str(s): m for s, m in tried.items()}}
            for column, values in ran.items():
                ratios = [a / b for a, b in zip(values, reference[column], strict=True)]
                inner, lr, momentum = known[column]
                print(
                    f"{name:28} {column:8} {_text(values)}   {_text(ratios)} of {given.only[0]}   "
                    f"(inner {inner}, lr {lr}, momentum {momentum}; {time.time() - start:.0f} s)",
                    flush=True,
                )
    if given.file is not None:
        given.file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
