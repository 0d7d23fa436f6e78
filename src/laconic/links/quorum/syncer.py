"""Decides which workers take part in which round. It has neither clock nor network: the caller
passes in times and messages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from laconic.links.quorum.port import (
    Closing,
    Delivery,
    Merge,
    Outcome,
    Paces,
    Rules,
    Speed,
)

W = TypeVar("W")


class _Waiting(NamedTuple):
    time: float
    delivery: Delivery


def closing_time(
    quorum: int,
    grace: float,
    mine: Sequence[float],
    there: Mapping[W, float],
    expected: Iterable[W],
) -> float | None:
    """The time at which a round closes if no other worker arrives before it; None: it does not.

    ``mine``: when the workers arrived that wait for this round; ``there``: when each worker did
    that waits for anything; ``expected``: those for which the round waits during the ``grace``."""
    if not mine or len(there) < quorum:
        return None
    reached = max(sorted(there.values())[max(quorum, 1) - 1], min(mine))
    last = max([reached, *(there.get(worker, math.inf) for worker in expected)])
    return min(last, reached + grace)


class Syncer:
    """Tracks which workers have arrived, and closes rounds. It runs on rank 0.

    A round closes ``grace`` seconds after the quorum has arrived, or as soon as all expected
    workers have (`Appointment.rounds`). Some workers cannot arrive before the others continue, and
    count as arrived: those that are in a call that waits for all workers (`meet`), that wait for a
    round of another kind, or that have left. ``recorded``: the rounds of an earlier run, to be
    repeated. Times then do not matter.
    """

    def __init__(
        self,
        workers: int,
        rules: Sequence[Rules],
        merge: Merge,
        paces: Paces,
        recorded: Sequence[Closing] | None = None,
    ) -> None:
        self.workers = workers
        self._rules, self._merge, self._paces = rules, merge, paces
        self._waiting: dict[int, _Waiting] = {}
        self._meeting: dict[int, float] = {}
        """When each worker entered the call that it is in."""
        self._meets, self._over = [0] * workers, 0
        """By rank, the calls of all workers that it has entered; how many are known to be over."""
        self._left: set[int] = set()
        self._speeds: dict[int, Speed] = {}
        self._recorded = None if recorded is None else list(recorded)
        self._expected = [[0] * workers for _ in rules]
        """By kind and rank: the first round that waits for this worker during the grace."""
        self.rounds = [0] * len(rules)
        """How many rounds of each kind have closed."""
        self.closings: list[Closing] = []
        self.outcomes: dict[int, Outcome] = {}
        """By rank, until that worker fetches it."""
        self.served = 0, 0
        """See `Port.served`."""

    def arrive(self, rank: int, delivery: Delivery, now: float, sending: float = 0.0) -> None:
        """Worker ``rank`` has delivered at the time ``now``. Its message took ``sending``
        seconds."""
        about = delivery.announcement
        self._end_meetings(self._meets[rank])  # its calls are over, so they are for all workers
        if about.seconds > 0 and about.steps > 0:
            speed = about.steps / about.seconds
            if math.isfinite(speed):
                self._speeds[rank] = Speed(speed, sending)
        self._waiting[rank] = _Waiting(now, delivery)

    def meet(self, rank: int, now: float) -> float | None:
        """Worker ``rank`` enters a call that waits for all workers. Once all have entered it,
        returns the time at which the last one did."""
        self._meets[rank] += 1
        if self._meets[rank] <= self._over:  # this message was slower than the call itself
            return None
        self._meeting[rank] = now
        entered = min(m for r, m in enumerate(self._meets) if r not in self._left)
        if entered <= self._over:
            return None
        last = max(self._meeting.values())
        self._end_meetings(entered)
        return last

    def _end_meetings(self, count: int) -> None:
        """The first ``count`` calls of all workers are over."""
        self._over = max(self._over, count)
        self._meeting = {r: t for r, t in self._meeting.items() if self._meets[r] > self._over}

    def leave(self, rank: int) -> None:
        """Worker ``rank`` takes part in no more rounds."""
        self._left.add(rank)
        self._meeting.pop(rank, None)

    def next_closing(self) -> tuple[float, int] | None:
        """The time and the kind of the next closing, if no other worker arrives before it. None: no
        round closes before another worker arrives."""
        if self._recorded is not None:
            return self._next_recorded(self._recorded)
        found = [
            (time, kind)
            for kind, rules in enumerate(self._rules)
            if (time := self._closing_time(kind, rules)) is not None
        ]
        return min(found, default=None)

    def _closing_time(self, kind: int, rules: Rules) -> float | None:
        mine = [w.time for w in self._waiting.values() if w.delivery.announcement.kind == kind]
        there = {**self._meeting, **{rank: w.time for rank, w in self._waiting.items()}}
        number = self.rounds[kind] + 1
        expected = [
            rank
            for rank, first in enumerate(self._expected[kind])
            if first <= number and rank not in self._left
        ]
        quorum = min(rules.quorum, self.workers) - len(self._left)
        return closing_time(quorum, rules.grace, mine, there, expected)

    def _next_recorded(self, recorded: Sequence[Closing]) -> tuple[float, int] | None:
        if not recorded:
            return None
        roster, kind = recorded[0].roster, recorded[0].kind
        there = [self._waiting.get(rank) for rank in roster]
        times = [w.time for w in there if w and w.delivery.announcement.kind == kind]
        return (max(times), kind) if len(times) == len(roster) else None

    def missing(self) -> list[int]:
        """The ranks that have not arrived."""
        there = {*self._waiting, *self._meeting, *self._left}
        return [rank for rank in range(self.workers) if rank not in there]

    def waiting(self) -> str:
        """The ranks that wait for a round, as text for errors; empty if there are none."""
        if not self._waiting:
            return ""
        ranks = f"ranks {sorted(self._waiting)} wait for a round with a quorum"
        if not self._recorded:
            return ranks
        following = self._recorded[0].roster
        return f"{ranks}, and the next round in closings= has ranks {list(following)}"

    def close(self, kind: int, until: float) -> tuple[int, ...]:
        """Close a round of this ``kind`` with the workers that have arrived by the time ``until``.
        Returns their ranks."""
        if self._recorded is not None:
            closing = self._recorded.pop(0)
            roster = closing.roster
        else:
            roster = tuple(
                rank
                for rank, w in sorted(self._waiting.items())
                if w.delivery.announcement.kind == kind and w.time <= until
            )
            number = self.rounds[kind] + 1
            appointments = self._paces(kind, self._speeds, roster)
            for rank, appointment in zip(roster, appointments, strict=True):
                self._expected[kind][rank] = number + appointment.rounds
            closing = Closing(kind, number, roster, tuple(a.steps for a in appointments))
        deliveries = {rank: self._waiting[rank].delivery for rank in roster}
        results = self._merge(closing, deliveries)
        self.rounds[kind] = closing.number
        self.closings.append(closing)
        for rank in roster:
            del self._waiting[rank]
            self.outcomes[rank] = Outcome(closing, results[rank])
            if rank:
                sent, received = self.served
                sent += self.outcomes[rank].nbytes
                self.served = sent, received + deliveries[rank].nbytes
        return roster

    def state(self) -> dict[str, object]:
        """What a run that is resumed needs, as plain data."""
        speeds = {rank: [*speed] for rank, speed in self._speeds.items()}
        return {
            "rounds": [*self.rounds],
            "speeds": speeds,
            "expected": [*map(list, self._expected)],
        }

    def load(self, state: Mapping[str, object]) -> None:
        """Restore what `state` returned."""
        rounds, speeds, expected = state["rounds"], state["speeds"], state["expected"]
        assert isinstance(rounds, list) and isinstance(speeds, dict), "of this class"
        assert isinstance(expected, list), "of this class"
        self._expected = [list(ranks) for ranks in expected]
        self.rounds = list(rounds)
        self._speeds = {rank: Speed(*speed) for rank, speed in speeds.items()}
