"""One worker of an elastic run, for tests. It reports what happens to it as events."""

from __future__ import annotations

import dataclasses
import hashlib
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import laconic

OWN = ("samples", "clip", "fails_after", "linger", "signs", "slow", "loader", "timeout")
"""The options that are not those of `laconic.Elastic`."""
FEW = 60
"""More steps than a worker can be ahead of another one, or than pass while one reads a file."""


def last_step(signs: Path, number: int, step: int) -> int | None:
    """The step at which all workers end, once a test has asked worker ``number`` for it: see
    `elastic_runs.Run.end_soon`."""
    agreed = signs / "last"
    if not agreed.exists() and (signs / f"ask{number}").exists():
        (signs / "new").write_text(str(step + FEW))
        (signs / "new").rename(agreed)
    return int(agreed.read_text()) if agreed.exists() else None


def wait_for_steps(signs: Path) -> None:
    """Wait until worker 1 has taken `FEW` steps more, which it writes to a file."""
    end, step = time.monotonic() + 60, int((signs / "step1").read_text() or 0)
    while int((signs / "step1").read_text() or 0) < step + FEW:
        assert time.monotonic() < end, "the others wait for this worker's first step"
        time.sleep(0.1)


class Clock:
    """An object whose state can be read ``fails_after`` times; None: always."""

    def __init__(self, fails_after: int | None) -> None:
        self.left = fails_after

    def state_dict(self) -> dict[str, int]:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("no state any more")
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"n": 1}


def digest_of(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def batches(options: dict[str, Any], sampler: Any, number: int) -> Callable[[], torch.Tensor]:
    """What draws a batch: of a dataset of so many ``samples``, through the processes of a
    DataLoader that are started by ``loader``; or each worker's own."""
    generator = torch.Generator().manual_seed(number)
    if "samples" not in options:
        return lambda: torch.randn(16, 20, generator=generator)
    data = torch.randn(options["samples"], 20, generator=torch.Generator().manual_seed(5))
    if "loader" not in options:
        samples = iter(sampler)
        return lambda: data[[next(samples) for _ in range(4)]]
    context = multiprocessing.get_context(options["loader"])
    if options["loader"] == "fork":
        context.Process(target=time.sleep, args=(1000,)).start()
    dataset: Any = data
    loaded = DataLoader(dataset, 4, sampler=sampler, num_workers=2, multiprocessing_context=context)
    iterator = iter(loaded)
    return lambda: next(iterator)


def train(
    say: Callable[..., None],
    recipe: str,
    steps: int,
    elastic: laconic.Elastic,
    options: dict[str, Any],
    number: int,
    pace: float,
) -> None:
    """Train a small model. ``options``: ``clip``: clip the gradients; ``fails_after``: see `Clock`;
    ``linger``: seconds to live on after the end; ``signs``: the folder in which a test asks for
    something, see `last_step` and `elastic_runs.Run.spoil`; ``slow``: the worker whose first step
    takes as long as many of worker 1; ``timeout``: of `laconic.attach`; and those of `batches`."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 100),
        torch.nn.BatchNorm1d(100),
        torch.nn.Tanh(),
        torch.nn.Linear(100, 5),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.95)
    sampler = laconic.ElasticSampler(options.get("samples", 1), seed=1)
    others = {"data": sampler, "rate": scheduler, "clock": Clock(options.get("fails_after"))}
    elastic = dataclasses.replace(elastic, others=others)
    made = eval(recipe, {"laconic": laconic})
    timeout = options.get("timeout", 60)
    sync = laconic.attach(model, optimizer, made, elastic=elastic, timeout=timeout)
    assert sync.view is not None
    view, begun = sync.view, sync.step
    say("ready", step=sync.step, workers=len(view.workers), id=view.workers[view.place])
    sync.on_change(lambda view: say("view", workers=len(view.workers), step=sync.step))
    signs, loss = Path(options.get("signs", "/nowhere")), torch.zeros(())
    draw = batches(options, sampler, number)
    while sync.step < min(steps, last_step(signs, number, sync.step) or steps):
        x = draw()
        loss = (model(x) - x[:, :5].sin()).square().mean()
        if options.get("slow") == number and sync.step == begun:
            wait_for_steps(signs)
        elif "slow" in options and number == 1:
            (signs / "step1").write_text(str(sync.step))
        optimizer.zero_grad()
        loss.backward()
        if options.get("clip"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        if begun >= 0:
            say("stepped")
            begun = -1
        if (signs / f"spoil{number}").exists():
            (signs / f"spoil{number}").unlink()
            with torch.no_grad():
                layer = model[0]
                assert isinstance(layer, torch.nn.Linear)
                layer.weight[0, 3] += 1e-3
        time.sleep(pace)
    sync.finish()
    assert sync.view is not None
    stats = {"workers": len(sync.view.workers), "drifted": sync.stats().steps_drifted}
    say("done", digest=digest_of(model), loss=loss.item(), step=sync.step, **stats)
    time.sleep(options.get("linger", 0.0))
