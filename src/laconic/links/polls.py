"""Rounds with a quorum: all workers decide, from what all say, when one closes.

In a poll every worker says whether it has arrived (`Standing`). All compute the same from that, so
no worker is needed to decide. Where workers come and go, see `laconic.links.elastic.polling`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from laconic.errors import LinkError
from laconic.links.calls import Call
from laconic.links.link import Link
from laconic.links.long_wait import LongWait
from laconic.links.metered import Metered
from laconic.links.null import NullLink
from laconic.links.rendezvous import ADVICE
from laconic.links.simulated import SimulatedLink, Stage
from laconic.links.staged import StagedLink
from laconic.links.tcp import TcpLink

T = TypeVar("T")
BUSY, ARRIVED, CALLING = range(3)
"""What a worker does: it computes, waits for a round, or waits in a call of all workers."""
CALLS = -1
"""In place of a kind of round: the call of all workers, in which all are now."""
POLL = Call(0, "round with a quorum")
"""The call that polls, and the rounds that close by them, belong to."""


class Rules(NamedTuple):
    """When a round of one kind closes: ``grace`` seconds after ``quorum`` workers have arrived, or
    as soon as all have."""

    quorum: int
    grace: float


Paces = Callable[[Mapping[int, float], Sequence[int]], Sequence[int]]
"""A function of the latest speed of each worker (steps per second, by rank), and the ranks of a
roster. Returns after how many steps each rank of the roster arrives again; 0: as the schedule
says."""


@dataclass(frozen=True)
class Closing:
    """A round with a quorum that has closed. `as_json` and `of` convert it to and from JSON data.

    Args:
        kind: 0, or the index of the fragment in its order of rounds.
        number: how many of the kind have closed, this one included.
        roster: the ranks of the workers that contributed, ascending.
        paces: for each of them, the number of steps until it arrives again; 0: as the schedule
            says.

    Examples:
        >>> laconic.Closing(kind=0, number=1, roster=(0, 2), paces=(12, 4)).pace(2)
        4
    """

    kind: int
    number: int
    roster: tuple[int, ...]
    paces: tuple[int, ...]

    def pace(self, rank: int) -> int:
        """The steps of ``rank``, one of the roster, until it arrives again."""
        return self.paces[self.roster.index(rank)]

    def as_json(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Closing:
        """The inverse of `as_json`, also of what has been through JSON."""
        return cls(**_with_tuples(fields))


class Standing(NamedTuple):
    """What one worker says in a poll.

    ``state``: `BUSY`, `ARRIVED` at a round of the ``kind``, or `CALLING`; ``waited``: for how many
    seconds it has been so. ``step``: the number of its steps; ``speed``: how many it takes per
    second, 0 if unknown. ``rates``: the learning rate of each bucket, where it counts.
    """

    state: int
    kind: int
    waited: float
    step: int
    speed: float
    rates: tuple[float, ...]

    def row(self) -> Tensor:
        """As numbers."""
        return torch.tensor([*self[:5], *self.rates], dtype=torch.float64)

    @classmethod
    def of(cls, row: Sequence[float]) -> Standing:
        """The inverse of `row`."""
        state, kind, waited, step, speed, *rates = row
        return cls(int(state), int(kind), waited, int(step), speed, tuple(rates))


@dataclass(frozen=True)
class Decision:
    """A round that closes: the workers of the ``roster`` (their ids) contribute to number
    ``number`` of its ``kind``. ``paces``: as in `Closing`. ``step`` and ``rates``: those of the
    first worker. Or the call of all workers (`CALLS`)."""

    kind: int
    number: int = 0
    roster: tuple[str, ...] = ()
    paces: tuple[int, ...] = ()
    step: int = 0
    rates: tuple[float, ...] = ()

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Decision:
        """From its `vars`, also what JSON makes of them."""
        return cls(**_with_tuples(fields))


def _with_tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}


def closing_time(
    rules: Rules, workers: int, mine: Iterable[float], there: Iterable[float]
) -> float | None:
    """The time at which a round closes if no other worker arrives before it; None: it does not.
    ``mine``: when those of all ``workers`` arrived that wait for this round; ``there``: when those
    did that wait for anything."""
    first, times = min(mine, default=None), sorted(there)
    quorum = min(rules.quorum, workers)
    if first is None or len(times) < quorum:
        return None
    end = max(times[quorum - 1], first) + rules.grace
    return min(times[-1], end) if len(times) == workers else end


class Polls:
    """Decides, from what all workers say, by id in the order of their ranks. ``rules`` and
    ``paces``: by kind. ``rounds``: how many of each kind have closed."""

    def __init__(self, rules: Sequence[Rules], paces: Sequence[Paces]) -> None:
        self._rules, self._paces = rules, paces
        self.rounds = [0] * len(rules)

    def next_closing(self, standings: Mapping[str, Standing]) -> tuple[float, int] | None:
        """The time, in seconds from now, and the kind of the next closing, if no other worker
        arrives before it. None: another one must arrive first."""
        there = [-s.waited for s in standings.values() if s.state != BUSY]
        if all(s.state == CALLING for s in standings.values()):
            return max(there), CALLS
        found = []
        for kind, rules in enumerate(self._rules):
            mine = [-s.waited for s in standings.values() if (s.state, s.kind) == (ARRIVED, kind)]
            time = closing_time(rules, len(standings), mine, there)
            if time is not None:
                found.append((time, kind))
        return min(found, default=None)

    def next_of_all(self, standings: Mapping[str, Standing]) -> tuple[float, int]:
        """As `next_closing`, where every worker waits."""
        found = self.next_closing(standings)
        assert found is not None, "nobody is missing"
        return found

    def overdue(self, standings: Mapping[str, Standing], limit: float) -> list[str]:
        """The workers that have computed for more than ``limit`` seconds, if another one has waited
        as long, and no round closes without them."""
        long = {id: s for id, s in standings.items() if s.waited > limit}
        if self.next_closing(standings) is not None or all(s.state == BUSY for s in long.values()):
            return []
        return [id for id, s in long.items() if s.state == BUSY]

    def now(self, standings: Mapping[str, Standing]) -> Decision | None:
        """What is decided now, if anything is."""
        found = self.next_closing(standings)
        return None if found is None or found[0] > 0 else self.close(standings, found[1], 0.0)

    def close(self, standings: Mapping[str, Standing], kind: int, until: float) -> Decision:
        """Close a round of this ``kind`` with the workers that have arrived by the time
        ``until``."""
        if kind == CALLS:
            return Decision(CALLS)
        roster = [
            rank
            for rank, s in enumerate(standings.values())
            if (s.state, s.kind) == (ARRIVED, kind) and -s.waited <= until
        ]
        speeds = {r: s.speed for r, s in enumerate(standings.values()) if s.speed}
        return self._decision(standings, kind, roster, self._paces[kind](speeds, roster))

    def repeat(
        self, standings: Mapping[str, Standing], closing: Closing
    ) -> tuple[float, Decision] | None:
        """When a recorded round closes, and what is decided then. None: another worker must arrive
        first."""
        said = [*standings.values()]
        mine = [said[rank] for rank in closing.roster if rank < len(said)]
        if any((s.state, s.kind) != (ARRIVED, closing.kind) for s in mine):
            return None
        if len(mine) < len(closing.roster):
            return None
        decision = self._decision(standings, closing.kind, closing.roster, closing.paces)
        return max(-s.waited for s in mine), decision

    def _decision(
        self,
        standings: Mapping[str, Standing],
        kind: int,
        roster: Sequence[int],
        paces: Sequence[int],
    ) -> Decision:
        ids = list(standings)
        first = standings[ids[roster[0]]]
        chosen = tuple(ids[rank] for rank in roster)
        number = self.rounds[kind] + 1
        return Decision(kind, number, chosen, tuple(paces), first.step, first.rates)


class Clock:
    """The real time."""

    def seconds(self, step: int) -> float:
        """The time, now that this worker has taken ``step`` steps."""
        return time.monotonic()

    def worked(self, step: int, waited: float) -> float:
        """As `seconds`, but without the time spent waiting, which is ``waited`` real seconds."""
        return time.monotonic() - waited

    def restart(self, step: int) -> None:
        """Continue a loaded run from ``step`` at the present time."""

    def arrive(self, step: int) -> float:
        """This worker waits, after ``step`` steps. Returns the time."""
        return time.monotonic()

    def waited(self, since: float) -> float:
        """The seconds since that time."""
        return time.monotonic() - since


class VirtualClock(Clock):
    """The virtual time of worker ``me``, which advances by its seconds per step. ``step``: how many
    it has taken so far."""

    def __init__(self, stage: Stage, me: int, step: int) -> None:
        self.stage, self._me, self._step = stage, me, step

    def seconds(self, step: int) -> float:
        return self.stage.clocks[self._me] + (step - self._step) * self.stage.step_seconds[self._me]

    def worked(self, step: int, waited: float) -> float:
        return step * self.stage.step_seconds[self._me]

    def restart(self, step: int) -> None:
        self._step = step

    def arrive(self, step: int) -> float:
        now = self.stage.clocks[self._me] = self.seconds(step)
        self._step = step
        return now

    def waited(self, since: float) -> float:
        """It is not known yet at which time the worker goes on: at 0."""
        return -since


class Polling:
    """What a worker does for rounds with a quorum over a ``link`` whose ranks stay.

    ``me``: its id; ``ids``: those of all, by rank, in the unit under way. Consecutive polls are one
    call of the ``link``.
    """

    replaying = False
    """Whether this worker is a newcomer that catches up."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.me, self.ids = str(link.rank), [str(rank) for rank in range(link.size)]
        self._guard = link.calls if isinstance(link, TcpLink) else None
        self._limit = link.connections.timeout if isinstance(link, TcpLink) else math.inf
        self._call: Call | None = None
        """The latest call of all workers."""
        self._wait = LongWait()

    def unit(self, job: Callable[[], T]) -> T:
        """Run a ``job``, which makes collectives."""
        return job()

    def poll(self, own: Standing, polls: Polls, *, admit: bool) -> Decision | None:
        """Say ``own``, hear what the others say, and decide. None: there is nothing to do yet.
        ``admit``: newcomers take part from now on."""
        guard = self._guard
        if guard is not None and guard.position.call != POLL:
            self._call = guard.position.call
            guard.begin(POLL)
        rows = self.link.gather(own.row()).tolist()
        standings = dict(zip(self.ids, map(Standing.of, rows), strict=True))
        if late := polls.overdue(standings, self._limit):
            ranks = [int(id) for id in late]
            text = f"no quorum in {self._limit:g} s: ranks {ranks} have not arrived. {ADVICE}"
            raise LinkError(text, ranks=ranks)
        self._log_wait(own, standings)
        return polls.now(standings)

    def _log_wait(self, own: Standing, standings: Mapping[str, Standing]) -> None:
        """Log now and then which ranks still compute, if this is the lowest one that waits."""
        if own.state == BUSY or self._guard is None:
            return
        seconds = self._wait.due((own.state, own.step), time.monotonic())
        late = [int(id) for id, standing in standings.items() if standing.state == BUSY]
        if seconds and late and self.link.rank == min(set(range(self.link.size)) - {*late}):
            self._guard.report(late, seconds)

    def call(self, job: Callable[[], T]) -> T:
        """Run a ``job`` of the call of all workers, right after a poll."""
        if self._guard is not None and self._call is not None:
            self._guard.begin(self._call)
        return job()

    def note(self, decision: Decision) -> None:
        """The round has begun. Only traces of elastic runs note it."""

    def clock(self, step: int) -> Clock:
        """The time of this worker, which has taken ``step`` steps so far."""
        return Clock()


class SimulatedPolling(Polling):
    """`Polling` of a simulated worker. It polls when it waits only, so in a poll of all, every time
    of arrival is known, and what comes next is decided. A worker that has not arrived by then takes
    part without a contribution, and polls again."""

    link: SimulatedLink

    def poll(self, own: Standing, polls: Polls, *, admit: bool) -> Decision | None:
        stage = self.link.stage
        standings = dict(zip(self.ids, said_in_poll(self.link, own), strict=True))
        until, decision = self._next(standings, polls)
        if decision.kind == CALLS or self.me in decision.roster:
            stage.clocks[self.link.me] = until
        return decision

    def _next(self, standings: Mapping[str, Standing], polls: Polls) -> tuple[float, Decision]:
        until, kind = polls.next_of_all(standings)
        recorded = self.link.stage.recorded
        if recorded is None or kind == CALLS:
            return until, polls.close(standings, kind, until)
        closing = next(recorded[self.link.me], None)
        found = None if closing is None else polls.repeat(standings, closing)
        if found is None:
            ranks = [rank for rank, s in enumerate(standings.values()) if s.state == ARRIVED]
            following = "is none" if closing is None else f"has ranks {list(closing.roster)}"
            raise LinkError(
                f"ranks {ranks} wait for a round with a quorum, and the next one in closings= "
                f"{following}"
            )
        return found

    def clock(self, step: int) -> VirtualClock:
        return VirtualClock(self.link.stage, self.link.me, step)


def said_in_poll(link: SimulatedLink, own: Standing) -> list[Standing]:
    """What all simulated workers of ``link`` say in a poll, by rank, once all of them wait."""
    link.stage.polled = True
    return [*map(Standing.of, link.join(str(POLL), own.row(), torch.stack).tolist())]


def polling_over(link: Link) -> Polling:
    """How a worker polls over ``link``. Raises ``ValueError`` for a link that does not support
    rounds with a quorum."""
    if isinstance(link, (Metered, StagedLink)):  # polls are not booked, and on the CPU
        return polling_over(link.link)
    if isinstance(link, SimulatedLink):
        return SimulatedPolling(link)
    if isinstance(link, (TcpLink, NullLink)):
        return Polling(link)
    raise ValueError(
        "rounds with a quorum run between processes with link='tcp', and in laconic.simulate "
        f"without link=, not over a {type(link).__name__}"
    )
