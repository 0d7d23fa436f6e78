"""Units: what the workers of an elastic run do all or nothing.

A *unit* is what the communication thread runs at a time, such as the exchange of one bucket: a few
collectives, the last of which brings what the unit changes.

Four attributes say who takes part, because they change at different times:

- The members of the latest view (`Members.view`): decided, perhaps not yet connected.
- `Rendezvous.ids`: the view that this worker is connected to. Newcomers are at its end.
- `Units.active`: the first ones of these, which have taken part in the last unit.
- `Units.ranks`: who takes part in the unit under way: the active ones, and newcomers that begin.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from laconic.links.calls import Call


@dataclass
class Outcome:
    """What a unit's last collective has brought. ``output``: a tensor that all workers receive;
    or ``pieces``: messages for this worker alone (`Link.swap`). ``digests``: what all workers have
    said of themselves (`Call.digest`), by id in the order of their ranks."""

    output: Tensor | None = None
    pieces: Sequence[Tensor] = ()
    digests: dict[str, int] = field(default_factory=dict)


class Units:
    """How far the worker ``me`` is, and with whom.

    ``note(event)`` is told who takes part (`laconic.Trace`).
    """

    def __init__(self, me: str) -> None:
        self.me = me
        self.done: int | None = None
        """How many units are complete; None for a newcomer that has not caught up."""
        self.active: list[str] = []
        """The ids of the workers that take part, by rank."""
        self.ranks: list[str] = []
        """The same in the unit under way, which newcomers may begin with."""
        self.under_way = False
        self.changed = threading.Condition()
        """Notified when no unit is under way any more."""
        self.call = Call(0, "setting up")
        """The call that the unit under way, or the last one, belongs to."""
        self.outcome, self.kept = Outcome(), Outcome()
        """Of the unit under way, and of the last one that was completed."""
        self.heard: dict[str, int] = {}
        """The digests of the last unit of the present call that was completed. All of its workers
        have the same, because the digests are passed on with the rest of the outcome."""
        self.outputs: list[Tensor] = []
        """What the collectives of the unit under way have brought so far, for newcomers."""
        self.collectives = 0
        """How many the unit under way has made so far."""
        self.note: Callable[[dict[str, Any]], None] = lambda event: None
        self._noted: list[str] = []

    @property
    def serial(self) -> int:
        """The number of the unit under way, or of the next one, counted from 1."""
        assert self.done is not None, "a newcomer takes part in nothing"
        return self.done + 1

    @property
    def rank(self) -> int:
        """This worker's rank in the unit under way."""
        return self.ranks.index(self.me) if self.me in self.ranks else len(self.ranks)

    def end(self) -> None:
        """None is under way."""
        with self.changed:
            self.under_way = False
            self.changed.notify_all()

    def attempt(self, ranks: Sequence[str]) -> None:
        """Begin the unit (again) among the workers ``ranks``."""
        self.ranks = list(ranks)
        self.collectives, self.outcome, self.outputs = 0, Outcome(), []

    def complete(self) -> None:
        """The unit under way is complete: its outcome counts."""
        self._note()
        self.done, self.kept = self.serial, self.outcome
        self.heard = self.outcome.digests
        self.active = list(self.ranks)

    def _note(self) -> None:
        if self.ranks != self._noted:
            self._noted = list(self.ranks)
            self.note({"unit": self.serial, "call": str(self.call), "workers": self._noted})
