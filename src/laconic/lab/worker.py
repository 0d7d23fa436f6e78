"""One rank of a race: trains one recipe as told by a JSON specification, and reports as JSON lines
on its standard output. Started by `laconic.lab.race` on every host."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import laconic
from laconic.attach import init
from laconic.lab import plan, workloads
from laconic.lab.workloads import Batch, Workload, lr_factor
from laconic.links import Link, Throttled, TorchLink
from laconic.parse import parse_recipe
from laconic.round import Recipe

REPORT_SECONDS = 0.5
"""How often rank 0 says how far it is."""


@dataclass(frozen=True)
class Spec:
    """What every rank of a race is told. ``recipe`` is empty for no communication; ``seconds`` or
    ``steps`` ends the run; ``bandwidth`` (bit/s) and ``latency`` (s) are for a link that must be
    slowed down here; ``interface`` is the one whose counter is read."""

    recipe: str
    workload: str
    data: str | None
    seconds: float | None
    steps: int | None
    seed: int
    validations: int
    bandwidth: float | None
    latency: float
    interface: str | None
    timeout: float

    def to_json(self) -> str:
        """For the command line of the worker."""
        return json.dumps(asdict(self))


def interface_bytes(interface: str | None) -> float:
    """Bytes that this host's ``interface`` has sent so far; NaN where there is none to read."""
    if interface is None:
        return math.nan
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return float(counts.split()[8])
    return math.nan


class Clock:
    """Seconds, waiting and bytes of the training alone: stopped while the model is validated."""

    def __init__(self, sync: laconic.Synchronizer, interface: str | None) -> None:
        self._sync = sync
        self._interface = interface
        self._started: tuple[float, ...] | None = None
        self._frames = self._meeting = 0.0
        self.steps = 0
        self.seconds = self.waiting = self.sent = self.frames = 0.0

    def _read(self) -> tuple[float, ...]:
        stats = self._sync.stats()
        return time.perf_counter(), stats.seconds_waiting, float(stats.bytes_sent)

    def _meet(self) -> float:
        """Wait for all ranks; what the interface has sent by then."""
        self._sync.mean(0.0)
        return interface_bytes(self._interface)

    def start(self) -> None:
        """Go on counting, all ranks at once."""
        self._frames = self._meet()
        if not self.steps:  # what a meeting itself sends
            self._meeting = self._meet() - self._frames
            self._frames += self._meeting
        self._started = self._read()

    def running(self) -> float:
        """Seconds so far, while counting."""
        assert self._started is not None, "asked while it stands"
        return self.seconds + time.perf_counter() - self._started[0]

    def stop(self, step: int) -> None:
        """Stop counting, after ``step``."""
        assert self._started is not None, "stopped before it was started"
        now = self._read()
        spent = [after - before for before, after in zip(self._started, now, strict=True)]
        self.steps = step
        self.seconds += spent[0]
        self.waiting += spent[1]
        self.sent += spent[2]
        self._started = None
        # what a rank has sent may be queued at its card still; when all have met, it is not
        met = self._meet()
        self.frames += met - self._frames - self._meeting

    def figures(self) -> dict[str, float]:
        """What was counted, as means over the ranks; every rank must call it."""
        mean = self._sync.mean
        return {
            "steps": self.steps,
            "seconds": mean(self.seconds),
            "waiting": mean(self.waiting) / mean(self.seconds),
            "sent": mean(self.sent),
            "frames": mean(self.frames),
        }


class Run:
    """A fresh model under a recipe, ready to train."""

    def __init__(self, spec: Spec, workload: Workload, recipe: Recipe) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.spec, self.workload, self.recipe = spec, workload, recipe
        torch.manual_seed(spec.seed)
        self.model = workload.model()
        self.optimizer = workload.optimizer(self.model)
        self.peaks = [group["lr"] for group in self.optimizer.param_groups]
        self.batches: Iterator[Batch] = workload.batches(self.rank, self.size, spec.seed)
        self.sync = laconic.attach(self.model, self.optimizer, recipe, link=self._link())
        self.clock = Clock(self.sync, spec.interface)
        self.loss = math.nan

    def _link(self) -> Link:
        timeout = timedelta(seconds=self.spec.timeout)
        link = TorchLink.world(torch.device("cpu"), timeout)
        if self.spec.bandwidth is None and not self.spec.latency:
            return link
        return Throttled(link, self.spec.bandwidth, self.spec.latency)

    def step(self, step: int, steps: int) -> None:
        """One ordinary training step, at the learning rate of ``step`` of ``steps``."""
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * lr_factor(step, steps, self.workload)
        loss = self.workload.loss(self.model, next(self.batches))
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.loss = loss.item()

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Of the consensus model, a share of the batches on each rank; without communication, the
        mean over the workers of each one's own on all batches."""
        alone = not self.recipe
        share = slice(None) if alone else slice(self.rank, None, self.size)
        self.model.eval()
        with nullcontext() if alone else self.sync.consensus():
            batches = self.workload.validation[share]
            losses = [float(self.workload.loss(self.model, batch)) for batch in batches]
        self.model.train()
        total, count = self.sync.mean(sum(losses)), self.sync.mean(float(len(losses)))
        return total / count


def say(rank: int, **event: Any) -> None:
    """An event for the race, from rank 0."""
    if rank == 0:
        print(json.dumps(event), flush=True)


def schedule(spec: Spec, workload: Workload, recipe: Recipe) -> plan.Schedule:
    """How long to run: the steps asked for, or those that fit into the seconds given, timed on a
    model that is then thrown away."""
    validations = spec.validations if recipe else spec.validations // 2
    if spec.seconds is None:
        assert spec.steps is not None, "the race checked that one of the two is given"
        return plan.Schedule(recipe, None, spec.steps, validations, {})
    run = Run(spec, workload, recipe)

    def timed(step: int, count: int) -> float:
        run.sync.mean(0.0)  # all ranks start together
        run.sync.step = step - 1
        start = time.perf_counter()
        for _ in range(count):
            run.step(1, 100)
        return run.sync.mean(time.perf_counter() - start)

    for _ in range(2):  # first steps make the optimiser's state and warm the caches
        timed(1, 1)
    costs = plan.Timed(recipe, timed).costs(repeats=3)
    run.sync.detach()
    steps = plan.steps_within(recipe, costs, spec.seconds)
    return plan.Schedule(recipe, spec.seconds, max(steps, 1), validations, costs)


def race(spec: Spec) -> None:
    """Train as told, and say the figures: means over the ranks."""
    init()
    data = None if spec.data is None else Path(spec.data)
    workload = workloads.load(spec.workload, data=data)
    recipe = parse_recipe(spec.recipe) if spec.recipe else ()
    rank = int(os.environ["RANK"])
    say(rank, event="planning")
    planned = schedule(spec, workload, recipe)
    run = Run(spec, workload, recipe)
    parameters = sum(p.numel() for p in run.model.parameters())
    say(rank, event="start", steps=planned.steps)
    curve = train(run, planned)
    say(rank, event="end", parameters=parameters, curve=curve, **run.clock.figures())
    run.sync.finish()
    run.sync.detach()


def train(run: Run, planned: plan.Schedule) -> list[tuple[int, float, float, float]]:
    """The run; (step, seconds, megabytes, validation loss) from before the first step on."""
    clock, reported, step = run.clock, 0.0, 0
    curve = [(0, 0.0, 0.0, run.validation_loss())]
    clock.start()
    while step < planned.steps and math.isfinite(curve[-1][3]):
        step += 1
        run.step(step, planned.steps)
        if time.perf_counter() - reported > REPORT_SECONDS:
            reported, pace = time.perf_counter(), clock.running() / step
            sent = run.sync.stats().bytes_sent
            say(run.rank, event="step", step=step, steps=planned.steps, loss=run.loss, sent=sent,
                pace=pace)  # fmt: skip
        if planned.is_look(step):
            clock.stop(step)
            elapsed, megabytes = run.sync.mean(clock.seconds), run.sync.mean(clock.sent) / 1e6
            if planned.look(step, elapsed):
                curve.append((step, elapsed, megabytes, run.validation_loss()))
            clock.start()
    clock.stop(step)
    return curve


def main() -> None:
    """Entry of ``python -m laconic.lab.worker SPECIFICATION``."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        race(Spec(**json.loads(sys.argv[1])))
    except (laconic.LinkError, ValueError, ImportError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)  # not through the process group's own shutdown, which may wait for the lost
    os._exit(0)


if __name__ == "__main__":
    main()
