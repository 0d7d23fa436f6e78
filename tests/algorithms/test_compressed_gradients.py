"""Gradients that travel coded, or in low rank: what they leave out is sent
later, and hard inputs. `test_contract` compares them with their references."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic as la
from laconic.errors import NotFiniteError

SHAPES = ((12, 9), (7,), (6, 3, 4), (3, 3), (11, 8))
"""Matrices, a vector, three dimensions, and one that is too small for rank 2."""
RECIPES: dict[str, la.Recipe] = {
    "int4": la.ddp(codec="int4"),
    "low rank": la.power_sgd(1),
    "low rank, int4": la.power_sgd(1, codec="int4"),
}


class Task:
    """A worker whose gradients are given."""

    def __init__(self, recipe: la.Recipe, dtype: torch.dtype = torch.float64, **options: Any):
        self.model = nn.ParameterList([torch.zeros(s, dtype=dtype) for s in SHAPES])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.sync = la.attach(self.model, self.optimizer, recipe, **options)

    def backward(self, gradients: list[Tensor]) -> list[Tensor]:
        """What becomes of ``gradients``."""
        self.optimizer.zero_grad()
        terms = [(g * p).sum() for g, p in zip(gradients, self.model, strict=True)]
        torch.stack(terms).sum().backward()
        return [p.grad.clone() for p in self.model if p.grad is not None]


def drawn(*seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(s * 1000**i for i, s in enumerate(seed)))
    return [torch.randn(s, generator=generator, dtype=dtype) for s in SHAPES]


def largest(state: Any) -> float:
    """In nested states."""
    if isinstance(state, Tensor):
        return float(state.abs().max())
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return max(map(largest, parts), default=0.0)


@pytest.mark.parametrize("name", ["int4", "low rank", "low rank, int4"])
def test_nothing_gets_lost(name: str) -> None:
    """Of gradients that differ by worker and do not change, the mean of what is brought comes as
    1/t to their mean: what is still owed stays bounded, and coded also each worker's residual."""

    def run(rank: int) -> list[Any]:
        task, total, found = Task(RECIPES[name]), [torch.zeros(s).double() for s in SHAPES], []
        for t in range(1, 81):
            for sum_, g in zip(total, task.backward(drawn(rank)), strict=True):
                sum_ += g
            task.optimizer.step()
            if t in (20, 80):
                means = [sum(gs) / 3 for gs in zip(*(drawn(r) for r in range(3)), strict=True)]
                left = [t * m - sum_ for m, sum_ in zip(means, total, strict=True)]
                owed = torch.cat([x.reshape(-1) for x in left])
                found += [owed, largest(task.sync.state_dict()["gradients"])]
        return found

    for early, residual, late, later in (runs := la.simulate(run, workers=3)):
        assert torch.equal(late, runs[0][2]), "replicas hold the same"
        assert 0 < float(late.abs().max()) < 3 * float(early.abs().max())
        assert "int4" not in name or 0 < later < 3 * residual


ENDING: dict[str, la.Recipe] = {
    "int4": la.post_local_sgd(5, 4, codec="int4"),
    "int4, elastic": la.post_local_sgd(5, 4, codec="int4"),
    "low rank": (replace(la.power_sgd(1)[0], when=la.until(5, la.every(1))),),
}
"""Without gradient rounds after step 5."""


@pytest.mark.fault("post_local_sgd never sent what its last coded gradients had left out")
@pytest.mark.parametrize("name", ENDING)
def test_the_last_coded_gradients_leave_nothing_out(name: str) -> None:
    def run(rank: int) -> float:
        task, total = Task(ENDING[name]), [torch.zeros(s).double() for s in SHAPES]
        for _ in range(5):
            for sum_, g in zip(total, task.backward(drawn(rank)), strict=True):
                sum_ += g
            task.optimizer.step()
        means = [sum(gs) / 3 for gs in zip(*(drawn(r) for r in range(3)), strict=True)]
        return max(float((5 * m - t).abs().max()) for m, t in zip(means, total, strict=True))

    more: Any = {"faults": la.Faults(3)} if "elastic" in name else {"workers": 3}
    assert max(la.simulate(run, **more)) < 1e-12


def test_a_mean_of_low_rank_arrives_whole() -> None:
    """Gradients of full rank on every worker, of rank 2 in the mean."""

    def run(rank: int, of: int) -> float:
        thin, noise = [], drawn(7)
        for i, shape in enumerate(SHAPES):
            rows = shape[0] if len(shape) > 1 else 1
            generator = torch.Generator().manual_seed(i)
            left = torch.randn(rows, 2, generator=generator).double()
            right = torch.randn(2, math.prod(shape) // rows, generator=generator).double()
            thin.append((left @ right).view(shape))
        signs = (1.0, -1.0, 0.0)
        given = [m + signs[rank] * e for m, e in zip(thin, noise, strict=True)]
        found = Task(la.power_sgd(of)).backward(given)
        return max(float((a - b).abs().max()) for a, b in zip(found, thin, strict=True))

    assert max(la.simulate(lambda rank: run(rank, 2), workers=3)) < 1e-12
    assert min(la.simulate(lambda rank: run(rank, 1), workers=3)) > 1e-3


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e30])
def test_gradients_of_less_rank_than_asked_for(scale: float) -> None:
    """Nothing at all for two steps, then of rank one; where squares would leave float32."""

    def run(rank: int) -> None:
        task = Task(la.power_sgd(2), torch.float32)
        for factor in (0.0, 0.0, scale, scale):
            given = [torch.full(s, factor * (1 + rank)) for s in SHAPES]
            for got in task.backward(given):
                assert torch.allclose(got, torch.full_like(got, 1.5 * factor), rtol=1e-4, atol=0)

    la.simulate(run, workers=2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", RECIPES)
def test_one_ranks_nan_is_an_error_on_all_before_anything_changed(name: str, bad: float) -> None:
    """In a matrix, or in a vector."""

    def run(rank: int) -> str:
        task = Task(RECIPES[name])
        for t in range(3):
            task.backward(drawn(rank, t))
            task.optimizer.step()
        before = repr(task.sync.state_dict()["gradients"])
        given = drawn(rank, 3)
        if rank == 1:
            given[int(bad == math.inf)][1] = bad
        with pytest.raises(NotFiniteError, match="had NaN") as caught:
            task.backward(given)
        assert "tensor(" in before and before == repr(task.sync.state_dict()["gradients"])
        return str(caught.value).partition(";")[0]  # then what this rank itself had

    assert len(set(la.simulate(run, workers=3))) == 1


def test_a_grad_scaler_skips_the_step_on_all_ranks() -> None:
    def run(rank: int) -> list[float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        task = Task(RECIPES["low rank"], torch.float32, scaler=scaler)
        scales = []
        for t in range(1, 4):
            before = task.model[0].detach().clone()
            task.optimizer.zero_grad()
            loss: Any = sum(((p - 1) ** 2).sum() for p in task.model)
            scaler.scale(loss * (math.inf if (rank, t) == (1, 2) else 1.0 + rank)).backward()
            scaler.step(task.optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            assert torch.equal(before, task.model[0]) == (t == 2)
        assert bool(task.model[0].isfinite().all())
        return scales

    assert la.simulate(run, workers=2) == [[256.0, 128.0, 128.0]] * 2


def test_autocast_changes_nothing() -> None:
    def run(rank: int, autocast: bool) -> list[Tensor]:
        task = Task(RECIPES["low rank"], torch.float32)
        for t in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                found = task.backward(drawn(rank, t, dtype=torch.float32))
        return found

    with_, without = (la.simulate(lambda r, a=a: run(r, a), workers=2) for a in (True, False))  # type: ignore[misc]
    for one, other in zip(with_, without, strict=True):
        assert all(map(torch.equal, one, other))


def test_refused() -> None:
    with pytest.raises(ValueError, match="for rounds on gradients: use GradientRound"):
        la.Round(la.every(2), la.updates.Average(), la.exchanges.LowRank(1))
