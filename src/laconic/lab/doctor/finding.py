"""The result of one check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """The result of one check. ``remedy`` is empty if ``level`` is "ok"."""

    level: Level
    group: str
    text: str
    remedy: str = ""


Case: TypeAlias = tuple[bool, Level, str, str]
"""What may be wrong: whether it is, its level, text and remedy."""


def check(group: str, well: str, *cases: Case) -> Finding:
    """Return the first case that applies, or that all is well."""
    for applies, level, text, remedy in cases:
        if applies:
            return Finding(level, group, text, remedy)
    return Finding("ok", group, well)
