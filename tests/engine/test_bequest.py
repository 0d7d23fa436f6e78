"""What a worker that leaves hands over: the sums over workers stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import laconic
from laconic.engine import bequest
from laconic.engine.synchronizer import Synchronizer


def trained(recipe: Any, results: dict[int, Any]) -> None:
    """Train four simulated workers, which then stop in the middle."""

    def worker(rank: int) -> Synchronizer:
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        elastic = laconic.Elastic("simulated")
        sync = laconic.attach(model, optimizer, recipe, elastic=elastic)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(7):
            optimizer.zero_grad()
            (model(torch.randn(5, 6, generator=generator)).square().sum()).backward()
            optimizer.step()
        results[rank] = sync
        return sync

    laconic.simulate(worker, faults=laconic.Faults(4))


@pytest.mark.parametrize(
    "recipe",
    [laconic.ddp(codec="int4"), laconic.local_sgd(3, codec="int4"), laconic.sparse_loco(3)],
)
def test_residuals_count_as_much_as_before(recipe: Any) -> None:
    """e/n in the mean over n workers; what is left of the mean's own error counts once."""
    found: dict[int, Synchronizer] = {}
    trained(recipe, found)

    def states(rank: int) -> list[Any]:
        run = found[rank].driver.run
        channels = [c for r in run.rounds for c in r.channels]
        channels += [c for g in run.gradients for c in g.channels]
        return [c.exchange_state for c in channels]

    def counted(ranks: list[int]) -> list[torch.Tensor]:
        n = len(ranks)
        sums = []
        for parts in zip(*map(states, ranks), strict=True):
            e = sum(part["residual"].double() for part in parts)
            o = sum(part["lag"].double() if "lag" in part else torch.tensor(0.0) for part in parts)
            sums.append(torch.as_tensor(e) / n + o)
        return sums

    before = counted([0, 1, 2, 3])
    assert all(float(value.abs().max()) > 0 for value in before)
    own = [state["residual"].clone() for state in states(3)]
    own_kept = [
        (s["residual"].double(), s.get("lag", torch.tensor(0.0)).double()) for s in states(1)
    ]
    bequest.take_over(found[3].driver, bequest.collect(found[1].driver), 4)
    for state, old, (e, o) in zip(states(3), own, own_kept, strict=True):
        # in the mean over three workers the change counts as e/4 + o did
        change = (state["residual"].double() - old.double()) / 3
        torch.testing.assert_close(change, e / 4 + o, rtol=1e-4, atol=1e-6)
