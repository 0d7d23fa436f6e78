"""Calls of recipe functions: named argument checks, and recipes that print as their call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, cast

from laconic.algorithms.identity import plain
from laconic.algorithms.round import NamedRecipe, is_recipe
from laconic.errors import did_you_mean

P = ParamSpec("P")
R = TypeVar("R")


def no_option(name: str, option: str, function: Callable[..., Any]) -> str:
    """Return the error text for a ``function``, called ``name``, that has no such ``option``."""
    choices = list(inspect.signature(function).parameters)
    meant = did_you_mean(option, choices)
    return f"{name} has no option {option!r}{meant}: its options are {', '.join(choices) or 'none'}"


def named(function: Callable[P, R], name: str | None = None) -> Callable[P, R]:
    """Wrap a function that makes a recipe, or `auto`: the recipe prints as the call that made it.
    ``name``: what the function is called there; None: its own name.

    A call that does not fit the function raises ``ValueError``, in one line that lists the options.
    """
    name, signature = name or function.__name__, inspect.signature(function)
    parameters = signature.parameters
    any_option = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        for option in options:
            if not (any_option or option in parameters):
                raise ValueError(no_option(name, option, function))
        try:
            given = signature.bind(*arguments, **options).arguments
        except TypeError as error:
            bare = [p.replace(annotation=p.empty) for p in parameters.values()]
            raise ValueError(f"{name}{inspect.Signature(bare)}: {error}") from None
        made: Any = function(*arguments, **options)
        text = call_text(name, function, given)
        return cast("R", NamedRecipe(made, text) if is_recipe(made) else made)

    return call


def call_text(name: str, function: Callable[..., Any], given: Mapping[str, Any]) -> str:
    """Return the source text of a call of ``function`` with the arguments ``given`` by name.

    Arguments equal to their default are omitted. The first argument, and those without a default,
    are positional.
    """
    words, positional = [], True
    for index, (key, parameter) in enumerate(inspect.signature(function).parameters.items()):
        if key not in given or given[key] == parameter.default:
            positional = False
            continue
        required = index == 0 or parameter.default is parameter.empty
        positional = positional and required and parameter.kind is not parameter.KEYWORD_ONLY
        value = plain(given[key])
        words.append(value if positional else f"{key}={value}")
    return f"{name}({', '.join(words)})"
