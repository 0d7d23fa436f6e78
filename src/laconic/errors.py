"""Exceptions, and checks of arguments whose messages list the choices."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from types import TracebackType

TIMEOUT = 600.0
"""Seconds after which a rank that does not answer is an error on all other ranks, by default."""


class WorkersChangedError(Exception):
    """A worker of an elastic run was lost in a call that consists of several parts: all others
    make the call again."""


class LinkError(RuntimeError):
    """A round cannot be completed: a rank died, hung, or is in another call.

    Every rank that still runs raises it. The message names the rank, the round and the remedy. A
    rank that does not answer comes before one that has ended, and a rank that only stopped because
    of another one is not named.

    Args:
        args: the message.
        ranks: the world ranks that caused it, ascending, the same on every rank; empty if unknown.

    Examples:
        >>> try:
        ...     optimizer.step()
        ... except laconic.LinkError as error:
        ...     print(error.ranks)
    """

    def __init__(self, *args: object, ranks: Iterable[int] = ()) -> None:
        super().__init__(*args)
        self.ranks: tuple[int, ...] = tuple(sorted(ranks))


class NotFiniteError(ValueError):
    """NaN, an infinity, or a number too large for a codec. In a coded round every rank raises it;
    the round is then half done, so load a checkpoint."""


def error_text(error: Exception) -> str:
    """The message of ``error``, after its type unless it is a RuntimeError or ValueError."""
    plain = isinstance(error, (RuntimeError, ValueError))
    return str(error) if plain else f"{type(error).__name__}: {error}"


def when_uncaught(act: Callable[[BaseException], None]) -> None:
    """Call ``act`` with an exception that ends the program, before it is printed."""
    before = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        act(error)
        before(kind, error, traceback)

    sys.excepthook = hook


def after_step(step: int) -> str:
    """When something happens that comes after ``step`` steps, in words."""
    return f"after step {step}" if step else "before the first step"


def install(extra: str) -> str:
    """The command that installs one of laconic's extras, for messages."""
    return f"pip install -e '.[{extra}]' in laconic's repository"


def refuse(problems: Mapping[str, object]) -> None:
    """Raise ``ValueError`` with the first of these messages whose value is true."""
    for problem, there in problems.items():
        if there:
            raise ValueError(problem)


def check_int(name: str, value: object, least: int) -> int:
    """Return ``value`` if it is an integer of at least ``least``, else raise ``ValueError``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")
    return value


def check_float(
    name: str,
    value: object,
    least: float,
    below: float = math.inf,
    *,
    strict: bool = False,
    most: float = math.inf,
) -> float:
    """Return ``value`` as a float if ``least <= value < below`` and ``value <= most``, else raise
    ``ValueError``. With ``strict``, ``value`` must exceed ``least``."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    number = float(value) if is_number else math.nan  # type: ignore[arg-type]
    within = math.isfinite(number) and least <= number < below and number <= most
    if not within or (strict and number == least):
        bound = f"greater than {least:g}" if strict else f"at least {least:g}"
        upper = "" if below == math.inf else f" and below {below:g}"
        upper += "" if most == math.inf else f" and at most {most:g}"
        raise ValueError(f"{name} must be a finite number {bound}{upper}, not {value!r}")
    return number


def did_you_mean(word: object, choices: Iterable[str]) -> str:
    """``" (did you mean 'this'?)"`` with the choice most similar to ``word``, ignoring case; the
    empty string if none is similar."""
    if not isinstance(word, str):
        return ""
    by_lower = {choice.lower(): choice for choice in choices}
    near = get_close_matches(word.lower(), by_lower, n=1)
    return f" (did you mean {by_lower[near[0]]!r}?)" if near else ""


def check_choice(name: str, value: object, choices: Iterable[str]) -> str:
    """Return ``value`` if it is one of ``choices``, else raise ``ValueError`` naming them."""
    names = list(choices)
    if not isinstance(value, str) or value not in names:
        choices, meant = ", ".join(map(repr, names)), did_you_mean(value, names)
        raise ValueError(f"{name} must be one of {choices}, not {value!r}{meant}")
    return value


def check_bool(name: str, value: object) -> bool:
    """Return ``value`` if it is True or False, else raise ``ValueError``."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, not {value!r}")
    return value
