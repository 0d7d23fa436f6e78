"""Run one trial: train the workload under one recipe at one learning rate.

Training uses simulated workers or emulated hosts, and reports the consensus model's validation
loss.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch

import laconic
from laconic.advisor.worker import workload_of
from laconic.algorithms.compile import in_groups
from laconic.algorithms.parse import parse_recipe
from laconic.algorithms.round import Recipe
from laconic.errors import check_int
from laconic.lab.race import plan, runner
from laconic.lab.race.workloads import Workload, lr_factor
from laconic.links.simulated import current_link
from laconic.policy.candidates import takes_muon
from laconic.policy.facts import Facts
from laconic.policy.predict import Prediction, predict
from laconic.policy.probe import BufferWatch
from laconic.tensors import itemsize_of

VALIDATIONS = 8
"""Validations in a run, the last one at its end."""
Report = Callable[[int, int, float], None]
"""Called with (step, number of steps, validation loss). Raising an exception ends the run."""


@dataclass(frozen=True)
class Length:
    """The length of each trial, in ``steps``, ``seconds``, or ``megabytes`` sent by each worker."""

    unit: Literal["steps", "seconds", "megabytes"]
    amount: float

    def steps(self, recipe: Recipe, cost: Prediction) -> int:
        """Return the number of steps of ``recipe``, each of which has this ``cost``.

        If the length is not in steps, the last step ends with a round (`plan.outermost`).
        """
        if self.unit == "steps":
            return int(self.amount)
        each = cost.seconds if self.unit == "seconds" else cost.bytes / 1e6
        if not each:
            raise ValueError("the recipe sends nothing: give the length in steps or seconds")
        inside = int(self.amount / each)
        back = range(inside, max(inside - plan.HORIZON, 0), -1)
        return next((step for step in back if plan.outermost(recipe, step)), inside)


@dataclass(frozen=True)
class Run:
    """The result of a trial: the final validation ``loss`` (not finite if it diverged), the number
    of ``steps``, and the seconds and bytes of each."""

    loss: float
    steps: int
    seconds_per_step: float
    bytes_per_step: float


@dataclass(frozen=True)
class Task:
    """What all trials have in common.

    ``race`` has the workload, the network and the seeds; the loss is the mean over the seeds, and
    its hosts and processes are the workers. ``emulated`` trains on hosts of the lab and measures
    time. Otherwise the simulator is used, and time is predicted from ``compute``, the compute
    seconds of a step.
    """

    race: runner.Settings
    length: Length
    emulated: bool = False
    compute: float = math.nan

    @property
    def workers(self) -> int:
        """The number of workers."""
        return self.race.hosts * self.race.per_host

    @cached_property
    def workload(self) -> Workload:
        """The workload, loaded once."""
        return workload_of(self.race.workload, self.race.data)

    def recipe(self, text: str) -> Recipe:
        """Parse ``text``."""
        recipe = parse_recipe(text, self.race.user_recipes())
        assert isinstance(recipe, tuple), "the space was checked"
        return recipe

    @cached_property
    def facts(self) -> Facts:
        """The facts for the cost model."""
        training = _Training(self.workload, 0, self.workers, self.race.seeds[0], 1.0)
        optimizer, watch = training.optimizer, BufferWatch(training.model)
        training.backward(1, 1, lambda _: None)
        optimizer.step()
        buffers, changing = watch.sizes()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        shapes = tuple(tuple(p.shape) for p in parameters)
        rate = self.race.bandwidth / self.race.per_host if self.emulated else self.race.bandwidth
        return Facts(
            self.workers, shapes, itemsize_of(parameters), self.compute, rate,
            self.race.impairments.latency / 2, overlapping=None if self.emulated else False,
            muon=takes_muon(optimizer, shapes), buffers=buffers, changing=changing,
        )  # fmt: skip

    def check(self, texts: list[str]) -> None:
        """Raise ``ValueError`` if the length is too short for a recipe, or a recipe cannot run."""
        replace(self.race, recipes=tuple(texts), baseline=False).check()
        if self.length.unit == "steps":
            check_int("steps", self.length.amount, VALIDATIONS)
        if self.length.unit == "steps" or (self.emulated and self.length.unit == "seconds"):
            return
        for text in texts:
            recipe = self.recipe(text)
            steps = self.length.steps(recipe, predict(recipe, self.facts))
            if steps < VALIDATIONS:
                raise ValueError(
                    f"{self.length.amount:g} {self.length.unit} is too little for {text}: "
                    f"it allows {steps} steps, and at least {VALIDATIONS} are needed"
                )

    def run(self, text: str, lr: float, report: Report) -> Run:
        """Train under the recipe ``text``, at ``lr`` times the workload's learning rate."""
        recipe = self.recipe(text)
        cost = predict(recipe, self.facts)
        if self.emulated:
            return self._emulated(text, recipe, cost, lr, report)
        steps = self.length.steps(recipe, cost)
        loss = self._simulated(recipe, steps, lr, report)
        return Run(loss, steps, cost.seconds, cost.bytes)

    def _simulated(self, recipe: Recipe, steps: int, lr: float, report: Report) -> float:
        """Train all seeds in lockstep, so that their mean loss is known during the run."""

        def worker(rank: int) -> float:
            link = current_link.get()
            assert link is not None, "a simulated worker has a link"
            runs = []
            for seed in self.race.seeds:
                run = _Training(self.workload, rank, self.workers, seed, lr)
                seed_link = link.split([range(self.workers)])
                size = self.race.group_size if in_groups(recipe) else None
                sync = laconic.attach(
                    run.model, run.optimizer, recipe, link=seed_link, group_size=size
                )
                runs.append((run, sync))
            planned, loss = plan.Schedule(recipe, None, steps, VALIDATIONS, {}), math.nan
            for step in range(1, steps + 1):
                for run, sync in runs:
                    run.backward(step, steps, sync.report_loss)
                    run.optimizer.step()
                if planned.is_check(step) and planned.check(step, 0.0):
                    losses = [_consensus_loss(run, sync, rank) for run, sync in runs]
                    loss = statistics.fmean(losses)
                    if rank == 0:
                        report(step, steps, loss)
            for _, sync in runs:
                sync.detach()
            return loss

        return laconic.simulate(worker, self.workers)[0]

    def _emulated(
        self, text: str, recipe: Recipe, cost: Prediction, lr: float, report: Report
    ) -> Run:
        seconds = self.length.amount if self.length.unit == "seconds" else None
        steps = None if seconds is not None else self.length.steps(recipe, cost)
        settings = replace(
            self.race, recipes=(text,), baseline=False, lr=lr, validations=VALIDATIONS,
            seconds=seconds, steps=steps,
        )  # fmt: skip

        def watch(_: str, event: runner.Event) -> None:
            if event["event"] == "validation":
                report(event["step"], event["steps"], event["loss"])

        (result,) = runner.run(settings, "", watch)
        (row,) = result.rows
        if row.status == "failed":
            raise ValueError(f"{text}: {row.error}")
        loss = math.inf if row.status == "diverged" or row.loss is None else row.loss
        return Run(loss, row.steps, row.seconds_per_step, row.ledger_bytes_per_step)


class _Training:
    """One worker's model and optimizer."""

    def __init__(self, workload: Workload, rank: int, workers: int, seed: int, lr: float) -> None:
        torch.manual_seed(seed)
        self.workload = workload
        self.model = workload.model()
        self.optimizer = workload.optimizer(self.model)
        self._peaks = [lr * group["lr"] for group in self.optimizer.param_groups]
        self._batches: Iterator[Any] = workload.batches(rank, workers, seed)
        self._rank = rank

    def backward(self, step: int, steps: int, report: Callable[[torch.Tensor], object]) -> None:
        """Run everything of ``step`` except the optimizer."""
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * lr_factor(step, steps, self.workload)
        batch = next(self._batches, None)
        if batch is None:
            raise ValueError(f"the batches of worker {self._rank} ended before step {step}")
        loss = self.workload.loss(self.model, batch)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        report(loss)

    @torch.no_grad()
    def validation_loss(self) -> float:
        self.model.eval()
        losses = [float(self.workload.loss(self.model, b)) for b in self.workload.validation]
        self.model.train()
        return statistics.fmean(losses)


def _consensus_loss(run: _Training, sync: laconic.Synchronizer, rank: int) -> float:
    """Return the loss of the consensus model, on rank 0. Call it on every rank."""
    with sync.consensus():
        return run.validation_loss() if rank == 0 else math.nan


def measure_compute(task: Task, steps: int = 20) -> float:
    """Return the compute seconds of one worker's step here, as the median of ``steps``."""
    training = _Training(task.workload, 0, task.workers, task.race.seeds[0], 1.0)
    spans = []
    for step in range(1, steps + 4):
        start = time.perf_counter()
        training.backward(step, steps + 4, lambda _: None)
        training.optimizer.step()
        spans.append(time.perf_counter() - start)
    return statistics.median(spans[3:])
