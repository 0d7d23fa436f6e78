"""Recipes print as their call, are read from it, and misspelled names are told what was meant."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

import laconic as la
from laconic.algorithms.parse import parse_recipe
from laconic.units import format_rate, parse_count, parse_duration, parse_rate, parse_share

from tests.support.loops import attached, refusal


def test_a_recipe_prints_as_its_call() -> None:
    for text, recipe in {
        "local_sgd(12, delay=3)": la.local_sgd(12, delay=3),
        "slowmo(slowmo(local_sgd(3), period=12))": la.slowmo(la.slowmo(la.local_sgd(3), 12)),
        "streaming_diloco(8, delay=1)": la.streaming_diloco(8, 4, 1),
    }.items():
        assert repr(recipe) == str(recipe) == text and parse_recipe(text) == recipe
        for same in (pickle.loads(pickle.dumps(recipe)), copy.deepcopy(recipe)):
            assert same == recipe and repr(same) == text


def test_recipes_are_alike_by_their_rounds_and_not_by_their_text() -> None:
    """A recipe of the user's own has a text, too, and a state is loaded under either."""
    short, default = la.lsgd(4, local_period=0), la.lsgd(4)
    assert repr(short) != repr(default) and short == default == tuple(default)
    assert hash(short) == hash(tuple(default))

    def mine(period: int, scale: float = 1.0) -> la.Recipe:
        return tuple(la.local_sgd(period))

    assert repr(parse_recipe("mine(4, 2.0)", {"mine": mine})) == "mine(4, scale=2.0)"

    def run(rank: int, old: la.Recipe, new: la.Recipe) -> None:
        _, _, first = attached(rank, old)
        _, _, second = attached(rank, new)
        second.load_state_dict(first.state_dict())

    la.simulate(partial(run, old=short, new=default), workers=1)
    said = refusal(lambda: la.simulate(lambda r: run(r, la.local_sgd(12), la.local_sgd(24)), 1))
    assert "saved under local_sgd(12), and this run follows local_sgd(24)" in said
    assert "sync.switch(" in said


def test_what_was_meant_is_named() -> None:
    with pytest.raises(ValueError, match=r"not 'in4' \(did you mean 'int4'\?\)"):
        la.ddp(codec="in4")
    with pytest.raises(ValueError, match=r"not 'rin' \(did you mean 'ring'\?\)"):
        la.sgp("rin")


# -- units ----

RIGHT: list[tuple[Callable[[str], float], dict[str, float]]] = [
    (parse_rate, {"100mbit": 1e8, "100 Mbit/s": 1e8, " 10 Gbit/s ": 1e10, "56kbit": 56e3}),
    (parse_rate, {".5 mbit": 0.5e6, "9600 bit": 9600.0, "9600": 9600.0, "1e6": 1e6}),
    (parse_duration, {"20ms": 0.02, "100 us": 1e-4, "100 µs": 1e-4, "1.5 S": 1.5, "2": 2.0}),
    (parse_duration, {"10min": 600.0, "1.5 h": 5400.0, "0": 0.0, "0ms": 0.0}),
    (parse_count, {"1.3B": 1.3e9, "125 M": 125e6, "865280": 865_280, "2k": 2000}),
    (parse_share, {"0.1%": 0.001, "0.001": 0.001, " 5 % ": 0.05, "0": 0, "100%": 1}),
]
WRONG: list[tuple[Callable[[str], float], str, list[str]]] = [
    (parse_rate, "mbit", ["", "fast", "mbit", "0", "0mbit", "-1mbit", "inf", "1e999", "5ms", "١"]),
    (parse_duration, "ms", ["", "soon", "ms", "-1ms", "nan", "inf", "1e999", "5 y", "5mbit"]),
    (parse_count, "865280", ["", "many", "0", "-1M", "1.5", "1.2345k", "nan", "1e999", "3 kB"]),
    (parse_share, "0.1%", ["", "%", "-1%", "101%", "1.5", "nan", "0.1 %%", "5ms"]),
]
SHOWN = {100e6: "100 Mbit/s", 2.5e9: "2.5 Gbit/s", 999_999: "1 Mbit/s", 123_456_789: "123.5 Mbit/s"}
SHOWN |= {0: "0 bit/s", 800: "800 bit/s", 56e3: "56 kbit/s", 4e13: "40000 Gbit/s"}


def test_what_is_read_and_what_is_refused_in_one_line_with_an_example() -> None:
    for parse, values in RIGHT:
        assert {text: parse(text) for text in values} == pytest.approx(values, rel=1e-12)
    for parse, example, texts in WRONG:
        for text in texts:
            with pytest.raises(ValueError, match=example) as caught:
                parse(text)
            assert repr(text) in str(caught.value) and "\n" not in str(caught.value)


@given(st.floats(1.0, 1e15))
def test_rates_for_a_reader_have_four_digits(rate: float) -> None:
    assert {rate: format_rate(rate) for rate in SHOWN} == SHOWN
    assert parse_rate(format_rate(rate)) == pytest.approx(rate, rel=1e-3)
