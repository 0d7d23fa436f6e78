"""One rank of a launch: the advisor's measurement, then all recipes in turn, several times over.
Rank 0 says what was measured, and of each recipe the seconds, as lines of JSON."""

from __future__ import annotations

import copy
import json
import os
import statistics
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch

import laconic
from laconic.advisor.advise import measured
from laconic.advisor.worker import Spec, Training, link_of
from laconic.algorithms.parse import parse_recipe
from laconic.algorithms.round import Recipe
from laconic.lab.race.worker import run
from laconic.links.link import Link
from laconic.predict import Facts, often, predict

STEPS = 24
"""Timed at a time for the facts."""
ALONE = 1.2
"""Seconds of steps without communication after each recipe: how fast the machine computes."""
TURN = 1.5
"""Seconds that a recipe is timed for in a pass, or one period."""
PASSES = 2
"""Through all recipes, at least."""


@dataclass(frozen=True)
class Job:
    """``recipes`` to time, pass by pass, for about so many ``seconds`` in all."""

    recipes: list[str]
    seconds: float


def whole_period(recipe: Recipe) -> int:
    """Steps after which all of its rounds have been."""
    return max(round(1 / often(r)) for r in recipe)


@dataclass(frozen=True)
class Turn:
    """Seconds per step of a recipe in one pass, ``alone`` those without communication right after
    it; ``steps`` timed, and seconds of ``waiting`` since it was attached."""

    seconds: float
    alone: float
    steps: int
    waiting: float


class Race:
    """Trains under one recipe after another, each time from the same start."""

    def __init__(self, training: Training, link: Link) -> None:
        self._training, self._link = training, link
        self._model = copy.deepcopy(training.model.state_dict())
        self._optimizer = copy.deepcopy(training.optimizer.state_dict())

    def run(self, job: Job, facts: Facts) -> dict[str, list[Turn]]:
        """All recipes in turn, pass by pass: what the machine's pace does, it does to all."""
        turns: dict[str, list[Turn]] = {text: [] for text in job.recipes}
        start, passes, spent = time.perf_counter(), 0, 0.0
        while passes < PASSES or spent * (passes + 1) / passes < job.seconds:
            for text, found in turns.items():
                found.append(self._time(text, facts))
            passes, spent = passes + 1, self._mean(time.perf_counter() - start)
        return turns

    def _mean(self, seconds: float) -> float:
        """Over the ranks, which begin and end each at its own time: the longest of their spans
        would be longer than what all take, the more so the shorter a turn is."""
        return float(self._link.gather(torch.tensor([seconds], dtype=torch.float64)).mean())

    def _alone(self) -> float:
        """Seconds of a step without communication, over the steps of all ranks. They begin together
        and go on for as long: one that had done its steps before the others would leave them its
        share of a processor. And it is their rates that are averaged: two ranks that have one
        processor for a while, and a third that has the other, do as much together as at any time,
        but the mean of their seconds would be longer."""
        self._training.step()
        self._mean(0.0)
        start, steps = time.perf_counter(), 0
        while time.perf_counter() - start < ALONE:
            self._training.step()
            steps += 1
        return 1 / self._mean(steps / (time.perf_counter() - start))

    def _time(self, text: str, facts: Facts) -> Turn:
        """Whole periods under the recipe."""
        recipe = parse_recipe(text)
        assert isinstance(recipe, tuple), "one of the rows"
        self._training.model.load_state_dict(self._model)
        self._training.optimizer.load_state_dict(copy.deepcopy(self._optimizer))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sync = laconic.attach(
                self._training.model, self._training.optimizer, recipe, link=self._link
            )
        period, delay = whole_period(recipe), max(r.delay for r in recipe)
        expected = period * predict(recipe, facts).seconds
        periods = max(1 if period > 1 else 2, round(TURN / expected))
        sync.step = max(period - 2, 0)  # the first round comes soon: it makes state, and warms up
        for _ in range(3 + delay):
            self._training.step()
        # what is in flight now takes the place of what will be at the end
        start = time.perf_counter()
        for _ in range(periods * period):
            self._training.step()
        total = time.perf_counter() - start
        waiting = sync.stats().seconds_waiting
        sync.mean(0.0)
        sync.detach()
        steps = periods * period
        return Turn(self._mean(total) / steps, self._alone(), steps, waiting)


def row(recipe: str, turns: list[Turn]) -> dict[str, Any]:
    """Medians over the passes."""
    return {
        "recipe": recipe,
        "seconds": statistics.median(turn.seconds for turn in turns),
        "alone": statistics.median(turn.alone for turn in turns),
        "steps": sum(turn.steps for turn in turns),
        "waiting": sum(turn.waiting for turn in turns),
    }


def say(**event: Any) -> None:
    if os.environ["RANK"] == "0":
        print(json.dumps(event), file=sys.__stdout__, flush=True)


def work(spec: Spec, job: Job) -> None:
    """Measure, predict, time."""
    laconic.init()
    training = Training(spec)
    link = link_of(spec)
    recipes: list[Recipe] = []
    for text in job.recipes:
        recipe = parse_recipe(text)
        assert isinstance(recipe, tuple), "one of the rows"
        recipes.append(recipe)
    start = time.perf_counter()
    found = measured(
        training.model,
        training.step,
        lambda workers: recipes,
        optimizer=training.optimizer,
        steps=spec.steps,
        link=link,
    )
    say(measured=asdict(found), took=time.perf_counter() - start)
    for text, turns in Race(training, link).run(job, found.facts).items():
        say(row=row(text, turns))


def main() -> None:
    spec, job = json.loads(sys.argv[1])
    run(lambda: work(Spec(**spec), Job(**job)))


if __name__ == "__main__":
    main()
