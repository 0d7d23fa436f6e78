"""How newcomers and donors find each other."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from laconic.links.elastic.feed import Feed
from laconic.links.elastic.members import Members
from laconic.links.elastic.relay import Relay, RelayError, Service, bequeath, call_donor
from laconic.links.elastic.relay_frames import Bequest
from laconic.links.elastic.units import Units

log = logging.getLogger("laconic")


class Reception:
    """Where newcomers call this worker, at the socket ``service``; and where it calls, if it is a
    newcomer itself. ``units``: see `laconic.links.elastic.turns.Turns`."""

    def __init__(self, members: Members, service: socket.socket, units: Units) -> None:
        self._members, self._service, self._units = members, service, units
        self._answering: Service | None = None
        self._feed: Feed | None = None
        self._waiting: SimpleQueue[Relay] = SimpleQueue()
        self._bequests: SimpleQueue[tuple[str, Bequest]] = SimpleQueue()

    def open(self) -> None:
        """Answer newcomers from now on."""
        members = self._members
        service = Service(self._service, members.secret, members.add, self._units)
        self._answering = service
        self._waiting, self._bequests = service.waiting, service.bequests

    def callers(self, step: int) -> list[Relay]:
        """The newcomers that have called, and get the state after ``step`` steps."""
        found = []
        while not self._waiting.empty():
            found.append(self._waiting.get())
        return found

    def leaves(self, step: int) -> bool:
        """Whether this worker is to leave after ``step`` by a plan."""
        return False

    def bequests(self, step: int) -> list[tuple[str, Bequest]]:
        """What workers have sent that left, with their ids, to be taken over after ``step``."""
        found = []
        while not self._bequests.empty():
            found.append(self._bequests.get())
        return found

    def bequeath(self, bequest: Bequest, heirs: Sequence[str], step: int) -> None:
        """Send ``bequest`` to the first of the ``heirs`` that takes it. This worker has left after
        ``step``."""
        members = self._members
        for heir in (m for id in heirs for m in members.view.members if m.id == id):
            try:
                bequeath(heir, members.secret, members.me, bequest)
                return
            except RelayError as error:
                log.info("%s does not take over what this worker holds: %s", heir.name, error)

    def call_donor(self, number: int, awake: Callable[[], None]) -> Feed:
        """Ask a worker of the run for its state; ``number`` counts the attempts. ``awake``: see
        `Feed`. Raises `laconic.links.elastic.relay.RelayError`."""
        members = self._members
        latest = members.view.members
        donor = latest[(int(members.me.id, 16) + number) % len(latest)]  # newcomers spread

        def check() -> None:
            if members.view.place(donor.id) is None:
                raise RelayError(f"the run goes on without {donor.name}")

        stream = call_donor(donor, members.secret, members.me)
        self._feed = Feed(stream, donor.id, awake, check)
        return self._feed

    def close(self) -> None:
        """Answer nobody from now on, and ask nobody."""
        if self._feed is not None:
            self._feed.close()
        if self._answering is None:
            self._service.close()
        else:
            self._answering.close()

    def end(self, until: float) -> None:
        """As `close`, and wait until the time ``until`` for the thread of a donor's frames."""
        self.close()
        if self._feed is not None:
            self._feed.join(until)
