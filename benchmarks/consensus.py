"""Compare three candidates for the model between two outer steps, at random steps:

    mean    the mean of the workers' x, which laconic uses
    last    the result of the last outer step or elastic round (anchor, center)
    outer   an early outer step, on the steps since the last one

python -m benchmarks.consensus [WORKERS]

Prints the losses of "last" and "outer" on all images of scikit-learn's digits, divided by the loss
of "mean": the geometric mean and the maximum. The network is 64-128-10, with batches of 8, 240
steps, two seeds of data and 12 random steps each.
"""

from __future__ import annotations

import random
import statistics
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.optim import Optimizer

import laconic as la
from benchmarks.study import digits

STEPS, STOPS, SEEDS = 240, 12, (0, 1)
OPTIMIZERS: dict[str, Callable[[Iterable[Any]], Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, 0.05, momentum=0.9, nesterov=True),
    "AdamW": lambda params: torch.optim.AdamW(params, 1e-3),
}
RECIPES = {
    "slowmo(local_sgd(3), 48, 0.5)": la.slowmo(la.local_sgd(3), 48, 0.5),
    "slowmo(local_sgd(3), 48, 0.2)": la.slowmo(la.local_sgd(3), 48, 0.2),
    "slowmo(None, 12, 0.5)": la.slowmo(None, 12, 0.5),
    "diloco(50)": la.diloco(50),
    "diloco(24, momentum=0.5)": la.diloco(24, momentum=0.5),
    "easgd(1)": la.easgd(1),
    "easgd(8)": la.easgd(8),
    "easgd(8, 0.3)": la.easgd(8, 0.3),
}


def loss_of(model: nn.Module) -> float:
    """Return the loss on all images."""
    images, labels = digits()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(images), labels))


@dataclass(frozen=True)
class Early:
    """The schedule ``when``, and also step ``extra``."""

    when: Callable[[int], bool]
    extra: int

    def __call__(self, step: int) -> bool:
        return step == self.extra or self.when(step)


def losses(
    recipe: la.Recipe, workers: int, optimizer: str, seed: int, stop: int
) -> tuple[float, float]:
    """Return the losses of the mean and of the last anchor after ``stop`` steps."""
    images, labels = digits()

    def run(rank: int) -> tuple[float, float]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        steps = OPTIMIZERS[optimizer](model.parameters())
        sync = la.attach(model, steps, recipe)
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        while sync.step < stop:
            batch = torch.randint(len(images), (8,), generator=generator)
            steps.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            steps.step()
        with sync.consensus():
            mean = loss_of(model)
        with sync.consensus(mean=False):
            return mean, loss_of(model)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return la.simulate(run, workers)[0]


def main() -> None:
    table = Table(title="Loss relative to the mean: geometric mean, maximum")
    for column in ("workers", "optimizer", "recipe", "last", "outer"):
        table.add_column(column)
    for workers in map(int, sys.argv[1:] or ["4"]):
        for optimizer in OPTIMIZERS:
            for name, recipe in RECIPES.items():
                last, outer = [], []
                for seed in SEEDS:
                    for stop in sorted(random.Random(seed).sample(range(20, STEPS), STOPS)):
                        at = workers, optimizer, seed, stop
                        mean, anchor = losses(recipe, *at)
                        early = (
                            *recipe[:-1],
                            replace(recipe[-1], when=Early(recipe[-1].when, stop)),
                        )
                        last.append(anchor / mean)
                        outer.append(losses(early, *at)[0] / mean)
                cells = [
                    f"{statistics.geometric_mean(ratios):.2f}, {max(ratios):.2f}"
                    for ratios in (last, outer)
                ]
                table.add_row(str(workers), optimizer, name, *cells)
                print(workers, optimizer, name, *cells, flush=True)
    Console(width=None if Console().is_terminal else 140).print(table)


if __name__ == "__main__":
    main()
