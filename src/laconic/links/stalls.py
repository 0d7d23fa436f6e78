"""Stalled connections: what one side sends does not arrive, though both processes live.

A firewall or a NAT that was started again does not know the open connections any more. It drops
their packets, or answers with a reset, and lets new connections pass. So a rank that waits for a
message while no byte moves asks the beacons of the ranks that it waits for whether they have sent
more than has come. If one has, and nothing has come by the next question, the connection is
stalled. The conversation with the beacon is a connection that works: both go on over it.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from laconic.links import health
from laconic.links.health import Again, Answer, LinkRecord, Request
from laconic.links.talks import EndedError

LOOK_SECONDS = 1.0
"""How often a rank that waits looks whether another one has made a connection again."""
QUIET_SECONDS, ASK_SECONDS = 10.0, 5.0
"""A rank asks the others after the first time in which no byte moved, and then after the second
each time. A network can lose all packets for some seconds."""
TRIES = 2
"""How often a connection is made again without a byte that moves."""
PIECE = 2**16
_POLL_MS = 200


class Counted(Protocol):
    """The connections of a link, as `laconic.links.connections.Connections` is."""

    def moved(self, rank: int, comes: bool) -> int:
        """How many bytes were sent to ``rank``, or have come from it."""


class Stalls:
    """Looks after the ``connections`` of ``rank``, which other ranks know by ``key``. ``numbers``:
    the ranks as beacons know them. ``others``: by rank, the address of its beacon, and its key."""

    def __init__(
        self,
        record: LinkRecord,
        key: str,
        rank: int,
        numbers: Sequence[int],
        others: Sequence[tuple[str, str]],
        connections: Counted,
    ) -> None:
        assert record.secret is not None, "the ranks have met"
        self._secret, self.rank, self._numbers = record.secret, rank, numbers
        self._others = others
        self._connections = weakref.ref(connections)  # closed when it is freed
        self.look_seconds = LOOK_SECONDS
        self.ended = False
        """Whether no message moves any more."""
        self.offered: dict[int, socket.socket] = {}
        """New connections that other ranks have made, by rank. Another thread adds them."""
        self._made: dict[int, tuple[tuple[int, int], int]] = {}
        self._came = threading.Event()
        self._promised: set[int] = set()
        self._doubts: dict[int, int] = {}
        """How many bytes a rank had received when it last asked, where more were sent."""
        self._ask_at = 0.0
        record.ends[key] = self

    # -- in the thread that moves messages ----

    def ask(self, ranks: Sequence[int], quiet: float) -> dict[int, Answer]:
        """The answers of those among the ``ranks`` to which the connection is stalled. No byte has
        moved for ``quiet`` seconds."""
        now = time.monotonic()
        if quiet < QUIET_SECONDS or now < self._ask_at:
            return {}
        self._ask_at = now + ASK_SECONDS
        return self.call(ranks)

    def call(self, ranks: Sequence[int], *, failed: bool = False) -> dict[int, Answer]:
        """As `ask`, at once. ``failed``: the connection has ended by an error."""
        connections = self._connections()
        assert connections is not None, "messages are under way"
        questions = []
        for r in ranks:
            address, key = self._others[r]
            again = Again(key, connections.moved(r, True), failed)
            number = self._numbers[self.rank]
            questions.append((address, self._secret, number, Request(again=again)))
        answers = health.ask_each(questions)
        return {r: answer for r, answer in zip(ranks, answers, strict=True) if answer.stalled}

    def in_vain(self, rank: int, positions: tuple[int, int]) -> bool:
        """The connection to ``rank`` is made again. ``positions``: how many bytes have come, and
        were received there. Returns whether it was so `TRIES` times, and nothing has moved."""
        before, times = self._made.get(rank, (positions, 0))
        self._made[rank] = positions, times + 1 if before == positions else 1
        return self._made[rank][1] > TRIES

    def exchange(
        self,
        connection: socket.socket,
        out: bytes,
        wanted: int,
        came: bytearray,
        give_up: Callable[[], bool],
    ) -> bool:
        """Send ``out`` over a new connection, and receive what comes into ``came``, at least until
        there are ``wanted`` bytes. Returns whether that worked within `QUIET_SECONDS`, and before
        ``give_up()``, which is called again and again. Raises `OSError`."""
        poll, left, until = select.poll(), memoryview(out), time.monotonic() + QUIET_SECONDS
        poll.register(connection, select.POLLIN)
        while len(left) or len(came) < wanted:
            if self.ended or time.monotonic() >= until or give_up():
                return False
            try:
                if len(left):
                    left = left[connection.send(left) :]
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                pass
            try:
                piece = connection.recv(PIECE)
                if not piece:
                    raise EndedError("closed by the other side")
                came += piece
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                poll.modify(connection, select.POLLIN | (select.POLLOUT if len(left) else 0))
                poll.poll(_POLL_MS)
        return True

    def wait(self) -> None:
        """Wait until a rank offers a connection, or until it is time to ask again."""
        self._came.wait(LOOK_SECONDS)
        self._came.clear()

    # -- in the beacon's thread ----

    def is_stalled(self, number: int, again: Again) -> bool:
        """Whether the connection to the rank with this ``number`` is stalled, which has asked
        ``again``."""
        connections = self._connections()
        if connections is None or self.ended or number not in self._numbers:
            return False
        rank = self._numbers.index(number)
        more = connections.moved(rank, False) > again.received
        stalled = again.failed or (more and self._doubts.get(rank) == again.received)
        self._doubts.pop(rank, None)
        if more:
            self._doubts[rank] = again.received
        if stalled:
            self._promised.add(rank)
        return stalled

    def take(self, number: int, connection: socket.socket) -> bool:
        """Take over a new connection, if that was promised."""
        rank = self._numbers.index(number) if number in self._numbers else -1
        if rank not in self._promised:
            return False
        self._promised.remove(rank)
        self.offered[rank] = connection
        self._came.set()
        return True
