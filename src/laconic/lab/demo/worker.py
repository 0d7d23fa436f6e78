"""A worker of ``laconic demo --elastic``: ``python -m laconic.lab.demo.worker STEPS``.

It trains until the run has taken ``STEPS`` steps, and prints a line of JSON per event, with its
time in seconds since 1970:

    attach  it asks to take part
    begin   it takes part; workers: how many there are; bytes: of the state that a newcomer has
            received
    view    who takes part has changed; step, workers
    step    step, workers, loss; round: whether a fragment has been exchanged in it
    end     step, digest: of the final model's parameters
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import laconic
from laconic.algorithms.parse import parse_recipe
from laconic.engine.donor import RESIDUALS
from laconic.lab.race import workloads

HOSTS = 4
RECIPE, ROUND_STEPS = 'streaming_diloco(8, outer="muon")', 2
"""One of its four fragments is exchanged every two steps."""
STEP_SECONDS = 0.1
"""A step takes so long at least. It computes for less, because all hosts share this machine."""
WARMUP = 40


def say(event: str, **more: object) -> None:
    print(json.dumps({"event": event, "time": time.time(), **more}), flush=True)


def bytes_of(state: Any) -> int:
    """Return the bytes of all tensors in ``state`` that a newcomer receives."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, Mapping):
        return sum(bytes_of(value) for key, value in state.items() if key not in RESIDUALS)
    return sum(map(bytes_of, state)) if isinstance(state, (list, tuple)) else 0


def main() -> None:
    steps, host = int(sys.argv[1]), int(os.environ["GROUP_RANK"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    workload = workloads.load(workloads.FEW)
    model = workload.model()
    optimizer = workload.optimizer(model)
    peaks = [group["lr"] for group in optimizer.param_groups]
    batches = workload.batches(host, HOSTS, os.getpid())  # a replacement draws other crops
    recipe = parse_recipe(RECIPE)
    say("attach")
    elastic = laconic.Elastic(workers=HOSTS, min_workers=1)
    sync = laconic.attach(model, optimizer, recipe, elastic=elastic)
    sync.on_change(lambda view: say("view", step=sync.step, workers=len(view.workers)))
    states = model.state_dict(), optimizer.state_dict(), sync.state_dict()
    say("begin", workers=len(sync.view.workers), bytes=bytes_of(states))
    while sync.step < steps:
        begin = time.monotonic()
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * min((sync.step + 1) / WARMUP, 1.0)
        loss = workload.loss(model, next(batches))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        rounds, workers = sync.step % ROUND_STEPS == 0, len(sync.view.workers)
        say("step", step=sync.step, workers=workers, loss=loss.item(), round=rounds)
        time.sleep(max(STEP_SECONDS - (time.monotonic() - begin), 0.0))
    sync.finish()
    parameters = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    say("end", step=sync.step, digest=hashlib.sha256(parameters).hexdigest()[:16])


if __name__ == "__main__":
    main()
