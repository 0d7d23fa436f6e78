"""Polls where workers come and go: a poll is the beginning of a unit, or none."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from laconic.errors import LinkError
from laconic.links.calls import CallPosition
from laconic.links.elastic.link import ElasticLink
from laconic.links.elastic.simulated import SimulatedElasticLink
from laconic.links.health import shown
from laconic.links.polls import (
    CALLS,
    POLL,
    Clock,
    Decision,
    Polling,
    Polls,
    Standing,
    VirtualClock,
)

T = TypeVar("T")


class ElasticPolling(Polling):
    """`Polling` over an elastic ``link``."""

    def __init__(self, link: ElasticLink) -> None:
        self.link: ElasticLink = link
        self.me = link.units.me
        self._latest = link.units.call
        """The latest call of all workers."""

    @property
    def replaying(self) -> bool:  # type: ignore[override]
        return self.link.replaying

    def unit(self, job: Callable[[], T]) -> T:
        return self.link.unit(job)

    def poll(self, own: Standing, polls: Polls, *, admit: bool) -> Decision | None:
        link, units, members = self.link, self.link.units, self.link.members
        if link.replaying:
            link.replay.begin_call(POLL)
            return Decision.unpack(link.replay.decided())
        units.call, units.heard = POLL, {}
        # a worker that does not come to the next poll is behind those that wait for it there
        members.is_at(CallPosition(units.serial + 1, shown(POLL)))
        if admit:
            link.admit(POLL)
        decision = self.decide(own, polls, admit)
        members.is_at(CallPosition(units.serial, shown(POLL)))
        if decision is not None and decision.kind != CALLS:  # silence is judged by rounds
            members.signs.begins(time.monotonic())
        units.collectives = 0 if decision is None else max(units.collectives, 1)
        if decision is not None and link.relays:
            units.outputs = [decision.pack()]
        return decision

    def decide(self, own: Standing, polls: Polls, admit: bool) -> Decision | None:
        """Say ``own``, hear what the others say, and decide."""
        link = self.link
        rows = link.gather(own.row()).tolist()
        standings = dict(zip(link.units.ranks, map(Standing.of, rows), strict=True))
        limit = link.members.limit
        if link.units.me in polls.overdue(standings, limit):
            raise LinkError(
                f"the others have waited for {limit:g} s in vain for this worker, whose training "
                "has not come to a round: they go on without it"
            )
        return polls.now(standings)

    def call(self, job: Callable[[], T]) -> T:
        link, units = self.link, self.link.units
        units.call = self._latest
        if link.rendezvous.link is not None:
            link.rendezvous.link.begin_digest(self._latest.digest)
        result = job()
        self._latest = units.call
        return result

    def note(self, decision: Decision) -> None:
        link = self.link
        if not link.replaying:
            link.units.note({"round": decision.as_json(), "serial": link.units.serial - 1})


class _Waiting(NamedTuple):
    """What a worker says in the poll of the unit ``serial``: ``own``. The rest is the same on all
    workers: see `Polling.poll`."""

    own: Standing
    serial: int
    active: Sequence[str]
    polls: Polls
    admit: bool


class ElasticPolls:
    """As `laconic.links.polls.SimulatedPolls`, where workers come and go."""

    def __init__(self, link: SimulatedElasticLink) -> None:
        self._cast = link.cast
        self._waiting: dict[int, _Waiting] = {}
        self._serial, self._decided = 0, Decision(CALLS)
        """The latest decision, and in which unit."""
        self._begun: set[int] = set()
        """The newcomers that take part, or did so."""
        self._cast.stage.when_idle.append(self._decide)

    def wait(self, me: int, waiting: _Waiting) -> Decision:
        """Wait, as worker ``me``, for what is decided."""
        stage = self._cast.stage
        if self._serial < waiting.serial:  # else a newcomer begins with it
            self._waiting[me] = waiting
            stage.runnable[me] = False
            stage.pass_turn(me)
            stage.take_turn(me)
        if self._serial != waiting.serial:
            raise stage.error()
        return self._decided

    def _decide(self) -> bool:
        """Decide what is next, if all workers wait. Returns whether there is something."""
        cast, waiting = self._cast, self._waiting
        if not waiting:
            return False
        one = next(iter(waiting.values()))
        present = self._left([int(id) for id in one.active], one.serial)
        if any(worker not in waiting for worker in present):
            return False
        found = self._next({str(worker): waiting[worker] for worker in present})
        if found is None and present:
            return False
        time, self._decided = found or (0.0, Decision(CALLS))  # where none is left, all end
        self._serial = one.serial
        joining = self._joining(one.serial, present) if one.admit else []
        self._begun.update(joining)
        if not cast.plan.recorded:
            cast.present_now = [*present, *joining]
        calls, roster = self._decided.kind == CALLS, self._decided.roster
        for worker in [w for w in present if calls or str(w) in roster] + joining:
            cast.stage.clocks[worker] = time
        for worker in waiting:
            cast.stage.runnable[worker] = True
        waiting.clear()
        return True

    def _left(self, active: Sequence[int], serial: int) -> list[int]:
        """Those of the ``active`` workers that take part in the unit ``serial``."""
        plan, waiting, gone = self._cast.plan, self._waiting, self._cast.stage.left
        active = [worker for worker in active if worker not in gone]
        if plan.recorded:
            return [w for w in active if w in plan.present(serial, POLL)]
        return [w for w in active if w not in waiting or not plan.killed(w, waiting[w].own.step)]

    def _joining(self, serial: int, present: Sequence[int]) -> list[int]:
        """The newcomers that begin with the unit ``serial``, to which a donor sends its state."""
        plan, fed = self._cast.plan, [w for w in self._cast.feeds if w not in self._begun]
        if plan.recorded:
            return [w for w in fed if w in plan.present(serial, POLL)]
        return [w for w in fed if self._cast.donors[w] in present]

    def _next(self, waiting: Mapping[str, _Waiting]) -> tuple[float, Decision] | None:
        """When these workers' next round closes, or call begins, and what is decided then."""
        if not waiting:
            return None
        one, plan = next(iter(waiting.values())), self._cast.plan
        said = {id: each.own for id, each in waiting.items()}
        decided = plan.decided(one.serial)
        if decided is not None:
            return max(-own.waited for own in said.values()), decided
        found = one.polls.next_closing(said)
        if found is None or (plan.recorded and found[1] != CALLS):
            return None
        return found[0], one.polls.close(said, found[1], found[0])


class SimulatedElasticPolling(ElasticPolling):
    """`ElasticPolling` where all decisions are those of `ElasticPolls`."""

    def __init__(self, link: SimulatedElasticLink) -> None:
        super().__init__(link)
        self._simulated = link

    def decide(self, own: Standing, polls: Polls, admit: bool) -> Decision:
        link, units = self._simulated, self.link.units
        stage = link.cast.stage
        stage.polls = shared = stage.polls or ElasticPolls(link)
        assert isinstance(shared, ElasticPolls), "workers come and go"
        at = units.serial, list(units.active), polls, admit
        decision = shared.wait(int(units.me), _Waiting(own, *at))
        link.rendezvous.adopt()  # raises if this worker has ended meanwhile
        units.attempt(units.active)
        link.rendezvous.take_part(units.active)
        link.deal([int(id) for id in units.active], units.serial)
        if admit:
            link.admit(POLL)
        return decision

    def clock(self, step: int) -> Clock:
        return VirtualClock(self._simulated.cast.stage, int(self.link.units.me), step)


def polling_over_elastic(link: ElasticLink) -> Polling:
    """How a worker of an elastic run polls."""
    if isinstance(link, SimulatedElasticLink):
        return SimulatedElasticPolling(link)
    return ElasticPolling(link)
