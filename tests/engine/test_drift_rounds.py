"""Parameter rounds, and elastic runs, whose workers should hold the same state, and do not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic as la
from laconic.engine import drift
from laconic.engine.parameter_rounds import ParameterRunner
from laconic.links import Link


@pytest.fixture(autouse=True)
def constants() -> Iterator[None]:
    before = drift.PARTS, drift.PART
    yield
    drift.PARTS, drift.PART = before


@dataclass(frozen=True)
class Row:
    """A ``recipe``, and the tensor whose change is looked for: a state of the update, of the
    exchange, or "x", the parameters that a round has written. ``index``: of its round. ``after``:
    the step before the change; ``found``: the step of the round that finds it."""

    recipe: la.Recipe
    name: str
    after: int
    found: int
    index: int = 0
    group_size: int | None = None


def adam(tensors: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(tensors, lr=0.01)


ROWS = {
    "local_sgd": Row(la.local_sgd(2), "x", 4, 6),
    "local_sgd, coded": Row(la.local_sgd(2, codec="int8"), "reference", 5, 6),
    "local_sgd, coded, late": Row(la.local_sgd(3, delay=2, codec="int4"), "reference", 5, 8),
    "post_local_sgd": Row(la.post_local_sgd(3, 2), "x", 6, 8),
    "post_local_sgd, coded": Row(la.post_local_sgd(3, 2, codec="int8"), "reference", 5, 6),
    "hierarchical, groups": Row(la.hierarchical(2, 6), "x", 4, 8, group_size=2),
    "hierarchical, all": Row(la.hierarchical(2, 6), "x", 6, 12, 1, group_size=2),
    "slowmo": Row(la.slowmo(la.local_sgd(2), 4, 0.5), "x", 4, 8, 1),
    "slowmo over sgp": Row(la.slowmo(la.sgp(), 4, 0.5, sharded=False), "u", 6, 8, 1),
    "slowmo, unsharded": Row(la.slowmo(None, 4, 0.5, sharded=False), "anchor", 6, 8),
    "diloco": Row(la.diloco(3, momentum=0.5), "x", 3, 6),
    "diloco, unsharded": Row(la.diloco(3, momentum=0.5, sharded=False), "m", 4, 6),
    "diloco, Adam": Row(la.diloco(3, outer=adam, sharded=False), "outer.exp_avg", 4, 6),
    "diloco, late": Row(la.diloco(4, sharded=False, delay=3), "anchor", 7, 11),
    "diloco, coded": Row(la.diloco(3, codec="int8"), "reference", 4, 6),
    "streaming_diloco": Row(la.streaming_diloco(4, 2, 1, momentum=0.5), "reference", 5, 7),
    "sparse_loco": Row(la.sparse_loco(3, 8, 64), "anchor", 4, 6),
    "sparse_loco, reference": Row(la.sparse_loco(3, 8, 64), "reference", 4, 6),
    "downpour": Row(la.downpour(2), "x", 4, 6),
    "easgd": Row(la.easgd(3, pull=0.1), "anchor", 4, 6),
}
"""Every family whose workers hold something alike."""
FAULTY = 2


def nudge(x: Tensor, at: int = -1) -> None:
    """Change one element by one unit in the last place."""
    with torch.no_grad():
        x[at] = torch.nextafter(x[at], torch.tensor(math.inf, dtype=x.dtype))


def state_of(running: ParameterRunner, name: str) -> Tensor:
    (channel,) = running.channels
    return {**channel.state, **channel.exchange_state}[name][: channel.bucket.numel]


def disturb(running: ParameterRunner, name: str) -> None:
    """Change what ``name`` says; "x": when the next round writes it."""
    if name != "x":
        nudge(state_of(running, name))
        return
    (channel,) = running.channels
    bucket, unpack = channel.bucket, channel.bucket.unpack

    def wrong(flat: Tensor) -> None:
        flat = flat.clone()
        nudge(flat, bucket.numel - 1)
        unpack(flat)
        bucket.unpack = unpack  # type: ignore[method-assign]

    bucket.unpack = wrong  # type: ignore[method-assign]


def build() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def go(
    model: nn.Module, optimizer: torch.optim.Optimizer, sync: la.Synchronizer, seed: int
) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * sync.step + seed))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def train(rank: int, row: Row, steps: int, link: Link | None = None) -> dict[str, Any]:
    """The drift found after each step, and at the end what should be the same."""
    model, optimizer = build()
    sync = la.attach(model, optimizer, row.recipe, group_size=row.group_size, link=link)
    running = sync.driver.run.rounds[row.index]
    drifted = [0]
    for step in range(1, steps + 1):
        if rank == FAULTY and step == row.after and row.name == "x":
            disturb(running, row.name)
        go(model, optimizer, sync, rank)
        drifted.append(sync.stats().steps_drifted)
        if rank == FAULTY and step == row.after and row.name != "x":
            disturb(running, row.name)
    params = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    step_digest = sync.driver.run._checks[id(running)].digest(steps)
    sync.detach()
    return {"drifted": drifted, "params": params, "digest": step_digest}


def check(results: list[dict[str, Any]], row: Row) -> None:
    """Every worker of the group, or of all, has found it in that step first."""
    for rank, r in enumerate(results):
        inside = row.group_size is None or row.index or rank >= row.group_size
        found = next((s for s, count in enumerate(r["drifted"]) if count), None)
        assert found == (row.found if inside else None), rank


def steps_of(row: Row) -> int:
    """So many that a round of all workers ends it, and what was wrong would be seen."""
    return 12 if row.group_size or row.found > 8 else row.found


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_one_unit_in_the_last_place_is_found_in_the_next_round(row: Row) -> None:
    workers = 4 if row.group_size else 3
    with pytest.warns(UserWarning, match="have drifted apart") as caught:
        results = la.simulate(lambda rank: train(rank, row, steps_of(row)), workers=workers)
    check(results, row)
    (text,) = {str(w.message) for w in caught}
    assert f"at step {row.found} ranks [" in text


@pytest.mark.parametrize("name", ["diloco, unsharded", "local_sgd, coded", "streaming_diloco"])
def test_it_is_found_after_a_resume(name: str, tmp_path: Path) -> None:
    """One of the saved states was changed: the next round of the resumed run finds it."""
    row = ROWS[name]

    def save(rank: int) -> None:
        model, optimizer = build()
        sync = la.attach(model, optimizer, row.recipe)
        while sync.step < row.after:
            go(model, optimizer, sync, rank)
        if rank == FAULTY:
            disturb(sync.driver.run.rounds[row.index], row.name)
        la.save(tmp_path, model, optimizer)

    def resume(rank: int) -> dict[str, Any]:
        model, optimizer = build()
        sync = la.attach(model, optimizer, row.recipe)
        la.load(tmp_path, model, optimizer)
        drifted = [0] * (row.after + 1)
        while sync.step < row.found:
            go(model, optimizer, sync, rank)
            drifted.append(sync.stats().steps_drifted)
        return {"drifted": drifted}

    la.simulate(save, workers=3)
    with pytest.warns(UserWarning, match=f"at step {row.found} "):
        check(la.simulate(resume, workers=3), row)


# -- no false alarms: a warning is an error here ----


@pytest.mark.parametrize("name", ["local_sgd", "diloco, unsharded", "easgd", "downpour", "slowmo"])
def test_values_that_are_not_numbers_are_no_drift(name: str) -> None:
    row = ROWS[name]

    def train(rank: int) -> float:
        model, optimizer = build()
        layer = model[0]
        assert isinstance(layer, nn.Linear)
        sync = la.attach(model, optimizer, row.recipe)
        while sync.step < 20:
            go(model, optimizer, sync, rank)
            if sync.step == 5 and rank == 1:
                with torch.no_grad():
                    layer.bias.fill_(math.nan)
        assert sync.stats().steps_drifted == 0
        return layer.bias[0].item()

    assert all(map(math.isnan, la.simulate(train, workers=3)))


# -- elastic runs ----

ELASTIC = {
    "ddp": (la.ddp(), "x", 9, 10),
    "ddp, coded": (la.ddp(codec="int8"), "x", 9, 10),
    "local_sgd, coded": (la.local_sgd(3, codec="int8"), "reference", 10, 12),
    "local_sgd, coded, late": (la.local_sgd(4, delay=2, codec="int8"), "reference", 11, 14),
    "local_sgd": (la.local_sgd(2), "x", 10, 12),
    "slowmo": (la.slowmo(la.local_sgd(2), 4, 0.5), "anchor", 9, 12),
    "diloco": (la.diloco(4, momentum=0.5), "m", 9, 12),
    "streaming_diloco": (la.streaming_diloco(4, 2, 1), "reference", 9, 11),
    "sparse_loco": (la.sparse_loco(3, 8, 64), "reference", 10, 12),
    "easgd": (la.easgd(4), "anchor", 9, 12),
}


def train_elastic(
    number: int, recipe: la.Recipe, name: str, after: int, faulty: int, steps: int
) -> dict[str, Any]:
    model, optimizer = build()
    sync = la.attach(model, optimizer, recipe, elastic=la.Elastic())
    rounds = sync.driver.run.rounds
    running = rounds[-1] if rounds and name in ("anchor", "m") else next(iter(rounds), None)
    drifted = {}
    while sync.step < steps:
        if number == faulty and sync.step == after - 1 and running and name == "x":
            disturb(running, name)
        go(model, optimizer, sync, number)
        drifted[sync.step] = sync.stats().steps_drifted
        if number == faulty and sync.step == after:
            if not running:
                layer = model[0]
                assert isinstance(layer, nn.Linear)
                nudge(layer.weight[0])
            elif name != "x":
                disturb(running, name)
    params = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    kept = running and name != "x"
    values = state_of(running, name).clone() if running and kept else params
    return {"drifted": drifted, "values": values}


@pytest.mark.parametrize("name", ELASTIC)
def test_it_is_found_in_an_elastic_run(name: str) -> None:
    """Worker 0 is killed before, a worker joins before and another one while it is found."""
    recipe, what, after, found = ELASTIC[name]
    faults = la.Faults(4, kill=((0, 5),), join=(6, after))
    args = recipe, what, after, FAULTY, 16
    with pytest.warns(UserWarning, match=f"drifted apart: at step {found} ranks ") as caught:
        results = la.simulate(lambda number: train_elastic(number, *args), faults=faults)
    assert sum("drifted" in str(w.message) for w in caught) == 1
    left = [r for r in results if r is not None]
    assert len(left) == 5
    for r in left:
        took_part = min(r["drifted"]) <= found
        first = min((s for s, count in r["drifted"].items() if count), default=None)
        assert first == found or not took_part
