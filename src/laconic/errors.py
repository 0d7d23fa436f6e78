"""Checks of what a user passes, and the errors they raise: one line that names the choices."""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import get_close_matches

TIMEOUT = 600.0
"""Seconds after which a rank that does not answer is an error on all other ranks, by default."""


class LinkError(RuntimeError):
    """A round could not be completed: a rank died, hung, or is doing something else.

    Raised on every rank that still runs; the message names the rank, the round and the remedy.

    ``ranks``: the world ranks that are to blame, ascending, alike on every rank that raises it;
    empty where that is unknown. A rank that does not answer is blamed before one that has ended,
    and a rank that only stopped because of another one is not blamed.
    """

    def __init__(self, *args: object, ranks: Iterable[int] = ()) -> None:
        super().__init__(*args)
        self.ranks: tuple[int, ...] = tuple(sorted(ranks))


class NotFiniteError(ValueError):
    """NaN, an infinity, or a number too large for a codec; of a coded round on every rank, which is
    half done then: a checkpoint is to be loaded."""


def in_words(error: Exception) -> str:
    """What ``error`` says, and its kind where it is another than one of ours."""
    plain = isinstance(error, (RuntimeError, ValueError))
    return str(error) if plain else f"{type(error).__name__}: {error}"


def install(extra: str) -> str:
    """What to type where a package of one of laconic's extras is missing."""
    return f"pip install -e '.[{extra}]' in laconic's repository"


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
    ``ValueError``. With ``strict``, ``value`` must exceed ``least``.
    """
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    number = float(value) if isinstance(value, (int, float)) else math.nan
    within = least <= number < below and number <= most
    if not ok or not within or (strict and number == least):
        bound = f"greater than {least:g}" if strict else f"at least {least:g}"
        upper = "" if below == math.inf else f" and below {below:g}"
        upper += "" if most == math.inf else f" and at most {most:g}"
        raise ValueError(f"{name} must be a finite number {bound}{upper}, not {value!r}")
    return number


def did_you_mean(word: object, choices: Iterable[str]) -> str:
    """``" (did you mean 'this'?)"`` with the choice that is most like ``word``; the empty string
    where none is. Upper and lower case count as alike."""
    if not isinstance(word, str):
        return ""
    by_lower = {choice.lower(): choice for choice in choices}
    near = get_close_matches(word.lower(), by_lower, n=1)
    return f" (did you mean {by_lower[near[0]]!r}?)" if near else ""


def check_choice(name: str, value: object, choices: Iterable[str]) -> str:
    """Return ``value`` if it is one of ``choices``, else raise ``ValueError`` naming them."""
    names = list(choices)
    if not isinstance(value, str) or value not in names:
        meant = did_you_mean(value, names)
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, names))}, not {value!r}{meant}"
        )
    return value


def check_bool(name: str, value: object) -> bool:
    """Return ``value`` if it is True or False, else raise ``ValueError``."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, not {value!r}")
    return value
