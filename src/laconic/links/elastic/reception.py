"""How newcomers and donors find each other."""

from __future__ import annotations

import socket
from collections.abc import Callable
from queue import SimpleQueue

from laconic.links.elastic.feed import Feed
from laconic.links.elastic.members import Members
from laconic.links.elastic.relay import Relay, RelayError, Service, call_donor


class Reception:
    """Where newcomers call this worker, at the socket ``service``; and where it calls, if it is a
    newcomer itself."""

    def __init__(self, members: Members, service: socket.socket) -> None:
        self._members, self._service = members, service
        self._waiting: SimpleQueue[Relay] = SimpleQueue()

    def open(self) -> None:
        """Answer newcomers from now on."""
        members = self._members
        self._waiting = Service(self._service, members.secret, members.add).waiting

    def callers(self, step: int) -> list[Relay]:
        """The newcomers that have called, and get the state after ``step`` steps."""
        found = []
        while not self._waiting.empty():
            found.append(self._waiting.get())
        return found

    def call_donor(self, number: int, awake: Callable[[], None]) -> Feed:
        """Ask a worker of the run for its state; ``number`` counts the attempts. ``awake``: see
        `Feed`. Raises `laconic.links.elastic.relay.RelayError`."""
        members = self._members
        latest = (members.registry.latest() or members.view).members
        donor = latest[number % len(latest)]

        def check() -> None:
            if members.view.place(donor.id) is None:
                raise RelayError(f"the run goes on without {donor.name}")

        stream = call_donor(donor, members.secret, members.me)
        return Feed(stream, donor.id, awake, check)

    def close(self) -> None:
        """Answer nobody from now on."""
        self._service.close()
