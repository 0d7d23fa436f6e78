"""Run one rank of a race. `laconic.lab.race.runner` starts this module on every host.

It trains one recipe according to a JSON specification and reports events as JSON lines on stdout.
"""

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
from pathlib import Path
from typing import Any, NoReturn

import torch

from laconic.algorithms.auto import Auto
from laconic.algorithms.compile import has_quorum
from laconic.algorithms.parse import parse_recipe
from laconic.algorithms.round import Recipe
from laconic.attach import init
from laconic.errors import LinkError, NotFiniteError
from laconic.lab.race import plan, rivals, user_files
from laconic.lab.race.entrant import Entrant, RecipeEntrant, RivalEntrant
from laconic.lab.race.rivals import Rival
from laconic.lab.race.workloads import Batch, Workload, lr_factor
from laconic.links.rank_sets import own_link

NOT_FINITE = 3
"""Exit code of a rank that ends with a `NotFiniteError`: training diverged."""
TIMEOUT = 60.0
"""A rank that does not answer for this many seconds fails its row."""
REPORT_SECONDS = 0.5
"""How often rank 0 reports progress."""


@dataclass(frozen=True)
class Spec:
    """The specification of a run, equal on all ranks.

    ``recipe`` is empty for no communication, and the name of another library if ``peer``. ``rules``
    is the file with the user's own recipes. ``group_size`` is workers per group. ``lr_scale``
    multiplies the learning rates. ``seconds`` or ``steps`` ends the run. ``paces`` are the factors
    by which each host's compute time is extended. ``interface`` is the one whose counter is read.
    """

    recipe: str
    peer: bool
    rules: str | None
    group_size: int | None
    workload: str
    lr_scale: float
    data: str | None
    seconds: float | None
    steps: int | None
    seed: int
    validations: int
    paces: list[float]
    interface: str | None

    def to_json(self) -> str:
        """Return the specification for the worker's command line."""
        return json.dumps(asdict(self))


def interface_bytes(interface: str | None) -> float:
    """Return the number of bytes that ``interface`` has sent so far, NaN if it does not exist."""
    lines = [] if interface is None else Path("/proc/self/net/dev").read_text().splitlines()
    found = {name.strip(): counts for name, _, counts in (line.partition(":") for line in lines)}
    return float(found[interface].split()[8]) if interface in found else math.nan


class Clock:
    """Counts seconds, waiting and bytes of training alone. It is stopped during validation."""

    def __init__(self, entrant: Entrant, interface: str | None) -> None:
        self._entrant = entrant
        self._interface = interface
        self._ranks = int(os.environ["LOCAL_WORLD_SIZE"])
        self._started: tuple[float, ...] | None = None
        self._frames = self._barrier_bytes = 0.0
        self.steps = 0
        self.seconds = self.waiting = self.sent = self.frames = 0.0

    def _read(self) -> tuple[float, ...]:
        return time.perf_counter(), self._entrant.waiting(), self._entrant.sent()

    def _barrier(self) -> float:
        """Wait for all ranks. Return the interface's count afterward."""
        self._entrant.mean(0.0)
        return interface_bytes(self._interface)

    def start(self) -> None:
        """Start counting, on all ranks at once."""
        self._frames = self._barrier()
        if not self.steps:  # measure what a barrier itself sends
            self._barrier_bytes = self._barrier() - self._frames
            self._frames += self._barrier_bytes
        self._started = self._read()

    def running(self) -> float:
        """Return the seconds so far, while counting."""
        assert self._started is not None, "the clock is stopped"
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
        # A rank's last bytes may still be queued at its interface. After a barrier they are not.
        now_sent = self._barrier()
        self.frames += now_sent - self._frames - self._barrier_bytes

    def megabytes(self) -> float:
        """Return the megabytes sent per host, the mean over ranks. Call it on every rank.

        They are from the ledger, or without one from the interface's counter.
        """
        mean = self._entrant.mean
        sent = mean(self.sent) * self._ranks
        return (mean(self.frames) if math.isnan(sent) else sent) / 1e6

    def figures(self) -> dict[str, float]:
        """Return the counts as means over the ranks. Call it on every rank."""
        mean = self._entrant.mean
        return {
            "steps": round(mean(self.steps)),
            "seconds": mean(self.seconds),
            "waiting": mean(self.waiting) / mean(self.seconds),
            "sent": mean(self.sent) * self._ranks,
            "frames": mean(self.frames),
        }


class Run:
    """A new model with an entrant, ready to train."""

    def __init__(self, spec: Spec, workload: Workload, entry: Recipe | Auto | Rival) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.host = int(os.environ["GROUP_RANK"])
        self.spec, self.workload = spec, workload
        torch.manual_seed(spec.seed)
        self.model = workload.model()
        self._optimizer = workload.optimizer(self.model)
        self._peaks = [group["lr"] * spec.lr_scale for group in self._optimizer.param_groups]
        self._batches: Iterator[Batch] = workload.batches(self.rank, self.size, spec.seed)
        self.entrant: Entrant
        if isinstance(entry, Rival):
            self.entrant = RivalEntrant(self.model, self._optimizer, entry)
        else:
            link = own_link(torch.device("cpu"), TIMEOUT)
            self.entrant = RecipeEntrant(self.model, self._optimizer, entry, link, spec.group_size)
        self._no_communication = entry == ()
        self._pace, self._stepping = spec.paces[self.host], 0.0
        self.clock = Clock(self.entrant, spec.interface)
        self.loss, self._reported = math.nan, 0.0

    def step(self, step: int, share: float, sample: bool = False) -> None:
        """Run one training step, at the learning rate after this ``share`` of the run.

        ``sample`` records the distance between the workers before the step's rounds.
        """
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * lr_factor(share, 1.0, self.workload)
        wall, busy = time.perf_counter(), time.thread_time()
        loss = self.workload.loss(self.entrant.model, self._batch(step))
        wall, forward = time.perf_counter() - wall, time.thread_time() - busy
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if self._pace > 1:
            # Waiting for the network takes no processor time and must not be extended. On shared
            # cores, the forward pass shows how wall time relates to processor time.
            computing = time.thread_time() - busy + self._stepping
            time.sleep((self._pace - 1) * computing * wall / max(forward, 1e-6))
        self.loss = loss.item()
        busy = time.thread_time()
        self.entrant.report(self.loss)
        self.entrant.step(sample)
        self._stepping = time.thread_time() - busy

    def report(self, step: int, steps: int) -> None:
        """Print the progress, if that is long ago."""
        if time.perf_counter() - self._reported > REPORT_SECONDS:
            self._reported = time.perf_counter()
            emit(self.rank, event="step", step=step, steps=steps, loss=self.loss)

    def _batch(self, step: int) -> Batch:
        try:
            return next(self._batches)
        except StopIteration:
            raise ValueError(
                f"the batches of worker {self.rank} ended before step {step}: they must be endless"
            ) from None

    def each(self, value: float) -> list[float]:
        """Return the number of every rank. Call it on every rank."""
        mean = self.entrant.mean
        return [self.size * mean(value * (r == self.rank)) for r in range(self.size)]

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Return the loss of the consensus model, with a share of the batches on each rank.

        Without communication, return the mean over the workers of their own models on all batches.
        """
        everything = self._no_communication
        share = slice(None) if everything else slice(self.rank, None, self.size)
        self.model.eval()
        with nullcontext() if everything else self.entrant.consensus():
            batches = self.workload.validation[share]
            losses = [float(self.workload.loss(self.model, batch)) for batch in batches]
        self.model.train()
        mean = self.entrant.mean
        total, count = mean(sum(losses)), mean(float(len(losses)))
        return total / count


def emit(rank: int, **event: Any) -> None:
    """Print an event for the runner, on rank 0."""
    if rank == 0:
        print(json.dumps(event), file=sys.__stdout__, flush=True)


def race(spec: Spec) -> None:
    """Train according to ``spec`` and print the results, as means over the ranks."""
    init()
    workload = user_files.load_workload(spec.workload, spec.data)
    entry: Recipe | Auto | Rival = ()
    if spec.peer:
        entry = rivals.find(spec.recipe)
    elif spec.recipe:
        entry = parse_recipe(spec.recipe, user_files.rules(Path(spec.rules)) if spec.rules else {})
    rank = int(os.environ["RANK"])
    emit(rank, event="warming up")
    quorum = isinstance(entry, tuple) and has_quorum(entry)
    pace = warm_up(spec, workload, () if quorum else entry)
    run = Run(spec, workload, entry)
    validations = spec.validations if entry else spec.validations // 2
    if quorum:
        assert spec.seconds is not None, "Settings.check requires seconds"
        curve = train_by_time(run, spec.seconds, validations)
    else:
        guess = spec.steps or max(int((spec.seconds or 0.0) / pace), 1)
        curve = train(run, plan.Schedule(run.entrant.rounds, spec.seconds, guess, validations))
    parameters = sum(p.numel() for p in run.model.parameters())
    choices = run.entrant.sync.choices if isinstance(run.entrant, RecipeEntrant) else []
    closings = run.entrant.sync.closings if isinstance(run.entrant, RecipeEntrant) else []
    rosters = [closing.roster for closing in closings]
    steps = run.each(run.clock.steps)
    texts = [f"after step {c.step}: {c.reason}" for c in choices]
    figures = run.clock.figures()
    emit(rank, event="end", parameters=parameters, curve=curve, choices=texts,
         rosters=rosters, worker_steps=steps, **figures)  # fmt: skip
    run.entrant.close()


Curve = list[tuple[int, float, float, float, float]]
"""Points (step, seconds, megabytes, validation loss, distance between the workers before the step's
rounds), from before the first step on."""


def warm_up(spec: Spec, workload: Workload, entry: Recipe | Auto | Rival) -> float:
    """Take three steps with a model of its own, and return the seconds of the last one, the mean
    over the ranks.

    The first ones create the optimizer's state and warm the caches.
    """
    run = Run(spec, workload, entry)
    start = 0.0
    for step in (1, 2, 3):
        run.entrant.mean(0.0)  # start together on all ranks
        start = time.perf_counter()
        run.step(step, 0.01)
    seconds = run.entrant.mean(time.perf_counter() - start)
    run.entrant.close()
    return seconds


def train_by_time(run: Run, seconds: float, validations: int) -> Curve:
    """Train for so many seconds of each worker's own clock, where rounds close with a quorum.

    Workers take different numbers of steps. The curve has their mean. Each validation is after the
    same time on all workers; those that wait for the others' last step are not timed meanwhile.
    """
    clock, step = run.clock, 0
    curve = [(0, 0.0, 0.0, run.validation_loss(), run.entrant.distance())]
    for number in range(1, validations + 1):
        clock.start()
        while (spent := clock.running()) < seconds * number / validations:
            step += 1
            run.step(step, spent / seconds)
            run.report(step, max(step, round(seconds * step / clock.running())))
        clock.stop(step)
        run.entrant.sample()
        mean = run.entrant.mean
        point = round(mean(step)), mean(clock.seconds), clock.megabytes()
        curve.append((*point, run.validation_loss(), run.entrant.distance()))
        emit(run.rank, event="validation", step=step, steps=step, loss=curve[-1][3])
        if not math.isfinite(curve[-1][3]):
            break
    return curve


def train(run: Run, planned: plan.Schedule) -> Curve:
    """Train as long as planned, and return the curve."""
    clock, step = run.clock, 0
    curve = [(0, 0.0, 0.0, run.validation_loss(), run.entrant.distance())]
    clock.start()
    while step < planned.steps and math.isfinite(curve[-1][3]):
        step += 1
        run.step(step, step / planned.steps, sample=planned.is_check(step))
        planned.recipe = run.entrant.rounds
        run.report(step, planned.steps)
        if planned.is_check(step):
            clock.stop(step)
            elapsed, megabytes = run.entrant.mean(clock.seconds), clock.megabytes()
            if planned.check(step, elapsed):
                figures = run.validation_loss(), run.entrant.distance()
                curve.append((step, elapsed, megabytes, *figures))
                emit(run.rank, event="validation", step=step, steps=planned.steps, loss=figures[0])
            clock.start()
    clock.stop(step)
    return curve


def run(job: Callable[[], object]) -> NoReturn:
    """Run ``job`` as this process. Output of user code must not mix with events on stdout."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    sys.stdout = sys.stderr
    try:
        job()
    except Exception as error:
        if not isinstance(error, (LinkError, ValueError, ImportError)):
            traceback.print_exc()
        print(user_files.error_line(error), file=sys.stderr)
        sys.stderr.flush()
        code = NOT_FINITE if isinstance(error, NotFiniteError) else 1
        os._exit(code)  # skip the process group's shutdown, which may wait for lost ranks
    os._exit(0)


def main() -> None:
    """Run the specification in the first argument of the command line."""
    run(lambda: race(Spec(**json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()
