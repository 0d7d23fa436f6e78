"""Calls of recipe functions: named argument checks, and recipes that print as their call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from laconic.algorithms.identity import plain
from laconic.algorithms.round import NamedRecipe, is_recipe
from laconic.errors import did_you_mean

P = ParamSpec("P")
R = TypeVar("R")


def bind(
    name: str, function: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of the call ``name(*arguments, **options)`` by parameter name.

    Raises ``ValueError``, in one line that lists the options, if the call does not fit
    ``function``.
    """
    signature = inspect.signature(function)
    parameters = signature.parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for option in options:
            if option not in parameters:
                raise ValueError(no_option(name, option, function))
    try:
        return dict(signature.bind(*arguments, **options).arguments)
    except TypeError as error:
        raise ValueError(f"{name}{_plain(signature)}: {error}") from None


def no_option(name: str, option: str, function: Callable[..., Any]) -> str:
    """Return the error text for a ``function``, called ``name``, that has no such ``option``."""
    choices = list(inspect.signature(function).parameters)
    meant = did_you_mean(option, choices)
    return f"{name} has no option {option!r}{meant}: its options are {', '.join(choices) or 'none'}"


def make(
    name: str, function: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Return what ``function``, called ``name``, makes: a recipe prints as this call. Checks the
    arguments, as `bind` does."""
    given = bind(name, function, arguments, options)
    made = function(*arguments, **options)
    return NamedRecipe(made, call_text(name, function, given)) if is_recipe(made) else made


def named(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function that makes a recipe, or `auto`: see `make`."""

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        made: R = make(function.__name__, function, arguments, options)
        return made

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


def _plain(signature: inspect.Signature) -> str:
    """Return the signature as a user types it, without annotations."""
    empty = inspect.Parameter.empty
    bare = [p.replace(annotation=empty) for p in signature.parameters.values()]
    return str(inspect.Signature(bare))
