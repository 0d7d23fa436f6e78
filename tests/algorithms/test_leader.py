"""Which worker leads under leader SGD, and what is said where that cannot be known."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic as la

STEPS = 4
RECIPE = la.lsgd(STEPS, local_period=0, pull=0.5, drift=0.0, window=3)
Report = Callable[[int, int], float | None]
"""The loss that a rank tells at a step; None: it tells none."""


def train(
    rank: int, report: Report, gradients: bool = True, recipe: la.Recipe = RECIPE, **options: Any
) -> tuple[Tensor, Tensor]:
    """x, which differs by rank, before and after a round after the last of STEPS steps."""
    p = nn.Parameter(torch.full((3,), 1.0, dtype=torch.float64))
    model, before = nn.ParameterList([p]), Tensor()
    optimizer = torch.optim.SGD([p], lr=1.0)
    sync = la.attach(model, optimizer, recipe, **options)
    for t in range(1, STEPS + 1):
        p.grad = torch.full_like(p, -float(rank + 1)) if gradients else None
        if (loss := report(rank, t)) is not None:
            sync.report_loss(loss)
        before = p.detach() - (0 if p.grad is None else p.grad)
        optimizer.step()
    return before, p.detach().clone()


def leader_of(runs: list[tuple[Tensor, Tensor]]) -> int:
    """Whose x all were pulled to, half of the way."""
    (leader,) = {
        r
        for r, (goal, _) in enumerate(runs)
        if all(torch.allclose(after, (own + goal) / 2, atol=1e-12) for own, after in runs)
    }
    return leader


REPORTS: dict[str, tuple[Report, int]] = {
    "the mean of the last three": (
        lambda r, t: -99.0 if (r, t) == (0, 1) else [3.0, 2.0, 1.0][r],
        2,
    ),
    "of equal losses the lowest rank's": (lambda r, t: [2.0, 1.0, 1.0][r], 1),
    "not one that is not a number": (lambda r, t: [math.nan, 5.0, 4.0][r], 2),
    "nor one that was not a number lately": (
        lambda r, t: math.nan if (r, t) == (0, 2) else [1.0, 5.0, 4.0][r],
        2,
    ),
    "but one that was not a number long ago": (
        lambda r, t: math.nan if (r, t) == (0, 1) else [1.0, 5.0, 4.0][r],
        0,
    ),
    "a negative loss": (lambda r, t: [0.0, -1.0, -2.0][r], 2),
    "that of the least decrease by gradients, where nobody tells a loss": (lambda r, t: None, 0),
}


@pytest.mark.parametrize("case", REPORTS)
def test_the_leader_is(case: str) -> None:
    report, leader = REPORTS[case]
    assert leader_of(la.simulate(lambda rank: train(rank, report), workers=3)) == leader


def test_a_worker_of_two_ranks_has_the_mean_of_their_losses() -> None:
    """Its ranks see different batches; here the worst and the best make the better worker."""
    losses = [9.0, 1.0, 6.0, 6.0]

    def run(rank: int) -> tuple[Tensor, Tensor]:
        return train(rank, lambda r, t: losses[r], nprocs_per_node=2)

    one, same, two, alike = la.simulate(run, workers=4)
    for x, y in [(one, same), (two, alike)]:
        assert torch.equal(x[1], y[1])
    mean = torch.full((3,), 1.0 + 1.5 * STEPS, dtype=torch.float64)
    assert torch.allclose(one[1], mean), "the leader stays"
    assert torch.allclose(two[1], (mean + 1.0 + 3.5 * STEPS) / 2), "the other comes half-way"


# -- where it cannot be known ----

UNKNOWN: dict[str, tuple[Report, bool, str]] = {
    "neither losses nor gradients": (lambda r, t: None, False, r"sync\.report_loss\(loss\)"),
    "losses on one rank, gradients on all": (
        lambda r, t: 1.0 if r == 1 else None,
        True,
        "some ranks have reported a loss and others have not",
    ),
    "losses on one rank, nothing else": (
        lambda r, t: 1.0 if r == 1 else None,
        False,
        r"sync\.report_loss\(loss\)",
    ),
}


def refused(rank: int, case: str, inner: int, link: la.links.Link | None = None) -> str:
    report, gradients, _ = UNKNOWN[case]
    with pytest.raises(ValueError) as caught:
        train(rank, report, gradients, nprocs_per_node=inner, link=link)
    return str(caught.value)


@pytest.mark.parametrize("inner", [1, 2])
@pytest.mark.parametrize("case", UNKNOWN)
def test_an_unknown_leader_is_an_error_on_every_rank(case: str, inner: int) -> None:
    """Also where the ranks of one worker tell different things."""
    texts = la.simulate(lambda rank: refused(rank, case, inner), workers=4)
    assert len(set(texts)) == 1
    assert re.search(UNKNOWN[case][2], texts[0])


def test_a_step_that_a_scaler_skips_leaves_the_score_alone() -> None:
    """Its gradients are infinite, and x does not move: that is no promise, nor the lack of one."""

    def run(rank: int) -> tuple[Tensor, Tensor]:
        p = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([p], lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        sync = la.attach(nn.ParameterList([p]), optimizer, RECIPE, scaler=scaler)
        before = Tensor()
        for t in range(1, STEPS + 1):
            optimizer.zero_grad()
            scale = math.inf if (rank, t) == (0, 2) else float(rank + 1)
            loss: Any = scaler.scale((scale * p).sum())
            loss.backward()
            before = p.detach() - 0.1 * (rank + 1)
            scaler.step(optimizer)
            scaler.update()
        assert sync.step == STEPS
        return before, p.detach().clone()

    assert leader_of(la.simulate(run, workers=2)) == 0
