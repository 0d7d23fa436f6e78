"""What an advice consists of, and how tables are printed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from laconic.units import three_digits


def table(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table: the first column at the left, the numbers at the right."""
    first, *widths = (max(map(len, column)) for column in zip(*lines, strict=True))
    for name, *cells in lines:
        cells = [cell.rjust(width + 2) for cell, width in zip(cells, widths, strict=True)]
        yield name.ljust(first) + "".join(cells)


@dataclass(frozen=True)
class Row:
    """The prediction for a recipe.

    ``seconds``: per step. ``hidden``: share of communication that overlaps with training.
    ``megabytes``: sent per step to other workers by a rank. ``memory``: bytes that rounds keep on a
    rank. ``speedup``: relative to DDP. ``share``: of the speed without communication. ``steps``:
    needed per step of DDP. ``steps_from``: the source of ``steps``, from `steps_of`; or that they
    are unknown and count as 1. ``quality``: what the literature or this repository says. ``own``:
    whether the user asked for the recipe.
    """

    recipe: str
    period: int | None
    seconds: float
    hidden: float
    megabytes: float
    memory: float
    speedup: float
    share: float
    steps: float
    steps_from: str
    quality: str
    own: bool = False

    @property
    def progress(self) -> float:
        """Progress per second relative to DDP: its seconds, over ``seconds * steps``."""
        return self.speedup / self.steps


@dataclass(frozen=True)
class Slow:
    """A rank that the others wait for.

    ``what``: "steps" if its steps take ``factor`` times as long as the median rank's, "network" if
    its network is so many times slower. ``ddp``: seconds per step of ddp(), and ``ddp_without`` if
    the rank were as fast as the median rank. ``gain``: how many times as many steps all ranks
    together would take if none waited for slower ones; None for a network.
    """

    rank: int
    what: Literal["steps", "network"]
    factor: float
    ddp: float
    ddp_without: float
    gain: float | None

    def __str__(self) -> str:
        """Return a sentence."""
        verb = "computes" if self.what == "steps" else "sends"
        gain = (
            ""
            if self.gain is None
            else (
                f" If none waited, all together would take {self.gain:.2g} times as many steps per "
                "second."
            )
        )
        return (
            f"Rank {self.rank} {verb} {self.factor:.2g} times as long as the median rank: a step "
            f"of ddp() takes {three_digits(self.ddp)} s because the others wait for it, and would "
            f"take {three_digits(self.ddp_without)} s otherwise.{gain}"
        )
