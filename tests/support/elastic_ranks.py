"""Elastic runs whose workers have two ranks, for tests: each rank is a process."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import laconic
from laconic.links.calls import Call
from laconic.links.elastic import leases

from tests.support import gloo
from tests.support.elastic_runs import Process, Reporter, Run, Signs, digest_of, use

RANKS = 2
Say = Callable[..., None]


def build() -> nn.Sequential:
    """Of the bias of the last layer, one rank has nothing; of others, ranks have unequal parts."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 1)).double()


def batch(id: str, rank: int, step: int) -> Tensor:
    """What a rank of the worker ``id`` draws in a step."""
    generator = torch.Generator().manual_seed(int(id, 16) + 10 * step + rank)
    return torch.randn(8, 5, dtype=torch.float64, generator=generator)


def loss_of(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = (model(x) - x.sum(1, keepdim=True).sin()).square().mean()
    return loss


def shards_of(model: Any) -> str:
    """A digest of all parameters, also of those of which this rank has a shard."""
    full = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]
    return digest_of(nn.ParameterList(full))


class ByStep(laconic.Trace):
    """A trace, by the steps after which calls begin: shards take other units than whole models."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        lines = [line for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
        events = [event for event in map(json.loads, lines) if "unit" in event]
        self._steps = [
            (int(found[1]) if (found := re.search(r"after (\d+) steps", e["call"])) else 0, e)
            for e in sorted(events, key=lambda e: int(e["unit"]))
        ]

    def present(self, serial: int, call: Call) -> list[int]:
        """Those of the latest change."""
        *_, latest = (event for step, event in self._steps if step <= call.step)
        return [self.ids.index(id) for id in latest["workers"]]


def repeat(recipe: str, ids: Sequence[str], steps: int, number: int) -> str:
    """Repeat the training of the worker ``ids[number]`` in one process, with the whole model and
    the batches of both ranks. Returns the `shards_of` the end."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.95)
    at: Any = model, optimizer, eval(recipe, {"laconic": laconic})
    elastic = laconic.Elastic("simulated", others={"rate": scheduler})
    sync = laconic.attach(*at, elastic=elastic, buffers="keep")
    while sync.step < steps:
        optimizer.zero_grad()
        losses = [loss_of(model, batch(ids[number], r, sync.step)) for r in range(RANKS)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        scheduler.step()
    sync.finish()
    return shards_of(model)


def train(say: Say, recipe: str, elastic: laconic.Elastic, options: Any, number: int) -> None:
    """Train a rank's shard of a small model. ``options``: ``clip``: clip the gradients; ``folder``:
    where to save a checkpoint at the end."""
    rank = torch.distributed.get_rank()
    signs = Signs(options["signs"], 10 * number + rank)
    mesh = init_device_mesh("cpu", (RANKS,))
    model = build()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.95)
    elastic = dataclasses.replace(elastic, others={"rate": scheduler})
    at: Any = model, optimizer, eval(recipe, {"laconic": laconic})
    sync = laconic.attach(*at, elastic=elastic, mesh=mesh, timeout=60, buffers=options["buffers"])
    id = sync.view.workers[sync.view.place]
    say("ready", step=sync.step, id=id)
    sync.on_change(lambda view: say("view", workers=len(view.workers)))
    while sync.step < signs.last_step(sync.step):
        signs.before_step(sync.step, model)
        optimizer.zero_grad()
        loss_of(model, batch(id, rank, sync.step)).backward()
        if options.get("clip"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        time.sleep(0.01)
    if "folder" in options:
        assert sync.mean(float(rank)) == (RANKS - 1) / 2
        with sync.consensus():
            consensus = shards_of(model)
        laconic.save(options["folder"], model, optimizer)
        saved = shards_of(model)
        optimizer.zero_grad()
        optimizer.step()
        laconic.load(options["folder"], model, optimizer)
        assert shards_of(model) == saved
    sync.finish()
    digest = shards_of(model)
    assert "folder" not in options or consensus == digest
    say("done", digest=digest, step=sync.step, workers=len(sync.view.workers))


def work(pipe: Connection, given: dict[str, str], at: Any, options: dict[str, Any]) -> None:
    """The process of a rank."""
    os.setsid()
    use(given)
    leases.START_SECONDS = 1.0
    torch.set_num_threads(1)
    number, rank, port, recipe, coordinator = at
    launched = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": RANKS}
    launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in launched.items()})
    reporter = Reporter(pipe)
    named = ("signs", "buffers", "clip", "folder")
    own = {name: options.pop(name) for name in named if name in options}
    laconic.init()
    try:
        train(reporter.say, recipe, laconic.Elastic(coordinator, **options), own, number)
    except Exception as error:  # as Python's last line would say it
        sys.excepthook(type(error), error, None)  # laconic may have its own
        reporter.write(f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None


class RanksRun(Run):
    """A coordinator, and workers of two ranks. ``workers`` has the processes of rank 0."""

    def __init__(self, recipe: str, count: int, buffers: str = "average", **options: Any) -> None:
        self.ranks: list[list[Process]] = []
        super().__init__(recipe, count, buffers=buffers, **options)

    def add(self, **more: Any) -> Process:
        """Start another worker."""
        number, port = len(self.ranks) + 1, gloo.free_port()
        given = {"signs": self._folder.name, **self.options, **more}
        places = [(number, r, port, self.recipe, f"127.0.0.1:{self.port}") for r in range(RANKS)]
        self.ranks.append([Process(work, at, dict(given)) for at in places])
        self.workers.append(self.ranks[-1][0])
        return self.workers[-1]

    def __enter__(self) -> RanksRun:
        return self

    def finished(self, *numbers: int) -> list[dict[str, Any]]:
        """What the ranks of these workers report at the end, which comes soon."""
        self.ask("end", 10 * numbers[0])
        return [rank.wait_for("done") for number in numbers for rank in self.ranks[number - 1]]

    def __exit__(self, *more: object) -> None:
        for process in (p for ranks in self.ranks for p in ranks):
            process.kill()
        super().__exit__(*more)
