"""The result of one check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """The result of one check. ``remedy`` is empty if ``level`` is "ok"."""

    level: Level
    group: str
    text: str
    remedy: str = ""
