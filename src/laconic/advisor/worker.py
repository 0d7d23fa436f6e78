"""Run one rank of a measurement on an emulated cluster.

`laconic.advisor.cluster` starts this module on every host with a JSON specification. Rank 0 prints
the measurement as a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from laconic.advisor.advise import measured
from laconic.advisor.choices import rehearsed
from laconic.advisor.measure import Measured
from laconic.attach import init
from laconic.lab.race import user_files, workloads
from laconic.lab.race.worker import run
from laconic.lab.race.workloads import Workload
from laconic.links import Link, Throttled, world_link
from laconic.policy.facts import Facts, Net


@dataclass(frozen=True)
class Spec:
    """The specification of a measurement, equal on all ranks.

    ``bandwidths`` (bit/s per rank) and ``latencies`` (s, round trips), by host, are for a link to
    be throttled here. ``paces`` are the factors by which each host's compute time is extended.
    ``recipes`` are the user's own, in addition to the advisor's."""

    workload: str
    data: str | None
    recipes: list[str]
    steps: int
    seed: int
    timeout: float
    bandwidths: list[float] | None = None
    latencies: list[float] | None = None
    paces: list[float] | None = None

    def to_json(self) -> str:
        """Return the specification for the worker's command line."""
        return json.dumps(asdict(self))


def workload_of(name: str, data: str | None) -> Workload:
    """Load a workload by its name, or from a user's file."""
    load = user_files.workload if user_files.is_workload(name) else workloads.load
    return load(name, data=None if data is None else Path(data))


class Training:
    """A workload's model and optimizer on this rank."""

    def __init__(self, spec: Spec) -> None:
        self.workload = workload_of(spec.workload, spec.data)
        torch.manual_seed(spec.seed)
        self.model: nn.Module = self.workload.model()
        self.optimizer: Optimizer = self.workload.optimizer(self.model)
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._batches = self.workload.batches(rank, size, spec.seed)
        self._pace = 1.0 if spec.paces is None else spec.paces[_host()]

    def step(self) -> None:
        """Run one local step: forward, backward, optimizer."""
        start = time.perf_counter()
        loss = self.workload.loss(self.model, next(self._batches))
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if self._pace > 1:
            time.sleep((self._pace - 1) * (time.perf_counter() - start))
        self.optimizer.step()


def _host() -> int:
    return int(os.environ["GROUP_RANK"])


def link_of(spec: Spec) -> Link:
    """Return a link to all ranks."""
    link = world_link(torch.device("cpu"), timedelta(seconds=spec.timeout))
    if spec.bandwidths is None or spec.latencies is None:
        return link
    return Throttled(link, spec.bandwidths[_host()], spec.latencies[_host()])


def facts_of(plain: dict[str, Any]) -> Facts:
    """Rebuild facts from the result of `asdict`."""
    nets = {name: Net(**net) for name, net in plain["nets"].items()}
    shapes = tuple(tuple(shape) for shape in plain["shapes"])
    names = ("computes", "rates", "receives", "shared", "buffers")
    alike = {name: tuple(plain.get(name, ())) for name in names}
    return Facts(**{**plain, **alike, "nets": nets, "shapes": shapes})


def measured_of(line: str) -> Measured:
    """Parse the line that rank 0 printed."""
    plain = json.loads(line)
    facts, computes = facts_of(plain["facts"]), tuple(plain["computes"])
    return Measured(facts, computes, plain["held"], plain["peak"])


def work(spec: Spec) -> None:
    """Measure, and print the result on rank 0."""
    init()
    training = Training(spec)
    found = measured(
        training.model,
        training.step,
        partial(rehearsed, recipes=spec.recipes),
        optimizer=training.optimizer,
        steps=spec.steps,
        link=link_of(spec),
    )
    if os.environ["RANK"] == "0":
        print(json.dumps(asdict(found)), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    run(lambda: work(Spec(**json.loads(sys.argv[1]))))
