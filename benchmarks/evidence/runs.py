"""One simulated run: a task, a recipe, an inner optimizer, a seed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

import laconic
from benchmarks.evidence.tasks import task
from benchmarks.study import Study
from laconic.algorithms.parse import parse_recipe

DATA = Path(__file__).with_name("runs.jsonl")
"""The runs that the pages were made from."""
WARMUP, FINAL = 0.05, 0.1


@dataclass(frozen=True)
class Job:
    """Everything that determines a run.

    ``inner``: ``"adamw"``, ``"muon"`` (beside AdamW), or ``"sgd"`` (with Nesterov's momentum).
    ``lr``: the peak learning rate, which rises over 5% of the ``steps`` and falls to a tenth along
    a half cosine. ``batch``: samples per worker and step.
    """

    task: str
    recipe: str
    inner: str
    lr: float
    workers: int
    steps: int
    batch: int
    seed: int


@dataclass(frozen=True)
class Outcome:
    """``loss``: of the consensus model on held-out data, in nats. ``floats``: sent by a worker per
    parameter and step."""

    loss: float
    floats: float


def factor(step: int, steps: int) -> float:
    """The learning rate in ``step``, from 1, as a fraction of its peak."""
    rising = WARMUP * steps
    if step <= rising:
        return step / rising
    at = (step - rising) / (steps - rising)
    return FINAL + (1 - FINAL) * (1 + math.cos(math.pi * at)) / 2


def optimizers_of(job: Job, model: nn.Module) -> Sequence[Optimizer]:
    """The optimizers of one worker."""
    if job.inner == "muon":
        return laconic.muon(model, job.lr)
    if job.inner == "sgd":
        return [torch.optim.SGD(model.parameters(), lr=job.lr, momentum=0.9, nesterov=True)]
    options = {"lr": job.lr, "betas": (0.9, 0.95), "weight_decay": 0.1}
    return [torch.optim.AdamW(model.parameters(), **options)]


def steps_of(
    job: Job, rank: int, model: nn.Module, optimizers: Sequence[Optimizer]
) -> Iterator[int]:
    """The steps of one worker, from 1, each with its learning rate and its gradients."""
    of = task(job.task)
    batches = of.batches(rank, job.workers, job.seed, job.batch)
    for step, batch in enumerate(islice(batches, job.steps), 1):
        for optimizer in optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = job.lr * factor(step, job.steps)
        of.loss(model, batch).backward()
        yield step


def train(job: Job) -> Outcome:
    """Run ``job`` in `laconic.simulate`."""
    recipe, of = parse_recipe(job.recipe), task(job.task)

    def worker(rank: int) -> Outcome:
        torch.manual_seed(job.seed)
        model = of.model()
        optimizers = optimizers_of(job, model)
        sync = laconic.attach(model, optimizers, recipe)
        for _ in steps_of(job, rank, model, optimizers):
            for optimizer in optimizers:
                optimizer.step()
        parameters = sum(p.numel() for p in model.parameters())
        floats = sync.stats().bytes_sent / 4 / parameters / job.steps
        sync.finish()
        sync.detach()
        if rank:
            return Outcome(0.0, floats)
        with torch.no_grad():
            return Outcome(float(of.loss(model, of.evaluation)), floats)

    return laconic.simulate(worker, workers=job.workers)[0]


def study(path: Path = DATA) -> Study[Job, Outcome]:
    """The runs in the file at ``path``."""
    return Study(path, Job, Outcome, train)
