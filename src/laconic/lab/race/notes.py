"""Notes below the table: on a run that was short, or whose workers took different steps."""

from __future__ import annotations

from collections.abc import Sequence

from laconic.algorithms.round import Recipe, Round

TOO_SHORT = "the run ended before its first round: give it more time"


def quorum_notes(steps: Sequence[int], rosters: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """Return notes on a run whose workers took different numbers of ``steps``, by rank."""
    if not rosters:
        return (TOO_SHORT,)
    parts = [sum(rank in roster for roster in rosters) for rank in range(len(steps))]
    rounds = f"part in {_listed(parts)} of {len(rosters)} rounds"
    return (f"workers took {_listed(steps)} steps, and {rounds}",)


def _listed(numbers: Sequence[int]) -> str:
    """Return numbers by rank as text."""
    return ", ".join(f"{number:,}" for number in numbers[:-1]) + f" and {numbers[-1]:,}"


def advice(recipe: Recipe, steps: int) -> tuple[str, ...]:
    """Return notes on a recipe in a run this short."""
    last = [r for r in recipe if isinstance(r, Round)][-1:]
    late = last and not any(last[0].when(step) for step in range(1, steps + 1))
    return (TOO_SHORT,) if late else ()
