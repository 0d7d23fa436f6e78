"""The newest references checked: by hand, by what they keep, by special cases."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.references.reference import (
    NAMES,
    SGD,
    AdamW,
    Array,
    Optimizer,
    Params,
    Recipe,
    Trace,
    Worker,
    copy,
    diloco,
    initial,
    local_sgd,
    make_data,
    max_difference,
    mean,
    run,
)
from tests.references.reference_newest import (
    MARGIN,
    POLYNOMIALS,
    Outer,
    des_loc,
    diloco_rda,
    length,
    muloco,
    muon_direction,
    odd,
    polar,
    radial_directional,
)

n, steps = 3, 13
data, init = make_data(n, steps, seed=1), initial(n, seed=2)
heavy: list[Optimizer] = [SGD(0.9, weight_decay=0.01), SGD(0.5)]
adam: list[Optimizer] = [AdamW(weight_decay=0.1), AdamW((0.8, 0.95), 1e-6, 0.0)]
mixed: list[Optimizer] = [AdamW(), SGD()]  # SGD without momentum has no state at all
rng = np.random.default_rng(3)


def lr(group: int, t: int) -> float:
    return (0.2, 0.1)[group] / (1 + 0.1 * t)


def go(recipe: Recipe, optimizer: list[Optimizer] = adam) -> Trace:
    return run(recipe, n, steps, optimizer, lr, data, init)


def drive(recipe: Recipe, x0: Params, moves: list[list[Params]]) -> Trace:
    """Local steps that are given, moves[t - 1][worker], instead of gradients."""
    workers, trace = [Worker(copy(x0)) for _ in moves[0]], Trace()
    recipe.start(copy(x0), len(workers))
    for t, step in enumerate(moves, 1):
        for w, move in zip(workers, step, strict=True):
            w.x = {name: w.x[name] + move[name] for name in NAMES}
        recipe.after_step(t, workers, lr)
        trace.record(workers, recipe.consensus(workers))
    return trace


def alike(values: list[float]) -> Params:
    return {name: np.array(values) for name in NAMES}


def random_moves(shapes: list[tuple[int, ...]], n: int = n, steps: int = 9) -> list[list[Params]]:
    named = dict(zip(NAMES, shapes, strict=True))
    return [
        [{name: rng.standard_normal(shape) for name, shape in named.items()} for _ in range(n)]
        for _ in range(steps)
    ]


def same(one: Trace, other: Trace, limit: float = 1e-12) -> None:
    assert max_difference(one, other) <= limit


def near(one: Array, other: Array | list[float] | float) -> None:
    assert np.abs(one - np.asarray(other)).max() <= 1e-12


# ---------------------------------------------------------------- DES-LOC
def with_state(x: float, step: float, m: float, v: float) -> Worker:
    entries = {"step": step, "exp_avg": m, "exp_avg_sq": v}
    state = {name: {key: np.array(value) for key, value in entries.items()} for name in NAMES}
    return Worker({name: np.array(x) for name in NAMES}, state)


def test_des_loc_by_hand() -> None:
    workers = [with_state(1.0, 5.0, 10.0, 100.0), with_state(3.0, 7.0, 30.0, 500.0)]

    def seen(entry: str) -> list[float]:
        return [float(w.state[name][entry]) for w in workers for name in ("w1", "b2")]

    recipe = des_loc(2, 3, 5)
    recipe.start(workers[0].x, 2)
    recipe.after_step(1, workers, lr)
    assert [float(w.x["w1"]) for w in workers] == [1.0, 3.0]
    recipe.after_step(2, workers, lr)
    assert [float(w.x["w1"]) for w in workers] == [2.0, 2.0]
    assert seen("exp_avg") == [10.0, 10.0, 30.0, 30.0]
    recipe.after_step(3, workers, lr)
    assert seen("exp_avg") == [20.0] * 4
    assert seen("exp_avg_sq") == [100.0, 100.0, 500.0, 500.0]
    recipe.after_step(5, workers, lr)
    assert seen("exp_avg_sq") == [300.0] * 4
    recipe.after_step(30, workers, lr)
    assert seen("step") == [5.0, 5.0, 7.0, 7.0]  # never averaged


def test_des_loc_averages_the_momentum_buffer_and_nothing_that_is_missing() -> None:
    workers = [Worker(alike([0.0])) for _ in range(2)]
    for worker, buffer in zip(workers, (1.0, 3.0), strict=True):
        worker.state["w1"] = {"momentum_buffer": np.array(buffer)}
    des_loc(1, 1, 1).after_step(1, workers, lr)
    for worker in workers:
        assert worker.state.pop("w1") == {"momentum_buffer": np.array(2.0)}
        assert worker.state == {"b1": {}, "w2": {}, "b2": {}}


@pytest.mark.parametrize("optimizer", [heavy, adam, mixed], ids=["heavy ball", "adam", "mixed"])
def test_des_loc_with_equal_periods_is_local_sgd_with_averaged_state(
    optimizer: list[Optimizer],
) -> None:
    same(go(des_loc(3, 3, 3), optimizer), go(local_sgd(3, 0, "average"), optimizer))
    never = steps + 1
    same(go(des_loc(3, never, never), optimizer), go(local_sgd(3), optimizer))
    workers = [with_state(1.0, 5.0, 10.0, 100.0), with_state(3.0, 7.0, 30.0, 500.0)]
    averaged = [Worker(copy(w.x), {k: copy(s) for k, s in w.state.items()}) for w in workers]
    local = local_sgd(3, 0, "average")
    local.start(workers[0].x, 2)
    des_loc(3, 3, 3).after_step(3, workers, lr)
    local.after_step(3, averaged, lr)
    for worker, other, step in zip(workers, averaged, (5.0, 7.0), strict=True):
        assert worker.x == other.x
        for name in NAMES:
            assert worker.state[name] == {**other.state[name], "step": np.array(step)}


def test_each_of_des_loc_s_periods_makes_a_difference() -> None:
    plain = go(des_loc(2, 4, 6))
    for other in (des_loc(3, 4, 6), des_loc(2, 3, 6), des_loc(2, 4, 3)):
        assert max_difference(plain, go(other)) > 1e-4


# ---------------------------------------------------------------- the outer steps' frame
def test_outer_steps_by_hand() -> None:
    """One worker and one coordinate, where all three are DiLoCo."""
    moves = [[alike([move])] for move in (-1.0, -1.0, 4.0, 0.0, 0.0)]
    for kind in (Outer, diloco_rda, muloco):
        # D = 2, m = 2, a = -0.5*(2 + 0.5*2) = -1.5; then x = 2.5, D = -4, m = -3, a = 1.25
        now = drive(kind(2, 0.5, 0.5), alike([0.0]), moves)
        assert [float(w[0]["w1"][0]) for w in now.workers] == [-1.0, -1.5, 2.5, 1.25, 1.25]
        assert [float(a["w1"][0]) for a in now.consensus] == [0.0, -1.5, -1.5, 1.25, 1.25]
        # x is -2 + 4 = 2 when a = -1.5 arrives, and becomes 0.25*2 + 0.75*(-1.5) = -0.625;
        # D = -1.5 + 0.625 = -0.875, m = 1 - 0.875 = 0.125, a = -1.5 + 0.5*0.8125 = -1.09375
        late = drive(kind(2, 0.5, 0.5, 1, 0.25), alike([0.0]), moves)
        end = 0.25 * -0.625 + 0.75 * -1.09375
        assert [float(w[0]["w1"][0]) for w in late.workers] == [-1.0, -2.0, -0.625, -0.625, end]
        assert [float(a["w1"][0]) for a in late.consensus] == [0, -1.5, -1.5, -1.09375, -1.09375]


@pytest.mark.parametrize("delay", [0, 1, 3])  # 3: what arrives comes in before what leaves
def test_the_frame_is_diloco_s(delay: int) -> None:
    same(go(Outer(3, 0.7, 0.9, delay)), go(diloco(3, 0.7, 0.9, delay)))


@pytest.mark.parametrize("kind", [diloco_rda, muloco])
def test_mix_and_delay(kind: type[Outer]) -> None:
    at_once, alone = go(kind(3, 0.7, 0.9)), go(Recipe())
    same(at_once, go(kind(3, 0.7, 0.9, 0, 0.25)))  # no delay, nothing to mix
    deaf, late = go(kind(3, 0.7, 0.9, 2, 1.0)), go(kind(3, 0.7, 0.9, 2))
    assert max_difference(deaf, alone, consensus=False) <= 1e-12
    assert max_difference(late, at_once) > 1e-4
    assert max_difference(late, go(kind(3, 0.7, 0.9, 2, 0.25))) > 1e-4
    assert max_difference(at_once, go(diloco(3, 0.7, 0.9))) > 1e-4


# ---------------------------------------------------------------- radial-directional average
def test_radial_directional_by_hand() -> None:
    # Lengths 5 and 1; directions (0.6, 0.8) and (1, 0), whose mean (0.8, 0.4) has length sqrt(0.8).
    found = radial_directional([np.array([3.0, 4.0]), np.array([1.0, 0.0])])
    near(found, [3.0 * 0.8 / math.sqrt(0.8), 3.0 * 0.4 / math.sqrt(0.8)])
    # A worker that has not moved shortens the step and has no say in the direction.
    near(radial_directional([np.array([3.0, 4.0]), np.zeros(2)]), [1.5, 2.0])
    # Matrices of length 2 and sqrt(2) = 2*h.
    h = math.sqrt(0.5)
    found = radial_directional([np.array([[0.0, 2.0], [0.0, 0.0]]), np.eye(2)[::-1]])
    near(found, (1 + h) * np.array([[0.0, 1 + h], [h, 0.0]]) / math.hypot(1 + h, h))
    assert not radial_directional([np.zeros((2, 3))] * 3).any()


def test_radial_directional_keeps_the_mean_length() -> None:
    for shape in ((5,), (4, 3), (2, 3, 4), ()):
        d = [factor * rng.standard_normal(shape) for factor in (0.01, 1.0, 30.0)]
        near(np.array(length(radial_directional(d))), sum(map(length, d)) / 3)
        assert length(sum(d[1:], d[0]) / 3) <= length(radial_directional(d))


def test_opposite_pseudo_gradients_cancel() -> None:
    d = rng.standard_normal((4, 3))
    for factor in (-1.0, -2.0):
        assert not radial_directional([d, factor * d]).any()
    moves = [[alike([3.0, 1.0]), alike([-3.0, -1.0])]]
    still = drive(diloco_rda(1, 0.7, 0.9), alike([5.0, 6.0]), moves)
    assert all(still.consensus[0][name].tolist() == [5.0, 6.0] for name in NAMES)


@pytest.mark.parametrize("delay", [0, 2, 3])
def test_of_identical_pseudo_gradients_it_is_diloco(delay: int) -> None:
    def twins(recipe: Recipe) -> Trace:
        return run(recipe, n, steps, adam, lr, [data[0]] * n, init)

    same(twins(diloco_rda(3, 0.7, 0.9, delay)), twins(diloco(3, 0.7, 0.9, delay)))


def test_tensors_are_averaged_on_their_own() -> None:
    start = go(diloco_rda(3, 0.7, 0.9), adam).consensus[2]
    before = go(Recipe(), adam).workers[2]
    for name in NAMES:
        d = radial_directional([init[0][name] - x[name] for x in before])
        near(start[name], init[0][name] - 0.7 * 1.9 * d)


# ---------------------------------------------------------------- Muon's direction
@pytest.mark.parametrize(
    ("coefficients", "least", "most", "apart"),
    [
        (POLYNOMIALS[0], 0.0020, 1.0000, 0.9701),
        (POLYNOMIALS[1], 0.0299, 1.9701, 0.7985),
        (POLYNOMIALS[2], 0.2015, 1.7985, 0.2253),
    ],
)
def test_each_polynomial_is_the_one_nearest_to_one(
    coefficients: tuple[float, ...], least: float, most: float, apart: float
) -> None:
    """Its distance is largest at 6 points, with alternating signs (Chebyshev's criterion for 5
    coefficients)."""
    off = odd(coefficients, np.linspace(least, most, 20001)) - 1.0
    assert abs(np.abs(off).max() - apart) < 1e-3
    peaks = off[np.abs(off) > apart - 1e-3]
    assert np.count_nonzero(np.diff(np.sign(peaks))) == 5


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    s = np.random.default_rng(4).standard_normal(shape)
    sigma, found = (np.linalg.svd(x, compute_uv=False) for x in (s, polar(s)))
    assert sigma.max() / sigma.min() > 1.23 / 0.77
    assert found.min() >= 0.77 and found.max() <= 1.23


def test_polar_by_hand() -> None:
    # diag(3, 4), element by element, as nothing mixes the two
    most = math.sqrt(MARGIN) * (3.0**8 + 4.0**8) ** 0.125
    expected = [scalar(3.0 / most), scalar(4.0 / most)]
    near(polar(np.diag([3.0, 4.0])), np.diag(expected))
    s = rng.standard_normal((6, 4))
    near(polar(s.T), polar(s).T)
    near(polar(7.0 * s), polar(s))
    near(polar(-s), -polar(s))


def scalar(sigma: float) -> float:
    """What the polynomials make of a singular value."""
    for p in POLYNOMIALS:
        square = sigma * sigma
        sigma *= p[0] + square * (p[1] + square * (p[2] + square * (p[3] + square * p[4])))
    return sigma


def test_muon_s_direction_by_hand() -> None:
    most = math.sqrt(MARGIN) * (3.0**8 + 4.0**8) ** 0.125
    p, q = scalar(3.0 / most), scalar(4.0 / most)
    found = muon_direction(np.diag([3.0, 4.0]))
    near(found, np.diag([5.0 * p / math.hypot(p, q), 5.0 * q / math.hypot(p, q)]))
    near(muon_direction(3.0 * np.eye(4)), 3.0 * np.eye(4))  # already orthogonal
    outer = np.outer([1.0, 2.0, 3.0], [4.0, -5.0])
    near(muon_direction(outer), outer)  # of rank 1
    assert not muon_direction(np.zeros((3, 2))).any()


def test_muon_s_direction_of_what_is_no_matrix_is_the_thing_itself() -> None:
    for shape in ((), (5,), (1, 5), (5, 1), (2, 3, 4), (2, 2, 1)):
        s = rng.standard_normal(shape)
        assert np.array_equal(muon_direction(s), s)
    s = rng.standard_normal((2, 3))
    assert np.abs(muon_direction(s) - s).max() > 1e-2


def test_the_muloco_step_is_as_long_as_diloco_s() -> None:
    one, other = go(muloco(3, 0.7, 0.9)).consensus[2], go(diloco(3, 0.7, 0.9)).consensus[2]
    for name in NAMES:
        mine, theirs = one[name] - init[0][name], other[name] - init[0][name]
        near(np.array(length(mine)), length(theirs))
        if name in ("b1", "b2"):
            near(mine, theirs)
        else:
            assert np.abs(mine - theirs).max() > 1e-3
            near(mine, muon_direction(theirs))


def test_the_momentum_is_of_pseudo_gradients_not_of_steps() -> None:
    moves = random_moves([(4, 3), (3, 4), (3, 3), (2, 6)], steps=2)
    x0 = copy(moves[0][0])
    trace = drive(muloco(1, 0.5, 0.8), x0, moves)
    first = {k: -mean(moves[0])[k] for k in NAMES}  # a - x is what was moved, turned round
    second = {k: -mean(moves[1])[k] for k in NAMES}
    for k in NAMES:
        a = x0[k] - 0.5 * muon_direction(first[k] + 0.8 * first[k])
        near(trace.consensus[0][k], a)
        a = a - 0.5 * muon_direction(second[k] + 0.8 * (0.8 * first[k] + second[k]))
        near(trace.consensus[1][k], a)


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_without_matrices_muloco_is_diloco(delay: int) -> None:
    moves = random_moves([(5,), (1, 4), (3, 1), (2, 3, 2)])
    x0 = copy(moves[0][0])
    same(drive(muloco(2, 0.7, 0.9, delay), x0, moves), drive(diloco(2, 0.7, 0.9, delay), x0, moves))
