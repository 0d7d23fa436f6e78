"""State dicts: they stay as they were saved, and what cannot be loaded changes nothing."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import laconic as la

from tests.support import training
from tests.support.recipes import ROWS
from tests.support.training import Job, build

STEPS = 14
Parts = tuple[Any, ...]
"""Model, optimizer and synchronizer, or their states."""


def attached(job: Job, rank: int) -> Parts:
    model, optimizer = build(job, rank)
    return model, optimizer, la.attach(model, optimizer, job.recipe)


def go(job: Job, rank: int, parts: Parts, end: int) -> list[Tensor]:
    """Train up to step ``end``; the parameters after each."""
    model, optimizer, sync = parts
    trace = []
    for t in range(sync.step + 1, end + 1):
        training.step(job, model, optimizer, job.data()[rank][t - 1], t, sync)
        trace.append(training.flat(model).clone())
    return trace


def saved(parts: Parts) -> Parts:
    return copy.deepcopy(tuple(part.state_dict() for part in parts))


def data_of(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def test_one_rank_alone_may_ask_for_its_state_which_then_does_not_change() -> None:
    job = Job(ROWS["diloco, late"].recipe, 3, STEPS)

    def run(rank: int, asks: bool) -> list[Tensor]:
        parts = attached(job, rank)
        trace, states = [], []
        for t in range(1, STEPS + 1):
            trace += go(job, rank, parts, t)
            if asks and rank == 0:
                state = parts[2].state_dict()
                states.append((state, data_of(state)))
        assert all(data_of(state) == before for state, before in states)
        return trace

    plain, asked = (la.simulate(partial(run, asks=asks), workers=3) for asks in (False, True))
    assert all(all(map(torch.equal, *each)) for each in zip(plain, asked, strict=True))


# -- what cannot be loaded ----


def only(rank: int, broken: int, right: Any, wrong: Any) -> Any:
    return wrong if rank == broken else right


def cut(state: dict[str, Any]) -> dict[str, Any]:
    """With a tensor that is too short."""
    state = copy.deepcopy(state)
    state["rounds"][-1]["state"][0]["u"] = torch.zeros(3)
    return state


SLOWMO = "slowmo(local_sgd(2), 6)"
OF_TWO: dict[str, tuple[Callable[[int, list[Any]], Parts], str]] = {
    "the states swapped": (lambda r, s: (*s[r][:2], s[1 - r][2]), "its own"),
    "one rank's state on both": (lambda r, s: (*s[r][:2], s[0][2]), "its own|ranks"),
    "rank 0 loads rank 1's": (lambda r, s: (*s[r][:2], only(r, 0, s[r][2], s[1][2])), "its own"),
    "the model not loaded": (lambda r, s: (None, *s[r][1:]), "load the model"),
    "the model not loaded on rank 1": (
        lambda r, s: (only(r, 1, s[r][0], None), *s[r][1:]),
        "load the model|ranks [1]",
    ),
    "rank 0's model on both": (lambda r, s: (s[0][0], *s[r][1:]), "load the model|ranks"),
    "a list in another order": (lambda r, s: (*s[r][:2], [s[1][2], s[0][2]]), "by rank: number 0"),
    "another version": (lambda r, s: (*s[r][:2], {**s[r][2], "version": 999}), "version|999"),
    "a tensor of another size": (lambda r, s: (*s[r][:2], only(r, 1, s[r][2], cut(s[r][2]))), "u"),
    "something else on one rank": (
        lambda r, s: (*s[r][:2], only(r, 1, s[r][2], {"step": 3})),
        "state",
    ),
    "an empty list": (lambda r, s: (*s[r][:2], []), "state"),
}
"""What each rank hands over, given both ranks' saved parts, and what the error says."""
OF_THREE: dict[str, tuple[Callable[[list[Any]], Any], str]] = {
    "one rank's": (lambda s: s[0], "list of all"),
    "too many": (lambda s: [s[0], s[1], s[1]], "list of all"),
    "one twice": (lambda s: [s[0], s[0]], "by rank: number 1"),
    "another step": (lambda s: [s[0], {**s[1], "step": 5}], "by rank: number 1"),
    "another recipe's": (lambda s: [s[0], {**s[1], "recipe": "another"}], "by rank: number 1"),
    "a part cut short": (lambda s: [s[0], {**s[1], "rounds": []}], "not what"),
}
"""What three ranks load of what two have saved."""


@pytest.mark.parametrize("name", [*OF_TWO, *OF_THREE, "diloco(4)", "slowmo(None, 4)"])
def test_a_load_that_fails_on_one_rank_changes_nothing_on_any(name: str) -> None:
    job = Job(ROWS[SLOWMO].recipe, 2, STEPS)

    def save(rank: int) -> Parts:
        parts = attached(job, rank)
        go(job, rank, parts, 7)
        return saved(parts)

    states = la.simulate(save, workers=2)
    workers = 3 if name in OF_THREE else 2
    other = Job(ROWS[name if name in ROWS else SLOWMO].recipe, workers, STEPS)

    def load(rank: int) -> str:
        parts = attached(other, rank)
        go(other, rank, parts, 5)
        given, said = states[rank % 2], f"was saved under {SLOWMO[:6]}"
        if name in OF_TWO:
            hand_over, said = OF_TWO[name]
            given = hand_over(rank, states)
        elif name in OF_THREE:
            choose, said = OF_THREE[name]
            given = (*states[0][:2], choose([state[2] for state in states]))
        for part, state in zip(parts[:2], given[:2], strict=True):
            if state is not None:
                part.load_state_dict(state)
        before = [data_of(part.state_dict()) for part in parts]
        with pytest.raises(ValueError) as caught:
            parts[2].load_state_dict(given[2])
        assert before == [data_of(part.state_dict()) for part in parts]
        assert any(word in str(caught.value) for word in said.split("|")), caught.value
        return str(caught.value)

    la.simulate(load, workers=workers)
