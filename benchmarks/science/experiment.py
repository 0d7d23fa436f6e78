"""One run of the experiment: a recipe, a learning rate, a seed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import islice

import torch
from torch import Tensor, nn

import laconic
from laconic.algorithms.parse import parse_recipe
from laconic.lab.race import workloads
from laconic.lab.race.workloads import DIGITS_BATCH, Batch, Workload, lr_factor

PICTURES = 1437
"""Number of training images: scikit-learn's 1797 digits without the 360 that are held out."""


@dataclass(frozen=True)
class Job:
    """Everything that determines a run, to the last bit.

    ``recipe`` is Python code, ``lr`` the peak learning rate. ``seed`` determines the initial
    parameters and every worker's batches.
    """

    recipe: str
    lr: float
    seed: int
    workers: int = 8
    group_size: int | None = None
    steps: int = 240


@dataclass(frozen=True)
class Outcome:
    """The result of a run: the consensus model's ``loss`` (nats) on the whole training set, its
    ``accuracy`` on held-out images, and the ``floats`` sent by a worker per parameter and step."""

    loss: float
    accuracy: float
    floats: float


@cache
def digits() -> Workload:
    """Return the lab's digits workload with the learning rate falling to 0.

    The MLP is 64-128-10, trained by Nesterov SGD with momentum 0.9 and 8 images per worker and
    step. The learning rate rises over 5% of the steps and then falls along a half cosine.
    """
    return replace(workloads.load("digits"), warmup=0.05, final=0.0)


@cache
def training_set() -> Batch:
    """Return the whole training set: one epoch of a single worker."""
    epoch = islice(digits().batches(0, 1, 0), -(-PICTURES // DIGITS_BATCH))
    inputs, targets = zip(*epoch, strict=True)
    return torch.cat(inputs)[:PICTURES], torch.cat(targets)[:PICTURES]


@cache
def held_out() -> Batch:
    """Return the held-out images."""
    inputs, targets = zip(*digits().validation, strict=True)
    return torch.cat(inputs), torch.cat(targets)


def train(job: Job) -> Outcome:
    """Run ``job`` in `laconic.simulate`."""
    recipe = parse_recipe(job.recipe)
    task = digits()

    def worker(rank: int) -> Outcome:
        torch.manual_seed(job.seed)
        model = task.model()
        optimizer = task.optimizer(model)
        batches = task.batches(rank, job.workers, job.seed)
        sync = laconic.attach(model, optimizer, recipe, group_size=job.group_size)
        for step, batch in enumerate(islice(batches, job.steps), 1):
            optimizer.param_groups[0]["lr"] = job.lr * lr_factor(step, job.steps, task)
            loss = task.loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            sync.report_loss(loss)
            optimizer.step()
        parameters = sum(p.numel() for p in model.parameters())
        floats = sync.stats().bytes_sent / 4 / parameters / job.steps
        sync.finish()
        sync.detach()
        return _evaluate(model, floats) if rank == 0 else Outcome(0.0, 0.0, floats)

    return laconic.simulate(worker, workers=job.workers)[0]


@torch.no_grad()
def _evaluate(model: nn.Module, floats: float) -> Outcome:
    inputs, targets = held_out()
    correct: Tensor = model(inputs).argmax(1) == targets
    loss = float(digits().loss(model, training_set()))
    return Outcome(loss, float(correct.float().mean()), floats)
