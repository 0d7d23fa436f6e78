"""Whether what a run shows of itself says how many more steps a longer period needs.

Every case is trained with `ddp` for several numbers of steps, and with streaming DiLoCo and Muon's
direction for several periods. As in `benchmarks.factors`, f(H) is how many steps a period of H
needs for one of `ddp`, and f(64) / f(8) the growth. For comparison, `OUTER` takes the outer step
over gradients. The signals, in the middle half of a run with period 8:

    agreement    the share that all workers have in common of |change|^2 over a period
    gradients    the same of |gradient|^2 in one step

of n workers with vectors v_i:  (n |mean(v)|^2 / mean(|v_i|^2) - 1) / (n - 1), which is 0 on average
for independent noise. The second one, s, gives the gradient noise scale, batch * (1 - s) / s:
McCandlish et al. 2018, arXiv 1812.06162, Appendix A.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import correlation, fmean
from typing import NamedTuple

import torch
from torch import Tensor

import laconic
from benchmarks.evidence.runs import Job, optimizers_of, steps_of
from benchmarks.evidence.tasks import task
from benchmarks.factors import factor
from benchmarks.study import Study
from laconic.algorithms.parse import parse_recipe
from laconic.algorithms.round import Round
from laconic.algorithms.update import Clock, State
from laconic.algorithms.updates.muon_step import MuonStep

DATA = Path(__file__).with_name("signals.jsonl")
"""The runs that the page was made from."""
STEPS, DDP_STEPS, PERIODS = 512, (128, 256, 512, 1024, 2048), (8, 16, 32, 64)
WORKERS, SEEDS, EVERY = 4, (200, 201), 32
"""``EVERY``: steps between two looks at the gradients."""
CASES = (
    *(("text, small", "adamw", 8e-3, batch) for batch in (2, 8, 32)),
    ("text, small", "adamw", 2e-3, 8),
    *(("images, small", "adamw", 8e-3, batch) for batch in (2, 8, 32)),
    ("images, small", "sgd", 0.05, 8),
    ("series", "adamw", 3e-3, 4),
    ("series", "sgd", 0.05, 4),
)
"""Task, inner optimizer, its learning rate, and samples per worker and step."""
OUTER = "outer_step(ddp(), 8, outer='muon')"


@dataclass(frozen=True)
class Seen:
    """What a run has shown: its ``loss`` and its signals, NaN for `ddp`."""

    loss: float
    agreement: float
    gradients: float


class Norm(NamedTuple):
    """The squared length of a change, or of a mean change, that was sent after ``step``."""

    step: int
    square: float


@dataclass(frozen=True)
class Watched(MuonStep):
    """`MuonStep` that notes the lengths of its changes and of their means."""

    sent: list[Norm] = field(default_factory=list, compare=False, repr=False)
    received: list[Norm] = field(default_factory=list, compare=False, repr=False)

    def send(self, x: Tensor, state: State, clock: Clock) -> Tensor:
        change = super().send(x, state, clock)
        self.sent.append(Norm(clock.step, squared(change)))
        return change

    def fold(
        self, x: Tensor, received: Tensor, sent: Tensor | None, state: State, clock: Clock
    ) -> Tensor:
        self.received.append(Norm(clock.step - clock.delay, squared(received)))
        return super().fold(x, received, sent, state, clock)


def squared(x: Tensor) -> float:
    return float(x.double().square().sum())


def shared(mean: float, own: float, n: int) -> float:
    """The share that ``n`` vectors have in common: ``mean`` is the squared length of their mean,
    ``own`` the mean of their squared lengths."""
    return (n * mean / own - 1) / (n - 1)


def train(job: Job) -> Seen:
    """Run ``job`` in `laconic.simulate`."""
    of = task(job.task)

    def worker(rank: int) -> tuple[float, list[Watched], dict[int, Tensor]]:
        torch.manual_seed(job.seed)
        model = of.model()
        optimizers = optimizers_of(job, model)
        recipe = parse_recipe(job.recipe)
        assert isinstance(recipe, tuple), "not auto()"
        updates = []
        if isinstance(recipe[0], Round):
            for r in recipe:
                of_round = {f.name: getattr(r.update, f.name) for f in fields(r.update)}
                updates.append(Watched(**of_round))
            recipe = tuple(replace(r, update=u) for r, u in zip(recipe, updates, strict=True))
        sync = laconic.attach(model, optimizers, recipe)
        gradients = {}
        for step in steps_of(job, rank, model, optimizers):
            if updates and step % EVERY == 0 and middle(step):
                parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
                gradients[step] = torch.cat(parts).double()
            for optimizer in optimizers:
                optimizer.step()
        sync.finish()
        sync.detach()
        with torch.no_grad():
            return float(of.loss(model, of.evaluation)), updates, gradients

    found = laconic.simulate(worker, workers=job.workers)
    loss, updates, gradients = found[0]
    if not updates:
        return Seen(loss, math.nan, math.nan)
    own = fmean(
        sum(s.square for u in updates for s in u.sent if middle(s.step)) for _, updates, _ in found
    )
    mean = sum(s.square for u in updates for s in u.received if middle(s.step))
    each = [[others[step] for _, _, others in found] for step in gradients]
    lone = sum(fmean(map(squared, rows)) for rows in each)
    together = sum(squared(torch.stack(rows).mean(0)) for rows in each)
    n = job.workers
    return Seen(loss, shared(mean, own, n), shared(together, lone, n))


def middle(step: int) -> bool:
    """Whether ``step`` is in the middle half of a run."""
    return STEPS // 4 <= step <= 3 * STEPS // 4


def study(path: Path = DATA) -> Study[Job, Seen]:
    """The runs in the file at ``path``."""
    return Study(path, Job, Seen, train)


def recipe_of(period: int) -> str:
    return f"streaming_diloco({period}, 4, 2, outer='muon')"


def jobs_of(case: tuple[str, str, float, int], seed: int) -> list[Job]:
    name, inner, lr, batch = case
    runs = [("ddp()", steps) for steps in DDP_STEPS]
    runs += [(recipe_of(period), STEPS) for period in PERIODS] + [(OUTER, STEPS)]
    return [Job(name, text, inner, lr, WORKERS, steps, batch, seed) for text, steps in runs]


def jobs() -> list[Job]:
    """All runs, those that take longest first."""
    found = [job for case in CASES for seed in SEEDS for job in jobs_of(case, seed)]
    return sorted(found, key=lambda job: -job.steps)


@dataclass(frozen=True)
class Line:
    """A case: means over the seeds of its signals, of f by period, and of f of `OUTER`."""

    case: tuple[str, str, float, int]
    agreement: float
    gradients: float
    factors: dict[int, float]
    outer: float

    @property
    def growth(self) -> float:
        return self.factors[PERIODS[-1]] / self.factors[PERIODS[0]]


def lines(known: Mapping[Job, Seen]) -> list[Line]:
    """The cases of which all runs are known."""
    found = []
    for case in CASES:
        of = [jobs_of(case, seed) for seed in SEEDS]
        if not all(job in known for each in of for job in each):
            continue
        factors: dict[str, list[float]] = {text: [] for text in (*map(recipe_of, PERIODS), OUTER)}
        for each in of:
            ddp = {job.steps: known[job].loss for job in each if job.recipe == "ddp()"}
            for text, own in factors.items():
                job = next(j for j in each if j.recipe == text)
                own.append(factor(known[job].loss, ddp, STEPS))
        short = [known[j] for each in of for j in each if j.recipe == recipe_of(PERIODS[0])]
        signals = fmean(s.agreement for s in short), fmean(s.gradients for s in short)
        means = {p: fmean(factors[recipe_of(p)]) for p in PERIODS}
        found.append(Line(case, *signals, means, fmean(factors[OUTER])))
    return found


def correlations(found: Sequence[Line]) -> tuple[float, float]:
    """Those of the logarithm of the growth with both signals, over the cases."""
    growth = [math.log(line.growth) for line in found]
    signals = [line.agreement for line in found], [line.gradients for line in found]
    return correlation(growth, signals[0]), correlation(growth, signals[1])
