"""How many steps a recipe takes for one of ddp()'s, from losses."""

from __future__ import annotations

import math

import pytest
from benchmarks.factors import ROWS, STEPS, factor

from laconic.algorithms.parse import parse_recipe

DDP = {STEPS // 4: 2.4, STEPS // 2: 2.2, STEPS: 1.8}


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (1.8, 1.0),
        (2.2, 2.0),
        (2.4, 4.0),
        (2.0, math.sqrt(2)),  # half way between, in the logarithm of the steps
        (1.5, 1.0),  # beyond either end the end
        (9.0, 4.0),
    ],
)
def test_a_factor_is_steps_over_those_of_ddp_at_the_same_loss(loss: float, expected: float) -> None:
    assert factor(loss, DDP) == pytest.approx(expected)


def test_the_rows_are_recipes() -> None:
    assert all(parse_recipe(row) for row in ROWS)
