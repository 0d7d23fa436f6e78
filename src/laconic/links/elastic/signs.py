"""Signs of life: which workers count as lost, as one worker knows it.

A sign of life is an answer to a question, or a part in a call that was completed. A suspicion is
local: only a view that the coordinator has decided counts (`laconic.links.elastic.members`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from laconic.links import health
from laconic.links.calls import CallPosition
from laconic.links.elastic.view import Member

SHORTEST, LONGEST, ROUNDS = 5.0, 30.0, 2.0
"""A worker counts as lost after a silence of ``ROUNDS`` times the time between rounds, but at least
``SHORTEST`` and at most ``LONGEST`` seconds."""
STUCK_SHORTEST, STUCK_ROUNDS = 60.0, 20.0
"""The same for a worker that answers and does not come to the round that others wait in."""


class Signs:
    """What this worker has heard of the others. ``limit``: the longest silence in seconds. Times
    are those of `time.monotonic`."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self.pace = 0.0
        """The longest recent time between rounds, in seconds."""
        self.active: set[str] = set()
        """The ids of the members that take part in rounds."""
        self.in_touch = 0.0
        """The latest time after which all active members have sent a message that came."""
        self.gone: set[str] = set()
        self.notes: dict[str, str] = {}
        """What the others have said last (`Answer.note`), by id."""
        self._silent_since: dict[str, float] = {}
        self._answered: dict[str, float] = {}
        """When the last question was asked that was answered, by id."""
        self._positions: dict[str, CallPosition] = {}

    @property
    def deadline(self) -> float:
        """Seconds of silence after which a worker counts as lost."""
        return min(max(SHORTEST, ROUNDS * self.pace), LONGEST, self._limit)

    @property
    def stuck_deadline(self) -> float:
        """Seconds after which a worker counts as lost that does not come to a round."""
        return min(max(STUCK_SHORTEST, STUCK_ROUNDS * self.pace), self._limit)

    def hear(self, id: str, start: float, answer: health.Answer) -> None:
        """The worker ``id`` has given this ``answer`` to a question asked at the time ``start``."""
        left = answer.position is not None and answer.position.left
        if answer == health.GONE or left:
            self.gone.add(id)
        elif answer.lost:
            if time.monotonic() - start > health.ANSWER_SECONDS + 1:
                return  # this process was stopped meanwhile: the silence was its own
            if start > self._answered.get(id, 0.0) and self.silent_since(id) is None:
                self._silent_since[id] = start
        else:
            self._answered[id] = max(start, self._answered.get(id, 0.0))
            self._silent_since.pop(id, None)
            if answer.position is not None:
                self._positions[id] = answer.position
            if answer.note:
                self.notes[id] = answer.note

    def silent_since(self, id: str) -> float | None:
        """When the first question was asked of those that ``id`` has not answered, if it has given
        no sign of life since."""
        since = self._silent_since.get(id)
        heard = since is not None and id in self.active and since <= self.in_touch
        return None if heard else since

    def lost(
        self, others: Iterable[Member], waiting_since: float | None, position: CallPosition
    ) -> dict[str, str]:
        """Those of the ``others`` that count as lost, by id, and why. This worker is in the call at
        ``position``, ``waiting_since`` then."""
        now, lost = time.monotonic(), dict[str, str]()
        stuck = waiting_since is not None and now - waiting_since >= self.stuck_deadline
        for id in (member.id for member in others):
            since, reached = self.silent_since(id), self._positions.get(id)
            if id in self.gone:
                lost[id] = "has ended"
            elif since is not None and now - since >= self.deadline:
                lost[id] = f"has not answered for {now - since:.0f} s"
            elif stuck and reached is not None and reached.serial < position.serial:
                lost[id] = f"has not come to {position} for {self.stuck_deadline:.0f} s"
        return lost
