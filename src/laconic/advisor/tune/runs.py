"""One trial: the workload trained under one recipe at one learning rate, by simulated workers or on
emulated hosts, telling the consensus model's validation loss as it goes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

import laconic
from laconic.algorithms.compile import in_groups
from laconic.algorithms.parse import parse_recipe
from laconic.algorithms.round import Recipe
from laconic.errors import check_int
from laconic.lab.race import plan, runner, user_files, workloads
from laconic.lab.race.workloads import Workload, lr_factor
from laconic.links.simulated import current_link
from laconic.predict import Facts, Prediction, itemsize_of, predict

LOOKS = 8
"""Validations in a run, the last at its end."""
Told = Callable[[int, int, float], None]
"""Told (step, of steps, validation loss); what it raises ends the run."""


@dataclass(frozen=True)
class Length:
    """How long each trial trains: so many ``steps``, ``seconds`` or ``megabytes`` (sent by each
    worker)."""

    unit: Literal["steps", "seconds", "megabytes"]
    amount: float

    def steps(self, recipe: Recipe, cost: Prediction) -> int:
        """Of ``recipe``, at the ``cost`` of each. Where the length is not in steps, the last one
        that ends with a round (`plan.outermost`)."""
        if self.unit == "steps":
            return int(self.amount)
        each = cost.seconds if self.unit == "seconds" else cost.bytes / 1e6
        if not each:
            raise ValueError("nothing is sent: give the length in steps or seconds")
        inside = int(self.amount / each)
        back = range(inside, max(inside - plan.HORIZON, 0), -1)
        return next((step for step in back if plan.outermost(recipe, step)), inside)


@dataclass(frozen=True)
class Run:
    """What came of a trial: the validation ``loss`` at its end (not finite where it diverged), the
    ``steps`` made, and what each took and sent."""

    loss: float
    steps: int
    seconds_per_step: float
    bytes_per_step: float


@dataclass(frozen=True)
class Task:
    """What all trials share. ``race``: workload, network, and the seeds over whose runs the loss is
    a mean; its hosts and processes are the workers. ``emulated``: on hosts of the lab, where time
    is measured; else in the simulator, where it is predicted from ``compute``, the seconds that a
    step computes."""

    race: runner.Settings
    length: Length
    emulated: bool = False
    compute: float = math.nan

    @property
    def workers(self) -> int:
        """How many train."""
        return self.race.hosts * self.race.per_host

    @cached_property
    def workload(self) -> Workload:
        """Loaded once."""
        data = None if self.race.data is None else Path(self.race.data)
        load = user_files.workload if user_files.is_workload(self.race.workload) else workloads.load
        return load(self.race.workload, data=data)

    def recipe(self, text: str) -> Recipe:
        """What ``text`` spells."""
        recipe = parse_recipe(text, self.race.own_recipes())
        assert isinstance(recipe, tuple), "the space was checked"
        return recipe

    @cached_property
    def facts(self) -> Facts:
        """For the cost model."""
        optimizer = self.workload.optimizer(self.workload.model())
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        shapes = tuple(tuple(p.shape) for p in parameters)
        rate = self.race.bandwidth / self.race.per_host if self.emulated else self.race.bandwidth
        return Facts(
            self.workers, shapes, itemsize_of(parameters), self.compute, rate,
            self.race.latency,
        )  # fmt: skip

    def check(self, texts: list[str]) -> None:
        """Raise ``ValueError`` for a length too short for one of the recipes, or where one needs
        what is not there."""
        replace(self.race, recipes=tuple(texts), baseline=False).check()
        if self.length.unit == "steps":
            check_int("steps", self.length.amount, LOOKS)
        if self.length.unit == "steps" or (self.emulated and self.length.unit == "seconds"):
            return
        for text in texts:
            recipe = self.recipe(text)
            steps = self.length.steps(recipe, predict(recipe, self.facts))
            if steps < LOOKS:
                raise ValueError(
                    f"{self.length.amount:g} {self.length.unit} are too few for {text}: "
                    f"{steps} steps, of at least {LOOKS}"
                )

    def run(self, text: str, lr: float, told: Told) -> Run:
        """Train under the recipe ``text``, at ``lr`` times the workload's learning rate."""
        recipe = self.recipe(text)
        cost = predict(recipe, self.facts)
        if self.emulated:
            return self._emulated(text, recipe, cost, lr, told)
        steps = self.length.steps(recipe, cost)
        loss = self._simulated(recipe, steps, lr, told)
        return Run(loss, steps, cost.seconds, cost.bytes)

    def _simulated(self, recipe: Recipe, steps: int, lr: float, told: Told) -> float:
        """All seeds in step with each other, so that their mean is known while they run."""

        def worker(rank: int) -> float:
            link = current_link.get()
            assert link is not None, "a simulated worker has one"
            runs = []
            for seed in self.race.seeds:
                run = _Training(self.workload, rank, self.workers, seed, lr)
                own_link = link.split([range(self.workers)])
                size = self.race.group_size if in_groups(recipe) else None
                sync = laconic.attach(
                    run.model, run.optimizer, recipe, link=own_link, group_size=size
                )
                runs.append((run, sync))
            planned, loss = plan.Schedule(recipe, None, steps, LOOKS, {}), math.nan
            for step in range(1, steps + 1):
                for run, sync in runs:
                    run.backward(step, steps, sync.report_loss)
                    run.optimizer.step()
                if planned.is_look(step) and planned.look(step, 0.0):
                    losses = [_consensus_loss(run, sync, rank) for run, sync in runs]
                    loss = statistics.fmean(losses)
                    if rank == 0:
                        told(step, steps, loss)
            for _, sync in runs:
                sync.detach()
            return loss

        return laconic.simulate(worker, self.workers)[0]

    def _emulated(self, text: str, recipe: Recipe, cost: Prediction, lr: float, told: Told) -> Run:
        seconds = self.length.amount if self.length.unit == "seconds" else None
        steps = None if seconds is not None else self.length.steps(recipe, cost)
        settings = replace(
            self.race, recipes=(text,), baseline=False, lr=lr, validations=LOOKS,
            seconds=seconds, steps=steps,
        )  # fmt: skip

        def watch(_: str, event: runner.Event) -> None:
            if event["event"] == "validation":
                told(event["step"], event["steps"], event["loss"])

        (result,) = runner.run(settings, "", watch)
        (row,) = result.rows
        if row.status == "failed":
            raise ValueError(f"{text}: {row.error}")
        loss = math.inf if row.status == "diverged" or row.loss is None else row.loss
        return Run(loss, row.steps, row.seconds_per_step, row.ledger_bytes_per_step)


class _Training:
    """One worker's model in training."""

    def __init__(self, workload: Workload, rank: int, workers: int, seed: int, lr: float) -> None:
        torch.manual_seed(seed)
        self.workload = workload
        self.model = workload.model()
        self.optimizer = workload.optimizer(self.model)
        self._peaks = [lr * group["lr"] for group in self.optimizer.param_groups]
        self._batches: Iterator[Any] = workload.batches(rank, workers, seed)
        self._rank = rank

    def backward(self, step: int, steps: int, report: Callable[[torch.Tensor], object]) -> None:
        """All of ``step`` but the optimiser's own."""
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
    """Of the consensus model, on rank 0; every rank must call it."""
    with sync.consensus():
        return run.validation_loss() if rank == 0 else math.nan


def measure_compute(task: Task, steps: int = 20) -> float:
    """Seconds that one worker's step computes here: the median of ``steps``, after a few more."""
    training = _Training(task.workload, 0, task.workers, task.race.seeds[0], 1.0)
    spans = []
    for step in range(1, steps + 4):
        start = time.perf_counter()
        training.backward(step, steps + 4, lambda _: None)
        training.optimizer.step()
        spans.append(time.perf_counter() - start)
    return statistics.median(spans[3:])
