"""The studies: which runs they consist of, and what is chosen from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from benchmarks.evidence.runs import Job, Outcome
from benchmarks.evidence.tasks import NAMES, TUNED

Runs = Callable[[Sequence[Job]], Mapping[Job, Outcome]]
"""Returns the outcome of every job, from a file or from running it."""
TUNING, FRESH = range(2), range(100, 105)
"""Seeds on which settings are chosen, and those that are reported."""


@dataclass(frozen=True)
class Row:
    """The losses of one setting over seeds."""

    what: str
    job: Job
    losses: tuple[float, ...]
    floats: float

    @property
    def mean(self) -> float:
        return fmean(self.losses)

    @property
    def spread(self) -> float:
        """The standard error of the mean; NaN for one seed."""
        n = len(self.losses)
        return stdev(self.losses) / n**0.5 if n > 1 else math.nan


def row(runs: Runs, what: str, job: Job, seeds: Sequence[int] = FRESH) -> Row:
    jobs = seeded(job, seeds)
    known = runs(jobs)
    losses = tuple(known[j].loss for j in jobs)
    return Row(what, job, losses, known[jobs[0]].floats)


def seeded(job: Job, seeds: Sequence[int]) -> list[Job]:
    return [Job(**{**vars(job), "seed": seed}) for seed in seeds]


# -- Muon inside ----

PERIOD, STEPS, SAMPLES, WORKERS = 30, 480, 32, (1, 2, 4, 8)
"""16 rounds; 32 samples in each step of all workers together."""
RATES, MOMENTA = (2e-3, 4e-3, 8e-3, 16e-3, 32e-3), (0.6, 0.8, 0.9)


def inside(task: str, inner: str, workers: int, lr: float, recipe: str) -> Job:
    return Job(task, recipe, inner, lr, workers, STEPS, SAMPLES // workers, 0)


def settings_of(task: str, inner: str, n: int) -> dict[tuple[float, float], Job]:
    """The settings to choose from: inner learning rate and outer momentum."""
    return {
        (lr, mu): inside(task, inner, n, lr, f"diloco({PERIOD}, momentum={mu})")
        for lr in RATES
        for mu in MOMENTA
    }


VARIANTS = {
    "int4": "diloco({0}, momentum={1}, codec='int4')",
    "int2": "diloco({0}, momentum={1}, codec='int2')",
    "outer muon": "diloco({0}, momentum={1}, outer='muon')",
}


def muloco(runs: Runs, task: str) -> Iterator[Row]:
    """AdamW and Muon inside DiLoCo, each tuned by itself for every number of workers: the setting
    with the lowest mean loss on the tuning seeds. And what changes for 4 and 8 workers with codecs,
    another average, and another outer step."""
    cases = {(k, n): settings_of(task, k, n) for k in ("adamw", "muon") for n in WORKERS}
    known = runs(
        [j for jobs in cases.values() for job in jobs.values() for j in seeded(job, TUNING)]
    )
    found: list[tuple[str, Job]] = []
    for (inner, n), jobs in cases.items():

        def loss(setting: tuple[float, float], jobs: Mapping[Any, Job] = jobs) -> float:
            return fmean(known[j].loss for j in seeded(jobs[setting], TUNING))

        lr, mu = min(jobs, key=loss)
        found.append(("DiLoCo", jobs[lr, mu]))
        if n >= 4:
            found += [
                (what, inside(task, inner, n, lr, text.format(PERIOD, mu)))
                for what, text in VARIANTS.items()
            ]
    runs([j for _, job in found for j in seeded(job, FRESH)])
    return (row(runs, what, job) for what, job in found)


# -- outer learning rate and momentum ----

OUTER_RATES, OUTER_MOMENTA = (0.5, 0.7, 1.0), (0.0, 0.3, 0.6, 0.8, 0.9)
CELLS = tuple((4, period, 512) for period in (4, 16))
"""Workers, period, and steps."""
BATCH = 8
INNER_LR = {"text, small": 8e-3, "text, large": 4e-3, "images, small": 8e-3, "images, large": 4e-3}


def cell(task: str, n: int, period: int, steps: int, eta: float, mu: float) -> Job:
    recipe = f"diloco({period}, {eta}, {mu})"
    return Job(task, recipe, "adamw", INNER_LR[task], n, steps, BATCH, 0)


def outer(runs: Runs, task: str, seeds: Sequence[int] = FRESH) -> Iterator[Row]:
    """All settings of the outer step, in all cells."""
    jobs = [cell(task, *at, eta, mu) for at in CELLS for eta in OUTER_RATES for mu in OUTER_MOMENTA]
    runs([j for job in jobs for j in seeded(job, seeds)])
    return (row(runs, "DiLoCo", job, seeds) for job in jobs)


# -- Muon outside ----

PERIODS = 8, 32
DIRECTIONS = {
    "Nesterov": "diloco({0}, 0.7, 0.6)",
    "Muon": "diloco({0}, 0.7, 0.6, outer='muon')",
    "Muon, int4": "diloco({0}, 0.7, 0.6, outer='muon', codec='int4')",
}


def direction(runs: Runs, task: str) -> Iterator[Row]:
    """Nesterov's outer step and Muon's with AdamW inside, with 4 workers; and gradients averaged in
    every step."""
    cases = [("ddp()", "ddp()")]
    cases += [
        (f"{what}, {period}", text.format(period))
        for period in PERIODS
        for what, text in DIRECTIONS.items()
    ]
    at = INNER_LR[task], 4, 512, BATCH, 0
    jobs = {what: Job(task, text, "adamw", *at) for what, text in cases}
    runs([j for job in jobs.values() for j in seeded(job, FRESH)])
    return (row(runs, what, job) for what, job in jobs.items())


# -- fragments that arrive late ----

SGD_LR = {"text, small": 0.3, "images, small": 0.05}
"""Learning rates of SGD with Nesterov's momentum of 0.9."""
LATE = {
    "Nesterov": "streaming_diloco({0}, 4, 2)",
    "Nesterov, loscar": "streaming_diloco({0}, 4, 2, merge='loscar')",
    "Muon, mix": "streaming_diloco({0}, 4, 2, lr=0.7, outer='muon', merge='mix')",
    "Muon, lr 0.7": "streaming_diloco({0}, 4, 2, lr=0.7, outer='muon')",
    "Muon": "streaming_diloco({0}, 4, 2, outer='muon')",
}


def late(runs: Runs, task: str, inner: str = "adamw") -> Iterator[Row]:
    """Streaming DiLoCo, whose fragments arrive two steps late, with 4 workers: both outer steps,
    and ways to combine what arrives with the progress made meanwhile."""
    cases = [("ddp()", "ddp()")]
    cases += [
        (f"{what}, {period}", text.format(period))
        for period in PERIODS
        for what, text in LATE.items()
    ]
    lr = INNER_LR[task] if inner == "adamw" else SGD_LR[task]
    jobs = {what: Job(task, text, inner, lr, 4, 512, BATCH, 0) for what, text in cases}
    runs([j for job in jobs.values() for j in seeded(job, FRESH)])
    return (row(runs, what, job) for what, job in jobs.items())


def late_sgd(runs: Runs, task: str) -> Iterator[Row]:
    """`late` with SGD inside, on the small tasks."""
    return late(runs, task, "sgd") if task in SGD_LR else iter(())


# -- outer steps of each worker's own ----

OWN_STEPS = 1024
OWN_PERIODS = {32: 8, 128: 32}
"""With the delays of the fragments."""
OWN = {
    "Muon": "streaming_diloco({0}, 4, {1}, outer='muon')",
    "own Muon every 8 steps": "outer_step(streaming_diloco({0}, 4, {1}, "
    "merge='loscar'), 8, outer='muon', average=False)",
    "own Muon every 4 steps": "outer_step(streaming_diloco({0}, 4, {1}, "
    "merge='loscar'), 4, outer='muon', average=False)",
}


def own(runs: Runs, task: str, inner: str = "adamw") -> Iterator[Row]:
    """Streaming DiLoCo whose workers also take outer steps of their own, with 4 workers; beside
    outer steps on averages alone, and those of a free network."""
    cases = [("free network", "outer_step(ddp(), 8, outer='muon')")]
    cases += [
        (f"{what}, {period}", text.format(period, delay))
        for period, delay in OWN_PERIODS.items()
        for what, text in OWN.items()
    ]
    lr = INNER_LR[task] if inner == "adamw" else SGD_LR[task]
    jobs = {what: Job(task, text, inner, lr, 4, OWN_STEPS, BATCH, 0) for what, text in cases}
    seeds = FRESH[:3]
    runs([j for job in jobs.values() for j in seeded(job, seeds)])
    return (row(runs, what, job, seeds) for what, job in jobs.items())


def own_sgd(runs: Runs, task: str) -> Iterator[Row]:
    """`own` with SGD inside, on the small tasks."""
    return own(runs, task, "sgd") if task in SGD_LR else iter(())


# -- fine-tuning ----

INSIDE = {"adamw": "AdamW", "sgd": "SGD", "muon": "Muon"}


@dataclass(frozen=True)
class Tuning:
    """How a task's model is trained on: so many ``steps``, with so many ``samples`` of all four
    workers together. ``lr``: the learning rate to begin with, by the optimizer inside; the others
    are a factor of ``apart`` from one another."""

    steps: int
    samples: int
    lr: Mapping[str, float]
    apart: float


TUNINGS = {
    "MiniLM": Tuning(240, 8, {"adamw": 1e-3, "sgd": 0.0316228}, 10**0.5),
    "text, tuned": Tuning(480, 16, {"adamw": 4e-3, "sgd": 0.05, "muon": 4e-3}, 2.0),
}
TUNED_WITH = {
    "ddp()": "",
    "outer_step(ddp(), 8, outer='muon')": ", outer step",
    "streaming_diloco(8, 4, 2, outer='muon')": ", streaming",
}
"""Recipes, and how the table calls them."""


def tuned(runs: Runs, task: str) -> Iterator[Row]:
    """A trained model is trained on. Where workers are equal, one with the samples of all is the
    same."""
    of = TUNINGS[task]
    for inner, lr in of.lr.items():
        for recipe, name in TUNED_WITH.items():
            workers = 1 if "ddp" in recipe else 4
            job = Job(task, recipe, inner, lr, workers, of.steps, of.samples // workers, 0)
            yield at_best_rate(runs, INSIDE[inner] + name, job, of.apart)


def at_best_rate(runs: Runs, what: str, job: Job, apart: float) -> Row:
    """The row at a learning rate that is better than its neighbors, a factor of ``apart`` below and
    above; ``job`` has the first one that is tried."""
    while True:
        near = [replace(job, lr=float(f"{job.lr * apart**k:.6g}")) for k in (-1, 0, 1)]
        known = runs(near)
        best = min(near, key=lambda j: math.inf if math.isnan(known[j].loss) else known[j].loss)
        if best == job:
            return Row(what, best, (known[best].loss,), known[best].floats)
        job = best


STUDIES: dict[str, Callable[[Runs, str], Iterator[Row]]] = {
    "muloco": muloco,
    "direction": direction,
    "outer": outer,
    "late": late,
    "late_sgd": late_sgd,
    "own": own,
    "own_sgd": own_sgd,
    "tuned": tuned,
}
assert set(INNER_LR) == set(NAMES) and set(TUNINGS) == set(TUNED)
