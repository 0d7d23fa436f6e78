"""The references' problem as a torch training loop, run over any link."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

import laconic

from tests.references import problem as reference
from tests.support.loops import descend


def changing_lr(group: int, step: int) -> float:
    """Different in the two groups, different in every step, up and down."""
    return (0.05, 0.02)[group] * (1.0 + 0.5 * math.sin(step + group))


def constant_lr(group: int, step: int) -> float:
    return (0.05, 0.02)[group]


def partly_zero_lr(group: int, step: int) -> float:
    return 0.0 if group == 1 and step > 4 else changing_lr(group, step)


OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], list[Any]]] = {
    "sgd": (lambda g: torch.optim.SGD(g), [reference.SGD(), reference.SGD()]),
    "nesterov": (
        lambda g: torch.optim.SGD(
            [
                {**g[0], "momentum": 0.9, "nesterov": True},
                {**g[1], "momentum": 0.5, "weight_decay": 0.1},
            ]
        ),
        [reference.SGD(0.9, True), reference.SGD(0.5, False, 0.1)],
    ),
    "adamw": (
        lambda g: torch.optim.AdamW(
            [{**g[0], "weight_decay": 0.1}, {**g[1], "weight_decay": 0.0, "betas": (0.8, 0.95)}]
        ),
        [reference.AdamW(weight_decay=0.1), reference.AdamW((0.8, 0.95), weight_decay=0.0)],
    ),
}
"""By name: the torch optimizer over two groups, and the reference's rules for them."""


_data = cache(reference.make_data)
"""Every worker asks for that of all."""


@dataclass(frozen=True)
class Job:
    """One run of the problem, alike on all links."""

    recipe: laconic.Recipe
    workers: int
    steps: int = 20
    optimizer: str = "nesterov"
    lr: Callable[[int, int], float] = changing_lr
    seed: int = 3
    options: tuple[tuple[str, Any], ...] = ()
    reports: bool = True

    @property
    def ranks(self) -> int:
        """Of each worker."""
        return int(dict(self.options).get("nprocs_per_node", 1))

    def data(self) -> reference.Data:
        return _data(self.workers, self.steps, self.seed)

    def expected(self, recipe: reference.Recipe) -> reference.Trace:
        """By worker, of which each has the batches of all of its ranks."""
        rules, n = OPTIMIZERS[self.optimizer][1], self.workers // self.ranks
        data, init = self.data(), reference.initial(n, self.seed)
        if self.ranks > 1:
            data = reference.join(data, self.ranks)
        return reference.run(recipe, n, self.steps, rules, self.lr, data, init)


def build(
    job: Job, rank: int, device: torch.device | str = "cpu"
) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """This worker's model, initialized differently from every other's, and optimizer."""
    model = nn.Sequential(
        nn.Linear(reference.INPUTS, reference.HIDDEN),
        nn.Tanh(),
        nn.Linear(reference.HIDDEN, reference.OUTPUTS),
    ).to(device, torch.float64)
    values = reference.initial(job.workers, job.seed)[rank]
    by_name = dict(zip(reference.NAMES, model.parameters(), strict=True))
    with torch.no_grad():
        for name, p in by_name.items():
            p.copy_(torch.from_numpy(values[name]))
    groups = [{"params": [by_name[n] for n in names], "lr": 1.0} for names in reference.GROUPS]
    return model, OPTIMIZERS[job.optimizer][0](groups)


def step(
    job: Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: reference.Batch,
    t: int,
    sync: laconic.Synchronizer | None = None,
) -> None:
    """One ordinary training step; nothing of laconic in it, but that ``sync`` hears of the loss."""
    for group, options in enumerate(optimizer.param_groups):
        options["lr"] = job.lr(group, t)
    device = next(model.parameters()).device
    x, y = (torch.from_numpy(a).to(device) for a in batch)
    descend(optimizer, nn.functional.mse_loss(model(x), y), sync if job.reports else None)


def values(model: nn.Module) -> dict[str, Any]:
    """A copy of the parameters, named as in the reference."""
    copies = [p.detach().clone().cpu().numpy() for p in model.parameters()]
    return dict(zip(reference.NAMES, copies, strict=True))


def train(job: Job, rank: int, link: laconic.links.Link | None = None, **more: Any) -> list[Any]:
    """(parameters, consensus) after every step, on this worker."""
    model, optimizer = build(job, rank)
    options: dict[str, Any] = {**dict(job.options), **more}
    sync = laconic.attach(model, optimizer, job.recipe, link=link, **options)
    data = job.data()[rank]
    trace = []
    for t in range(1, job.steps + 1):
        step(job, model, optimizer, data[t - 1], t, sync)
        with sync.consensus(mean=False):
            consensus = values(model)
        trace.append((values(model), consensus))
    sync.detach()
    return trace


def simulated(job: Job) -> list[list[Any]]:
    """`train` on every worker, as threads."""
    return laconic.simulate(lambda rank: train(job, rank), workers=job.workers)


def largest_difference(runs: list[list[Any]], trace: reference.Trace) -> float:
    """Between what the workers had after every step and what the reference says; NaN counts."""
    worst = 0.0
    for rank, run in enumerate(runs):
        assert len(run) == len(trace.workers)
        for t, (own, consensus) in enumerate(run):
            for name in reference.NAMES:
                expected = (trace.workers[t][rank][name], trace.consensus[t][name])
                for got, want in zip((own[name], consensus[name]), expected, strict=True):
                    difference = float(np.abs(got - want).max())
                    worst = max(worst, difference if difference == difference else np.inf)
    return worst


def same_bits(one: list[list[Any]], other: list[list[Any]]) -> bool:
    """Whether two sets of runs are equal to the last bit."""
    return all(
        np.array_equal(a[which][name], b[which][name])
        for run, run2 in zip(one, other, strict=True)
        for a, b in zip(run, run2, strict=True)
        for which in (0, 1)
        for name in reference.NAMES
    )
