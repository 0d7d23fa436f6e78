"""DeMo: the largest frequencies of every tile of each worker's momentum, and their mean's sign."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import laconic as la
from laconic.algorithms.exchanges import FastComponents, Mean
from laconic.algorithms.round import GradientRound, Round
from laconic.algorithms.update import Update
from laconic.algorithms.updates import Average, Sign
from laconic.codecs.dct import Tiling, cosines, divisor
from laconic.errors import NotFiniteError

from tests.references import reference_coded as coded
from tests.support import gloo, linear
from tests.support.linear import Problem, Training

SHAPES = ((12, 8), (6,), (4, 3, 2), (7, 10))
"""In tiles of 4 x 4, 3, 4 x 3 and 1 x 2 for a chunk of 4."""
EVEN = ((12, 8), (8,), (4, 4, 2), (7, 10))
"""Waves over an even number of elements are nowhere 0, and have a sign everywhere."""


def problem(workers: int = 3, **more: Any) -> Problem:
    return Problem(la.demo(0.9, 3, 4), workers, SHAPES, **more)


def every_step(update: Update, exchange: Any) -> la.Recipe:
    return (GradientRound(la.every(1), update, exchange, over="world"),)


# -- the transform ----


@pytest.mark.parametrize("n", [1, 2, 3, 8, 64])
def test_cosines_are_orthonormal_and_those_of_the_formula(n: int) -> None:
    c = cosines(n, torch.float64, torch.device("cpu"))
    assert torch.allclose(c @ c.mT, torch.eye(n, dtype=torch.float64), rtol=0, atol=1e-13)
    assert np.abs(c.numpy() - coded.cosines(n)).max() < 1e-14


def test_cosines_by_hand() -> None:
    """A constant has one coefficient, its sum by sqrt(n); what is 0 is so exactly, as the sign of a
    rounding error would be that of a step."""
    c = cosines(4, torch.float64, torch.device("cpu"))
    assert torch.allclose(c @ torch.ones(4).double(), torch.tensor([2.0, 0, 0, 0]).double())
    half = math.cos(math.pi / 4)
    two = cosines(2, torch.float64, torch.device("cpu"))
    assert torch.allclose(two, torch.tensor([[half, half], [half, -half]]).double())
    three, five = (cosines(n, torch.float64, torch.device("cpu")) for n in (3, 5))
    assert (three == 0).nonzero().tolist() == [[1, 1]]
    assert (five == 0).nonzero().tolist() == [[1, 2], [3, 2]]


@pytest.mark.parametrize(
    ("shape", "tiling"),
    [
        ((128, 192), (128, 192, 64, 64)),
        ((100, 7), (100, 7, 50, 7)),
        ((67, 96), (67, 96, 1, 48)),
        ((512,), (1, 512, 1, 64)),
        ((), (1, 1, 1, 1)),
        ((8, 3, 5, 5), (8, 75, 8, 25)),
        ((64, 576), (64, 576, 64, 64)),
    ],
)
def test_tiles_have_the_largest_sides_that_divide(
    shape: tuple[int, ...], tiling: tuple[int, ...]
) -> None:
    assert Tiling.of(shape, 64) == Tiling(*tiling)


def test_divisors() -> None:
    found = [[divisor(n, most) for most in (1, 2, 3, 4, 64)] for n in (1, 12, 17)]
    assert found == [[1, 1, 1, 1, 1], [1, 2, 3, 4, 12], [1, 1, 1, 1, 17]]


@pytest.mark.parametrize("shape", [(12, 8), (6,), (4, 3, 2), (7, 10), (130, 65)])
def test_the_inverse_gives_it_back_and_each_tile_is_its_own(shape: tuple[int, ...]) -> None:
    tiling = Tiling.of(shape, 4)
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    c = tiling.forward(x.reshape(-1))
    assert c.shape == (tiling.count, tiling.size)
    assert torch.allclose(tiling.inverse(c), x.reshape(-1), rtol=0, atol=1e-13)
    assert math.isclose(float((c * c).sum()), float((x * x).sum()), rel_tol=1e-12)
    matrix, number = x.reshape(tiling.rows, tiling.columns).numpy(), 0
    down, across = coded.cosines(tiling.height), coded.cosines(tiling.width)
    for i in range(0, tiling.rows, tiling.height):
        for j in range(0, tiling.columns, tiling.width):
            tile = matrix[i : i + tiling.height, j : j + tiling.width]
            expected = (down @ tile @ across.T).reshape(-1)
            assert np.abs(c[number].numpy() - expected).max() < 1e-13
            number += 1


# -- the algorithm ----


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(
    ("k", "shapes"), [(1, EVEN), (2, EVEN), (3, SHAPES), (16, SHAPES)], ids=["1", "2", "3", "all"]
)
def test_it_equals_its_reference(k: int, shapes: tuple[tuple[int, ...], ...], workers: int) -> None:
    """Whose momentum has the gradient times lr: a power of two, and so the same bits."""
    given = replace(problem(workers), recipe=la.demo(0.9, k, 4), shapes=shapes)
    reference = coded.demo(0.9, k, 4)
    expected = given.expected(reference)
    assert reference.margin > 1e-7, "rounding would decide a sign"
    assert linear.gap(linear.simulated(given), expected) < 1e-13


def test_the_default_is_the_papers() -> None:
    given = Problem(la.demo(), 2, ((128, 64), (192,), (10, 7)), steps=3)
    reference = coded.demo()
    expected = given.expected(reference)
    assert reference.margin > 1e-7, "rounding would decide a sign"
    assert linear.gap(linear.simulated(given), expected) < 1e-13


def test_all_frequencies_and_no_sign_are_ddp() -> None:
    """Whatever the decay: nothing is left that could decay."""
    given = problem()
    dense = linear.simulated(replace(given, recipe=la.ddp()))
    every = every_step(Average(), FastComponents(0.9, 16, 4))
    found = linear.simulated(replace(given, recipe=every))
    assert 0 < linear.distance(found[0], dense[0]) < 1e-6  # values travel in float32


def test_all_frequencies_are_sign_sgd() -> None:
    given = problem()
    dense = linear.simulated(replace(given, recipe=every_step(Sign(), Mean())))
    found = linear.simulated(replace(given, recipe=la.demo(0.5, 16, 4)))
    assert linear.distance(found[0], dense[0]) < 1e-13
    moved = found[0][1][0] - found[0][0][0]
    assert np.allclose(np.abs(moved), given.lr, rtol=0, atol=1e-13)


def test_sign_of_nothing_is_nothing() -> None:
    values = torch.tensor([-2.0, 0.0, 1e-30, math.inf])
    clock = la.Clock(1, math.nan, 0, 0, 1)
    assert Sign().combine(values, {}, clock).tolist() == [-1.0, 0.0, 1.0, 1.0]


# -- nothing gets lost ----


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_what_is_sent_leaves_the_momentum_and_nothing_else_does(decay: float) -> None:
    """One worker's, which is its own mean: e is decay*e + g without what was brought."""
    recipe = every_step(Average(), FastComponents(decay, 3, 4))
    given = replace(problem(1), recipe=recipe)

    def run(rank: int) -> float:
        training, worst = Training(given, rank), 0.0
        for t in range(1, given.steps + 1):
            before = linear.carried(training, "momentum")
            training.backward(t)
            after = linear.carried(training, "momentum")
            for i, p in enumerate(training.model):
                assert p.grad is not None
                went_in = decay * before[i] + training.raw[-1][i].reshape(-1)
                lost = went_in - after[i] - p.grad.reshape(-1)
                worst = max(worst, float(lost.abs().max()))
            assert after[0].any()
            training.optimizer.step()
        return worst

    assert la.simulate(run, workers=1)[0] < 1e-14


def test_a_coefficient_is_the_mean_over_those_who_send_it() -> None:
    """One tile of four constant rows: worker 0's momentum is all in coefficient 0, worker 1's in
    coefficient 2 and, half as large, in 0, of which it sends one."""
    recipe = every_step(Average(), FastComponents(1.0, 1, 4))
    wave = coded.cosines(4)[2]

    def offset(given: Problem, worker: int, step: int) -> list[Any]:
        own = 6.0 * wave + 1.5 if worker else np.full(4, 4.0)
        return [own - linear.SLOPE * given.start()[0]]

    given = Problem(recipe, 2, ((4,),), steps=1, lr=1.0, offset=offset)

    def run(rank: int) -> tuple[Any, Any]:
        training = Training(given, rank)
        moved = given.start()[0] - training.steps(1, 1)[0][0]
        return moved, linear.carried(training, "momentum")[0]

    (moved, rest), (same, other) = la.simulate(run, workers=2)
    assert np.abs(moved - (4.0 + 6.0 * wave)).max() < 1e-6 and np.array_equal(moved, same)
    assert rest.abs().max() < 1e-6 and (other - 1.5).abs().max() < 1e-6


def test_replicas_hold_the_same_bits() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        runs = linear.simulated(problem(4, dtype=dtype))
        assert linear.same_bits(runs, [runs[0]] * 4)


def test_gloo_equals_the_simulation(pool: gloo.Pool) -> None:
    for workers in (2, 3):
        given = problem(workers, dtype=torch.float32)
        processes = pool.run(linear.over_gloo, given, ranks=workers)
        assert linear.same_bits(processes, linear.simulated(given))


@pytest.mark.parametrize("workers", [2, 3])
def test_bytes_are_those_of_the_cost_law(workers: int) -> None:
    def run(rank: int) -> int:
        training = Training(problem(workers), rank)
        training.steps(1, 1)
        before = training.sync.stats().bytes_sent
        training.steps(2, 2)
        return training.sync.stats().bytes_sent - before

    # three coefficients of 12 bits and 4 bytes are 5 + 12 bytes; two of a tile of two 3 + 8
    expected = (workers - 1) * ((6 + 2 + 2) * 17 + 35 * 11)
    assert la.simulate(run, workers=workers) == [expected] * workers


# -- going on ----


def test_resume_is_exact() -> None:
    assert linear.resumes(problem(3, dtype=torch.float32), (1, 5))


def test_with_another_number_of_workers_the_mean_of_the_momenta_stays() -> None:
    given = problem(4, dtype=torch.float32)

    def first(rank: int) -> tuple[Any, dict[int, Tensor]]:
        training = Training(given, rank)
        training.steps(1, 5)
        return linear.copy_of(training.state()), linear.carried(training, "momentum")

    before = la.simulate(first, workers=4)

    def second(rank: int) -> dict[int, Tensor]:
        training = Training(replace(given, workers=3), rank)
        training.model.load_state_dict(before[0][0]["model"])
        training.sync.load_state_dict([kept["sync"] for kept, _ in before])
        return linear.carried(training, "momentum")

    linear.check_pooled([left for _, left in before], la.simulate(second, workers=3))


# -- hard inputs ----


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 3])
def test_one_ranks_nan_is_an_error_on_all_before_anything_changed(bad: float, place: int) -> None:
    given = problem(3)

    def run(rank: int) -> str:
        training = Training(given, rank)
        training.steps(1, 3)
        before = linear.carried(training, "momentum")
        hook = training.model[place].register_hook(
            lambda g: g.index_fill(0, torch.tensor([1]), bad) if rank == 1 else g
        )
        with pytest.raises(NotFiniteError, match=r"ranks \[1\] of its link had NaN") as caught:
            training.backward(4)
        hook.remove()
        after = linear.carried(training, "momentum")
        assert all(torch.equal(before[i], after[i]) for i in before)
        return str(caught.value)

    assert len(set(la.simulate(run, workers=3))) == 1


def test_autocast_changes_nothing() -> None:
    given = problem(2, dtype=torch.float32, steps=3)

    def run(rank: int) -> Any:
        training = Training(given, rank)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return training.steps(1, 3)

    assert linear.same_bits(la.simulate(run, workers=2), linear.simulated(given))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: la.demo(1.0), "decay must be a finite number at least 0 and below 1"),
        (lambda: la.demo(k=0), "k must be an integer of at least 1"),
        (lambda: la.demo(chunk=0), "chunk must be an integer of at least 1"),
        (lambda: la.demo(chunk=65), "chunk must be at most 64, not 65"),
    ],
)
def test_bad_arguments(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_it_is_for_gradients_alone() -> None:
    with pytest.raises(ValueError, match="for rounds on gradients: use GradientRound"):
        Round(la.every(2), Average(), FastComponents(0.9, 2, 4))
