"""Polls where workers come and go: a poll is the beginning of a unit, or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from laconic.errors import LinkError
from laconic.links.elastic.link import ElasticLink
from laconic.links.elastic.simulated import EndedError, SimulatedElasticLink
from laconic.links.polls import (
    CALLS,
    POLL,
    Clock,
    Decision,
    Polling,
    Polls,
    Standing,
    VirtualClock,
    said_in_poll,
)
from laconic.links.simulated import SimulatedLink
from laconic.tensors import packed, unpacked

T = TypeVar("T")


class ElasticPolling(Polling):
    """`Polling` over an elastic ``link``."""

    def __init__(self, link: ElasticLink) -> None:
        self.link: ElasticLink = link
        self.me = link.units.me
        self._latest = link.units.call
        """The latest call of all workers."""

    @property
    def ids(self) -> Sequence[str]:  # type: ignore[override]
        return self.link.ids

    @property
    def replaying(self) -> bool:  # type: ignore[override]
        return self.link.replaying

    def unit(self, job: Callable[[], T]) -> T:
        return self.link.unit(job)

    def poll(self, own: Standing, polls: Polls, *, admit: bool) -> Decision | None:
        link, units, members = self.link, self.link.units, self.link.members
        if link.replaying:
            link.replay.begin_call(POLL)
            return Decision.of(unpacked(link.replay.decided()))
        units.call, units.heard = POLL, {}
        # a worker that does not come to the next poll is behind those that wait for it there
        members.is_at(units.serial + 1, POLL)
        decision = self.decide(own, polls, admit)
        members.is_at(units.serial, POLL)
        if decision is not None and decision.kind != CALLS:  # silence is judged by rounds
            members.round_begins()
        units.collectives = 0 if decision is None else max(units.collectives, 1)
        if decision is not None and link.relays:
            units.outputs = [packed(vars(decision))]
        return decision

    def decide(self, own: Standing, polls: Polls, admit: bool) -> Decision | None:
        """Say ``own``, hear what the others say, and decide. Newcomers begin with it: ``admit``."""
        link = self.link
        if admit:
            link.admit(POLL)
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
            link.units.note({"round": vars(decision), "serial": link.units.serial - 1})


class SimulatedElasticPolling(ElasticPolling):
    """`ElasticPolling` of a simulated worker, which polls when it waits only: see
    `laconic.links.polls.SimulatedPolling`."""

    link: SimulatedElasticLink

    def decide(self, own: Standing, polls: Polls, admit: bool) -> Decision:
        link, units, cast = self.link, self.link.units, self.link.cast
        if units.active:  # else a newcomer begins with what the others have decided
            present = self._present()
            said = said_in_poll(SimulatedLink(cast.stage, int(self.me), present), own)
            if cast.polled_in != units.serial:
                standings = {str(w): each for w, each in zip(present, said, strict=True)}
                self._decide(standings, polls, admit)
        link.rendezvous.adopt()  # raises if this worker has ended meanwhile
        units.attempt(units.active)
        link.rendezvous.take_part(units.active)
        link.deal([int(id) for id in units.active], units.serial)
        if admit:
            link.admit(POLL)
        return cast.decision

    def _present(self) -> list[int]:
        """The workers that poll."""
        cast, units = self.link.cast, self.link.units
        active = [int(id) for id in units.active]
        if not cast.plan.recorded:
            return active
        present = cast.plan.present(units.serial, POLL)
        if int(self.me) not in present:
            raise EndedError
        return [worker for worker in active if worker in present]

    def _decide(self, said: Mapping[str, Standing], polls: Polls, admit: bool) -> None:
        """The first worker that knows what all have said decides who takes part, and in what."""
        cast, serial = self.link.cast, self.link.units.serial
        plan = cast.plan
        left = {id: s for id, s in said.items() if not plan.killed(int(id), s.step)}
        joining = [w for w in cast.feeds if w not in cast.begun] if admit else []
        if plan.recorded:
            joining = [w for w in joining if w in plan.present(serial, POLL)]
        else:
            joining = [w for w in joining if str(cast.donors[w]) in left]
            cast.present_now = [*map(int, left), *joining]
        cast.begun.update(joining)
        cast.polled_in = serial
        if not left:  # all end
            return
        until, cast.decision = self._next(left, polls)
        contribute = left if cast.decision.kind == CALLS else cast.decision.roster
        for worker in [*map(int, contribute), *joining]:
            cast.stage.clocks[worker] = until

    def _next(self, said: Mapping[str, Standing], polls: Polls) -> tuple[float, Decision]:
        """When these workers' next round closes, or call begins, and what is decided then."""
        plan = self.link.cast.plan
        decided = plan.decided(self.link.units.serial)
        if decided is not None:
            return max(-own.waited for own in said.values()), decided
        until, kind = polls.next_of_all(said)
        if plan.recorded and kind != CALLS:
            raise LinkError("a round with a quorum closes that is not in the trace")
        return until, polls.close(said, kind, until)

    def clock(self, step: int) -> Clock:
        return VirtualClock(self.link.cast.stage, int(self.link.units.me), step)


def polling_over_elastic(link: ElasticLink) -> Polling:
    """How a worker of an elastic run polls."""
    if isinstance(link, SimulatedElasticLink):
        return SimulatedElasticPolling(link)
    return ElasticPolling(link)
