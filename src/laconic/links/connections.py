"""The connections of a link, by rank, and the messages under way over them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import ssl
import struct
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from laconic.errors import LinkError
from laconic.links import congestion, forks, frames
from laconic.links.link import Sent
from laconic.links.sockets import tcp_info

_SENT = struct.Struct("=100xI16xQ28xI8xQ")  # total_retrans, bytes_acked, data_segs_out, busy_time
_RECEIVED = struct.Struct("=128xQ")  # bytes_received
_HEARD = struct.Struct("=52x2I")  # last_data_recv, last_ack_recv
_RETRIES = struct.Struct("=2x2B")  # retransmits and probes since the last acknowledgement
QUIET_SECONDS, LEAST_RETRIES = 10.0, 2
"""A connection is stalled if nothing has come for so long, and the system has sent the same so
often again. It does not where the other host has no room, since its process is slow: then it asks
whether there is some, and the host answers."""


class Connections(dict[int, socket.socket]):
    """Connected sockets, by rank. Closed when this object is freed. ``names``: the numbers of the
    ranks in errors. ``timeout``: seconds in which some byte must move."""

    traffic: Traffic | None = None
    """The messages that have begun, if not all of them are complete."""

    def __init__(self, names: Sequence[int], timeout: float) -> None:
        super().__init__()
        self.names, self.timeout = names, timeout
        self.secured: dict[int, ssl.SSLSocket] = {}
        """Those that use TLS, by file descriptor."""
        self.bbr: dict[int, congestion.Bbr] = {}
        """Of those whose congestion control it is, by rank."""
        self.answers: Callable[[int], bool] = lambda rank: False
        """Whether a rank answers over a new connection."""
        self._process = os.getpid()
        forks.close_in_child(self)

    def check_fork(self) -> None:
        """Raise `LinkError` in a forked child, whose copy was closed."""
        if os.getpid() != self._process:
            raise LinkError("a forked process cannot use its parent's link: start it with spawn")

    def keep(self, rank: int, connection: socket.socket, bbr: congestion.Bbr | None = None) -> None:
        """Take over the ``connection`` to ``rank``, which uses ``bbr``, if that was chosen."""
        connection.setblocking(False)
        self[rank] = connection
        if isinstance(connection, ssl.SSLSocket):
            self.secured[connection.fileno()] = connection
        if bbr is not None:
            self.bbr[rank] = bbr

    def received(self, rank: int) -> int:
        """How many bytes have come from ``rank``; 0 where the system does not report it. For any
        thread."""
        return sum(self._info(rank, _RECEIVED))

    def heard(self, rank: int) -> float:
        """Seconds since anything came from the host of ``rank``, acknowledgements included; 0 where
        the system does not report it."""
        return min(self._info(rank, _HEARD), default=0) / 1000

    def _info(self, rank: int, layout: struct.Struct) -> tuple[int, ...]:
        connection = self.get(rank)
        return () if connection is None else tcp_info(connection, layout)

    def forgotten(self) -> list[int]:
        """The ranks that answer over new connections, while nothing passes over those of now."""
        quiet = [rank for rank in self if self.heard(rank) >= QUIET_SECONDS]
        stalled = [r for r in quiet if max(self._info(r, _RETRIES), default=0) >= LEAST_RETRIES]
        return [rank for rank in stalled if self.answers(rank)]

    def sent(self) -> dict[int, Sent]:
        """What was sent to each rank so far; empty where the system does not report it."""
        found = {}
        for rank, connection in self.items():
            info = tcp_info(connection, _SENT)
            if not info:
                return {}
            again, acknowledged, packets, busy = info
            found[rank] = Sent(packets, again, acknowledged, busy / 1e6)
        return found

    def before_messages(self, ranks: Iterable[int]) -> None:
        """To be called before messages for ``ranks`` are sent, for which none are under way."""
        for rank in ranks:
            if rank in self.bbr:
                self.bbr[rank].before_message()

    def close(self) -> None:
        """Close all connections."""
        while self:
            _, connection = self.popitem()
            connection.close()

    def shutdown(self) -> None:
        """End all connections, here and at the other ranks, so that waiting threads return."""
        for connection in self.values():
            with contextlib.suppress(OSError):  # it has ended already
                # without TLS's closing message: a thread may be in a call
                socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def __del__(self) -> None:
        self.close()


class Traffic:
    """Messages under way over some connections, in the order in which they began. Every message
    follows the one before it on the same connection in the same direction."""

    def __init__(self) -> None:
        self.messages = frames.array(0)()
        self.ranks: list[int] = []
        """The rank that each message is for, or comes from."""
        self.latest: dict[tuple[int, bool], int] = {}
        """The last message by rank, and by whether it comes from there."""
        self.transfers = 0
        """How many `Transfer` are not complete."""
        self.tensors: list[Tensor] = []
        """Bytes of all messages move in any of the transfers, so all of their memory is kept."""
        self.failure: Callable[[], Exception] | None = None
        """Makes the error that has ended them."""

    def is_complete(self, index: int) -> bool:
        """Whether a message has moved as a whole; -1: there is none."""
        return index < 0 or frames.is_complete(self.messages[index])

    def grow(self, count: int) -> None:
        """Make room for ``count`` more messages."""
        before = self.messages
        self.messages = frames.array(len(before) + count)()
        ctypes.memmove(self.messages, before, ctypes.sizeof(before))
