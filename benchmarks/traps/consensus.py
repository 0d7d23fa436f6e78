"""Traps of the final model: it must contain every step taken."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import laconic as la
from benchmarks.traps import Trapped, trap

BOUND = 1.05
"""Maximum loss of the finished model, relative to that of the mean of the workers' models."""
STOPS, LAST = 20, 100
README = la.slowmo(la.local_sgd(3), period=48)

RECIPES: dict[str, tuple[la.Recipe, int | None]] = {
    "ddp()": (la.ddp(), None),
    "ddp(codec='int4')": (la.ddp(codec="int4"), None),
    "power_sgd(2)": (la.power_sgd(2), None),
    "demo()": (la.demo(), None),
    "local_sgd(12)": (la.local_sgd(12), None),
    "local_sgd(12, delay=8)": (la.local_sgd(12, delay=8), None),
    "local_sgd(12, codec='int8')": (la.local_sgd(12, codec="int8"), None),
    "post_local_sgd(20, 8)": (la.post_local_sgd(20, 8), None),
    "hierarchical(4, 16)": (la.hierarchical(4, 16), 2),
    "slowmo(local_sgd(3), 48)": (README, None),
    "slowmo(local_sgd(3), 12, 0.4)": (la.slowmo(la.local_sgd(3), 12, 0.4), None),
    "slowmo(sgp(), 24, 0.4, average=False)": (la.slowmo(la.sgp(), 24, 0.4, average=False), None),
    "sgp()": (la.sgp(), None),
    "sgp(delay=2)": (la.sgp(delay=2), None),
    "d_psgd()": (la.d_psgd(), None),
    "easgd(8)": (la.easgd(8), None),
    "eamsgd(8)": (la.eamsgd(8), None),
    "downpour(4)": (la.downpour(4), None),
    "lsgd(8, local_period=0)": (la.lsgd(8, local_period=0), None),
    "lsgd(8, local_period=2), groups of 2": (la.lsgd(8, local_period=2), 2),
    "diloco(100)": (la.diloco(100), None),
    "diloco(24)": (la.diloco(24), None),
    "diloco(24, delay=8)": (la.diloco(24, delay=8), None),
    "diloco(16, delay=16, merge='eager')": (la.diloco(16, delay=16, merge="eager"), None),
    "streaming_diloco(16, 4, 2)": (la.streaming_diloco(16, 4, 2), None),
    "sparse_loco(12)": (la.sparse_loco(12), None),
    "noloco(12)": (la.noloco(12), None),
}
"""Recipes, with the group size of those that have groups."""


@cache
def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def loss_of(model: nn.Module) -> float:
    """Return the loss on all images."""
    images, labels = digits()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(images), labels))


class Worker:
    """One worker's training of a small network. ``data`` selects the batches."""

    def __init__(
        self, recipe: la.Recipe, rank: int, group_size: int | None = None, data: int = 0
    ) -> None:
        images, _ = digits()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        signs = any("FastComponents" in type(r.exchange).__name__ for r in recipe)
        summed = any("Downpour" in type(r.update).__name__ for r in recipe)
        lr, momentum = (0.002, 0.0) if signs else (0.0125 if summed else 0.05, 0.9)
        nesterov = bool(momentum)
        params = self.model.parameters()
        self.optimizer = torch.optim.SGD(params, lr, momentum=momentum, nesterov=nesterov)
        self.sync = la.attach(self.model, self.optimizer, recipe, group_size=group_size)
        self._generator = torch.Generator().manual_seed(1000 * data + rank)
        self._count = len(images)

    def go(self, end: int) -> None:
        images, labels = digits()
        while self.sync.step < end:
            batch = torch.randint(self._count, (8,), generator=self._generator)
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(images[batch]), labels[batch])
            loss.backward()
            self.sync.report_loss(loss)
            self.optimizer.step()

    def flat(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])


@dataclass(frozen=True)
class Ends:
    """Losses of the mean of the workers' models, and of the model that a call produced."""

    mean: float
    model: float

    @property
    def ratio(self) -> float:
        return self.model / self.mean


def simulate(worker: Callable[[int], Any], workers: int = 4) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return la.simulate(worker, workers)


def loss_of_mean(flats: list[Tensor]) -> float:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    torch.nn.utils.vector_to_parameters(torch.stack(flats).mean(0), model.parameters())
    return loss_of(model)


def finished(recipe: la.Recipe, stop: int, group_size: int | None, data: int = 0) -> Ends:
    """Train ``stop`` steps, call `finish`, and return the losses."""

    def run(rank: int) -> tuple[Tensor, float]:
        worker = Worker(recipe, rank, group_size, data)
        worker.go(stop)
        before = worker.flat()
        worker.sync.finish()
        return before, loss_of(worker.model)

    ends = simulate(run)
    return Ends(loss_of_mean([flat for flat, _ in ends]), ends[0][1])


def validated(
    recipe: la.Recipe, stops: Collection[int], group_size: int | None
) -> tuple[list[Ends], bool]:
    """Return the losses inside `consensus` after each of ``stops``.

    Also returns whether the run ended bit-identical to one without validation.
    """

    def run(rank: int) -> tuple[list[tuple[Tensor, float]], Tensor]:
        worker = Worker(recipe, rank, group_size)
        seen = []
        for stop in sorted(stops):
            worker.go(stop)
            flat = worker.flat()
            with worker.sync.consensus() as model:
                seen.append((flat, loss_of(model)))
        worker.go(LAST)
        return seen, worker.flat()

    def undisturbed(rank: int) -> Tensor:
        worker = Worker(recipe, rank, group_size)
        worker.go(LAST)
        return worker.flat()

    runs, others = simulate(run), simulate(undisturbed)
    ends = [
        Ends(loss_of_mean([flat for flat, _ in stop]), stop[0][1])
        for stop in zip(*(seen for seen, _ in runs), strict=True)
    ]
    return ends, all(torch.equal(a, b) for (_, a), b in zip(runs, others, strict=True))


@trap("finish() one step before the slow step of the README's recipe keeps all training steps")
def finish_before_the_slow_step() -> str:
    ends = finished(README, 47, None)
    return _judge({47: ends}, "slowmo(local_sgd(3), period=48)")


@trap("finish() of diloco(100) after 99 steps keeps all training steps")
def finish_before_the_outer_step() -> str:
    return _judge({99: finished(la.diloco(100), 99, None)}, "diloco(100)")


@trap("every recipe, stopped by finish() after 20 random steps, is no worse than the mean", 1200)
def finish_anywhere() -> str:
    return _every_recipe(
        lambda recipe, stops, size: [finished(recipe, stop, size) for stop in stops]
    )


@trap(
    "every recipe: consensus() after 20 random steps is the mean and leaves the run unchanged", 600
)
def validate_anywhere() -> str:
    changed = []

    def ends(recipe: la.Recipe, stops: list[int], size: int | None) -> list[Ends]:
        found, same = validated(recipe, stops, size)
        if not same:
            changed.append(recipe)
        return found

    text = _every_recipe(ends)
    if changed:
        raise Trapped(f"validation changes the run under {changed}")
    return f"{text}; runs end bit-identical to those without validation"


def _every_recipe(
    ends_of: Callable[[la.Recipe, list[int], int | None], list[Ends]],
) -> str:
    worst: tuple[float, str] = (0.0, "")
    beyond: list[str] = []
    for index, (name, (recipe, size)) in enumerate(RECIPES.items()):
        stops = sorted(random.Random(index).sample(range(1, LAST), STOPS))
        ends = ends_of(recipe, stops, size)
        ratio, stop = max((end.ratio, stop) for end, stop in zip(ends, stops, strict=True))
        print(f"{name}: at most {ratio:.4f} times the mean's loss, after {stop} steps", flush=True)
        worst = max(worst, (ratio, f"{name} after {stop} steps"))
        if not ratio <= BOUND:
            beyond.append(f"{name} {ratio:.2f}")
    if beyond:
        raise Trapped(f"loss as a multiple of the mean's: {', '.join(beyond)}")
    return f"{len(RECIPES)} recipes, loss at most {worst[0]:.3f} times the mean's ({worst[1]})"


def _judge(ends: dict[int, Ends], name: str) -> str:
    for stop, end in ends.items():
        text = f"{name} stopped at {stop}: loss {end.model:.4f}, the mean of the workers' models "
        text += f"{end.mean:.4f}"
        if not (math.isfinite(end.model) and end.ratio <= BOUND):
            raise Trapped(text)
    return text


@trap("optimizer.step() inside consensus(), whose result would be discarded, raises an error")
def step_inside_consensus() -> str:
    def run(rank: int) -> str:
        worker = Worker(la.local_sgd(4), rank)
        worker.go(3)
        with worker.sync.consensus():
            try:
                worker.go(4)
            except ValueError as error:
                return str(error)
        return f"the step was counted ({worker.sync.step}) and its result discarded"

    text = simulate(run, 2)[0]
    if "consensus()" not in text:
        raise Trapped(text)
    return text
