"""A loop as fairscale's guide has it, over simulated workers or gloo processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import laconic as la
from laconic.links.simulated import current_link

from tests.references import problem
from tests.support import gloo, training


@dataclass(frozen=True)
class Settings:
    """One run of the references' problem; ``options`` are the wrapper's."""

    ranks: int = 4
    nprocs_per_node: int = 1
    steps: int = 24
    optimizer: str = "nesterov"
    lr: Callable[[int, int], float] = training.changing_lr
    options: dict[str, Any] = field(default_factory=dict)
    job_seed: int = 3

    @property
    def job(self) -> training.Job:
        return training.Job((), self.ranks, self.steps, self.optimizer, self.lr, self.job_seed)


@contextmanager
def over_gloo(ranks: int) -> Iterator[None]:
    """Within a pool's process: the wrapper's link is over its first ``ranks`` processes."""
    token = current_link.set(gloo.link_of(ranks))
    try:
        yield
    finally:
        current_link.reset(token)


def build(
    settings: Settings, rank: int
) -> tuple[la.SlowMoDistributedDataParallel, torch.optim.Optimizer]:
    """The wrapper over a model initialized differently on every rank, and its optimizer."""
    model, optimizer = training.build(settings.job, rank)
    wrapped = la.SlowMoDistributedDataParallel(model, settings.nprocs_per_node, **settings.options)
    return wrapped, optimizer


def step(
    settings: Settings,
    model: la.SlowMoDistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    batch: problem.Batch,
    t: int,
) -> None:
    """One iteration of the guide's loop."""
    for group, options in enumerate(optimizer.param_groups):
        options["lr"] = settings.lr(group, t)
    x, y = (torch.from_numpy(a) for a in batch)
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    model.zero_grad(set_to_none=True)
    model.perform_slowmo(optimizer)


class Wide(nn.Module):
    """With statistics of its batches; by default what counts is the model's bytes."""

    def __init__(self, hidden: int = 256, out: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, out)
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


def square_step(
    model: la.SlowMoDistributedDataParallel, optimizer: torch.optim.Optimizer, x: Tensor
) -> None:
    """One iteration of the guide's loop; the loss is the mean square of what comes out."""
    model(x).square().mean().backward()
    optimizer.step()
    model.zero_grad()
    model.perform_slowmo(optimizer)


def train(settings: Settings, rank: int) -> list[dict[str, Any]]:
    """This rank's parameters after every step."""
    model, optimizer = build(settings, rank)
    data = settings.job.data()[rank]
    trace = []
    for t in range(1, settings.steps + 1):
        step(settings, model, optimizer, data[t - 1], t)
        trace.append(training.values(model.module))
    return trace


def simulated(settings: Settings) -> list[list[dict[str, Any]]]:
    return la.simulate(lambda rank: train(settings, rank), workers=settings.ranks)


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """To the last bit."""
    return all(np.array_equal(one[name], other[name]) for name in problem.NAMES)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])


def batches(rank: int, steps: int) -> list[Tensor]:
    """Inputs of 64 numbers, each rank's own."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(8, 64, generator=generator) for _ in range(steps)]
