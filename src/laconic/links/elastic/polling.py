"""Polls over an elastic link: see `laconic.links.quorum.polls`."""

from __future__ import annotations

import time

from laconic.errors import LinkError
from laconic.links.calls import Call, CallPosition
from laconic.links.elastic.link import ElasticLink
from laconic.links.health import shown
from laconic.links.quorum.polls import CALLS, POLL, Decision, Polls, Standing
from laconic.links.quorum.tcp import Clock


class Polling:
    """What a worker does for rounds with a quorum over its ``link``."""

    def __init__(self, link: ElasticLink) -> None:
        self.link = link

    def poll(self, own: Standing, polls: Polls, *, admit: bool) -> Decision | None:
        """Begin a unit with a poll, in which this worker says ``own``. None: there is nothing to do
        yet, and the unit does not count. ``admit``: newcomers take part from now on."""
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
        standings = polls.standings(link.units.ranks, link.gather(own.row()))
        found, limit = polls.next_closing(standings), link.members.limit
        if link.units.me in polls.overdue(standings, limit):
            raise LinkError(
                f"the others have waited for {limit:g} s in vain for this worker, whose training "
                "has not come to a round: they go on without it"
            )
        return None if found is None or found[0] > 0 else polls.close(standings, found[1], 0.0)

    def resume(self, call: Call) -> None:
        """Go on with ``call`` after a poll."""
        self.link.units.call = call
        if self.link.rendezvous.link is not None:
            self.link.rendezvous.link.begin_digest(call.digest)

    def clock(self, step: int) -> Clock:
        """The time of this worker, which has taken ``step`` steps so far."""
        return Clock()
