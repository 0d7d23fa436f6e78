"""One worker is three times slower: what rounds that do not wait for it gain, in virtual time.

    python -m benchmarks.quorum              tunes each method, then compares fresh seeds
    python -m benchmarks.quorum --quick      a small grid and two seeds

Four workers train an MLP 64-128-10 on scikit-learn's digits, in the simulator, for the same virtual
time. A step takes 1, 1, 1, and 3 seconds; messages take no time. The row "equal workers" has four
workers of 1.2 seconds, so the same number of steps per second in all. Learning rates decay with
the time, so that every method ends at the same rate. Three figures for each method, means and
their standard errors over fresh seeds:

    default   DiLoCo's outer learning rate 0.7 and momentum 0.9, inner rate 0.08
    common    the settings that are best for equal workers
    tuned     the settings that are best for this method, on other seeds
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
from functools import cache, partial
from multiprocessing import Pool
from pathlib import Path

import torch
from torch import Tensor, nn

import laconic as la
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


METHODS: dict[str, Method] = {
    "equal workers, DiLoCo": Method(partial(la.diloco, PERIOD, quorum=WORKERS), EQUAL),
    "synchronous DiLoCo": Method(partial(la.diloco, PERIOD, quorum=WORKERS)),
    "naive asynchronous": Method(naive),
    "delayed Nesterov": Method(partial(la.diloco, PERIOD, quorum=1)),
    "delayed Nesterov, quorum 3": Method(partial(la.diloco, PERIOD, quorum=3)),
    "delayed Nesterov, own pace": Method(partial(la.diloco, PERIOD, pace="own", quorum=3, grace=1)),
    "own pace, by steps": Method(
        partial(la.diloco, PERIOD, pace="own", quorum=3, grace=1, weigh="steps")
    ),
}
GRID = {"inner": (0.08, 0.16, 0.32), "lr": (0.7, 1.0, 1.3), "momentum": (0.0, 0.3, 0.6)}
DEFAULT = 0.08, 0.7, 0.9


@cache
def digits() -> tuple[Tensor, Tensor]:
    """The images, scaled to 0..1, and their digits."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)


def worker(recipe: la.Recipe, inner: float, seconds: float, seed: int, rank: int) -> float:
    """Train for so many virtual seconds. Returns the loss of the consensus on all images."""
    x, y = digits()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), inner, momentum=0.9, nesterov=True)
    sync = la.attach(model, optimizer, recipe)
    batches = torch.Generator().manual_seed(1000 * seed + rank)
    while (spent := sync.seconds / seconds) < 1:
        warm = min(20 * spent + 0.05, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = inner * warm * (1 + math.cos(math.pi * spent)) / 2
        chosen = torch.randint(len(x), (BATCH,), generator=batches)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
    sync.finish()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(x), y))


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
    parser.add_argument("--seconds", type=float, default=300.0, help="virtual, for each run")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--file", type=Path, help="write the results there, as JSON")
    given = parser.parse_args(arguments)
    grid = {k: v[1:2] for k, v in GRID.items()} if given.quick else GRID
    tuning, fresh = (TUNING[:1], FRESH[:2]) if given.quick else (TUNING, FRESH)
    settings = list(itertools.product(*grid.values()))
    start, found = time.time(), {}
    common: tuple[float, ...] | None = None
    print(f"{'':28}  {'default':17}  {'common':17}  tuned")
    with Pool(given.processes) as pool:
        for name in given.only:
            tasks = [(name, *s, given.seconds, seed) for s in settings for seed in tuning]
            losses = pool.map(run, tasks, chunksize=1)
            means = [
                statistics.fmean(losses[i * len(tuning) : (i + 1) * len(tuning)])
                for i in range(len(settings))
            ]
            best = settings[means.index(min(means))]
            common = common or best
            losses_of = {
                which: pool.map(run, [(name, *s, given.seconds, seed) for seed in fresh])
                for which, s in (("default", DEFAULT), ("common", common), ("tuned", best))
            }
            chosen = dict(zip(grid, best, strict=True))
            tried = {str(s): mean for s, mean in zip(settings, means, strict=True)}
            found[name] = {**losses_of, "settings": chosen, "grid": tried}
            print(
                f"{name:28}  {'  '.join(_text(losses) for losses in losses_of.values())}  "
                + ", ".join(f"{k} {v}" for k, v in chosen.items())
                + f"   ({time.time() - start:.0f} s)",
                flush=True,
            )
    if given.file is not None:
        given.file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
