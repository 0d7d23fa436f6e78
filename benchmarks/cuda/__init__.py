"""Everything that needs a GPU, in one command (``make gpu``).

A part is a function that returns what it has found as numbers by name. It raises `FailedError`
where a result is wrong. It runs on any device, so that its code is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Numbers = dict[str, float]
Run = Callable[[torch.device], Numbers]


class FailedError(Exception):
    """A result is wrong, or misses its limit. ``numbers``: what was found."""

    def __init__(self, text: str, numbers: Numbers | None = None) -> None:
        super().__init__(text)
        self.numbers = numbers or {}


def nothing() -> str:
    """What most parts lack."""
    return ""


@dataclass(frozen=True)
class Part:
    """``text``: what is shown, as a sentence. ``figures``: its numbers are measurements, and not
    only checks. ``most``: seconds that it may take. ``lacks()`` says what is missing here that it
    needs, such as data; empty if nothing is."""

    name: str
    text: str
    run: Run
    figures: bool
    most: float = 120.0
    lacks: Callable[[], str] = nothing


PARTS: list[Part] = []


def part(text: str, *, figures: bool = False) -> Callable[[Run], Run]:
    """Make a function a part of ``make gpu``."""

    def add(run: Run) -> Run:
        PARTS.append(Part(run.__name__, text, run, figures))
        return run

    return add
