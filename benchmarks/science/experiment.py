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
"""To train on: scikit-learn's 1797 digits without the 360 that the workload holds out."""


@dataclass(frozen=True)
class Job:
    """What decides a run, to the last bit: the recipe as one writes it in Python, the peak
    learning rate, and the seed of the first parameters and of every worker's batches."""

    recipe: str
    lr: float
    seed: int
    workers: int = 8
    group_size: int | None = None
    steps: int = 240


@dataclass(frozen=True)
class Outcome:
    """Of the consensus model, the loss (nats) on the whole training set and the accuracy on the
    pictures held out; and the floats that a worker sent per parameter and step."""

    loss: float
    accuracy: float
    floats: float


@cache
def digits() -> Workload:
    """The lab's digits, MLP 64-128-10 and Nesterov SGD with momentum 0.9, with 8 pictures per
    worker and step; lr rises over 5% of the steps and falls to 0 along a half cosine."""
    return replace(workloads.load("digits"), warmup=0.05, final=0.0)


@cache
def training_set() -> Batch:
    """All that is trained on: one epoch of a single worker."""
    epoch = islice(digits().batches(0, 1, 0), -(-PICTURES // DIGITS_BATCH))
    inputs, targets = zip(*epoch, strict=True)
    return torch.cat(inputs)[:PICTURES], torch.cat(targets)[:PICTURES]


@cache
def held_out() -> Batch:
    """The pictures that nobody trains on."""
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
        return _judge(model, floats) if rank == 0 else Outcome(0.0, 0.0, floats)

    return laconic.simulate(worker, workers=job.workers)[0]


@torch.no_grad()
def _judge(model: nn.Module, floats: float) -> Outcome:
    inputs, targets = held_out()
    right: Tensor = model(inputs).argmax(1) == targets
    return Outcome(float(digits().loss(model, training_set())), float(right.float().mean()), floats)
