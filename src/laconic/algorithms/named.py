"""Calls of recipe functions: arguments checked by name, and recipes that print as their call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from laconic.algorithms.round import NamedRecipe, Recipe, plain
from laconic.errors import did_you_mean

P = ParamSpec("P")
R = TypeVar("R")


def bind(
    name: str, function: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of the call ``name(*arguments, **options)``, by the parameters of ``function``.

    Raises ``ValueError``, in one line that names the options, where the call does not fit.
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
    """The error where ``function``, which users call ``name``, has no parameter ``option``."""
    choices = list(inspect.signature(function).parameters)
    meant = did_you_mean(option, choices)
    return f"{name} has no option {option!r}{meant}: its options are {', '.join(choices) or 'none'}"


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, whose calls raise the ``ValueError`` of `bind` in place of a ``TypeError``."""

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        bind(function.__name__, function, arguments, options)
        return function(*arguments, **options)

    return call


def named(function: Callable[P, Recipe]) -> Callable[P, Recipe]:
    """``function``, which makes a recipe, with `checked` arguments and a result that prints as the
    call that made it."""
    name = function.__name__

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> Recipe:
        given = bind(name, function, arguments, options)
        return NamedRecipe(function(*arguments, **options), call_text(name, function, given))

    return call


def call_text(name: str, function: Callable[..., Any], given: Mapping[str, Any]) -> str:
    """A call of ``function`` with the arguments ``given`` by name, as one writes it. Arguments that
    equal their default are left out; the first, and those without a default, stand without name."""
    words, positional = [], True
    for index, (key, parameter) in enumerate(inspect.signature(function).parameters.items()):
        if key not in given or given[key] == parameter.default:
            positional = False
            continue
        required = index == 0 or parameter.default is parameter.empty
        positional = positional and required and parameter.kind is not parameter.KEYWORD_ONLY
        said = plain(given[key])
        words.append(said if positional else f"{key}={said}")
    return f"{name}({', '.join(words)})"


def _plain(signature: inspect.Signature) -> str:
    """The signature as a user types it, without annotations."""
    empty = inspect.Parameter.empty
    bare = [p.replace(annotation=empty) for p in signature.parameters.values()]
    return str(inspect.Signature(bare))
