"""Workers that should hold the same parameters, and do not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.algorithms.parse import parse_recipe
from laconic.engine import comparison, drift
from laconic.engine.drift import Difference, part_of
from laconic.links import Link
from laconic.tensors import as_bytes

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
                model[0].weight[2, 1] += 1e-3
    params = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    sync.detach()
    return {"drifted": drifted, "params": params}


def train_and_warn(*options: Any) -> dict[str, Any]:
    """In a process of its own."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return {**train(*options, gloo.link_of(3)), "warned": [str(w.message) for w in caught]}


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


def on_accelerator(pieces: Sequence[Tensor]) -> int:
    data = torch.cat([as_bytes(piece).reshape(-1) for piece in pieces])
    return 1 + comparison._on_accelerator(data)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int8]
)
@pytest.mark.parametrize("of", [comparison.digest, on_accelerator])
def test_a_digest_depends_on_every_bit(
    dtype: torch.dtype, of: Callable[[Sequence[Tensor]], int]
) -> None:
    x = (100 * torch.randn(100, dtype=torch.float64)).to(dtype)
    before = of([x])
    assert before == of([x.clone()]) and 0 < before < 2**64
    bits = torch.view_as_real(x).view(torch.int32) if dtype.is_complex else x
    whole = bits.reshape(-1).view(torch.uint8)
    for place in range(0, len(whole), 7):
        whole[place] ^= 1 << place % 8
        assert of([x]) != before
        whole[place] ^= 1 << place % 8
    assert of([x]) == before
    assert of([x[:50], x[50:]]) != of([x[50:], x[:50]])
    x[3], x[4] = 1, 2
    before = of([x])
    x[3], x[4] = 2, 1
    assert of([x]) != before, "the order counts inside a piece, too"


def test_parts_cover_everything_once() -> None:
    tensors = [torch.arange(5.0), torch.arange(5.0, 105.0).view(10, 10), torch.zeros(0)]
    drift.PART, drift.PARTS = 8, 10
    parts = [torch.cat(list(part_of(tensors, k))) for k in range(10)]
    again = torch.cat(list(part_of(tensors, 10)))
    assert torch.equal(torch.cat(parts), torch.arange(105.0)) and torch.equal(again, parts[0])
    several = [torch.cat(list(part_of(tensors, 8, count))) for count in (2, 5, 99)]
    assert torch.equal(several[0], torch.cat(parts[8:]))
    assert torch.equal(several[1], torch.cat([*parts[8:], *parts[:3]]))
    assert torch.equal(several[2], torch.cat([*parts[8:], *parts[:8]])), "none twice"
    assert list(part_of([torch.zeros(0)], 3, 2)) == []


@pytest.mark.parametrize(
    ("digests", "found"),
    [
        ([1, 1, 2], (0, [2])),
        ([2, 1, 1], (1, [0])),
        ([1, 2], (0, [1])),
        ([1, 2, 3, 2, 1], (0, [1, 2, 3])),
        ([0, 0, 2, 0, 1, 1], (4, [2])),
        ([1, 1, 1], None),
        ([0, 1, 0], None),
        ([0, 0, 0], None),
        ([], None),
    ],
)
def test_the_largest_group_counts(digests: list[int], found: tuple[int, list[int]] | None) -> None:
    """A rank with 0 has nothing to compare."""
    assert Difference.of(digests) == found


@pytest.fixture(autouse=True)
def constants() -> Iterator[None]:
    before = drift.PARTS, drift.PART
    yield
    drift.PARTS, drift.PART = before
