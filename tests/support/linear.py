"""Training on given gradients, c(worker, step) + slope*x, of tensors of any shapes: as a torch loop
over any link, and as `reference_coded` wants it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import laconic as la
from laconic.links import Link

from tests.references import reference_coded as coded
from tests.references.reference_coded import Array, Params
from tests.support import gloo

SLOPE = 0.25


@dataclass(frozen=True)
class Problem:
    """``lr`` of SGD with ``momentum``; c(i, t) is Gaussian, other numbers for every ``seed``."""

    recipe: la.Recipe
    workers: int
    shapes: tuple[tuple[int, ...], ...]
    steps: int = 12
    lr: float = 2.0**-4
    momentum: float = 0.0
    dtype: torch.dtype = torch.float64
    seed: int = 1
    offset: Callable[[Problem, int, int], Params] | None = None
    """In place of the Gaussian c."""

    def start(self) -> Params:
        rng = np.random.default_rng(self.seed)
        return [rng.standard_normal(shape) for shape in self.shapes]

    def c(self, worker: int, step: int) -> Params:
        if self.offset is not None:
            return self.offset(self, worker, step)
        rng = np.random.default_rng([self.seed, worker, step])
        return [rng.standard_normal(shape) for shape in self.shapes]

    def gradient(self, worker: int, step: int, x: Params) -> Params:
        return [c + SLOPE * p for c, p in zip(self.c(worker, step), x, strict=True)]

    def expected(self, algorithm: coded.Algorithm) -> coded.Trace:
        run = (self.workers, self.steps, self.start(), self.gradient, lambda t: self.lr)
        return coded.run(algorithm, *run, momentum=self.momentum)


class Training:
    """One worker's training loop, to be stopped and gone on with anywhere."""

    def __init__(self, problem: Problem, rank: int, link: Link | None = None, **more: Any) -> None:
        self.problem, self.rank = problem, rank
        start = [torch.from_numpy(p).to(problem.dtype) for p in problem.start()]
        self.model = nn.ParameterList([nn.Parameter(p + rank) for p in start])  # rank 0's counts
        options = {"lr": problem.lr, "momentum": problem.momentum}
        self.optimizer = torch.optim.SGD(self.model.parameters(), **options)
        self.sync = la.attach(self.model, self.optimizer, problem.recipe, link=link, **more)
        self.raw: list[list[Tensor]] = []
        """This worker's own gradients, by step and tensor."""

    def backward(self, step: int) -> None:
        c = [torch.from_numpy(c).to(self.problem.dtype) for c in self.problem.c(self.rank, step)]
        x = [p.detach() for p in self.model]
        self.raw.append([a + SLOPE * p for a, p in zip(c, x, strict=True)])
        terms = [
            (a * p).sum() + SLOPE / 2 * (p * p).sum() for a, p in zip(c, self.model, strict=True)
        ]
        self.optimizer.zero_grad()
        torch.stack(terms).sum().backward()

    def steps(self, first: int, last: int) -> list[list[Array]]:
        """The parameters after each of these steps."""
        found = []
        for t in range(first, last + 1):
            self.backward(t)
            self.optimizer.step()
            found.append(self.values())
        return found

    def values(self) -> list[Array]:
        return [p.detach().double().numpy().copy() for p in self.model]

    def consensus(self) -> list[Array]:
        with self.sync.consensus(mean=False):
            return self.values()

    def state(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "sync": self.sync}
        return {name: part.state_dict() for name, part in parts.items()}

    def load(self, saved: dict[str, Any]) -> None:
        for name in ("model", "optimizer", "sync"):
            getattr(self, name).load_state_dict(saved[name])


def simulated(problem: Problem, **more: Any) -> list[list[list[Array]]]:
    """By worker and step; ``more`` is `laconic.attach`'s."""

    def run(rank: int) -> list[list[Array]]:
        return Training(problem, rank, **more).steps(1, problem.steps)

    return la.simulate(run, workers=problem.workers)


def of_two_ranks(problem: Problem) -> tuple[list[list[list[Array]]], Problem]:
    """By worker and step, where two ranks, which must hold the same bits, make up a worker; and
    what such workers are: half as many, each with the mean of its ranks' gradients."""
    runs = simulated(problem, nprocs_per_node=2)
    assert same_bits(runs[0::2], runs[1::2])

    def joined(given: Problem, worker: int, step: int) -> Params:
        both = [replace(given, offset=None).c(2 * worker + i, step) for i in (0, 1)]
        return [(a + b) / 2 for a, b in zip(*both, strict=True)]

    return runs[0::2], replace(problem, workers=problem.workers // 2, offset=joined)


def over_gloo(rank: int, problem: Problem) -> list[list[Array]]:
    training = Training(problem, rank, gloo.link_of(problem.workers))
    found = training.steps(1, problem.steps)
    training.sync.detach()
    return found


def gap(runs: list[list[list[Array]]], trace: coded.Trace) -> float:
    """The largest difference between what all workers had after every step and what they should
    have had; NaN counts."""
    worst = 0.0
    for rank, run in enumerate(runs):
        assert len(run) == len(trace.workers)
        for t, tensors in enumerate(run):
            for got, want in zip(tensors, trace.workers[t][rank], strict=True):
                difference = float(np.abs(got - want).max())
                worst = max(worst, difference if difference == difference else np.inf)
    return worst


def distance(one: list[list[Array]], other: list[list[Array]]) -> float:
    """The largest difference between two workers' runs; NaN counts."""
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a, b, strict=True)]
    worst = [float(np.abs(a - b).max()) for a, b in pairs]
    return max(d if d == d else np.inf for d in worst)


def same_bits(runs: list[list[list[Array]]], others: list[list[list[Array]]]) -> bool:
    """Whether two sets of runs are equal to the last bit."""
    return all(
        np.array_equal(a, b)
        for run, other in zip(runs, others, strict=True)
        for here, there in zip(run, other, strict=True)
        for a, b in zip(here, there, strict=True)
    )


def resumes(problem: Problem, saves: tuple[int, ...], tail: int = 4) -> bool:
    """Whether runs that go on from what was saved after these steps are the one that never
    stopped, bit for bit."""
    kept: dict[int, list[dict[str, Any]]] = {t: [{}] * problem.workers for t in saves}

    def straight(rank: int) -> list[list[Array]]:
        training, found = Training(problem, rank), []
        for t in range(1, problem.steps + 1):
            found += training.steps(t, t)
            if t in saves:
                kept[t][rank] = copy_of(training.state())
        return found

    whole = la.simulate(straight, workers=problem.workers)
    assert same_bits(whole, simulated(problem)), "saving disturbed the run"

    def again(rank: int, t: int) -> list[list[Array]]:
        training = Training(problem, rank)
        training.load(kept[t][rank])
        return training.steps(t + 1, t + tail)

    return all(
        same_bits(
            [run[t : t + tail] for run in whole],
            la.simulate(lambda rank, t=t: again(rank, t), workers=problem.workers),
        )
        for t in saves
    )


def copy_of(state: Any) -> Any:
    """As what a file gives back: sharing no tensor with the run."""
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: copy_of(value) for key, value in state.items()}
    return [copy_of(value) for value in state] if isinstance(state, list) else state


def carried(training: Training, name: str) -> dict[int, Tensor]:
    """What the gradient round's exchange keeps under ``name``, as long as the message, by the
    number of the parameter, flat."""
    round_, found = training.sync.driver.run.gradients[-1], {}
    numbers = {id(p): i for i, p in enumerate(training.model)}
    for bucket, state in ((c.bucket, c.exchange_state) for c in round_.channels):
        for segment, values in zip(bucket.segments, bucket.split(state[name]), strict=True):
            found[numbers[id(segment.tensor)]] = values.clone()
    return found


def check_pooled(before: list[dict[int, Tensor]], after: list[dict[int, Tensor]]) -> None:
    """Check pooled state, by worker and parameter: with fewer workers the mean over them is what it
    was, and workers differ by what they differed before."""
    assert len(after) < len(before)
    for i in before[0]:
        old = torch.stack([state[i].double() for state in before])
        new = torch.stack([state[i].double() for state in after])
        bound = 1e-6 * float(old.abs().max())
        assert float((new.mean(0) - old.mean(0)).abs().max()) <= bound
        assert float(((new - new[0]) - (old - old[0])[: len(new)]).abs().max()) <= bound
    assert any(float((before[1][i] - before[0][i]).abs().max()) > 0.1 for i in before[0])
