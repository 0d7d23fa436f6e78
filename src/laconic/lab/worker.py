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
from laconic.lab.timeline import Recorder, Watched, interface_counts
from laconic.lab.workloads import Batch, Workload, lr_factor
from laconic.links import Link, Throttled, TorchLink
from laconic.parse import parse_recipe
from laconic.round import Recipe

REPORT_SECONDS = 0.5
"""How often rank 0 says how far it is."""
SAMPLED = 2**16
"""Parameters at most over which the workers' distance is taken: averaging all takes a round."""


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
    return math.nan if interface is None else interface_counts(interface)[0]


class Clock:
    """Seconds, waiting and bytes of the training alone: stopped while the model is validated."""

    def __init__(
        self, sync: laconic.Synchronizer, interface: str | None, recorder: Recorder
    ) -> None:
        self._sync = sync
        self._interface = interface
        self._recorder = recorder
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
        self._recorder.resume()
        self._started = self._read()

    def running(self) -> float:
        """Seconds so far, while counting."""
        assert self._started is not None, "asked while it stands"
        return self.seconds + time.perf_counter() - self._started[0]

    def stop(self, step: int) -> None:
        """Stop counting, after ``step``."""
        assert self._started is not None, "stopped before it was started"
        now = self._read()
        self._recorder.pause()
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
        # a card that ranks share tells of none of them when its bytes have left
        alone = os.environ.get("LOCAL_WORLD_SIZE") == "1"
        self.recorder = Recorder(spec.interface if alone else None)
        self._link = self._connect()
        watched = Watched(self._link, self.recorder)
        # hooks run in the order in which they come: this one before the synchroniser's
        self.optimizer.register_step_post_hook(lambda *_: self._stepped())
        self.noting = False
        """Whether the next step ends with a look at how far the workers are apart."""
        self.note()
        self.sync = laconic.attach(self.model, self.optimizer, recipe, link=watched)
        self.sync.observe_waiting(self.recorder.waited)
        self.clock = Clock(self.sync, spec.interface, self.recorder)
        self.loss = math.nan

    def _connect(self) -> Link:
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

    @torch.no_grad()
    def distance(self) -> float:
        """How far apart the workers' models x_i are, as `note` saw them: from their mean
        m = (1/n) sum_i x_i, the root mean square over the P parameters, averaged over n workers,

            d = (1/n) sum_i sqrt((1/P) sum_p (x_ip - m_p)^2)

        in units of the parameters. Every rank must call it, while the clock stands."""
        mean = self._noted.clone()
        self.sync.mean(0.0)  # all messages in flight have arrived: the link is free
        self._link.mean(mean)
        return self.sync.mean(float((self._noted - mean).square().mean().sqrt()))

    @torch.no_grad()
    def note(self) -> None:
        """Keep this worker's parameters for `distance`: above `SAMPLED`, so many of them, evenly
        spread."""
        flat = torch.cat([p.detach().reshape(-1).float() for p in self.model.parameters()])
        self._noted = flat[:: -(-flat.numel() // SAMPLED)].clone()

    def _stepped(self) -> None:
        """The optimiser has moved the parameters, and no round has run since."""
        if self.noting:
            self.note()


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
    record = {"event": "timeline", "ran": run.recorder.ran, "spans": run.recorder.spans()}
    print(json.dumps(record), flush=True)  # of every rank
    say(rank, event="rounds", rounds=[asdict(rounds) for rounds in run.recorder.rounds()])
    say(rank, event="end", parameters=parameters, curve=curve, **run.clock.figures())
    run.sync.finish()
    run.sync.detach()


def train(run: Run, planned: plan.Schedule) -> list[tuple[int, float, float, float, float]]:
    """The run; (step, seconds, megabytes, validation loss, distance between the workers before the
    step's round) from before the first step on."""
    clock, reported, step = run.clock, 0.0, 0
    curve = [(0, 0.0, 0.0, run.validation_loss(), run.distance())]
    clock.start()
    while step < planned.steps and math.isfinite(curve[-1][3]):
        step += 1
        run.noting = planned.is_look(step)
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
                figures = run.validation_loss(), run.distance()
                curve.append((step, elapsed, megabytes, *figures))
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
