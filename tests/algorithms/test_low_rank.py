"""PowerSGD: gradients as matrices of low rank, and what these leave out sent later."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import laconic as la
from laconic.algorithms.exchanges import LowRank
from laconic.algorithms.exchanges.low_rank import orthonormal
from laconic.algorithms.round import Round
from laconic.algorithms.updates import Average
from laconic.errors import NotFiniteError

from tests.references import reference_coded as coded
from tests.references.reference_coded import Params
from tests.support import gloo, linear
from tests.support.linear import Problem, Training

SHAPES = ((12, 9), (7,), (6, 3, 4), (3, 3), (11, 8))
"""Matrices, a vector, three dimensions, and one that is too small for rank 2."""


def problem(rank: int = 2, workers: int = 3, **more: Any) -> Problem:
    return Problem(la.power_sgd(rank), workers, SHAPES, **more)


def bases(training: Training) -> list[np.ndarray[Any, Any] | None]:
    """Where each parameter's power iteration starts, None for those that travel as they are."""
    round_, found = training.sync.driver.run.gradients[-1], {}
    numbers = {id(p): i for i, p in enumerate(training.model)}
    for bucket, state in ((c.bucket, c.exchange_state) for c in round_.channels):
        low, _ = round_.exchange.shaped(bucket.shapes)._matrices()  # type: ignore[attr-defined]
        starts = {stretch.start: stretch.columns for stretch in low}
        place = row = 0
        for segment, size in zip(bucket.segments, bucket.sizes, strict=True):
            if place in starts:
                rows = state["basis"][row : row + starts[place]]
                found[numbers[id(segment.tensor)]] = rows.double().numpy().copy()
                row += starts[place]
            place += size
        assert row == len(state["basis"])
    return [found.get(i) for i in range(len(training.model))]


def reference(given: Problem) -> coded.PowerSGD:
    start = la.simulate(lambda rank: bases(Training(given, rank)), workers=given.workers)
    for own in start:
        for a, b in zip(own, start[0], strict=True):
            assert (a is None) == (b is None) and (a is None or np.array_equal(a, b))
    return coded.power_sgd(start[0])


# -- the algorithm ----


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("rank", [1, 2])
def test_it_equals_its_reference(rank: int, workers: int) -> None:
    given = problem(rank, workers, momentum=0.5)
    expected = reference(given)
    kinds = [q is not None for q in expected.start_q]
    assert kinds == [True, False, True, rank == 1, True]
    assert linear.gap(linear.simulated(given), given.expected(expected)) < 1e-10


def test_float32_stays_close_to_its_reference() -> None:
    given = problem(dtype=torch.float32)
    assert 0 < linear.gap(linear.simulated(given), given.expected(reference(given))) < 1e-3


def thin(given: Problem, worker: int, step: int) -> Params:
    """Of full rank on every worker, of rank 2 in the mean: what is more, two workers have with
    different signs."""
    rng = np.random.default_rng([step])
    sign = (1.0, -1.0, 0.0)[worker]
    found = []
    for shape, x in zip(given.shapes, given.start(), strict=True):
        rows = shape[0] if len(shape) > 1 else 1
        mean = rng.standard_normal((rows, 2)) @ rng.standard_normal((2, x.size // rows))
        noise = rng.standard_normal(shape)
        found.append(mean.reshape(shape) + sign * noise - linear.SLOPE * x)
    return found


def test_a_mean_of_low_rank_arrives_whole() -> None:
    """In the first step, in which x is still the common start, which the gradients leave out."""
    given = problem(2, 3, offset=thin, steps=1)
    dense = replace(given, recipe=la.ddp())
    for low, full in zip(linear.simulated(given), linear.simulated(dense), strict=True):
        assert linear.distance(low, full) < 1e-12
    poor = replace(given, recipe=la.power_sgd(1))
    assert linear.distance(linear.simulated(poor)[0], linear.simulated(dense)[0]) > 1e-3


def test_what_is_no_shorter_in_low_rank_is_ddp() -> None:
    full = replace(problem(), recipe=la.power_sgd(99))
    dense = replace(problem(), recipe=la.ddp())
    assert linear.same_bits(linear.simulated(full), linear.simulated(dense))


def test_a_dense_start() -> None:
    """Until then ddp, bit for bit; from then on PowerSGD, which begins with nothing owed."""
    given = replace(problem(), recipe=la.power_sgd(2, start=4), momentum=0.5)
    dense = linear.simulated(replace(given, recipe=la.ddp()))
    mixed = linear.simulated(given)
    assert linear.same_bits([r[:4] for r in mixed], [r[:4] for r in dense])
    assert linear.distance(mixed[0][4:5], dense[0][4:5]) > 1e-3

    class Late(coded.PowerSGD):
        def gradients(self, t: int, grads: list[Params], lr: float) -> list[Params]:
            if t > 4:
                return super().gradients(t, grads, lr)
            mean = [coded.mean_of(list(g)) for g in zip(*grads, strict=True)]
            return [[g.copy() for g in mean] for _ in grads]

    expected = given.expected(Late(reference(given).start_q))
    assert linear.gap(mixed, expected) < 1e-10


# -- nothing gets lost ----


def owed(rank: int, given: Problem) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Of each parameter: the sum of this worker's gradients, that of what was brought, and what is
    left."""
    training, brought = Training(given, rank), [torch.zeros(s).double() for s in given.shapes]
    for t in range(1, given.steps + 1):
        training.backward(t)
        for total, p in zip(brought, training.model, strict=True):
            assert p.grad is not None
            total += p.grad
        training.optimizer.step()
    own = [torch.stack(list(g)).sum(0) for g in zip(*training.raw, strict=True)]
    left = linear.carried(training, "residual")
    return own, brought, [left[i].view(s) for i, s in enumerate(given.shapes)]


def test_what_was_brought_and_what_is_left_is_all_that_went_in() -> None:
    given = problem(1, 3)
    found = la.simulate(lambda rank: owed(rank, given), workers=3)
    for i in range(len(SHAPES)):
        went_in = sum(own[i] for own, _, _ in found)
        left = sum(rest[i] for _, _, rest in found)
        assert torch.allclose(3 * found[0][1][i] + left, went_in, rtol=0, atol=1e-12)
        assert bool(left.any()) == (len(SHAPES[i]) > 1), "a vector leaves nothing behind"


@pytest.mark.parametrize("codec", ["int8", "int4", "bfloat16"])
def test_factors_may_travel_coded(codec: str) -> None:
    """What is rounded off them is left with the rest; replicas stay alike."""
    given = replace(problem(2, 3), recipe=la.power_sgd(2, codec=codec))
    found = la.simulate(lambda rank: owed(rank, given), workers=3)
    for i in range(len(SHAPES)):
        went_in = sum(own[i] for own, _, _ in found)
        left = sum(rest[i] for _, _, rest in found)
        assert torch.allclose(3 * found[0][1][i] + left, went_in, rtol=0, atol=1e-12)
        assert bool(left.any())
    runs = linear.simulated(given)
    assert linear.same_bits(runs, [runs[0]] * 3)


def apart(given: Problem, worker: int, step: int) -> Params:
    """Gradients that differ from worker to worker, and do not change."""
    rng = np.random.default_rng([worker])
    return [rng.standard_normal(shape) for shape in given.shapes]


def test_what_workers_differ_by_does_not_add_up() -> None:
    """Else what they send would be ever larger, its codes coarser, and what is owed more."""
    given = problem(1, 3, offset=apart)
    given = replace(given, recipe=la.power_sgd(1, codec="int4"), lr=0.0)

    def run(rank: int) -> list[Tensor]:
        training, left = Training(given, rank), []
        for end in (50, 400):
            training.steps(training.sync.step + 1, end)
            left.append(torch.cat(list(linear.carried(training, "residual").values())))
        return left

    early, late = zip(*la.simulate(run, workers=3), strict=True)
    for before, after in (*zip(early, late, strict=True), (sum(early) / 3, sum(late) / 3)):
        assert 0 < float(after.abs().max()) < 2 * float(before.abs().max())


def test_replicas_hold_the_same_bits() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        runs = linear.simulated(problem(2, 4, dtype=dtype))
        assert linear.same_bits(runs, [runs[0]] * 4)


def test_gloo_equals_the_simulation(pool: gloo.Pool) -> None:
    for workers in (2, 3):
        given = problem(2, workers, dtype=torch.float32)
        processes = pool.run(linear.over_gloo, given, ranks=workers)
        assert linear.same_bits(processes, linear.simulated(given))


def test_half_precision_keeps_its_state_in_float32() -> None:
    given = problem(2, 2, dtype=torch.bfloat16, steps=2)

    def run(rank: int) -> set[torch.dtype]:
        training = Training(given, rank)
        training.steps(1, 2)
        carried = [c.exchange_state for c in training.sync.driver.run.gradients[0].channels]
        return {t.dtype for state in carried for t in state.values()}

    assert la.simulate(run, workers=2) == [{torch.float32}] * 2


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_bytes_are_those_of_the_cost_law(workers: int) -> None:
    given = problem(2, workers)

    def run(rank: int) -> int:
        training = Training(given, rank)
        training.steps(1, 1)
        before = training.sync.stats().bytes_sent
        training.steps(2, 2)
        return training.sync.stats().bytes_sent - before

    numbers = [2 * (12 + 6 + 11) + 7 + 9, 2 * (9 + 12 + 8)]  # P and what is dense; Q
    padded = [math.ceil(k / workers) * workers for k in numbers]
    expected = sum(2 * (workers - 1) * 8 * k // workers for k in padded)
    assert la.simulate(run, workers=workers) == [expected] * workers


# -- going on ----


def test_resume_is_exact() -> None:
    assert linear.resumes(problem(2, 3, momentum=0.5, dtype=torch.float32), (1, 5))
    assert linear.resumes(replace(problem(2, 2), recipe=la.power_sgd(2, start=4)), (3, 6))


def test_with_another_number_of_workers_the_mean_of_the_residuals_stays() -> None:
    given = problem(2, 4, dtype=torch.float32)

    def first(rank: int) -> tuple[Any, list[Any], dict[int, Tensor]]:
        training = Training(given, rank)
        training.steps(1, 5)
        kept = linear.copy_of(training.state())
        return kept, bases(training), linear.carried(training, "residual")

    before = la.simulate(first, workers=4)

    def second(rank: int) -> tuple[list[Any], dict[int, Tensor], list[Any]]:
        training = Training(replace(given, workers=2), rank)
        training.model.load_state_dict(before[0][0]["model"])
        training.optimizer.load_state_dict(before[0][0]["optimizer"])
        training.sync.load_state_dict([kept["sync"] for kept, _, _ in before])
        return bases(training), linear.carried(training, "residual"), training.steps(6, 9)

    after = la.simulate(second, workers=2)
    assert linear.same_bits([after[0][2]], [after[1][2]])
    for q, _, _ in after:
        for a, b in zip(q, before[0][1], strict=True):
            assert (a is None and b is None) or np.array_equal(a, b)
    linear.check_pooled([left for _, _, left in before], [left for _, left, _ in after])


def test_residuals_stay_with_their_parameters_when_others_join() -> None:
    given = problem(2, 2)

    def run(rank: int) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        training = Training(given, rank)
        training.steps(1, 3)
        before = linear.carried(training, "residual")
        training.model[1].requires_grad_(False)
        training.sync.driver.run.gradients[0].refresh()
        return before, linear.carried(training, "residual")

    for before, after in la.simulate(run, workers=2):
        assert set(after) == {0, 2, 3, 4}
        assert all(torch.equal(after[i], before[i]) for i in after) and before[0].any()


# -- hard inputs ----


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_one_ranks_nan_is_an_error_on_all_before_anything_changed(bad: float, place: int) -> None:
    """In a matrix, and in a vector."""
    given = problem(2, 3)

    def run(rank: int) -> str:
        training = Training(given, rank)
        training.steps(1, 3)
        before = linear.copy_of(training.sync.state_dict()["gradients"])
        with torch.no_grad():
            hook = training.model[place].register_hook(
                lambda g: g.index_fill(0, torch.tensor([1]), bad) if rank == 1 else g
            )
        with pytest.raises(NotFiniteError, match="some ranks had NaN") as caught:
            training.backward(4)
        hook.remove()
        after = training.sync.state_dict()["gradients"]
        for one, other in zip(before[0]["carried"], after[0]["carried"], strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)
        return str(caught.value)

    assert len(set(la.simulate(run, workers=3))) == 1


def test_a_grad_scaler_skips_the_step_on_all_ranks() -> None:
    given = problem(2, 2, dtype=torch.float32)

    def run(rank: int) -> tuple[list[float], bool]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        training = Training(given, rank, scaler=scaler)
        scales = []
        for t in range(1, 4):
            before = training.values()
            training.optimizer.zero_grad()
            x = training.model[0]
            loss = (x * x).sum() * (math.inf if (rank, t) == (1, 2) else 1.0 + rank)
            scaler.scale(loss).backward()
            scaler.step(training.optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            moved = not np.array_equal(before[0], training.values()[0])
            assert moved == (t != 2)
        return scales, bool(np.isfinite(training.values()[0]).all())

    assert la.simulate(run, workers=2) == [([256.0, 128.0, 128.0], True)] * 2


def zero_then_one(given: Problem, worker: int, step: int) -> Params:
    """Nothing at all for two steps (x is still the start), then gradients of rank one."""
    start = [-linear.SLOPE * p for p in given.start()]
    return start if step < 3 else [p + 1.0 for p in start]


def test_no_gradient_and_gradients_of_less_rank_than_asked_for() -> None:
    for dtype in (torch.float64, torch.float32):
        given = problem(2, 2, offset=zero_then_one, steps=3, dtype=dtype)
        dense = linear.simulated(replace(given, recipe=la.ddp()))
        low = linear.simulated(given)
        limit = 1e-12 if dtype == torch.float64 else 1e-5
        assert linear.distance(low[0], dense[0]) < limit


@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-30, 1.0, 3e37])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_orthonormal_columns(scale: float, rank: int) -> None:
    """Also where p has fewer dimensions than columns, and where squares would leave the range."""
    rng = torch.Generator().manual_seed(1)
    left, right = torch.randn(20, rank, generator=rng), torch.randn(rank, 3, generator=rng)
    p = (left @ right).clamp(-5, 5) * scale if scale else torch.zeros(20, 3)
    q = orthonormal(p)
    assert torch.allclose(q.mT @ q, torch.eye(3), atol=1e-5)
    if scale >= 1e-30:
        unit = p / p.abs().max()
        assert torch.allclose(q @ (q.mT @ unit), unit, atol=1e-5), "spans other columns"
    assert torch.equal(q, orthonormal(p.clone()))


def test_autocast_changes_nothing() -> None:
    given = problem(2, 2, dtype=torch.float32, steps=3)

    def run(rank: int) -> Any:
        training = Training(given, rank)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return training.steps(1, 3)

    assert linear.same_bits(la.simulate(run, workers=2), linear.simulated(given))


def test_bad_arguments() -> None:
    for rank in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="rank must be an integer of at least 1"):
            la.power_sgd(rank)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="start must be an integer of at least 0"):
        la.power_sgd(start=-1)


def test_it_is_for_gradients_alone() -> None:
    with pytest.raises(ValueError, match="for rounds on gradients: use GradientRound"):
        Round(la.every(2), Average(), LowRank(1))


def test_what_another_recipe_left_over_is_sent_once() -> None:
    """After a switch from coded gradients, a bias travels as it is, in all steps but the first."""

    def run(rank: int, recipe: la.Recipe, then: la.Recipe) -> list[Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Linear(20, 30)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        sync = la.attach(model, optimizer, recipe)
        found = []
        for t in range(5):
            if t == 2:
                sync.switch(then)
            x = torch.randn(4, 20, generator=torch.Generator().manual_seed(10 * t + rank))
            optimizer.zero_grad()
            model(x).square().sum().backward()
            assert model.bias.grad is not None
            found.append(model.bias.grad.clone())
            optimizer.step()
        return found

    both = la.ddp(codec="int2"), la.power_sgd(1)
    ours, _ = la.simulate(lambda rank: run(rank, *both), workers=2)
    theirs, _ = la.simulate(lambda rank: run(rank, la.ddp(), la.ddp()), workers=2)
    assert not torch.allclose(ours[2], theirs[2], rtol=1e-4), "with what was left over"
    for a, b in zip(ours[3:], theirs[3:], strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)
