"""laconic.save and laconic.load: exact, atomic on every rank, and refused with the reason."""

from __future__ import annotations

import copy
import errno
import json
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import laconic as la
from laconic import saving
from laconic.links.wrapped import Wrapped

import gloo

STEPS, NEXT = 14, 4
RECIPES: dict[str, la.Recipe] = {
    "ddp": la.ddp(),
    "local_sgd, late": la.local_sgd(3, delay=7),
    "slowmo": la.slowmo(la.local_sgd(2, delay=3), 6),
    "sgp, late": la.sgp("bipartite_linear", delay=2),
    "d_psgd": la.d_psgd(),
    "easgd": la.easgd(2, pull=0.3),
    "diloco, late": la.diloco(4, delay=3),
    "lsgd": la.lsgd(4, local_period=0),
}


# -- a run that draws from every generator ----


class Net(nn.Module):
    """Drops out, and keeps running statistics."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(3, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.last = nn.Linear(hidden, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)).tanh()
        return self.last(nn.functional.dropout(hidden, 0.3, self.training))


class Run:
    """One worker's model, optimiser, schedule and synchroniser; ``seed`` of the generators."""

    def __init__(
        self,
        recipe: la.Recipe,
        seed: int,
        link: la.links.Link | None = None,
        hidden: int = 6,
        **options: Any,
    ) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = Net(hidden)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": self.model.first.parameters(), "weight_decay": 0.1},
                {"params": [*self.model.norm.parameters(), *self.model.last.parameters()]},
            ],
            lr=0.05,
        )
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.sync = la.attach(self.model, self.optimizer, recipe, link=link, **options)

    def go(self, end: int) -> list[Tensor]:
        """Train up to step ``end``; all that the run is, after each step."""
        trace = []
        while self.sync.step < end:
            x = torch.randn(5, 3) * random.random()
            y = torch.from_numpy(np.random.normal(size=(5, 2))).float()
            loss = (self.model(x) - y).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.sync.report_loss(loss)
            self.optimizer.step()
            self.scheduler.step()
            trace.append(torch.cat([loss.detach().reshape(1), self.values()]))
        return trace

    def values(self) -> Tensor:
        """The model, the optimiser's state and its learning rates, flat."""
        state = self.optimizer.state_dict()
        kept = [v.reshape(-1) for s in state["state"].values() for v in s.values()]
        lrs = torch.tensor([group["lr"] for group in state["param_groups"]])
        whole = [*(v.reshape(-1) for v in self.model.state_dict().values()), *kept, lrs]
        return torch.cat([v.double() for v in whole]).clone()

    def save(self, path: Path, **others: Any) -> None:
        la.save(path, self.model, self.optimizer, others={"scheduler": self.scheduler, **others})

    def load(self, path: Path, **others: Any) -> dict[str, Any]:
        others = {"scheduler": self.scheduler, **others}
        return la.load(path, self.model, self.optimizer, self.sync, others=others)


def same(one: list[list[Tensor]], other: list[list[Tensor]]) -> bool:
    """Whether two sets of traces are alike to the last bit."""
    return all(
        torch.equal(a, b)
        for trace, trace2 in zip(one, other, strict=True)
        for a, b in zip(trace, trace2, strict=True)
    )


def whole(
    rank: int,
    recipe: la.Recipe,
    saves: list[int],
    folder: Path,
    link: la.links.Link | None = None,
) -> list[Tensor]:
    """The run that never stops, and saves on its way."""
    run = Run(recipe, 100 + rank, link)
    trace = []
    for step in [*saves, STEPS]:
        trace += run.go(step)
        if step in saves:
            run.save(folder / str(step), epoch=step // 3)
    run.sync.detach()
    return trace


def tail(
    rank: int, recipe: la.Recipe, step: int, folder: Path, link: la.links.Link | None = None
) -> list[Tensor]:
    """The steps after ``step``, by a worker that starts with other random state."""
    run = Run(recipe, 999, link)
    assert run.load(folder / str(step)) == {"epoch": step // 3, "step": step}
    assert run.sync.step == step
    trace = run.go(min(step + NEXT, STEPS))
    run.sync.detach()
    return trace


def over_gloo(rank: int, task: Callable[..., Any], ranks: int, *arguments: Any) -> Any:
    return task(rank, *arguments, link=gloo.link_of(ranks))


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    saves = sorted(random.Random(name).sample(range(1, STEPS - 1), 4))
    undisturbed = la.simulate(lambda r: whole(r, recipe, [], tmp_path), workers=3)
    saving_run = la.simulate(lambda r: whole(r, recipe, saves, tmp_path), workers=3)
    assert same(undisturbed, saving_run), "saving disturbed the run"
    for step in saves:
        tails = la.simulate(partial(_tail, recipe, step, tmp_path), workers=3)
        expected = [trace[step : step + NEXT] for trace in undisturbed]
        assert same(expected, tails), f"saved after step {step}"


def _tail(recipe: la.Recipe, step: int, folder: Path, rank: int) -> list[Tensor]:
    return tail(rank, recipe, step, folder)


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_goes_on_in_processes_that_never_ran_it(
    pool: gloo.Pool, name: str, tmp_path: Path
) -> None:
    """What threads saved goes on in processes, and what processes saved in threads."""
    recipe = RECIPES[name]
    first, second = sorted(random.Random(f"{name}, processes").sample(range(2, STEPS - 2), 2))
    here, there = tmp_path / "threads", tmp_path / "processes"
    threads = la.simulate(lambda r: whole(r, recipe, [first, second], here), workers=3)
    processes = pool.run(over_gloo, whole, 3, recipe, [first, second], there, ranks=3)
    assert same(threads, processes)
    for step in (first, second):
        expected = [trace[step : step + NEXT] for trace in threads]
        assert same(expected, pool.run(over_gloo, tail, 3, recipe, step, here, ranks=3))
        assert same(
            expected, la.simulate(partial(_tail, recipe, step, there), workers=3)
        )
