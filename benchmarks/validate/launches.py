"""Finished launches and their journal.

A line has the settings that all launches of a table share, the network, its measurements, and the
recipes' times.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.study import Journal, checked, key
from benchmarks.validate.rows import Network
from laconic.advisor.quorum import predict
from laconic.algorithms.parse import parse_recipe
from laconic.policy.facts import Facts, Net


def facts_of(plain: dict[str, Any]) -> Facts:
    """Rebuild facts from the result of `asdict`, also of an earlier version, which had more."""
    nets = {name: Net(**net) for name, net in plain["nets"].items()}
    shapes = tuple(tuple(shape) for shape in plain["shapes"])
    known = {name: plain[name] for name in Facts.__dataclass_fields__ if name in plain}
    alike = {
        name: tuple(plain.get(name, ())) for name in ("computes", "rates", "receives", "shared")
    }
    return Facts(**{**known, **alike, "nets": nets, "shapes": shapes})


@dataclass(frozen=True)
class Timed:
    """A recipe's ``seconds`` per step, and those ``alone``, without communication, right after it.

    Both are medians over the passes, with ``steps`` steps in total.
    """

    recipe: str
    seconds: float
    alone: float
    steps: int
    waiting: float


@dataclass(frozen=True)
class Launch:
    """The launch on one network: the measured ``facts`` and every recipe's time."""

    shared: Mapping[str, object]
    network: Network
    facts: Facts
    rows: tuple[Timed, ...]

    @property
    def compute(self) -> float:
        """Seconds of a step without communication, over the whole launch.

        The recipes took turns, so the value applies to each of them.
        """
        return statistics.median(row.alone for row in self.rows)

    def predicted(self, row: Timed) -> float:
        """Return the seconds per step that the current model predicts."""
        recipe = parse_recipe(row.recipe)
        assert isinstance(recipe, tuple), "auto is not a row"
        return predict(recipe, replace(self.facts, compute=self.compute)).seconds

    def error(self, row: Timed) -> float:
        """Return the error of the prediction, relative to the measurement."""
        return self.predicted(row) / row.seconds - 1

    def chosen(self) -> Timed:
        """Return the row with the shortest prediction."""
        return min(self.rows, key=self.predicted)

    def regret(self) -> float:
        """Return how much longer the chosen row takes than the fastest one, as measured."""
        return self.chosen().seconds / min(row.seconds for row in self.rows) - 1

    @property
    def identity(self) -> Hashable:
        return key(self.shared), self.network

    def document(self) -> dict[str, Any]:
        """Return the line of the journal."""
        return {"key": key(self.shared), **asdict(self)}


def parsed(fields: Mapping[str, Any]) -> Launch:
    """Parse what `Launch.document` returned."""
    rows = tuple(Timed(**row) for row in fields["rows"])
    if not rows:
        raise ValueError("it has no rows")
    network, facts = Network(**fields["network"]), facts_of(fields["facts"])
    return Launch(checked(fields), network, facts, rows)


def journal(path: Path) -> Journal[Launch]:
    """The launches in the file at ``path``."""
    return Journal(path, parsed)
