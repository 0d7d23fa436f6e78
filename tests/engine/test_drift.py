"""Workers that should hold the same values, and do not: the next step or round finds it."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import laconic as la
from laconic.algorithms.update import Clock, Slot, State, Update

from tests.support.loops import descend

FAULTY = 2


def build(recipe: Any, width: int = 7, **options: Any) -> tuple[Any, Any, la.Synchronizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, la.attach(model, optimizer, recipe, **options)


def go(model: nn.Module, optimizer: Any, sync: la.Synchronizer, seed: int) -> int:
    """One step; returns in how many steps the workers have differed."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * sync.step + seed))
    descend(optimizer, model(x).square().mean())
    return sync.stats().steps_drifted


@torch.no_grad()
def nudge(x: Tensor) -> None:
    """Change one element by one unit in the last place."""
    first = x.view(-1)[:1]
    first.copy_(torch.nextafter(first, torch.full_like(first, math.inf)))


# -- recipes that average gradients ----


def drift(rank: int, recipe: la.Recipe, **more: Any) -> list[int]:
    """The drift after each step, where a weight of worker 2 changes after step 3."""
    model, optimizer, sync = build(recipe, **more)
    drifted = []
    for step in range(1, 9):
        drifted.append(go(model, optimizer, sync, rank))
        if (step, rank) == (3, FAULTY):
            nudge(model[-1].bias)
    sync.detach()
    return drifted


@pytest.mark.parametrize("recipe", [la.ddp(), la.power_sgd(1)])
def test_one_worker_that_drifts_is_named(recipe: la.Recipe) -> None:
    """In the next step, and counted in each from then on: nothing is repaired."""
    with pytest.warns(UserWarning, match=r"at step 4 ranks \[2\] differ from rank 0") as caught:
        runs = la.simulate(partial(drift, recipe=recipe), workers=3)
    assert runs == [[0, 0, 0, 1, 2, 3, 4, 5]] * 3 and len(caught) == 1


def test_of_a_large_model_each_step_compares_a_part() -> None:
    """What changed, the last parameter, is in the third part."""
    with pytest.warns(UserWarning, match=r"ranks \[2\] differ"):
        runs = la.simulate(partial(drift, recipe=la.ddp(), width=7000), workers=3)
    assert runs == [runs[0]] * 3 and runs[0][:3] == [0] * 3 and 1 <= runs[0][-1] <= 2


# -- recipes that average parameters ----


class Row(NamedTuple):
    """``name``: the saved state of which worker 2 loads another value after step ``after``. The
    round of step ``found`` finds it."""

    recipe: la.Recipe
    name: str
    after: int
    found: int


ADAM: Any = partial(torch.optim.Adam, lr=0.01)
ROWS = {
    "local_sgd, coded, late": Row(la.local_sgd(3, delay=2, codec="int4"), "reference", 5, 8),
    "diloco, Adam": Row(la.diloco(3, outer=ADAM, sharded=False), "outer.exp_avg", 4, 6),
    "streaming_diloco": Row(la.streaming_diloco(4, 2, 1, momentum=0.5), "reference", 5, 7),
    "easgd": Row(la.easgd(3, pull=0.1), "anchor", 4, 6),
}
"""Families whose workers hold something alike."""


@pytest.mark.parametrize("name", ROWS)
def test_one_unit_in_the_last_place_is_found_in_the_next_round(name: str) -> None:
    """Also in one that goes on from what was saved after the fault."""
    row = ROWS[name]

    def run(rank: int) -> list[int]:
        model, optimizer, sync = build(row.recipe)
        drifted = []
        while sync.step < 12:
            drifted.append(go(model, optimizer, sync, rank))
            if sync.step == row.after:
                state = sync.state_dict()
                if rank == FAULTY:
                    saved = state["rounds"][0]
                    kept = [s for s in (*saved["state"], *saved["carried"]) if row.name in s]
                    nudge(kept[0][row.name])
                sync.load_state_dict(state)
        return drifted

    with pytest.warns(UserWarning, match=f"drifted apart: at step {row.found} ranks ") as caught:
        runs = la.simulate(run, workers=3)
    assert len(caught) == 1
    assert [drifted.index(1) + 1 for drifted in runs] == [row.found] * 3


@pytest.mark.fault("a comparison outlived the state that it was about")
def test_what_a_late_round_compared_is_forgotten_by_a_load() -> None:
    row = ROWS["local_sgd, coded, late"]

    def run(rank: int) -> list[int]:
        model, optimizer, sync = build(row.recipe)
        while sync.step < row.after:
            go(model, optimizer, sync, rank)
        parts = (model, optimizer, sync)
        before = [copy.deepcopy(part.state_dict()) for part in parts]
        state = sync.state_dict()
        if rank == FAULTY:
            nudge(next(s for s in state["rounds"][0]["carried"] if row.name in s)[row.name])
        sync.load_state_dict(state)
        while sync.step < row.found - 1:  # the round under way compares what differs
            go(model, optimizer, sync, rank)
        for part, state in zip(parts, before, strict=True):
            part.load_state_dict(state)
        return [go(model, optimizer, sync, rank) for _ in range(6)]

    assert la.simulate(run, workers=3) == [[0] * 6] * 3


# -- elastic runs ----


class Kept(Update):
    """Keeps what arrives; at step 9 worker 2 keeps something else."""

    slots: ClassVar[dict[str, Slot]] = {"kept": "everywhere"}

    def init(self, x: Tensor) -> State:
        return {"kept": x}

    def fold(
        self, x: Tensor, received: Tensor, sent: Tensor | None, state: State, clock: Clock
    ) -> Tensor:
        state["kept"].copy_(received)
        if clock.step == 9 + clock.delay and clock.worker == FAULTY:
            nudge(state["kept"])
        return received


@pytest.mark.parametrize("delay", [None, 1])
def test_it_is_found_in_an_elastic_run(delay: int | None) -> None:
    """A worker is killed and another one joins before, and a third while it is found. None: a
    weight changes, where gradients are averaged."""
    recipe: la.Recipe = la.ddp(codec="int8")
    if delay is not None:
        recipe = (la.Round(la.every(3), Kept(), la.exchanges.Mean(), delay=delay),)
    found = 10 if delay is None else 12 + delay

    def run(number: int) -> dict[int, int]:
        model, optimizer, sync = build(recipe, elastic=la.Elastic())
        drifted = {}
        while sync.step < 16:
            count = go(model, optimizer, sync, number)
            drifted[sync.step] = count
            if delay is None and (sync.step, number) == (9, FAULTY):
                nudge(model[0].weight)
        return drifted

    faults = la.Faults(4, kill=((0, 5),), join=(6, 10))
    with pytest.warns(UserWarning, match=f"drifted apart: at step {found} ranks ") as caught:
        runs = [each for each in la.simulate(run, faults=faults) if each is not None]
    assert len(runs) == 5 and len(caught) == 1
    for drifted in runs:
        first = min((step for step, count in drifted.items() if count), default=None)
        assert first == found or min(drifted) > found
