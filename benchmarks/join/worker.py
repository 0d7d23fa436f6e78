"""A worker of `benchmarks.join`: it trains until it is ended, and records its steps.

    python -m benchmarks.join.worker RECIPE DIRECTORY NAME SECONDS CROPS WORKERS

Every process writes its own file: a line of JSON per event, with times of the host's monotonic
clock. The events are:

    ready       the process has done all but `laconic.attach`
    attach      the newcomer calls `laconic.attach`
    attached    step: the steps of the run so far; bytes: of the model's and optimizer's state, and
                laconic's
    step        step, begin, computed, end: when it began, called ``optimizer.step()``, and returned
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import laconic
from laconic.algorithms.parse import parse_recipe
from laconic.engine.donor import RESIDUALS
from laconic.lab.race import workloads


def bytes_of(state: Any) -> int:
    """Return the bytes of all tensors in ``state`` that a donor sends."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, Mapping):
        return sum(bytes_of(value) for key, value in state.items() if key not in RESIDUALS)
    return sum(map(bytes_of, state)) if isinstance(state, (list, tuple)) else 0


class Training:
    """The text model. A step takes ``seconds`` at least, on ``crops`` of the text."""

    def __init__(self, seconds: float, crops: int) -> None:
        workload = workloads.load("text")
        torch.manual_seed(0)
        self.model = workload.model()
        self.optimizer = workload.optimizer(self.model)
        self._loss, self._seconds, self._crops = workload.loss, seconds, crops
        host, hosts = int(os.environ["GROUP_RANK"]), int(os.environ["WORLD_SIZE"])
        self._batches = workload.batches(host, hosts, 0)

    def compute(self) -> None:
        """Compute the gradients of a step. What is left of its time passes before the backward
        pass, during which gradients may be sent."""
        begin = time.monotonic()
        inputs, targets = next(self._batches)
        loss = self._loss(self.model, (inputs[: self._crops], targets[: self._crops]))
        self.optimizer.zero_grad()
        forward = time.monotonic() - begin
        time.sleep(max(self._seconds - 3 * forward, 0))  # backward takes twice as long
        loss.backward()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe")
    parser.add_argument("directory", type=Path)
    parser.add_argument("name")
    parser.add_argument("seconds", type=float)
    parser.add_argument("crops", type=int)
    parser.add_argument("workers", type=int)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(created).2f %(name)s %(message)s")
    logging.getLogger("laconic").setLevel(logging.INFO)
    torch.set_num_threads(1)
    training = Training(options.seconds, options.crops)
    training.compute()  # the first one takes longer
    file = (options.directory / f"{options.name}.jsonl").open("a", buffering=1)

    def say(event: str, **more: object) -> None:
        file.write(json.dumps({"event": event, "time": time.monotonic(), **more}) + "\n")

    say("ready")
    newcomer = options.name.startswith("newcomer")
    if newcomer:
        (options.directory / f"{options.name}.go").read_bytes()  # a pipe: it waits
        say("attach")
    elastic = laconic.Elastic(
        min_workers=1, workers=options.workers, trace=options.directory / f"{options.name}.trace"
    )
    recipe = parse_recipe(options.recipe)
    assert isinstance(recipe, tuple), "auto is not supported here"
    sync = laconic.attach(training.model, training.optimizer, recipe, elastic=elastic)
    states = training.model.state_dict(), training.optimizer.state_dict(), sync.state_dict()
    say("attached", step=sync.step, bytes=bytes_of(states))
    while True:
        begin = time.monotonic()
        training.compute()
        computed = time.monotonic()
        training.optimizer.step()
        say("step", step=sync.step, begin=begin, computed=computed, end=time.monotonic())


if __name__ == "__main__":
    main()
