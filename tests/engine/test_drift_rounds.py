"""Parameter rounds, and elastic runs, whose workers should hold the same state, and do not."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic as la
from laconic.algorithms.exchanges import Push, ShardedMean
from laconic.algorithms.round import Round
from laconic.algorithms.schedules import every
from laconic.algorithms.topology import Graph
from laconic.algorithms.updates import Average, Downpour
from laconic.engine import drift
from laconic.engine.parameter_rounds import ParameterRunner
from laconic.links import Link
from laconic.links.calls import Call
from laconic.links.elastic.relay import Record
from laconic.links.elastic.replay import Replay

from tests.support import all_recipes, gloo


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


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
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


def train_and_warn(rank: int, name: str) -> dict[str, Any]:
    """In a process of its own."""
    row = ROWS[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = train(rank, row, steps_of(row), gloo.link_of(3))
    return {**result, "warned": sum("have drifted apart" in str(w.message) for w in caught)}


OVER_PROCESSES = (
    "local_sgd",
    "local_sgd, coded, late",
    "slowmo",
    "diloco, unsharded",
    "streaming_diloco",
    "sparse_loco",
    "easgd",
)


@pytest.mark.parametrize("name", OVER_PROCESSES)
def test_over_processes_as_simulated(name: str, pool: gloo.Pool) -> None:
    """Also the digests are the same."""
    row = ROWS[name]
    results = pool.run(train_and_warn, name, ranks=3)
    check(results, row)
    assert [r["warned"] for r in results] == [1, 0, 0]
    with pytest.warns(UserWarning, match="have drifted apart"):
        simulated = la.simulate(lambda rank: train(rank, row, steps_of(row)), workers=3)
    for here, there in zip(results, simulated, strict=True):
        assert torch.equal(here["params"], there["params"]) and here["digest"] == there["digest"]
    assert results[0]["digest"] > 0


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


def test_a_larger_state_is_looked_at_in_turn() -> None:
    """A round every 2 steps looks at 2 parts of 8 of 43 elements: after at most 3 rounds a fault
    anywhere is found."""
    drift.PART = 8
    for at in range(0, 43, 9):

        def train(rank: int, at: int = at) -> int:
            model, optimizer = build()
            sync = la.attach(model, optimizer, la.diloco(2, sharded=False))
            for _ in range(8):
                if sync.step == 2 and rank == 1:
                    state_of(sync.driver.run.rounds[0], "anchor")[at] += 0.1
                go(model, optimizer, sync, rank)
            return sync.stats().steps_drifted

        with pytest.warns(UserWarning, match="have drifted apart"):
            found = la.simulate(train, workers=3)
        assert found[0] and found == found[:1] * 3


# -- no false alarms: a warning is an error here ----


def odd_model(rank: int) -> tuple[nn.Module, Any]:
    """Odd sizes, a frozen tensor, two dtypes, a strided parameter, buffers, two optimizers."""
    drift.PART = 32
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))
    model[3].weight = nn.Parameter(torch.randn(7, 3).t())
    model[0].bias.requires_grad_(False)
    model.register_parameter("gain", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    first = torch.optim.SGD(model[0].parameters(), lr=0.02, momentum=0.9)
    rest = [*model[1].parameters(), *model[3].parameters(), model.gain]
    return model, [first, torch.optim.AdamW(rest, lr=0.01)]


def odd_step(model: Any, optimizers: Any, sync: la.Synchronizer, rank: int) -> None:
    generator = torch.Generator().manual_seed(100 * sync.step + rank)
    model.zero_grad()
    out = model(torch.randn(4, 5, generator=generator)) * model.gain.float()
    loss = out.square().mean()
    loss.backward()
    sync.report_loss(loss)
    for optimizer in optimizers:
        optimizer.step()


TWO_SHARDS = Round(every(3), Downpour(), ShardedMean(shards=2))
GOSSIP = Round(every(2), Average(), Push(Graph("ring")))
ALIKE = {
    **all_recipes.ROWS,
    "downpour, two shards": all_recipes.Row((TWO_SHARDS,)),
    "gossip that replaces x": all_recipes.Row((GOSSIP,)),
}


@pytest.mark.parametrize("name", ALIKE)
def test_no_false_alarm(name: str) -> None:
    """Nor after `load_state_dict`, `finish` and `switch`."""
    row = ALIKE[name]

    def train(rank: int) -> int:
        model, optimizers = odd_model(rank)
        sync = la.attach(model, optimizers, row.recipe, group_size=row.group_size(4))

        def go_to(step: int) -> None:
            while sync.step < step:
                odd_step(model, optimizers, sync, rank)

        go_to(17)
        everything = (model, *optimizers, sync)
        states = [copy.deepcopy(each.state_dict()) for each in everything]
        go_to(25)
        for each, state in zip(everything, states, strict=True):
            each.load_state_dict(state)
        go_to(33)
        sync.finish()
        go_to(45)
        sync.switch(la.diloco(3, sharded=False))
        go_to(55)
        return sync.stats().steps_drifted

    assert la.simulate(train, workers=4) == [0] * 4


@pytest.mark.parametrize("name", ["local_sgd", "diloco, unsharded", "easgd", "downpour", "slowmo"])
def test_values_that_are_not_numbers_are_no_drift(name: str) -> None:
    row = ROWS[name]

    def train(rank: int) -> float:
        model, optimizer = build()
        sync = la.attach(model, optimizer, row.recipe)
        while sync.step < 20:
            go(model, optimizer, sync, rank)
            if sync.step == 5 and rank == 1:
                with torch.no_grad():
                    model[0].bias.fill_(math.nan)
        assert sync.stats().steps_drifted == 0
        return model[0].bias[0].item()

    assert all(map(math.isnan, la.simulate(train, workers=3)))


@pytest.mark.parametrize("name", ["diloco, unsharded", "local_sgd, coded", "sparse_loco", "easgd"])
@pytest.mark.parametrize("others", [2, 5])
def test_no_false_alarm_with_other_workers(name: str, others: int, tmp_path: Path) -> None:
    """A run of three goes on with fewer and with more."""
    row = ROWS[name]

    def train(rank: int, end: int, load: bool) -> int:
        model, optimizer = build()
        sync = la.attach(model, optimizer, row.recipe)
        if load:
            la.load(tmp_path, model, optimizer)
        while sync.step < end:
            go(model, optimizer, sync, rank)
        if not load:
            la.save(tmp_path, model, optimizer)
        return sync.stats().steps_drifted

    la.simulate(lambda rank: train(rank, 7, False), workers=3)
    assert la.simulate(lambda rank: train(rank, 20, True), workers=others) == [0] * others


def test_what_was_noted_of_x_is_saved() -> None:
    """A state of an earlier version, or of other workers, has nothing of it."""

    def train(rank: int) -> list[int]:
        model, optimizer = build()
        sync = la.attach(model, optimizer, la.local_sgd(2))
        (check_of_round,) = sync.driver.run._checks.values()
        noted = [check_of_round.digest(2)]
        for _ in range(2):
            go(model, optimizer, sync, rank)
        noted.append(check_of_round.digest(4))
        state = sync.state_dict()
        check_of_round.forget()
        sync.load_state_dict(state)
        noted.append(check_of_round.digest(4))
        del state["drift"]
        sync.load_state_dict(state)
        return [*noted, check_of_round.digest(4)]

    for before, noted, loaded, earlier in la.simulate(train, workers=2):
        assert before == 0 and loaded == noted > 0 and earlier == 0


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
                nudge(model[0].weight[0])
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


def test_a_newcomer_gets_digests_with_what_it_repeats() -> None:
    replay, call, x = Replay(lambda: None), Call(3, "a round"), torch.zeros(4)
    replay.feed = lambda call: Record(call, 2, [torch.ones(4)], [5, 7])
    replay.begin_call(call)
    assert replay.digests == []
    replay.unit(lambda: replay.mean(x))
    assert replay.digests == [5, 7] and x.tolist() == [1.0] * 4
    replay.begin_call(call)
    assert replay.digests == []
