"""Run one rank of a measurement on an emulated cluster.

`laconic.advisor.cluster` starts this module on every host with a JSON specification. Rank 0 prints
the advice as a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
from torch import nn
from torch.optim import Optimizer

from laconic.advisor import show
from laconic.advisor.advise import advise
from laconic.attach import init
from laconic.lab.race import user_files
from laconic.lab.race.worker import run
from laconic.links import Link, Throttled, world_link


@dataclass(frozen=True)
class Spec:
    """The specification of a measurement, equal on all ranks.

    ``bandwidths`` (bit/s per rank) and ``latencies`` (s, round trips), by host, are for a link to
    be throttled here. ``paces`` are the factors by which each host's compute time is extended.
    ``recipes`` are the user's own, in addition to the advisor's. ``form``: what to print, "answer",
    "everything", or "json"."""

    workload: str
    data: str | None
    recipes: list[str]
    steps: int
    seed: int
    timeout: float
    bandwidths: list[float] | None = None
    latencies: list[float] | None = None
    paces: list[float] | None = None
    form: str = "answer"

    def to_json(self) -> str:
        """Return the specification for the worker's command line."""
        return json.dumps(asdict(self))


class Training:
    """A workload's model and optimizer on this rank."""

    def __init__(self, spec: Spec) -> None:
        self._workload = user_files.load_workload(spec.workload, spec.data)
        torch.manual_seed(spec.seed)
        self.model: nn.Module = self._workload.model()
        self.optimizer: Optimizer = self._workload.optimizer(self.model)
        self._rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._batches = self._workload.batches(self._rank, size, spec.seed)
        self._pace = 1.0 if spec.paces is None else spec.paces[_host()]

    def step(self) -> None:
        """Run one local step: forward, backward, optimizer."""
        start = time.perf_counter()
        batch = next(self._batches, None)
        if batch is None:
            raise ValueError(f"the batches of worker {self._rank} ended: they must be endless")
        loss = self._workload.loss(self.model, batch)
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


def work(spec: Spec) -> None:
    """Measure, and print the advice on rank 0."""
    init()
    training = Training(spec)
    advice = advise(
        training.model,
        training.step,
        optimizer=training.optimizer,
        recipes=spec.recipes,
        steps=spec.steps,
        link=link_of(spec),
    )
    if os.environ["RANK"] == "0":
        text = show.text(advice, spec.form)
        print(json.dumps({"advice": text}), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    run(lambda: work(Spec(**json.loads(sys.argv[1]))))
