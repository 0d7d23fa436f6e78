"""What a session holds of others: the choices of a policy, and a worker that joins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Choice:
    """A policy's choice after ``step``: the recipe's text, the measured facts (of `auto`,
    `laconic.policy.facts.Facts`), and the reason."""

    step: int
    text: str
    facts: Any
    reason: str


class Joining(Protocol):
    """A worker that has loaded the state of an elastic run, and has taken no step."""

    def arrive(self) -> None:
        """Take part from the next step on."""

    def finish(self) -> None:
        """Load what `Synchronizer.finish` leaves on the others."""
