"""Plan how many steps of a recipe fit into a time limit.

A recipe's rounds are pure functions of the step, so there are a few kinds of steps: without a
round, with an average, with a slow step, and so on. Each kind is timed at its first occurrence, by
setting the step counter there. The time of a run is the sum over its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from laconic.algorithms.round import GradientRound, Recipe, Round

Kind = tuple[bool, ...]
"""Which of a recipe's rounds are due at a step."""

HORIZON = 20_000
"""Steps that are searched for kinds. A round that is due later plays no part in a race."""


def kind_of(recipe: Recipe, step: int) -> Kind:
    """Return the kind of ``step``."""
    return tuple(r.when(step) for r in recipe)


def first_steps(recipe: Recipe, horizon: int = HORIZON) -> dict[Kind, int]:
    """Return each kind of step with its first step."""
    firsts: dict[Kind, int] = {}
    for step in range(1, horizon + 1):
        firsts.setdefault(kind_of(recipe, step), step)
    return firsts


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


def cost_of(recipe: Recipe, step: int, costs: Mapping[Kind, float]) -> float:
    """Return the seconds of ``step``. A kind without a timing counts as the most expensive."""
    return costs.get(kind_of(recipe, step), max(costs.values()))


def steps_within(
    recipe: Recipe, costs: Mapping[Kind, float], seconds: float, after: int = 0
) -> int:
    """Return the last `outermost` step after ``after`` that is reached within ``seconds``.

    ``costs`` are seconds by kind of step. Without such a step, return ``after``; for a whole run
    (``after`` 0), return the last step in time.
    """
    spent, fresh, inside = 0.0, after, after
    for step in range(after + 1, after + HORIZON):
        spent += cost_of(recipe, step, costs)
        if spent > seconds:
            break
        inside = step
        fresh = step if outermost(recipe, step) else fresh
    return inside if fresh == after == 0 else fresh


@dataclass
class Schedule:
    """Decides when to check the clock, when to validate and when to stop.

    The decisions are equal on all ranks, because all inputs are.

    A run of ``seconds`` is planned from the costs of its kinds of steps. The plan is updated at
    about ``checks`` steps with the time spent so far. ``validations`` are spread evenly over the
    time. A run with only ``steps`` has that length.
    """

    recipe: Recipe
    seconds: float | None
    steps: int
    validations: int
    costs: Mapping[Kind, float]
    checks: int = 32

    def __post_init__(self) -> None:
        self._planned = 0.0
        self._counted = 0
        self._next_check = 1
        self._validated = 0

    def is_check(self, step: int) -> bool:
        """Return whether ranks must agree on the time after ``step``."""
        fresh = outermost(self.recipe, step) and step >= self._next_check
        return fresh or step >= self.steps

    def check(self, step: int, elapsed: float) -> bool:
        """Update the plan ``elapsed`` seconds into the run. Return whether to validate now."""
        self._next_check = step + max(self.steps // self.checks, 1)
        if self.seconds is not None:
            for s in range(self._counted + 1, step + 1):
                self._planned += cost_of(self.recipe, s, self.costs)
            self._counted = step
            slower = elapsed / self._planned
            costs = {kind: cost * slower for kind, cost in self.costs.items()}
            self.steps = steps_within(self.recipe, costs, self.seconds - elapsed, after=step)
        share = elapsed / self.seconds if self.seconds is not None else step / self.steps
        if step < self.steps and share * self.validations < self._validated + 1:
            return False
        self._validated = int(share * self.validations)
        return True


@dataclass(frozen=True)
class Timer:
    """Times kinds of steps with ``run(step, count)``: seconds of ``count`` steps from ``step``."""

    recipe: Recipe
    run: Callable[[int, int], float]

    def costs(self, repeats: int) -> dict[Kind, float]:
        """Return the seconds of each kind of step, as the median of ``repeats``."""
        late = max((r.delay for r in self.recipe), default=0)
        quiet = (False,) * len(self.recipe)
        firsts = first_steps(self.recipe)
        plain = 0.0
        costs: dict[Kind, float] = {}
        for kind in sorted(firsts, key=sum):
            step = firsts[kind]
            follow = late if kind != quiet else 0
            spans = sorted(self.run(step, 1 + follow) for _ in range(repeats))
            costs[kind] = max(spans[len(spans) // 2] - follow * plain, 0.0)
            plain = costs.get(quiet, plain)
        return costs
