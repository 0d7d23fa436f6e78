"""Recipes from text: ``"slowmo(local_sgd(12), period=48)"`` as in Python, parsed, never run."""

from __future__ import annotations

import ast
import inspect
from typing import Any

from laconic.recipes import RECIPES
from laconic.round import Recipe


def parse_recipe(text: str) -> Recipe:
    """The recipe that ``text`` spells: a recipe's name with or without arguments, which are
    numbers, words in quotes, True, False, None, or recipes.

    Raises ``ValueError``, in one line that names the choices, for everything else.
    """
    try:
        return _recipe(ast.parse(text.strip(), mode="eval").body, text)
    except (SyntaxError, UnicodeError, RecursionError, MemoryError):
        said = text if len(text) < 100 else text[:97] + "..."
        raise ValueError(
            f"cannot read the recipe {said!r}: write it as in Python, like 'local_sgd(12)'"
        ) from None


def _recipe(node: ast.expr, text: str) -> Recipe:
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name) or call.func.id not in RECIPES:
        said = ast.unparse(call.func)
        raise ValueError(f"no recipe {said!r} in {text!r}: choose from {', '.join(RECIPES)}")
    name, function = call.func.id, RECIPES[call.func.id]
    signature = inspect.signature(function)
    arguments = [_value(a, text) for a in call.args]
    options: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg not in signature.parameters:
            said = f"option {keyword.arg!r}" if keyword.arg else "options after **"
            choices = ", ".join(signature.parameters) or "none"
            raise ValueError(f"{name} has no {said}: its options are {choices}")
        if keyword.arg in options:
            raise ValueError(f"{name}: option {keyword.arg!r} is given twice, in {text!r}")
        options[keyword.arg] = _value(keyword.value, text)
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        raise ValueError(f"{name}{_plain(signature)}: {error}, in {text!r}") from None
    try:
        return function(*arguments, **options)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _plain(signature: inspect.Signature) -> str:
    """The signature as a user types it, without annotations."""
    empty = inspect.Parameter.empty
    bare = [p.replace(annotation=empty) for p in signature.parameters.values()]
    return str(inspect.Signature(bare))


def _value(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Call) or (isinstance(node, ast.Name) and node.id in RECIPES):
        return _recipe(node, text)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        said = ast.unparse(node)
        raise ValueError(
            f"cannot read {said!r} in {text!r}: numbers, words in quotes, True, False, None and "
            f"recipes ({', '.join(RECIPES)}) can stand there"
        ) from None
