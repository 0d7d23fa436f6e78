"""How long a race runs, against doing the sums step by step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise

import pytest

import laconic as la
from laconic.lab.race.plan import (
    HORIZON,
    Kind,
    Schedule,
    Timer,
    first_steps,
    kind_of,
    outermost,
    steps_within,
)

# recipe: (its rounds' steps by hand, in recipe order; the steps after which it is at rest)
Due = Callable[[int], tuple[bool, ...]]
RECIPES: dict[str, tuple[la.Recipe, Due, Callable[[int], bool]]] = {
    "silence": ((), lambda t: (), lambda t: True),
    "ddp": (la.ddp(), lambda t: (True,), lambda t: True),
    "local": (la.local_sgd(12), lambda t: (t % 12 == 0,), lambda t: t % 12 == 0),
    "every": (la.local_sgd(1), lambda t: (True,), lambda t: True),
    "late": (la.local_sgd(7, delay=3), lambda t: (t % 7 == 0,), lambda t: t > 3 and t % 7 == 3),
    "slow": (
        la.slowmo(la.local_sgd(3), 48),
        lambda t: (t % 3 == 0 and t % 48 > 0, t % 48 == 0),
        lambda t: t % 48 == 0,
    ),
    "coprime": (
        la.slowmo(la.local_sgd(5), 7),
        lambda t: (t % 5 == 0 and t % 7 > 0, t % 7 == 0),
        lambda t: t % 7 == 0,
    ),
    "gradients and slow": (
        la.slowmo(la.ddp(), 10),
        lambda t: (True, t % 10 == 0),
        lambda t: t % 10 == 0,
    ),
    "switch": (
        la.post_local_sgd(20, 8),
        lambda t: (t <= 20, t > 20 and t % 8 == 0),
        lambda t: t <= 20 or t % 8 == 0,
    ),
    "outer": (la.diloco(24), lambda t: (t % 24 == 0,), lambda t: t % 24 == 0),
}


@functools.cache
def costs_of(recipe: la.Recipe) -> dict[Kind, float]:
    """Seconds that no two kinds share, and whose sums meet no round number."""
    kinds = enumerate(first_steps(recipe))
    return {kind: 0.0101 + 0.0307 * sum(kind) + 0.0013 * i for i, kind in kinds}


def spent(recipe: la.Recipe, costs: Mapping[Kind, float], last: int, after: int = 0) -> float:
    return sum(costs[kind_of(recipe, step)] for step in range(after + 1, last + 1))


@pytest.mark.parametrize("name", RECIPES)
def test_kinds_are_the_rounds_that_fall_due(name: str) -> None:
    recipe, due, _ = RECIPES[name]
    assert [kind_of(recipe, t) for t in range(1, 200)] == [due(t) for t in range(1, 200)]


@pytest.mark.parametrize("name", RECIPES)
def test_first_steps_are_the_first(name: str) -> None:
    recipe, due, _ = RECIPES[name]
    for horizon in (1, 11, 12, 500):
        found = first_steps(recipe, horizon)
        kinds = [due(t) for t in range(1, horizon + 1)]
        assert found == {kind: kinds.index(kind) + 1 for kind in kinds}
        assert list(found.values()) == sorted(found.values())
    assert set(first_steps(recipe)) == set(first_steps(recipe, 500))


def test_a_round_beyond_the_horizon_has_no_kind_of_its_own() -> None:
    assert first_steps(la.local_sgd(HORIZON)) == {(False,): 1, (True,): HORIZON}
    assert first_steps(la.local_sgd(HORIZON + 1)) == {(False,): 1}


@pytest.mark.parametrize("name", RECIPES)
def test_the_consensus_is_fresh_after_the_outermost_round(name: str) -> None:
    recipe, _, fresh = RECIPES[name]
    assert [outermost(recipe, t) for t in range(1, 200)] == [fresh(t) for t in range(1, 200)]


def test_the_consensus_is_fresh_while_gradients_alone_are_averaged() -> None:
    """Before local SGD starts, every worker holds it; a race that ends there may run its time."""
    recipe = la.post_local_sgd(1000, 12)
    assert outermost(recipe, 7)
    assert steps_within(recipe, costs_of(recipe), seconds=2.0) > 10
    assert [t for t in range(1001, 1100) if outermost(recipe, t)] == [*range(1008, 1100, 12)]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("after", [0, 1, 24, 100])
def test_steps_within_a_time_are_those_whose_costs_add_up_to_it(name: str, after: int) -> None:
    recipe, _, _ = RECIPES[name]
    costs = costs_of(recipe)
    steps = range(after + 1, after + 1000)
    clock = [*accumulate(costs[kind_of(recipe, step)] for step in steps)]
    for tenths in (-10, 0, 1, 2, 5, 10, 33, 80):
        in_time = [t for t, at in zip(steps, clock, strict=True) if at <= tenths / 10]
        # a run too short for its first round still takes the steps that it can
        none_fresh = max(in_time, default=after) if after == 0 else after
        last = max((t for t in in_time if outermost(recipe, t)), default=none_fresh)
        assert steps_within(recipe, costs, tenths / 10, after) == last


def test_steps_within_a_time_that_is_spent_exactly() -> None:
    costs = {(True,): 0.25}
    assert steps_within(la.ddp(), costs, 1.0) == 4
    assert steps_within(la.ddp(), costs, 0.999) == 3
    assert steps_within(la.ddp(), costs, 0.0) == 0


def test_a_kind_that_comes_late_in_a_long_race_is_planned_for() -> None:
    """Costs are known of the kinds within the horizon alone; the plan may look beyond it."""
    recipe = la.slowmo(la.post_local_sgd(HORIZON + 100, 4), 8)
    costs = costs_of(recipe)
    assert steps_within(recipe, costs, seconds=1e6, after=1000) > 1000


def run(
    planned: Schedule, speed: Callable[[int], float], costs: Mapping[Kind, float]
) -> tuple[list[int], list[int], list[float]]:
    """What a rank does with a schedule, on a clock that is `speed` times slower than planned:
    the looks, the validations, and the clock after each step."""
    looks, validations, clock, step = [], [], [0.0], 0
    while step < planned.steps:
        step += 1
        clock.append(clock[-1] + speed(step) * costs[kind_of(planned.recipe, step)])
        if planned.is_check(step):
            looks.append(step)
            if planned.check(step, clock[-1]):
                validations.append(step)
        assert step < 100_000
    return looks, validations, clock


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("steps", [1, 2, 7, 24, 100, 960])
@pytest.mark.parametrize("validations", [1, 4, 8])
def test_a_race_of_steps_takes_them_all(name: str, steps: int, validations: int) -> None:
    recipe, _, _ = RECIPES[name]
    costs = costs_of(recipe)
    planned = Schedule(recipe, None, steps, validations, {})
    looks, validated, clock = run(planned, lambda step: 1.0, costs)
    assert len(clock) == steps + 1 and planned.steps == steps
    assert looks[-1] == validated[-1] == steps
    assert set(validated) <= set(looks)
    assert all(outermost(recipe, step) for step in looks[:-1])
    assert all(later - sooner >= max(steps // 32, 1) for sooner, later in pairwise(looks[:-1]))
    if all(outermost(recipe, step) for step in range(1, 100)):
        assert min(steps, 32) <= len(looks) <= 2 * 32
    assert len(validated) <= validations + 1
    # a validation falls on the first look at or after its share of the way, and on no other
    due: list[int] = []
    for share in (steps * k / validations for k in range(1, validations + 1)):
        due.append(next(step for step in looks if step >= share - 1e-9))
    assert validated == sorted({*due, steps})


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("seconds", [3.07, 20.0])
@pytest.mark.parametrize("slower", [0.51, 1.0, 2.03])
def test_a_race_of_seconds_ends_with_the_last_round_in_time(
    name: str, seconds: float, slower: float
) -> None:
    """Whatever the timing foresaw: the plan is mended at the first look."""
    recipe, _, _ = RECIPES[name]
    costs = costs_of(recipe)
    planned = Schedule(recipe, seconds, steps_within(recipe, costs, seconds), 8, costs)
    looks, validated, clock = run(planned, lambda step: slower, costs)
    assert len(clock) - 1 == steps_within(recipe, costs, seconds / slower) > 0
    assert clock[-1] <= seconds
    assert all(outermost(recipe, step) for step in looks)
    assert looks[-1] == validated[-1] == len(clock) - 1
    assert len(validated) <= 9
    sparse = max(later - sooner for sooner, later in pairwise([0, *looks]))
    assert max(b - a for a, b in pairwise([0, *validated])) <= (len(clock) - 1) / 8 + 2 * sparse


@pytest.mark.parametrize("name", ["ddp", "local", "slow"])
def test_a_race_of_seconds_keeps_to_them_while_the_machine_slows_down(name: str) -> None:
    recipe, _, _ = RECIPES[name]
    costs = costs_of(recipe)
    seconds = 20.0
    planned = Schedule(recipe, seconds, steps_within(recipe, costs, seconds), 8, costs)
    looks, validated, clock = run(planned, lambda step: 1.0 if step < 200 else 3.0, costs)
    round_seconds = 3 * max(spent(recipe, costs, 48), 1.0)
    assert seconds - round_seconds <= clock[-1] <= seconds + round_seconds
    assert looks[-1] == validated[-1] == len(clock) - 1


def test_all_ranks_plan_alike() -> None:
    """What goes in is agreed upon, so two schedules told the same do the same."""
    recipe = la.slowmo(la.local_sgd(3), 48)
    costs = costs_of(recipe)
    runs = [
        run(Schedule(recipe, 9.0, steps_within(recipe, costs, 9.0), 8, costs), lambda _: 1.3, costs)
        for _ in range(2)
    ]
    assert runs[0] == runs[1] and runs[0][1]


@pytest.mark.parametrize("name", ["silence", "ddp", "local", "slow", "coprime"])
def test_timing_finds_the_cost_of_each_kind(name: str) -> None:
    recipe, _, _ = RECIPES[name]
    costs = costs_of(recipe)
    calls: list[tuple[int, int]] = []

    def timed(step: int, count: int) -> float:
        calls.append((step, count))
        hiccup = 1.0 if len(calls) % 3 == 2 else 0.0  # one of the three repeats
        return spent(recipe, costs, step + count - 1, step - 1) + hiccup

    assert Timer(recipe, timed).costs(repeats=3) == pytest.approx(costs)
    assert calls == [
        (step, 1)
        for _, step in sorted(first_steps(recipe).items(), key=lambda item: sum(item[0]))
        for _ in range(3)
    ]


def test_a_late_round_is_timed_until_it_is_folded() -> None:
    """The round costs 0.5 s at its own step and 0.25 s three steps later; other steps 0.1 s."""
    recipe = la.local_sgd(7, delay=3)

    def timed(step: int, count: int) -> float:
        steps = range(step, step + count)
        return sum(0.1 + 0.5 * (t % 7 == 0) + 0.25 * (t % 7 == 3 and t > 3) for t in steps)

    found = Timer(recipe, timed).costs(repeats=1)
    assert found == pytest.approx({(False,): 0.1, (True,): 0.85})


def test_a_round_at_every_step_that_is_late_has_no_quiet_step_to_compare_with() -> None:
    found = Timer(la.local_sgd(1, delay=2), lambda step, count: 0.1 * count).costs(repeats=1)
    assert set(found) == {(True,)}
    assert found[True,] >= 0.1
