"""How newcomers and donors find each other."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable
from queue import SimpleQueue

from laconic.links import handshake, secured
from laconic.links.elastic.feed import Feed
from laconic.links.elastic.members import Members
from laconic.links.elastic.relay import (
    HANDSHAKE_SECONDS,
    PIECE,
    PURPOSE,
    Relay,
    RelayError,
    Stream,
    call_donor,
)
from laconic.links.elastic.units import Units
from laconic.links.elastic.view import View
from laconic.links.talks import Service, Talk

log = logging.getLogger("laconic")

_NOT_SENT = getattr(socket, "TCP_NOTSENT_LOWAT", None)  # not on Windows


class Reception:
    """Where newcomers call this worker, at the socket ``server``, answered by a thread of its own;
    and where it calls, if it is a newcomer itself. ``units``: see `Relay`."""

    def __init__(self, members: Members, server: socket.socket, units: Units) -> None:
        self._members, self._units = members, units
        self._feed: Feed | None = None
        self._waiting: SimpleQueue[Relay] = SimpleQueue()
        at = "laconic-service", [server], self._exchange, HANDSHAKE_SECONDS, self._answered
        self._service = Service(*at)

    def open(self) -> None:
        """Answer newcomers from now on."""
        self._service.open()

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
            if members.view.place(donor.id) is None:
                raise RelayError(f"the run goes on without {donor.name}")

        stream = call_donor(donor, members.secret, members.me)
        self._feed = Feed(stream, donor.id, check)
        return self._feed

    def close(self) -> None:
        """Answer nobody from now on, and ask nobody."""
        if self._feed is not None:
            self._feed.close()
        self._service.close()

    def end(self, until: float) -> None:
        """As `close`, and wait until the time ``until`` for the thread of a donor's frames."""
        self.close()
        if self._feed is not None:
            self._feed.join(until)

    # -- who calls ----

    def _exchange(self) -> handshake.Exchange:
        return handshake.answer(PURPOSE, lambda key: self._members.secret, self._welcome)

    def _welcome(self, hello: handshake.Hello, text: bytes) -> bytes:
        View.unpack(text.decode())
        return b""

    def _answered(self, talk: Talk, error: Exception | None) -> None:
        if error is not None:
            return
        talk.kept = True
        stream = Stream(secured.waiting(talk.connection))
        hello = View.unpack(talk.result[handshake.HELLO_BYTES :].decode())
        if _NOT_SENT is not None:  # else the kernel takes in MiB, and sends them beside a round
            with contextlib.suppress(OSError):  # it has ended already
                talk.connection.setsockopt(socket.IPPROTO_TCP, _NOT_SENT, PIECE)
        self._waiting.put(Relay(hello.members[0], stream, self._members.add, self._units))
