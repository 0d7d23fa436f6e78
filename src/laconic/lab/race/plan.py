"""Decide when a race checks its clock, when it validates, and after which step it ends.

A run of some seconds is measured while it trains: the steps of its recent past say how many fit
into the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from laconic.algorithms.round import GradientRound, Recipe, Round

HORIZON = 20_000
"""Steps that are searched for the last one of a run."""
LATE = 0.02
"""The share of its steps that a run may take too many, where it would end earlier by more."""
CHECKS = 32
"""About how often a run's clock is checked."""


def outermost(recipe: Recipe, step: int) -> bool:
    """Return whether a race may evaluate the consensus after ``step``.

    It may if the recipe's last parameter round was just folded (so that its messages were useful),
    if the recipe has none, or if gradients were averaged and there is no outer step.
    """
    last = [r for r in recipe if isinstance(r, Round)][-1:]
    if not last:
        return True
    sent = step - last[0].delay
    if sent > 0 and last[0].when(sent):
        return True
    averaged = any(isinstance(r, GradientRound) and r.when(step) for r in recipe)
    return averaged and last[0].update.anchor is None


def last_step(recipe: Recipe, most: int) -> int:
    """Return the last `outermost` step up to ``most``, or without one, ``most``."""
    back = range(most, max(most - HORIZON, 0), -1)
    return next((step for step in back if outermost(recipe, step)), most)


@dataclass
class Schedule:
    """The course of a run. What it decides is equal on all ranks, because all inputs are.

    ``steps`` is the length of the run. With ``seconds``, it is a first guess, which `check`
    corrects. ``validations`` are spread evenly. Set ``recipe`` when it changes, as `auto` does.
    """

    recipe: Recipe
    seconds: float | None
    steps: int
    validations: int

    def __post_init__(self) -> None:
        self._checked = [(0, 0.0)]
        self._next_check = 1
        self._validated = 0

    def is_check(self, step: int) -> bool:
        """Return whether ranks must agree on the time after ``step``."""
        due = step >= self._next_check and outermost(self.recipe, step)
        return due or step >= self.steps

    def check(self, step: int, elapsed: float) -> bool:
        """Correct the length, ``elapsed`` seconds into the run. Return whether to validate now."""
        share = step / self.steps
        if self.seconds is not None:
            since, before = max(c for c in self._checked if c[0] <= step / 2)
            left = (self.seconds - elapsed) * (step - since) / (elapsed - before)
            most = step + int(left)
            found = last_step(self.recipe, most)
            if most - found > LATE * most:
                found = last_step(self.recipe, int(most * (1 + LATE)))
            self.steps = max(found, step)
            self._checked.append((step, elapsed))
            share = elapsed / self.seconds
        self._next_check = step + max(self.steps // CHECKS, 1)
        if step < self.steps and share * self.validations < self._validated + 1:
            return False
        self._validated = int(share * self.validations)
        return True
