"""Recipes from text: every spelling that Python has for them, and no other Python."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest

import laconic as la
from laconic.algorithms.parse import parse_recipe
from laconic.algorithms.recipes import RECIPES

NAMES = ", ".join([*RECIPES, "auto"])

SPELLINGS: dict[str, Callable[[], la.Recipe]] = {
    "ddp": la.ddp,
    "(ddp)": la.ddp,
    "  ddp ( ) \n": la.ddp,
    "ddp  # all gradients": la.ddp,
    "local_sgd(+12,)": lambda: la.local_sgd(12),
    "local_sgd(0x0C)": lambda: la.local_sgd(12),
    "local_sgd(\n  12,\n  delay=3,\n)": lambda: la.local_sgd(12, delay=3),
    "local_sgd(delay=3, period=12)": lambda: la.local_sgd(12, delay=3),
    'local_sgd(12, optimizer_state="reset")': lambda: la.local_sgd(12, optimizer_state="reset"),
    "post_local_sgd(100, 16)": lambda: la.post_local_sgd(100, 16),
    "diloco(24, 1e-1, .5)": lambda: la.diloco(24, 0.1, 0.5),
    "diloco(24, momentum=0, outer=None)": lambda: la.diloco(24, momentum=0.0),
    "diloco(24, sharded=False, delay=4)": lambda: la.diloco(24, sharded=False, delay=4),
    "power_sgd(rank=2, start=100)": lambda: la.power_sgd(2, start=100),
    "streaming_diloco(24, 4, 2, codec='int4')": lambda: la.streaming_diloco(24, 4, 2, codec="int4"),
    "hierarchical(3, period=12)": lambda: la.hierarchical(3, 12),
    "sgp('ring', peers=2)": lambda: la.sgp("ring", 2),
    "d_psgd('bipartite_linear')": lambda: la.d_psgd("bipartite_linear"),
    "easgd(16, pull=.5)": lambda: la.easgd(16, 0.9, pull=0.5),
    "lsgd(16, local_period=None)": lambda: la.lsgd(16, window=10),
    "slowmo(None, 24, 0.2, 2)": lambda: la.slowmo(None, 24, 0.2, 2),
    "slowmo(sgp, average=False)": lambda: la.slowmo(la.sgp(), average=False),
    "outer_step(ddp, outer='muon')": lambda: la.outer_step(la.ddp(), 8, outer="muon"),
    "slowmo(base=local_sgd(period=12))": lambda: la.slowmo(la.local_sgd(12)),
    "slowmo(slowmo(local_sgd(3), 12), 48)": lambda: la.slowmo(la.slowmo(la.local_sgd(3), 12), 48),
}


def refusal(text: str) -> str:
    """What the user is told: a plain ValueError of one line, and no other exception."""
    with pytest.raises(ValueError) as raised:
        parse_recipe(text)
    said = str(raised.value)
    assert type(raised.value) is ValueError and said and "\n" not in said, raised.value
    return said


@pytest.mark.parametrize("text", SPELLINGS)
def test_a_spelling_means_what_python_means_by_it(text: str) -> None:
    assert parse_recipe(text) == SPELLINGS[text]()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("local_sgd(12, perod=3)", "no option 'perod' (did you mean 'period'?): its options are "),
        ("ddp(period=3)", "ddp has no option 'period': its options are codec"),
        ("slowmo(local_sgd(12, base=1))", "local_sgd has no option 'base': its options are period"),
        ("local_sgd()", "local_sgd(period, *, delay=0, codec=None, optimizer_state='keep')"),
        ("local_sgd", "missing a required argument: 'period'"),
        ("slowmo(local_sgd)", "missing a required argument: 'period', in 'slowmo(local_sgd)'"),
        ("ddp(1)", "ddp(*, codec=None): too many positional arguments"),
        ("local_sgd(12, period=3)", "multiple values for argument 'period'"),
        ("local_sgd(period=12, period=24)", "period"),
    ],
)
def test_a_call_that_does_not_fit_is_told_the_options(text: str, said: str) -> None:
    assert said in refusal(text)


VALUES = [
    *("().__class__.__base__", "la.ddp", "lambda: 1", "[x for x in (1,)]", "{x: x for x in (1,)}"),
    *("f'{1}'", "f''", "*(1,)", "(x := 1)", "1 if True else 2", "1 + 1", "2 ** 31", "1 < 2"),
    *("not 1", "x", "x[0]", "...[0]", "(yield)", "{**{}}", "{[]}", "{[]: 1}"),
]


@pytest.mark.parametrize("code", VALUES)
def test_code_in_place_of_a_value_is_refused(code: str) -> None:
    for text in (f"local_sgd({code})", f"slowmo(ddp, {code})"):
        said = refusal(text)
        assert f"one of the recipes {NAMES}" in said, said
        assert text in said


NO_RECIPES = [
    *("sgd", "Local_SGD(3)", "slowmo(sgd(3))", "print(1)", "12", "__import__('os')"),
    *("__import__('os').system('true')", "local_sgd(__import__('os'))", "local_sgd(eval('12'))"),
    *("local_sgd.__globals__", "local_sgd.__call__(12)", "(lambda: ddp)()", "[ddp][0]", "ddp()()"),
    *("ddp if True else ddp", "ddp or ddp", "await ddp"),
]


@pytest.mark.parametrize("text", NO_RECIPES)
def test_what_is_no_recipe_gets_all_of_them(text: str) -> None:
    assert f"choose from {NAMES}" in refusal(text)


NO_EXPRESSIONS = [
    *("", " \n\t", "# nothing", "local_sgd(12", "local_sgd 12", "local_sgd(12))", "ddp; ddp"),
    *("ddp\nddp", "x = ddp", "import os", "local_sgd(012)", "local_sgd(period=12, 3)"),
    *("local_sgd(x:=12", "ddp\0", "ddp\udcff", "'", "£$%"),
]


@pytest.mark.parametrize("text", NO_EXPRESSIONS)
def test_what_is_no_expression_gets_an_example(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        said = refusal(text)
    assert repr(text) in said
    assert "such as 'local_sgd(12)'" in said


DEEP = 10_000


@pytest.mark.parametrize(
    "text",
    [
        "(" * DEEP,
        "(" * DEEP + "ddp" + ")" * DEEP,
        "slowmo(" * DEEP + "ddp" + ")" * DEEP,
        "local_sgd(" + "[" * DEEP + "]" * DEEP + ")",
        "-" * DEEP + "1",
        "local_sgd(" + "-" * DEEP + "1)",
        "local_sgd(" + "not " * DEEP + "1)",
        "local_sgd(" + "1+" * DEEP + "1)",
        "ddp" + ".x" * DEEP,
        "ddp" + "()" * DEEP,
        "local_sgd(" + "lambda: " * DEEP + "1)",
        "local_sgd(" + "9" * DEEP + ")",
        "x" * 10 * DEEP,
    ],
    ids=lambda text: f"{text[:12]}...{text[-4:]}",
)
def test_text_without_end_is_refused_like_any_other(text: str) -> None:
    assert refusal(text)


def test_nesting_that_python_reads_is_read() -> None:
    depth = 40
    expected = la.ddp()
    for _ in range(depth):
        expected = la.slowmo(expected)
    assert parse_recipe("slowmo(" * depth + "ddp" + ")" * depth) == expected
