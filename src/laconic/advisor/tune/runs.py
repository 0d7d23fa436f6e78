"""Run one trial: train the workload under one recipe at one learning rate.

Workers are simulated. The loss is the consensus model's on the validation data.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import laconic
from laconic.advisor.worker import Training
from laconic.algorithms.compile import in_groups
from laconic.algorithms.parse import parse_recipe
from laconic.algorithms.round import Recipe
from laconic.errors import check_int
from laconic.lab.race import plan, runner, user_files
from laconic.lab.race.workloads import Workload
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

    ``race`` has the workload, the network, the seeds, and the number of steps. The loss is the mean
    over the seeds, and its processes are the workers. Time is predicted from ``compute``, the
    compute seconds of a step. ``seconds``: the predicted length of a trial, in place of the steps.
    """

    race: runner.Settings
    compute: float = math.nan
    seconds: float | None = None

    @property
    def workers(self) -> int:
        """The number of workers."""
        return self.race.per_host

    @cached_property
    def workload(self) -> Workload:
        """The workload, loaded once."""
        return user_files.load_workload(self.race.workload, self.race.data)

    def recipe(self, text: str) -> Recipe:
        """Parse ``text``."""
        recipe = parse_recipe(text, self.race.user_recipes())
        assert isinstance(recipe, tuple), "the space was checked"
        return recipe

    @cached_property
    def facts(self) -> Facts:
        """The facts for the cost model."""
        training = Training(self.workload, 0, self.workers, self.race.seeds[0])
        optimizer, watch = training.optimizer, BufferWatch(training.model)
        training.schedule(1, 1)
        training.step()
        buffers, changing = watch.sizes()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        network = self.race.network
        shapes = tuple(tuple(p.shape) for p in parameters)
        return Facts(
            self.workers, shapes, itemsize_of(parameters), self.compute,
            network.bandwidth or math.inf, network.latency / 2, overlapping=False,
            muon=takes_muon(optimizer, shapes), buffers=buffers, changing=changing,
        )  # fmt: skip

    def steps(self, recipe: Recipe, cost: Prediction) -> int:
        """Return the number of steps of a trial of ``recipe``, each of which has this ``cost``.

        If the length is in seconds, the last step ends with a round (`plan.last_step`).
        """
        if self.seconds is None:
            assert self.race.steps is not None, "the length of a trial"
            return self.race.steps
        return plan.last_step(recipe, int(self.seconds / cost.seconds))

    def check(self, texts: list[str]) -> None:
        """Raise ``ValueError`` if the length is too short for a recipe, or a recipe cannot run."""
        replace(self.race, recipes=tuple(texts), baseline=False).check()
        if self.seconds is None:
            check_int("steps", self.race.steps, VALIDATIONS)
            return
        for text in texts:
            recipe = self.recipe(text)
            steps = self.steps(recipe, predict(recipe, self.facts))
            if steps < VALIDATIONS:
                raise ValueError(
                    f"{self.seconds:g} seconds is too little for {text}: it allows {steps} steps, "
                    f"and at least {VALIDATIONS} are needed"
                )

    def run(self, text: str, lr: float, report: Report) -> Run:
        """Train under the recipe ``text``, at ``lr`` times the workload's learning rate."""
        recipe = self.recipe(text)
        cost = predict(recipe, self.facts)
        steps = self.steps(recipe, cost)
        loss = self._train(recipe, steps, lr, report)
        return Run(loss, steps, cost.seconds, cost.bytes)

    def _train(self, recipe: Recipe, steps: int, lr: float, report: Report) -> float:
        """Train all seeds in lockstep, so that their mean loss is known during the run."""

        def worker(rank: int) -> float:
            link = current_link.get()
            assert link is not None, "a simulated worker has a link"
            runs = []
            for seed in self.race.seeds:
                run = Training(self.workload, rank, self.workers, seed, lr)
                seed_link = link.split([range(self.workers)])
                size = self.race.group_size if in_groups(recipe) else None
                sync = laconic.attach(
                    run.model, run.optimizer, recipe, link=seed_link, group_size=size
                )
                runs.append((run, sync))
            planned, loss = plan.Schedule(recipe, None, steps, VALIDATIONS), math.nan
            for step in range(1, steps + 1):
                for run, sync in runs:
                    run.schedule(step, steps)
                    sync.report_loss(run.backward())
                    run.optimizer.step()
                if planned.is_check(step) and planned.check(step, 0.0):
                    losses = []
                    for run, sync in runs:
                        with sync.consensus():
                            losses.append(run.validation_loss() if rank == 0 else math.nan)
                    loss = statistics.fmean(losses)
                    if rank == 0:
                        report(step, steps, loss)
            for _, sync in runs:
                sync.detach()
            return loss

        return laconic.simulate(worker, self.workers)[0]


def measure_compute(task: Task, steps: int = 20) -> float:
    """Return the compute seconds of one worker's step here, as the median of ``steps``."""
    training = Training(task.workload, 0, task.workers, task.race.seeds[0])
    spans = []
    for step in range(1, steps + 4):
        start = time.perf_counter()
        training.schedule(step, steps + 4)
        training.step()
        spans.append(time.perf_counter() - start)
    return statistics.median(spans[3:])
