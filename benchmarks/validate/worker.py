"""Run one rank of a launch: the advisor's measurement, then all recipes in turn, several times.

Rank 0 prints the measurement, and the seconds of each recipe, as lines of JSON.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

import laconic
from laconic.advisor.quorum import predict
from laconic.algorithms.parse import parse_recipe
from laconic.algorithms.round import Recipe
from laconic.lab.race import workloads
from laconic.lab.race.worker import TIMEOUT, run
from laconic.links.link import Link
from laconic.links.rank_sets import own_link
from laconic.policy.facts import Facts
from laconic.policy.predict import often

STEPS = 24
"""Steps per timing of the advisor's measurement."""
ALONE = 1.2
"""Seconds of steps without communication after each recipe, to track the machine's pace."""
TURN = 1.5
"""Seconds, or one period, that a recipe is timed in a pass."""
PASSES = 2
"""Minimum number of passes through all recipes."""


class Training:
    """The text model and its optimizer on this rank."""

    def __init__(self) -> None:
        self._workload = workloads.load("text")
        torch.manual_seed(0)
        self.model = self._workload.model()
        self.optimizer = self._workload.optimizer(self.model)
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._batches = self._workload.batches(rank, size, 0)

    def step(self) -> None:
        """Run one local step: forward, backward, optimizer."""
        loss = self._workload.loss(self.model, next(self._batches))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def whole_period(recipe: Recipe) -> int:
    """Return the number of steps after which all of the recipe's rounds have run."""
    return max(round(1 / often(r)) for r in recipe)


@dataclass(frozen=True)
class Turn:
    """Seconds per step of a recipe in one pass, and ``alone``, without communication, after it.

    ``steps`` were timed. ``waiting`` is the seconds spent waiting since it was attached.
    """

    seconds: float
    alone: float
    steps: int
    waiting: float


class Race:
    """Trains under one recipe after another, each time from the same state."""

    def __init__(self, training: Training, link: Link) -> None:
        self._training, self._link = training, link
        self._model = copy.deepcopy(training.model.state_dict())
        self._optimizer = copy.deepcopy(training.optimizer.state_dict())

    def run(self, recipes: Sequence[str], seconds: float, facts: Facts) -> dict[str, list[Turn]]:
        """Run all recipes in turn, for about ``seconds`` in total, pass by pass, so that the
        machine's pace affects all equally."""
        turns: dict[str, list[Turn]] = {text: [] for text in recipes}
        start, passes, spent = time.perf_counter(), 0, 0.0
        while passes < PASSES or spent * (passes + 1) / passes < seconds:
            for text, found in turns.items():
                found.append(self._time(text, facts))
            passes, spent = passes + 1, self._mean(time.perf_counter() - start)
        return turns

    def _mean(self, seconds: float) -> float:
        """Return the mean over the ranks.

        Ranks begin and end at different times. The longest of their spans would overestimate the
        time, more so for shorter turns.
        """
        return float(self._link.gather(torch.tensor([seconds], dtype=torch.float64)).mean())

    def _alone(self) -> float:
        """Return the seconds of a step without communication, over the steps of all ranks.

        The ranks run for the same time from a common start. Otherwise a rank that finished its
        steps early would leave its share of a processor to the others. The rates are averaged, not
        the seconds: if two ranks share one processor for a while and a third has another, their
        combined rate is as usual, but the mean of their seconds is longer.
        """
        self._training.step()
        self._mean(0.0)
        start, steps = time.perf_counter(), 0
        while time.perf_counter() - start < ALONE:
            self._training.step()
            steps += 1
        return 1 / self._mean(steps / (time.perf_counter() - start))

    def _time(self, text: str, facts: Facts) -> Turn:
        """Time whole periods under the recipe."""
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
        session = sync.driver.session
        session.step = max(period - 2, 0)  # start with a round, which creates state and warms up
        for _ in range(3 + delay):
            self._training.step()
        # Messages in flight now make up for those that will be in flight at the end.
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
    """Return the medians over the passes."""
    return {
        "recipe": recipe,
        "seconds": statistics.median(turn.seconds for turn in turns),
        "alone": statistics.median(turn.alone for turn in turns),
        "steps": sum(turn.steps for turn in turns),
        "waiting": sum(turn.waiting for turn in turns),
    }


def emit(**event: Any) -> None:
    if os.environ["RANK"] == "0":
        print(json.dumps(event), file=sys.__stdout__, flush=True)


def work(recipes: Sequence[str], seconds: float) -> None:
    """Measure, predict, and time."""
    laconic.init()
    training = Training()
    link = own_link(torch.device("cpu"), TIMEOUT)
    start = time.perf_counter()
    facts = laconic.advise(
        training.model,
        training.step,
        optimizer=training.optimizer,
        recipes=recipes,
        steps=STEPS,
        link=link,
    ).facts
    emit(measured={"facts": asdict(facts)}, took=time.perf_counter() - start)
    for text, turns in Race(training, link).run(recipes, seconds, facts).items():
        emit(row=row(text, turns))


def main() -> None:
    run(lambda: work(*json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
