"""How newcomers and donors find each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from laconic.links import handshake, secured
from laconic.links.addresses import Address
from laconic.links.elastic.feed import Feed
from laconic.links.elastic.members import Members
from laconic.links.elastic.relay import PIECE, PURPOSE, Relay, RelayError, Stream
from laconic.links.elastic.units import Units
from laconic.links.elastic.view import View
from laconic.links.health import Beacon
from laconic.links.sockets import limit_unsent
from laconic.links.talks import Talk, converse

HANDSHAKE_SECONDS = 5.0


class Reception:
    """Where newcomers call this worker, at its ``beacon``; and where it calls, if it is a newcomer
    itself. ``units``: see `Relay`."""

    def __init__(self, members: Members, beacon: Beacon, units: Units) -> None:
        self._members, self._units = members, units
        self._feed: Feed | None = None
        self._waiting: SimpleQueue[Relay] = SimpleQueue()
        beacon.others[PURPOSE] = self._enter

    def callers(self, step: int) -> list[Relay]:
        """The newcomers that have called, and get the state after ``step`` steps."""
        found = list[Relay]()
        while not self._waiting.empty():
            found.append(self._waiting.get())
        return found

    def call_donor(self, number: int, look: Callable[[], None]) -> Feed:
        """Ask a worker of the run for its state; ``number`` counts the attempts. Whoever waits for
        its frames calls ``look()`` now and then. Raises
        `laconic.links.elastic.relay.RelayError`."""
        members = self._members
        latest = members.view.members
        donor = latest[(int(members.me.id, 16) + number) % len(latest)]  # newcomers spread

        def check() -> None:
            look()
            if donor.id not in members.view.ids:
                raise RelayError(f"the run goes on without {donor.name}")

        host, port, key = Address.parse(donor.beacon)
        say = members.client.secret, PURPOSE, bytes.fromhex(key), 0
        exchange = partial(handshake.call, *say, View(1, (members.me,)).pack().encode())
        try:
            connection = converse(host, port, exchange, HANDSHAKE_SECONDS)
        except (OSError, handshake.RefusedError) as error:
            raise RelayError(str(error)) from error
        self._feed = Feed(Stream(connection), donor.id, check)
        return self._feed

    def close(self) -> None:
        """Ask nobody from now on."""
        if self._feed is not None:
            self._feed.close()

    def end(self, until: float) -> None:
        """As `close`, and wait until the time ``until`` for the thread of a donor's frames."""
        self.close()
        if self._feed is not None:
            self._feed.join(until)

    def _enter(self, talk: Talk) -> None:
        """A newcomer has called."""
        try:
            newcomer = View.unpack(talk.result[handshake.HELLO_BYTES :].decode()).members[0]
        except ValueError:  # of another version
            return
        talk.kept = True
        limit_unsent(talk.connection, PIECE)  # or it takes in MiB, and sends them beside a round
        stream = Stream(secured.Stream(talk.connection))
        self._waiting.put(Relay(newcomer, stream, self._members.add, self._units))
