"""How many steps of a recipe fit into a span of time: measured kind of step by kind of step.

A recipe's rounds are pure functions of the step, so the steps fall into a few kinds (no round, an
averaging, a slow step, ...). Each kind is timed where it first occurs, by setting the step counter
there; the sum over a run's steps is its time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from laconic.algorithms.round import GradientRound, Recipe, Round

Kind = tuple[bool, ...]
"""Which of a recipe's rounds fall due at a step."""

HORIZON = 20_000
"""Steps looked ahead for kinds: a round that falls due later has no part in a race."""


def kind_of(recipe: Recipe, step: int) -> Kind:
    """The kind of ``step``."""
    return tuple(r.when(step) for r in recipe)


def first_steps(recipe: Recipe, horizon: int = HORIZON) -> dict[Kind, int]:
    """Each kind of step, and the first step of the kind."""
    firsts: dict[Kind, int] = {}
    for step in range(1, horizon + 1):
        firsts.setdefault(kind_of(recipe, step), step)
    return firsts


def outermost(recipe: Recipe, step: int) -> bool:
    """Whether a race may look at the consensus after ``step``: the recipe's last parameter round
    was folded (its messages were not sent for nothing then), there is none to wait for, or
    gradients were averaged and there is no outer step."""
    last = [r for r in recipe if isinstance(r, Round)][-1:]
    if not last:
        return True
    sent = step - last[0].delay
    if sent > 0 and last[0].when(sent):
        return True
    agreed = any(isinstance(r, GradientRound) and r.when(step) for r in recipe)
    return agreed and last[0].update.anchor is None


def cost_of(recipe: Recipe, step: int, costs: Mapping[Kind, float]) -> float:
    """Seconds of ``step``; a kind that was not timed counts as the dearest."""
    return costs.get(kind_of(recipe, step), max(costs.values()))


def steps_within(
    recipe: Recipe, costs: Mapping[Kind, float], seconds: float, after: int = 0
) -> int:
    """The last step, counted on from ``after``, by which the steps' costs (seconds by kind) add
    up to at most ``seconds``, and which is `outermost`. Where there is none,
    ``after`` itself; for a whole run, the last that is in time."""
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
    """When to look at the clock, when to validate, when to stop: the same on every rank, because
    all that goes in is agreed upon.

    A run of ``seconds`` is planned from the costs of its kinds of steps, and planned anew,
    by how the plan has turned out so far, at about ``looks`` steps. ``validations`` are spread
    evenly over the time. A run of ``steps`` is what was asked for.
    """

    recipe: Recipe
    seconds: float | None
    steps: int
    validations: int
    costs: Mapping[Kind, float]
    looks: int = 32

    def __post_init__(self) -> None:
        self._planned = 0.0
        self._counted = 0
        self._next_look = 1
        self._validated = 0

    def is_look(self, step: int) -> bool:
        """Whether ranks must agree on the time after ``step``."""
        fresh = outermost(self.recipe, step) and step >= self._next_look
        return fresh or step >= self.steps

    def look(self, step: int, elapsed: float) -> bool:
        """Plan anew after ``step``, ``elapsed`` seconds into the run; whether to validate now."""
        self._next_look = step + max(self.steps // self.looks, 1)
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
class Timed:
    """Times kinds of steps with ``run(step, count)``: seconds for ``count`` steps from ``step``."""

    recipe: Recipe
    run: Callable[[int, int], float]

    def costs(self, repeats: int) -> dict[Kind, float]:
        """Seconds of each kind of step: the median of ``repeats``."""
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
