"""Workers that should hold the same parameters, and do not."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import laconic
from laconic.algorithms.parse import parse_recipe
from laconic.engine import drift
from laconic.links import Link

from tests.support import gloo


def train(
    rank: int,
    steps: int,
    faults: dict[int, int],
    recipe: str = "ddp()",
    parts: int = 256,
    link: Link | None = None,
) -> dict[str, Any]:
    """``faults``: the rank on which a weight changes after a step."""
    drift.PARTS, drift.PART = parts, 8
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sync = laconic.attach(model, optimizer, parse_recipe(recipe), buffers="keep", link=link)
    generator = torch.Generator().manual_seed(rank)
    drifted = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        model(torch.randn(3, 4, generator=generator)).square().mean().backward()
        optimizer.step()
        drifted.append(sync.stats().steps_drifted)
        if faults.get(step) == rank:
            with torch.no_grad():
                layer = model[0]
                assert isinstance(layer, nn.Linear)
                layer.weight[2, 1] += 1e-3
    params = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    sync.detach()
    return {"drifted": drifted, "params": params}


def train_and_warn(
    rank: int, steps: int, faults: dict[int, int], recipe: str, parts: int
) -> dict[str, Any]:
    """In a process of its own."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        link = gloo.link_of(3)
        return {
            **train(rank, steps, faults, recipe, parts, link),
            "warned": [str(w.message) for w in caught],
        }


def check_found(results: Sequence[dict[str, Any]]) -> None:
    for r in results:
        assert r["drifted"] == [0, 0, 0, 1, 2, 3, 4, 5]
    assert not torch.equal(results[2]["params"], results[0]["params"]), "nothing was handed on"


@pytest.mark.parametrize("recipe", ["ddp()", "ddp(codec='int8')", "power_sgd(1)"])
def test_one_worker_that_drifts_is_named(recipe: str) -> None:
    """A fault after step 3 on rank 2 is found in step 4, and in every step from then on."""
    with pytest.warns(UserWarning, match=r"at step 4 ranks \[2\] differ from rank 0"):
        results = laconic.simulate(lambda rank: train(rank, 8, {3: 2}, recipe, 1), workers=3)
    check_found(results)


def test_over_processes_as_simulated(pool: gloo.Pool) -> None:
    results = pool.run(train_and_warn, 8, {3: 2}, "ddp()", 1, ranks=3)
    check_found(results)
    assert [sum("differ from rank" in w for w in r["warned"]) for r in results] == [1, 0, 0]
    with pytest.warns(UserWarning, match="differ from rank 0"):
        simulated = laconic.simulate(lambda rank: train(rank, 8, {3: 2}, "ddp()", 1), workers=3)
    assert torch.equal(results[0]["params"], simulated[0]["params"])


@pytest.mark.filterwarnings("ignore:the workers' parameters have drifted")
def test_every_part_is_looked_at_in_turn() -> None:
    """With 49 parameters in parts of 8, a fault in one of them is found within 7 steps."""
    results = laconic.simulate(lambda rank: train(rank, 12, {1: 1}), workers=3)
    found = results[0]["drifted"].index(1)
    assert 1 <= found <= 8


@pytest.mark.parametrize(
    "recipe", ["local_sgd(2)", "post_local_sgd(2, 2)", "local_sgd(3, delay=2)", "sgp()"]
)
def test_nothing_is_found_where_workers_may_differ(recipe: str) -> None:
    """x changes on one worker between two rounds, as by a step: the next round averages it."""
    results = laconic.simulate(lambda rank: train(rank, 6, {3: 2}, recipe, 1), workers=3)
    assert results[0]["drifted"][-1] == 0


@pytest.fixture(autouse=True)
def constants() -> Iterator[None]:
    before = drift.PARTS, drift.PART
    yield
    drift.PARTS, drift.PART = before
