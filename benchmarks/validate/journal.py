"""The launches that were finished, one line of JSON each, so that a validation that was killed goes
on: the settings that all must share, the network, what was measured there, and the recipes' times.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.race.journal import append, key, opened, read
from benchmarks.validate.rows import Network
from laconic.advisor.worker import facts_of
from laconic.algorithms.parse import parse_recipe
from laconic.predict import Facts, predict

__all__ = ["Launch", "Timed", "append", "key", "load", "opened"]


@dataclass(frozen=True)
class Timed:
    """A recipe's ``seconds`` per step, and those ``alone``, without communication, right after it:
    medians over the passes, of so many ``steps`` in all."""

    recipe: str
    seconds: float
    alone: float
    steps: int
    waiting: float


@dataclass(frozen=True)
class Launch:
    """One network's: ``facts`` as measured, and every recipe's time."""

    shared: Mapping[str, object]
    network: Network
    facts: Facts
    rows: tuple[Timed, ...]

    @property
    def compute(self) -> float:
        """Seconds of a step without communication, all over the launch: the recipes took turns, so
        that it is that of each of them."""
        return statistics.median(row.alone for row in self.rows)

    def predicted(self, row: Timed) -> float:
        """Seconds per step by the model as it is now."""
        recipe = parse_recipe(row.recipe)
        assert isinstance(recipe, tuple), "auto is no row"
        return predict(recipe, replace(self.facts, compute=self.compute)).seconds

    def error(self, row: Timed) -> float:
        """Of the prediction, relative to what was measured."""
        return self.predicted(row) / row.seconds - 1

    def chosen(self) -> Timed:
        """The row with the shortest prediction."""
        return min(self.rows, key=self.predicted)

    def regret(self) -> float:
        """How much longer the chosen row takes than the fastest measured one."""
        return self.chosen().seconds / min(row.seconds for row in self.rows) - 1

    def to_line(self) -> str:
        """For the journal."""
        return json.dumps({"key": key(self.shared), **asdict(self)})

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Launch:
        """From what `to_line` wrote. Raises ``ValueError`` for anything else."""
        try:
            rows = tuple(Timed(**row) for row in fields["rows"])
            launch = cls(
                fields["shared"], Network(**fields["network"]), facts_of(fields["facts"]), rows
            )
            agrees = fields["key"] == key(launch.shared)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a launch of this benchmark: {error!r}") from None
        if not agrees or not rows:
            raise ValueError("not a launch of this benchmark: its settings and key do not agree")
        return launch


def load(path: Path) -> list[Launch]:
    """The journal's launches, the last one of each network under its settings; none where there is
    no file. A line that was cut off does not count. Raises ``ValueError`` for one of another kind.
    """
    found: dict[tuple[str, Network], Launch] = {}
    for launch in read(path, Launch.from_fields):
        found[key(launch.shared), launch.network] = launch
    return list(found.values())
