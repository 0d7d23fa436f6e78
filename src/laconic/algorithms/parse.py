"""Recipes from text such as ``"slowmo(local_sgd(12), period=48)"``. Parsed, never executed."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from laconic.algorithms.auto import Auto, auto
from laconic.algorithms.named import named, no_option
from laconic.algorithms.recipes import RECIPES
from laconic.algorithms.round import AnyRound, Recipe, is_recipe
from laconic.errors import did_you_mean

Functions = Mapping[str, Callable[..., Any]]


def parse_recipe(
    text: str, own: Mapping[str, Callable[..., Recipe]] | None = None
) -> Recipe | Auto:
    """Return the recipe that ``text`` describes in Python syntax.

    ``text`` is the name of a recipe, or ``auto``, with or without arguments. Arguments are numbers,
    quoted strings, True, False, None, or recipes. ``own``: a user's own recipe functions by name,
    in addition to laconic's.

    Raises ``ValueError``, in one line that lists the choices, for anything else.
    """
    functions: Functions = {**RECIPES, "auto": auto, **(own or {})}
    return cast("Recipe | Auto", parse_call(text, functions, "recipe"))


def as_recipe(value: object) -> Recipe | Auto:
    """Return ``value``, a recipe or its text. Raises ``ValueError`` for anything else."""
    if isinstance(value, str):
        return parse_recipe(value)
    if isinstance(value, Auto) or is_recipe(value):
        return cast("Recipe | Auto", value)
    hint = ": put the round in a tuple, (round,)" if isinstance(value, AnyRound) else ""
    raise ValueError(
        "recipe must be what a recipe function returns, such as laconic.local_sgd(12), or its "
        f"text, such as 'local_sgd(12)', not {value!r}{hint}"
    )


def parse_call(text: str, functions: Functions, noun: str) -> Any:
    """Return what the call in ``text`` of one of ``functions`` returns; see `parse_recipe`.

    ``noun`` is what error messages call the result.
    """
    try:
        return _call(ast.parse(text.strip(), mode="eval").body, text, functions, noun)
    except (SyntaxError, UnicodeError, RecursionError, MemoryError):
        shown = text if len(text) < 100 else text[:97] + "..."
        raise ValueError(
            f"cannot read the {noun} {shown!r}: write it as in Python, such as 'local_sgd(12)'"
        ) from None


def _call(node: ast.expr, text: str, functions: Functions, noun: str) -> Any:
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name) or call.func.id not in functions:
        called = ast.unparse(call.func)
        meant = did_you_mean(called, functions)
        choices = ", ".join(functions)
        raise ValueError(f"no {noun} {called!r} in {text!r}{meant}: choose from {choices}")
    name, function = call.func.id, functions[call.func.id]
    arguments = [_value(a, text, functions, noun) for a in call.args]
    options: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError(no_option(name, "**", function))
        if keyword.arg in options:
            raise ValueError(f"{name}: option {keyword.arg!r} is given twice, in {text!r}")
        options[keyword.arg] = _value(keyword.value, text, functions, noun)
    try:
        return named(function, name)(*arguments, **options)
    except ValueError as error:
        raise ValueError(f"{error}, in {text!r}") from None


def _value(node: ast.expr, text: str, functions: Functions, noun: str) -> Any:
    if isinstance(node, ast.Call) or (isinstance(node, ast.Name) and node.id in functions):
        return _call(node, text, functions, noun)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        raise ValueError(
            f"cannot read {ast.unparse(node)!r} in {text!r}: an argument must be a number, a "
            f"quoted string, True, False, None, or one of the {noun}s {', '.join(functions)}"
        ) from None


def qualified(text: str) -> str:
    """Return a recipe's text as a program that imports only ``laconic`` would write it: a recipe's
    name alone becomes a call."""
    names = re.compile(rf"\b({'|'.join(RECIPES)})\b(\s*\()?")
    return names.sub(lambda found: f"laconic.{found[1]}{found[2] or '()'}", text.strip())
