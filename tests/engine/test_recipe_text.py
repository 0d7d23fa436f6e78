"""Recipes print as their call, are read from it, and misspelled names are told what was meant."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import laconic as la
from laconic.algorithms.parse import parse_recipe

from tests.support.loops import attached, refusal

LOOSE: Any = la
"""The library without its types: what is passed here is wrong on purpose."""
TEXTS: dict[str, la.Recipe] = {
    "ddp()": la.ddp(codec=None),
    "local_sgd(12, delay=3)": la.local_sgd(12, delay=3),
    "slowmo(local_sgd(3))": la.slowmo(la.local_sgd(3), period=48),
    "slowmo(slowmo(local_sgd(3), period=12))": la.slowmo(la.slowmo(la.local_sgd(3), 12)),
    "streaming_diloco(8, delay=1)": la.streaming_diloco(8, 4, 1),
}


def test_a_recipe_prints_as_its_call() -> None:
    for text, recipe in TEXTS.items():
        assert repr(recipe) == str(recipe) == text and parse_recipe(text) == recipe
        for same in (pickle.loads(pickle.dumps(recipe)), copy.deepcopy(recipe), copy.copy(recipe)):
            assert same == recipe and repr(same) == text


def test_recipes_are_alike_by_their_rounds_and_not_by_their_text() -> None:
    """A recipe of the user's own has a text, too, and a state is loaded under either."""
    given, default = la.lsgd(4, local_period=0), la.lsgd(4)
    assert repr(given) != repr(default) and given == default == tuple(default)
    assert hash(given) == hash(tuple(default))

    def mine(period: int, scale: float = 1.0) -> la.Recipe:
        return tuple(la.local_sgd(period))

    assert repr(parse_recipe("mine(4, 2.0)", {"mine": mine})) == "mine(4, scale=2.0)"

    def run(rank: int, old: la.Recipe, new: la.Recipe) -> None:
        _, _, first = attached(rank, old)
        _, _, second = attached(rank, new)
        second.load_state_dict(first.state_dict())

    la.simulate(partial(run, old=given, new=default), workers=1)
    said = refusal(lambda: la.simulate(lambda r: run(r, la.local_sgd(12), la.local_sgd(24)), 1))
    assert "saved under local_sgd(12), and this run follows local_sgd(24)" in said
    assert "sync.switch(" in said


MISSPELLED: list[tuple[Callable[[], object], str]] = [
    (lambda: LOOSE.local_sgd(perod=3), "no option 'perod' (did you mean 'period'?): its options"),
    (lambda: LOOSE.ddp(xyz=3), "ddp has no option 'xyz': its options are codec"),
    (lambda: LOOSE.ddp(1), "too many positional arguments"),
    (lambda: la.ddp(codec="in4"), "not 'in4' (did you mean 'int4'?)"),
    (lambda: la.sgp("rin"), "not 'rin' (did you mean 'ring'?)"),
    (lambda: parse_recipe("Local_SDG(3)"), "(did you mean 'local_sgd'?): choose from ddp, "),
]


def test_what_was_meant_is_named() -> None:
    for call, said in MISSPELLED:
        with pytest.raises(ValueError, match=re.escape(said)):
            call()
