"""Recipes from text: ``"slowmo(local_sgd(12), period=48)"`` as in Python, parsed, never run."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from laconic.auto import Auto, auto
from laconic.recipes import RECIPES
from laconic.round import Recipe

Functions = Mapping[str, Callable[..., Any]]


def parse_recipe(
    text: str, own: Mapping[str, Callable[..., Recipe]] | None = None
) -> Recipe | Auto:
    """The recipe that ``text`` spells: a recipe's name (or ``auto``) with or without arguments,
    which are numbers, words in quotes, True, False, None, or recipes. ``own``: a user's own recipes
    by name, beside laconic's.

    Raises ``ValueError``, in one line that names the choices, for everything else.
    """
    functions: Functions = {**RECIPES, "auto": auto, **(own or {})}
    return cast("Recipe | Auto", parse_call(text, functions, "recipe"))


def parse_call(text: str, functions: Functions, noun: str) -> Any:
    """What a call of one of ``functions`` returns, spelled as for `parse_recipe`; ``noun`` is
    what messages call it."""
    try:
        return _call(ast.parse(text.strip(), mode="eval").body, text, functions, noun)
    except (SyntaxError, UnicodeError, RecursionError, MemoryError):
        said = text if len(text) < 100 else text[:97] + "..."
        raise ValueError(
            f"cannot read the {noun} {said!r}: write it as in Python, like 'local_sgd(12)'"
        ) from None


def _call(node: ast.expr, text: str, functions: Functions, noun: str) -> Any:
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name) or call.func.id not in functions:
        said = ast.unparse(call.func)
        raise ValueError(f"no {noun} {said!r} in {text!r}: choose from {', '.join(functions)}")
    name, function = call.func.id, functions[call.func.id]
    signature = inspect.signature(function)
    arguments = [_value(a, text, functions, noun) for a in call.args]
    options: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg not in signature.parameters:
            said = f"option {keyword.arg!r}" if keyword.arg else "options after **"
            choices = ", ".join(signature.parameters) or "none"
            raise ValueError(f"{name} has no {said}: its options are {choices}")
        if keyword.arg in options:
            raise ValueError(f"{name}: option {keyword.arg!r} is given twice, in {text!r}")
        options[keyword.arg] = _value(keyword.value, text, functions, noun)
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


def _value(node: ast.expr, text: str, functions: Functions, noun: str) -> Any:
    if isinstance(node, ast.Call) or (isinstance(node, ast.Name) and node.id in functions):
        return _call(node, text, functions, noun)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        said = ast.unparse(node)
        raise ValueError(
            f"cannot read {said!r} in {text!r}: numbers, words in quotes, True, False, None and "
            f"{noun}s ({', '.join(functions)}) can stand there"
        ) from None


def qualified(text: str) -> str:
    """A recipe's text as a program writes it that has imported laconic alone."""
    return ast.unparse(_Qualify().visit(ast.parse(text.strip(), mode="eval")))


class _Qualify(ast.NodeTransformer):
    """A recipe's name alone stands for its call without arguments."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        arguments = [self.visit(a) for a in node.args]
        options = [ast.keyword(k.arg, self.visit(k.value)) for k in node.keywords]
        named = isinstance(node.func, ast.Name) and node.func.id in RECIPES
        return ast.Call(_of_laconic(node.func) if named else node.func, arguments, options)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Call(_of_laconic(node), [], []) if node.id in RECIPES else node


def _of_laconic(name: ast.expr) -> ast.expr:
    assert isinstance(name, ast.Name)
    return ast.Attribute(ast.Name("laconic", ast.Load()), name.id, ast.Load())
