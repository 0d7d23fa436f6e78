"""Notes below the table: on a run that was short, or whose workers took different steps."""

from __future__ import annotations

from collections.abc import Sequence

from laconic.algorithms.round import Recipe, Round
from laconic.algorithms.updates import DelayedNesterov, OuterStep

FEW_ROUNDS = 100
"""With fewer outer rounds, DiLoCo's usual momentum of 0.9 may overshoot."""


def quorum_notes(
    recipe: Recipe, steps: Sequence[int], rosters: Sequence[Sequence[int]]
) -> tuple[str, ...]:
    """Return notes on a run whose workers took different numbers of ``steps``, by rank."""
    if not rosters:
        return ("the run ended before its first round: give it more time",)
    parts = [sum(rank in roster for roster in rosters) for rank in range(len(steps))]
    took = f"workers took {_listed(steps)} steps, and part in {_listed(parts)} of {len(rosters)}"
    notes = (f"{took} rounds",)
    momenta = [r.update.momentum for r in recipe if isinstance(r.update, DelayedNesterov)]
    return notes + _overshoot(max(momenta, default=0.0), sum(parts) // len(parts))


def _listed(numbers: Sequence[int]) -> str:
    """Return numbers by rank as text."""
    return ", ".join(f"{number:,}" for number in numbers[:-1]) + f" and {numbers[-1]:,}"


def _overshoot(momentum: float, rounds: int) -> tuple[str, ...]:
    """Return a note if ``rounds`` outer rounds are too few for this outer momentum."""
    if momentum <= 0.6 or rounds >= FEW_ROUNDS:
        return ()
    return (
        f"{rounds} outer rounds; below about {FEW_ROUNDS} an outer momentum of {momentum:g} may "
        "overshoot: also try 0.3 to 0.6",
    )


def advice(recipe: Recipe, steps: int) -> tuple[str, ...]:
    """Return notes on a recipe in a run this short."""
    last = [r for r in recipe if isinstance(r, Round)][-1:]
    if last and not any(last[0].when(step) for step in range(1, steps + 1)):
        return ("the run ended before its first round: give it more time",)
    for r in recipe:
        if isinstance(r.update, OuterStep) and r.update.outer is None:
            rounds = sum(r.when(step) for step in range(1, steps + 1))
            return _overshoot(r.update.momentum, rounds)
    return ()
