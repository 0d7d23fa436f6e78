"""How newcomers and donors find each other."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TypeVar

from laconic.links import handshake, secured
from laconic.links.elastic.feed import Feed
from laconic.links.elastic.members import Members
from laconic.links.elastic.relay import (
    BEQUEST,
    HANDSHAKE_SECONDS,
    PIECE,
    PURPOSE,
    READY,
    Relay,
    RelayError,
    Stream,
    bequeath,
    call_donor,
)
from laconic.links.elastic.relay_frames import Bequest
from laconic.links.elastic.units import Units
from laconic.links.elastic.view import View
from laconic.links.talks import Service, Talk

T = TypeVar("T")
log = logging.getLogger("laconic")

_NOT_SENT = getattr(socket, "TCP_NOTSENT_LOWAT", None)  # not on Windows


class Reception:
    """Where newcomers call this worker, at the socket ``server``, answered by a thread of its own;
    and where it calls, if it is a newcomer itself. ``units``: see `Relay`."""

    def __init__(self, members: Members, server: socket.socket, units: Units) -> None:
        self._members, self._units = members, units
        self._feed: Feed | None = None
        self._waiting: SimpleQueue[Relay] = SimpleQueue()
        self._bequests: SimpleQueue[tuple[str, Bequest]] = SimpleQueue()
        at = "laconic-service", [server], self._exchange, HANDSHAKE_SECONDS, self._answered
        self._service = Service(*at)

    def open(self) -> None:
        """Answer newcomers from now on."""
        self._service.open()

    def callers(self, step: int) -> list[Relay]:
        """The newcomers that have called, and get the state after ``step`` steps."""
        return _taken(self._waiting)

    def leaves(self, step: int) -> bool:
        """Whether this worker is to leave after ``step`` by a plan."""
        return False

    def bequests(self, step: int) -> list[tuple[str, Bequest]]:
        """What workers have sent that left, with their ids, to be taken over after ``step``."""
        return _taken(self._bequests)

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
        if hello.why == BEQUEST:
            at = hello.members[0].id, stream
            threading.Thread(target=self._inherit, args=at, daemon=True).start()
            return
        if _NOT_SENT is not None:  # else the kernel takes in MiB, and sends them beside a round
            with contextlib.suppress(OSError):  # it has ended already
                talk.connection.setsockopt(socket.IPPROTO_TCP, _NOT_SENT, PIECE)
        self._waiting.put(Relay(hello.members[0], stream, self._members.add, self._units))

    def _inherit(self, id: str, stream: Stream) -> None:
        try:
            frame = stream.receive()
            if isinstance(frame, Bequest):
                self._bequests.put((id, frame))
                stream.say(READY)
        except RelayError as error:
            log.info("what %s held was not taken over: %s", id, error)
        finally:
            stream.close()


def _taken(waiting: SimpleQueue[T]) -> list[T]:
    found = []
    while not waiting.empty():
        found.append(waiting.get())
    return found
