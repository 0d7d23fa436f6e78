"""One rank of a race: trains one recipe as told by a JSON specification, and reports as JSON lines
on its standard output. Started by `laconic.lab.race.runner` on every host."""

from __future__ import annotations

import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch

from laconic.algorithms.parse import parse_recipe
from laconic.algorithms.round import Recipe
from laconic.attach import init
from laconic.auto import WARMUP, WINDOW, Auto
from laconic.auto import start as auto_start
from laconic.errors import LinkError, NotFiniteError
from laconic.lab.race import plan, rivals, user_files, workloads
from laconic.lab.race.entrant import Contender, Laconic, Other
from laconic.lab.race.rivals import Peer
from laconic.lab.race.timeline import interface_counts
from laconic.lab.race.workloads import Batch, Workload, lr_factor
from laconic.links import Link, Throttled, world_link

NOT_FINITE = 3
"""The exit code of a rank that ends with a `NotFiniteError`: the training diverged."""
REPORT_SECONDS = 0.5
"""How often rank 0 says how far it is."""


@dataclass(frozen=True)
class Spec:
    """What every rank of a race is told. ``recipe`` is empty for no communication, and the name of
    another library where it is a ``peer``; ``rules`` is the file with the user's own recipes;
    ``group_size`` workers make up a group; ``lr`` is in multiples of the workload's;
    ``seconds`` or ``steps`` ends the run. ``bandwidths`` (bit/s, of a rank on each host) and
    ``latency`` (s) are for a link that must be slowed down here; ``paces`` say how many times as
    long each host's computing is to take; ``interface`` is the one whose counter is read."""

    recipe: str
    peer: bool
    rules: str | None
    group_size: int | None
    workload: str
    data: str | None
    seconds: float | None
    steps: int | None
    seed: int
    validations: int
    bandwidths: list[float] | None
    latency: float
    paces: list[float]
    interface: str | None
    timeout: float
    lr: float = 1.0

    def to_json(self) -> str:
        """For the command line of the worker."""
        return json.dumps(asdict(self))


def interface_bytes(interface: str | None) -> float:
    """Bytes that this host's ``interface`` has sent so far; NaN where there is none to read."""
    return math.nan if interface is None else interface_counts(interface)[0]


class Clock:
    """Seconds, waiting and bytes of the training alone: stopped while the model is validated."""

    def __init__(self, contender: Contender, interface: str | None) -> None:
        self._contender = contender
        self._interface = interface
        self._recorder = contender.recorder
        self._ranks = int(os.environ["LOCAL_WORLD_SIZE"])
        self._started: tuple[float, ...] | None = None
        self._frames = self._meeting = 0.0
        self.steps = 0
        self.seconds = self.waiting = self.sent = self.frames = 0.0

    def _read(self) -> tuple[float, ...]:
        return time.perf_counter(), self._contender.waiting(), self._contender.sent()

    def _meet(self) -> float:
        """Wait for all ranks; what the interface has sent by then."""
        self._contender.mean(0.0)
        return interface_bytes(self._interface)

    def start(self) -> None:
        """Go on counting, all ranks at once."""
        self._frames = self._meet()
        if not self.steps:  # what a meeting itself sends
            self._meeting = self._meet() - self._frames
            self._frames += self._meeting
        if self._recorder is not None:
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
        if self._recorder is not None:
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

    def megabytes(self) -> float:
        """Sent by each host so far, as the mean over the ranks, which all must call it: by the
        ledger, or where there is none by the interface's counter."""
        mean = self._contender.mean
        sent = mean(self.sent) * self._ranks
        return (mean(self.frames) if math.isnan(sent) else sent) / 1e6

    def figures(self) -> dict[str, float]:
        """What was counted, as means over the ranks; every rank must call it."""
        mean = self._contender.mean
        return {
            "steps": self.steps,
            "seconds": mean(self.seconds),
            "waiting": mean(self.waiting) / mean(self.seconds),
            "sent": mean(self.sent) * self._ranks,
            "frames": mean(self.frames),
        }


class Run:
    """A fresh model in the hands of a contender, ready to train."""

    def __init__(self, spec: Spec, workload: Workload, entry: Recipe | Auto | Peer) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.host = int(os.environ["GROUP_RANK"])
        self.spec, self.workload = spec, workload
        torch.manual_seed(spec.seed)
        self.model = workload.model()
        self._optimizer = workload.optimizer(self.model)
        self._peaks = [spec.lr * group["lr"] for group in self._optimizer.param_groups]
        self._batches: Iterator[Batch] = workload.batches(self.rank, self.size, spec.seed)
        self.contender: Contender
        if isinstance(entry, Peer):
            self.contender = Other(self.model, self._optimizer, entry)
        else:
            # a card that ranks share tells of none of them when its bytes have left
            card = spec.interface if os.environ["LOCAL_WORLD_SIZE"] == "1" else None
            self.contender = Laconic(
                self.model, self._optimizer, entry, self._link(), spec.group_size, card
            )
        self._alone = entry == ()
        self._pace, self._stepping = spec.paces[self.host], 0.0
        self.clock = Clock(self.contender, spec.interface)
        self.loss = math.nan

    def _link(self) -> Link:
        timeout = timedelta(seconds=self.spec.timeout)
        link = world_link(torch.device("cpu"), timeout)
        if self.spec.bandwidths is None and not self.spec.latency:
            return link
        bandwidth = None if self.spec.bandwidths is None else self.spec.bandwidths[self.host]
        return Throttled(link, bandwidth, self.spec.latency)

    def step(self, step: int, steps: int, look: bool = False) -> None:
        """One ordinary training step, at the learning rate of ``step`` of ``steps``. ``look``: at
        how far the workers are apart before its rounds."""
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * lr_factor(step, steps, self.workload)
        wall, busy = time.perf_counter(), time.thread_time()
        loss = self.workload.loss(self.contender.model, self._batch(step))
        wall, forward = time.perf_counter() - wall, time.thread_time() - busy
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if self._pace > 1:
            # Waiting for the network is no computing and takes no processor time; what computing
            # takes beyond its processor time, on shared cores, the forward pass shows.
            computing = time.thread_time() - busy + self._stepping
            time.sleep((self._pace - 1) * computing * wall / max(forward, 1e-6))
        self.loss = loss.item()
        busy = time.thread_time()
        self.contender.report(self.loss)
        self.contender.step(look)
        self._stepping = time.thread_time() - busy

    def _batch(self, step: int) -> Batch:
        try:
            return next(self._batches)
        except StopIteration:
            raise ValueError(
                f"the batches of worker {self.rank} ended before step {step}: they must be endless"
            ) from None

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Of the consensus model, a share of the batches on each rank; without communication, the
        mean over the workers of each one's own on all batches."""
        share = slice(None) if self._alone else slice(self.rank, None, self.size)
        self.model.eval()
        with nullcontext() if self._alone else self.contender.consensus():
            batches = self.workload.validation[share]
            losses = [float(self.workload.loss(self.model, batch)) for batch in batches]
        self.model.train()
        mean = self.contender.mean
        total, count = mean(sum(losses)), mean(float(len(losses)))
        return total / count


def say(rank: int, **event: Any) -> None:
    """An event for the race, from rank 0."""
    if rank == 0:
        print(json.dumps(event), file=sys.__stdout__, flush=True)


def schedule(spec: Spec, workload: Workload, entry: Recipe | Auto | Peer) -> plan.Schedule:
    """How long to run: the steps asked for, or those that fit into the seconds given, timed on a
    model that is then thrown away; what chooses its recipe has done so by then."""
    recipe = entry.rounds if isinstance(entry, Peer) else entry
    if isinstance(recipe, Auto):
        recipe = auto_start(2).recipe
    validations = spec.validations if recipe else spec.validations // 2
    if spec.seconds is None:
        assert spec.steps is not None, "the race checked that one of the two is given"
        return plan.Schedule(recipe, None, spec.steps, validations, {})
    run = Run(spec, workload, entry)

    def timed(step: int, count: int) -> float:
        run.contender.mean(0.0)  # all ranks start together
        run.contender.seek(step - 1)
        start = time.perf_counter()
        for _ in range(count):
            run.step(1, 100)
        return run.contender.mean(time.perf_counter() - start)

    for _ in range(2):  # first steps make the optimiser's state and warm the caches
        timed(1, 1)
    if isinstance(entry, Auto):
        assert isinstance(run.contender, Laconic), "laconic's own"
        for _ in range(WARMUP + WINDOW):
            timed(1, 1)
        recipe = run.contender.sync.recipe
    costs = plan.Timed(recipe, timed).costs(repeats=3)
    run.contender.close()
    steps = plan.steps_within(recipe, costs, spec.seconds)
    return plan.Schedule(recipe, spec.seconds, max(steps, 1), validations, costs)


def race(spec: Spec) -> None:
    """Train as told, and say the figures: means over the ranks."""
    init()
    data = None if spec.data is None else Path(spec.data)
    load = user_files.workload if user_files.is_workload(spec.workload) else workloads.load
    workload = load(spec.workload, data=data)
    entry: Recipe | Auto | Peer = ()
    if spec.peer:
        entry = rivals.find(spec.recipe)
    elif spec.recipe:
        entry = parse_recipe(spec.recipe, user_files.rules(Path(spec.rules)) if spec.rules else {})
    rank = int(os.environ["RANK"])
    say(rank, event="planning")
    planned = schedule(spec, workload, entry)
    run = Run(spec, workload, entry)
    parameters = sum(p.numel() for p in run.model.parameters())
    say(rank, event="start", steps=planned.steps)
    curve = train(run, planned)
    recorder = run.contender.recorder
    if recorder is not None:
        record = {"event": "timeline", "ran": recorder.ran, "spans": recorder.spans()}
        print(json.dumps(record), file=sys.__stdout__, flush=True)  # of every rank
        say(rank, event="rounds", rounds=[asdict(rounds) for rounds in recorder.rounds()])
    choices = run.contender.sync.choices if isinstance(run.contender, Laconic) else []
    told = [f"after step {c.step}: {c.reason}" for c in choices]
    figures = run.clock.figures()
    say(rank, event="end", parameters=parameters, curve=curve, choices=told, **figures)
    run.contender.close()


def train(run: Run, planned: plan.Schedule) -> list[tuple[int, float, float, float, float]]:
    """The run; (step, seconds, megabytes, validation loss, distance between the workers before the
    step's rounds) from before the first step on."""
    clock, reported, step = run.clock, 0.0, 0
    curve = [(0, 0.0, 0.0, run.validation_loss(), run.contender.distance())]
    clock.start()
    while step < planned.steps and math.isfinite(curve[-1][3]):
        step += 1
        run.step(step, planned.steps, look=planned.is_look(step))
        if time.perf_counter() - reported > REPORT_SECONDS:
            reported, pace = time.perf_counter(), clock.running() / step
            say(run.rank, event="step", step=step, steps=planned.steps, loss=run.loss,
                sent=run.contender.sent(), pace=pace)  # fmt: skip
        if planned.is_look(step):
            clock.stop(step)
            elapsed, megabytes = run.contender.mean(clock.seconds), clock.megabytes()
            if planned.look(step, elapsed):
                figures = run.validation_loss(), run.contender.distance()
                curve.append((step, elapsed, megabytes, *figures))
                say(run.rank, event="validation", step=step, steps=planned.steps, loss=figures[0])
            clock.start()
    clock.stop(step)
    return curve


def run(job: Callable[[], object]) -> NoReturn:
    """``job`` as this process; what a user's code prints is no event."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    sys.stdout = sys.stderr
    try:
        job()
    except Exception as error:
        if not isinstance(error, (LinkError, ValueError, ImportError)):
            traceback.print_exc()
        print(user_files.told(error), file=sys.stderr)
        sys.stderr.flush()
        code = NOT_FINITE if isinstance(error, NotFiniteError) else 1
        os._exit(code)  # not through the process group's own shutdown, which may wait for the lost
    os._exit(0)


def main() -> None:
    """Entry of ``python -m laconic.lab.race.worker SPECIFICATION``."""
    run(lambda: race(Spec(**json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()
