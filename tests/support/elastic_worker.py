"""One worker of an elastic run, for tests: ``worker.py NAME RECIPE STEPS COORDINATOR OPTIONS``.

Writes a line for each event: ready, view, done with a digest of the model.
"""

from __future__ import annotations

import atexit
import dataclasses
import hashlib
import json
import logging
import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader


def say(event: str, **more: Any) -> None:
    print(json.dumps({"event": event, "time": time.monotonic(), **more}), flush=True)


def end() -> None:
    """Say which threads may be inside torch at the end of this process."""
    say("end", threads=[t.name for t in threading.enumerate() if t.name == "laconic-comm"])


if __name__ == "__main__":
    atexit.register(end)  # before laconic's functions, which run before it

import laconic  # noqa: E402

from tests.support import forgetful  # noqa: E402

OWN = ("samples", "clip", "fails_after", "linger", "signs", "slow", "loader")
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


def wait_for_steps(signs: Path) -> bool:
    """Wait until worker 1 has taken `FEW` steps more, which it writes to a file."""
    end, step = time.monotonic() + 30, int((signs / "step1").read_text() or 0)
    while int((signs / "step1").read_text() or 0) < step + FEW:
        assert time.monotonic() < end, "the others wait for this worker's first step"
        time.sleep(0.1)
    return False


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


def train(
    say: Callable[..., None],
    recipe: str,
    steps: int,
    elastic: laconic.Elastic,
    options: dict[str, Any],
    number: int,
    pace: float,
) -> None:
    """Train a small model. ``options``: ``samples`` of a dataset, else each worker draws its own by
    its ``number``; ``clip``: clip the gradients; ``fails_after``: see `Clock`; ``linger``: seconds
    to live on after the end; ``signs``: the folder in which a test asks for something, see
    `last_step` and `elastic_runs.Run.spoil`; ``slow``: the worker whose first step takes as long as
    many of worker 1, 0 for none; ``loader``: how the processes of a DataLoader are started."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 100),
        torch.nn.BatchNorm1d(100),
        torch.nn.Tanh(),
        torch.nn.Linear(100, 5),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.95)
    generator = torch.Generator().manual_seed(number)
    sampler = laconic.ElasticSampler(options.get("samples", 1), seed=1)
    others = {"data": sampler, "rate": scheduler, "clock": Clock(options.get("fails_after"))}
    elastic = dataclasses.replace(elastic, others=others)
    recipes = {"laconic": laconic}
    sync = laconic.attach(model, optimizer, eval(recipe, recipes), elastic=elastic, timeout=60)
    view = sync.view
    say("ready", step=sync.step, workers=len(view.workers), id=view.workers[view.place])
    sync.on_change(lambda view: say("view", workers=len(view.workers), step=sync.step))
    data = torch.randn(options.get("samples", 1), 20, generator=torch.Generator().manual_seed(5))
    samples = iter(sampler)
    signs = Path(options.get("signs", "/nowhere"))
    slow = options.get("slow") == number
    loader, loss = iter(()), torch.zeros(())
    if "loader" in options:
        context = multiprocessing.get_context(options["loader"])
        if options["loader"] == "fork":
            context.Process(target=time.sleep, args=(1000,)).start()
        loaded = DataLoader(
            data, 4, sampler=sampler, num_workers=2, multiprocessing_context=context
        )
        loader = iter(loaded)
        say("loads")
    while sync.step < min(steps, last_step(signs, number, sync.step) or steps):
        if "loader" in options:
            x = next(loader)
        elif "samples" in options:
            x = data[[next(samples) for _ in range(4)]]
        else:
            x = torch.randn(16, 20, generator=generator)
        loss = (model(x) - x[:, :5].sin()).square().mean()
        if slow:
            slow = wait_for_steps(signs)
        elif "slow" in options and number == 1:
            (signs / "step1").write_text(str(sync.step))
        optimizer.zero_grad()
        loss.backward()
        if options.get("clip"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        if (signs / f"spoil{number}").exists():
            (signs / f"spoil{number}").unlink()
            rounds = sync.driver.run.rounds
            state = rounds[0].channels[0].exchange_state if rounds else {}
            state.get("reference", model[0].weight.detach()).view(-1)[3] += 1e-3
        time.sleep(pace)
    sync.finish()
    digest = hashlib.sha256()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            digest.update(tensor.detach().numpy().tobytes())
    stats = {"workers": len(sync.view.workers), "drifted": sync.stats().steps_drifted}
    say("done", digest=digest.hexdigest(), loss=loss.item(), step=sync.step, **stats)
    time.sleep(options.get("linger", 0.0))


def main(name: str, recipe: str, steps: int, coordinator: str, options: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests' own may be ignored
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    if options.pop("hasten", False):
        forgetful.hasten()
    if options.pop("hold", False):
        say("held")
        sys.stdin.readline()
    own = {name: options.pop(name) for name in OWN if name in options}
    pace = options.pop("pace", 0.003)
    train(say, recipe, steps, laconic.Elastic(coordinator, **options), own, int(name), pace)


if __name__ == "__main__":
    main(*sys.argv[1:3], int(sys.argv[3]), sys.argv[4], json.loads(sys.argv[5]))
