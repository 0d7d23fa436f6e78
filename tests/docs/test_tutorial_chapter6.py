"""Chapter 6 of the tutorial: its loops against laconic's recipes, and its workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import laconic
from tutorial import averaging
from tutorial.averaging import ADAM, MOMENTUM, SAMPLES, SGD, Task, Team, by_laconic

STEPS = 21  # five rounds of 4, and one step

Loop = Callable[[Team], Tensor]
CASES: dict[str, tuple[Loop, laconic.Recipe, dict[str, Any]]] = {
    "ddp": (lambda team: averaging.gradient_averaging(team, STEPS), laconic.ddp(), {}),
    "local SGD": (lambda team: averaging.local_sgd(team, STEPS, 4), laconic.local_sgd(4), {}),
    "SlowMo": (
        lambda team: averaging.slowmo(team, STEPS, base=2, period=4, beta=0.6, lr=0.02, alpha=0.9),
        laconic.slowmo(laconic.local_sgd(2), 4, 0.6, 0.9),
        {},
    ),
    "EASGD": (lambda team: averaging.easgd(team, STEPS, 4, 0.6), laconic.easgd(4, 0.6), {}),
    "LSGD": (
        lambda team: averaging.lsgd(team, STEPS, period=6, local_period=2, group=2, c=0.2),
        laconic.lsgd(
            6, local_period=2, pull=0.2, local_pull=0.2, drift=0.2, local_drift=0.2, window=10
        ),
        {"group_size": 2},
    ),
    "SGP": (lambda team: averaging.sgp(team, STEPS, averaging.exponential), laconic.sgp(), {}),
    "DiLoCo": (
        lambda team: averaging.diloco(team, STEPS, 4, eta=0.6, mu=0.8),
        laconic.diloco(4, 0.6, 0.8),
        {},
    ),
}


def check(task: Task, loop: Loop, recipe: laconic.Recipe, options: dict[str, Any]) -> None:
    team = Team(task)
    start = team.x
    model = loop(team)
    trained = by_laconic(task, recipe, STEPS, **options)
    torch.testing.assert_close(team.x, trained.x, rtol=0, atol=1e-13)
    torch.testing.assert_close(model, trained.model, rtol=0, atol=1e-13)
    assert float((trained.x - start).abs().max()) > 1e-2  # something was learned


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_loops_from_the_papers_equal_recipes(
    case: tuple[Loop, laconic.Recipe, dict[str, Any]],
) -> None:
    check(Task(MOMENTUM, seed=5), *case)


def test_adam_inside_diloco() -> None:
    check(Task(ADAM, seed=6), *CASES["DiLoCo"])


def test_gossip_with_weights_that_differ() -> None:
    task = replace(Task(MOMENTUM), workers=3)
    recipe = laconic.sgp("bipartite_linear")
    check(task, lambda team: averaging.sgp(team, STEPS, averaging.row_of_three), recipe, {})


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 12])
def test_gossips_lose_nothing_and_weights_stay_one(n: int) -> None:
    w = torch.ones(n, 1, dtype=torch.float64)
    for k in range(8):
        shares = averaging.exponential(n, k)
        torch.testing.assert_close(shares.sum(0), w[:, 0])
        torch.testing.assert_close(shares @ w, w)


@pytest.mark.parametrize("alike", [False, True])
def test_shards_are_a_partition_and_ordered_or_alike(alike: bool) -> None:
    task = Task(alike=alike)
    shards = [task.shard(rank)[1].flatten() for rank in range(4)]
    whole = task.samples()[1].flatten()
    assert torch.equal(torch.cat(shards).sort().values, whole.sort().values)
    assert [len(shard) for shard in shards] == [SAMPLES // 4] * 4
    in_order = all(a.max() <= b.min() for a, b in pairwise(shards))
    assert in_order != alike


def test_a_team_is_written_by_row_and_for_all_and_its_rows_are_not_shared() -> None:
    team = Team(Task(SGD))
    rows = torch.arange(4, dtype=torch.float64)[:, None].expand_as(team.x)
    team.x = rows
    assert torch.equal(team.x, rows)
    team.x = rows[2]
    assert torch.equal(team.x, rows[2].expand_as(rows))
    team.backward()
    team.g = rows  # lr 0.05: worker i's parameters fall by 0.05*i
    assert torch.equal(team.g, rows)
    team.step()
    torch.testing.assert_close(team.x, rows[2] - 0.05 * rows)


def test_bytes_are_those_of_the_steps_and_not_of_the_start() -> None:
    assert by_laconic(Task(), laconic.local_sgd(100), 3).sent < 0.01
    assert by_laconic(Task(), laconic.local_sgd(1), 3).sent == pytest.approx(1.5, rel=0.05)
