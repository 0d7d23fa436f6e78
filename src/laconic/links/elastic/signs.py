"""Signs of life: what one worker knows of the others, and reports to the coordinator.

A sign of life is an answer to a question, or bytes that have come. A report is no more than that:
only the coordinator decides (`laconic.links.elastic.leases`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from itertools import pairwise

from laconic.links import health
from laconic.links.calls import CallPosition
from laconic.links.elastic.leases import GONE, SILENT
from laconic.links.elastic.view import Member

SHORTEST, LONGEST, ROUNDS = 5.0, 30.0, 2.0
"""A worker is reported after a silence of ``ROUNDS`` times the time between rounds, but at least
``SHORTEST`` and at most ``LONGEST`` seconds."""
PACES = 8
"""The longest of so many times between calls counts as the time between rounds."""
STUCK_SHORTEST, STUCK_ROUNDS = 60.0, 20.0
"""The same for a worker that answers and does not come to the round that others wait in."""


class Signs:
    """What this worker has heard of the others. ``limit``: the longest silence in seconds. Times
    are those of `time.monotonic`."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self.pace = 0.0
        """The longest recent time between rounds, in seconds."""
        self._begun: deque[float] = deque(maxlen=PACES + 1)
        self.notes: dict[str, str] = {}
        """What workers that are gone have said last, by id."""
        self._unreached: dict[str, float] = {}
        """Since when no connection to it could be made, by id."""
        self._gone: set[str] = set()
        """Those at whose address nobody listened last."""
        self._silent_since: dict[str, float] = {}
        self._answered: dict[str, float] = {}
        """When the last question was asked that was answered, by id."""
        self._moved: dict[str, tuple[int, float]] = {}
        """How many bytes have come in all, and when they last became more, by id."""
        self._positions: dict[str, CallPosition] = {}

    @property
    def deadline(self) -> float:
        """Seconds of silence after which a worker is reported, or loses its lease."""
        return min(max(SHORTEST, ROUNDS * self.pace), LONGEST, self._limit)

    @property
    def stuck_deadline(self) -> float:
        """Seconds after which a worker is reported that does not come to a round."""
        return min(max(STUCK_SHORTEST, STUCK_ROUNDS * self.pace), self._limit)

    def begins(self, now: float) -> None:
        """A round begins."""
        self._begun.append(now)
        self.pace = max((b - a for a, b in pairwise(self._begun)), default=0.0)

    def hear(self, id: str, start: float, answer: health.Answer) -> bool:
        """The worker ``id`` has given this ``answer`` to a question asked at the time ``start``.
        Returns whether that is news."""
        before = id in self._silent_since, id in self._gone
        if answer.lost:
            if time.monotonic() - start > health.ANSWER_SECONDS + 1:
                return False  # this process was stopped meanwhile: the silence was its own
            if start > self._answered.get(id, 0.0):
                if self.silent_since(id) is None:
                    self._silent_since[id] = start
                (self._gone.add if answer == health.GONE else self._gone.discard)(id)
        else:
            self._answered[id] = max(start, self._answered.get(id, 0.0))
            self._silent_since.pop(id, None)
            self._gone.discard(id)
            if answer.position is not None:
                self._positions[id] = answer.position
        return before != (id in self._silent_since, id in self._gone)

    def connected(self, missing: Iterable[str]) -> None:
        """Connections to all members were made, or tried: not to those that are ``missing``."""
        now = time.monotonic()
        self._unreached = {id: self._unreached.get(id, now) for id in missing}

    def moved(self, id: str, bytes: int) -> None:
        """So many ``bytes`` have come from the worker ``id`` so far."""
        if self._moved.get(id, (0, 0.0))[0] != bytes:
            self._moved[id] = bytes, time.monotonic()

    def silent_since(self, id: str) -> float | None:
        """When the first question was asked of those that ``id`` has not answered, if it has given
        no sign of life since."""
        since, (_, lately) = self._silent_since.get(id), self._moved.get(id, (0, 0.0))
        return None if since is None or since <= lately else since

    def reports(
        self, others: Iterable[Member], waiting_since: float | None, position: CallPosition
    ) -> dict[str, tuple[str, str]]:
        """What to report of the ``others``, by id. This worker is in the call at ``position``,
        ``waiting_since`` then."""
        now, found = time.monotonic(), dict[str, tuple[str, str]]()
        stuck = waiting_since is not None and now - waiting_since >= self.stuck_deadline
        for id in (member.id for member in others):
            since, reached = self.silent_since(id), self._positions.get(id)
            unreached = now - self._unreached.get(id, now) >= 2 * self.deadline
            if since is not None and now - since >= self.deadline:
                found[id] = SILENT, f"has not answered for {self.deadline:.0f} s"
            elif unreached:
                found[id] = SILENT, "answers, and no connection to it can be made"
            elif since is not None and id in self._gone:
                found[id] = GONE, "has ended"
            elif stuck and reached is not None and reached.serial < position.serial:
                found[id] = SILENT, f"has not come to {position} for {self.stuck_deadline:.0f} s"
        return found
