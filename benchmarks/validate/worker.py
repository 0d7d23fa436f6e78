"""One rank of a launch: the advisor's measurement, then every recipe in turn. Rank 0 says what was
measured, and of each recipe the seconds, as lines of JSON."""

from __future__ import annotations

import copy
import json
import os
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch

import laconic
from laconic.advisor.advise import measured
from laconic.advisor.worker import Spec, Training, link_of
from laconic.lab.worker import run
from laconic.links.link import Link
from laconic.parse import parse_recipe
from laconic.predict import Facts, often, predict
from laconic.round import Recipe

STEPS = 24
"""Timed at a time for the facts."""
ALONE = 5
"""Steps without communication before each recipe, which say whether the machine still computes as
fast as when it was measured."""


@dataclass(frozen=True)
class Job:
    """``recipes`` to time for about ``seconds`` each."""

    recipes: list[str]
    seconds: float


def whole_period(recipe: Recipe) -> int:
    """Steps after which all of its rounds have been."""
    return max(round(1 / often(r)) for r in recipe)


class Race:
    """Trains under one recipe after another, from the same start."""

    def __init__(self, training: Training, link: Link) -> None:
        self._training, self._link = training, link
        self._model = copy.deepcopy(training.model.state_dict())
        self._optimizer = copy.deepcopy(training.optimizer.state_dict())

    def slowest(self, seconds: float) -> float:
        """Of all ranks."""
        return float(self._link.gather(torch.tensor([seconds], dtype=torch.float64)).max())

    def alone(self) -> float:
        """Seconds of a step without communication, all ranks at once."""
        self.slowest(0.0)
        start = time.perf_counter()
        for _ in range(ALONE):
            self._training.step()
        return self.slowest(time.perf_counter() - start) / ALONE

    def time(self, text: str, facts: Facts, seconds: float) -> dict[str, Any]:
        """A handful of whole periods under the recipe."""
        recipe = parse_recipe(text)
        assert isinstance(recipe, tuple), "one of the rows"
        self._training.model.load_state_dict(self._model)
        self._training.optimizer.load_state_dict(copy.deepcopy(self._optimizer))
        before = self.alone()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sync = laconic.attach(
                self._training.model, self._training.optimizer, recipe, link=self._link
            )
        period, delay = whole_period(recipe), max(r.delay for r in recipe)
        expected = predict(recipe, facts).seconds
        periods = max(1, round(seconds / (period * expected)))
        periods = max(periods, -(-4 // period))
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
        after = self.alone()
        return {
            "recipe": text,
            "seconds": self.slowest(total) / (periods * period),
            "predicted": expected,
            "alone": (before + after) / 2,
            "steps": periods * period,
            "waiting": waiting,
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
    race = Race(training, link)
    for text in job.recipes:
        say(row=race.time(text, found.facts, job.seconds))


def main() -> None:
    spec, job = json.loads(sys.argv[1])
    run(lambda: work(Spec(**spec), Job(**job)))


if __name__ == "__main__":
    main()
