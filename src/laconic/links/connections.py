"""The connections of a link, by rank, and the messages under way over them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import ssl
import struct
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from laconic.links import congestion, forks, frames
from laconic.links.link import Sent
from laconic.links.sockets import borrowed, tcp_info, unacknowledged
from laconic.links.stalls import Stalls

_SENT = struct.Struct("=100xI16xQ28xI8xQ")  # total_retrans, bytes_acked, data_segs_out, busy_time
SPARE = 2**19
"""How many more bytes are kept than the other host has not acknowledged: TLS takes in whole records
only, and a proxy acknowledges what it may lose."""


class Kept:
    """The last bytes that were sent, up to byte ``end``."""

    def __init__(self) -> None:
        self.end, self._data = 0, bytearray()

    def add(self, end: int, data: bytes, most: int) -> None:
        """The next bytes up to ``end``, of which ``data`` are the last. ``most``: how many are
        enough."""
        if end - self.end > len(data):
            self._data.clear()
        self._data += data
        del self._data[: max(len(self._data) - most, 0)]
        self.end = end

    def since(self, position: int) -> bytes | None:
        """All from byte ``position`` on; None if it was not kept."""
        start = len(self._data) - (self.end - position)
        return None if start < 0 else bytes(self._data[start:])


class Connections(dict[int, int]):
    """The file descriptors of connected sockets, by rank. Closed when this object is freed."""

    traffic: Traffic | None = None
    """The messages that have begun, if not all of them are complete."""

    def __init__(self) -> None:
        super().__init__()
        self.secured: dict[int, ssl.SSLSocket] = {}
        """Those that use TLS, by file descriptor."""
        self.bbr: dict[int, congestion.Bbr] = {}
        """Those whose congestion control is BBR, by file descriptor."""
        self.stalls: Stalls | None = None
        self.totals: dict[tuple[int, bool], int] = {}
        """How many bytes have moved before the messages under way, by rank, and by whether they
        have come from there."""
        self.early: dict[int, bytearray] = {}
        """What was read from an earlier connection before its messages were due, by rank."""
        self._kept: dict[int, Kept] = {}
        """What may have to be sent again of messages whose memory may change, by the rank that they
        are for."""
        self._process = os.getpid()
        forks.close_in_child(self)

    @property
    def forked(self) -> bool:
        """Whether this is a forked child's copy, which was closed."""
        return os.getpid() != self._process

    def keep(self, rank: int, connection: socket.socket) -> None:
        """Take over the connection to ``rank``, in place of an earlier one."""
        connection.setblocking(False)
        bbr = congestion.Bbr.of(connection)
        before = self.get(rank)
        with forks.guard:
            if isinstance(connection, ssl.SSLSocket):
                self[rank] = fd = connection.fileno()
                self.secured[fd] = connection
            else:
                self[rank] = connection.detach()
        if bbr is not None:
            self.bbr[self[rank]] = bbr
        if before is not None:
            self._close(before)

    # -- what has moved, over one connection after another ----

    def moved(self, rank: int, comes: bool) -> int:
        """How many bytes were sent to ``rank``, or have come from it (``comes``). For any
        thread."""
        traffic, total = self.traffic, self.totals.get((rank, comes), 0)
        if traffic is not None:
            at = zip(traffic.ranks, traffic.messages, strict=False)
            total += sum(m.moved for r, m in at if r == rank and bool(m.comes) == comes)
        return total + (len(self.early.get(rank, b"")) if comes else 0)

    def feed(self) -> tuple[int, int, int]:
        """Take in what was read early. Returns what `frames.move` does."""
        traffic = self.traffic
        for rank, data in self.early.items():
            for i, r in enumerate(traffic.ranks if traffic is not None and data else ()):
                assert traffic is not None
                if r == rank and traffic.messages[i].comes:
                    outcome = frames.feed(traffic.messages[i], data)
                    if outcome != frames.FINE:
                        return outcome, i, 0
        return frames.FINE, 0, 0

    def release(self, traffic: Traffic, messages: Mapping[int, int]) -> None:
        """The memory of these ``messages``, which were sent, may change, by rank: keep what may
        have to be sent again."""
        for rank, index in messages.items():
            message, most = traffic.messages[index], SPARE + unacknowledged(self[rank])
            data = frames.sent_bytes(message, max(message.moved - most, 0))
            if rank not in self._kept:
                self._kept[rank] = Kept()
            self._kept[rank].add(traffic.starts[index] + message.moved, data, most)

    def drain(self, rank: int) -> int:
        """Read what the system has received over the connection to ``rank``, which is used no more.
        Returns how many bytes have come from there in all."""
        fd, early = self[rank], self.early.setdefault(rank, bytearray())
        with borrowed(fd) as plain, contextlib.suppress(OSError):  # there is nothing, or no more
            while piece := self.secured.get(fd, plain).recv(2**16):
                early += piece
        return self.moved(rank, True)

    def kept(self, rank: int, position: int) -> bytes | None:
        """What was sent to ``rank`` from byte ``position`` on and is no message under way; None if
        it was not kept."""
        kept = self._kept.get(rank, Kept())
        return kept.since(position)

    def go_on(self, rank: int, connection: socket.socket, position: int) -> None:
        """Messages go on over another connection to ``rank``, where all up to ``position`` has
        come, or was sent again."""
        self.keep(rank, connection)
        traffic, fd = self.traffic, self[rank]
        assert traffic is not None, "a message waits"
        end = self._kept[rank].end if rank in self._kept else 0
        for r, message, start in zip(traffic.ranks, traffic.messages, traffic.starts, strict=True):
            if r != rank:
                continue
            message.fd = fd
            if not message.comes and start >= end:
                message.moved = min(message.moved, max(position - start, 0))

    def sent(self) -> dict[int, Sent]:
        """What was sent to each rank so far; empty where the system does not report it."""
        found = {}
        for rank, fd in self.items():
            info = tcp_info(fd, _SENT)
            if not info:
                return {}
            again, acknowledged, packets, busy = info
            found[rank] = Sent(packets, again, acknowledged, busy / 1e6)
        return found

    def before_messages(self, ranks: Iterable[int]) -> None:
        """To be called before messages for ``ranks`` are sent, for which none are under way."""
        if not self.bbr:
            return
        for fd in (self[rank] for rank in ranks):
            if fd in self.bbr:
                self.bbr[fd].before_message(fd)

    def close(self) -> None:
        """Close all connections."""
        if self.stalls is not None:
            self.stalls.ended = True
        while self:
            self._close(self.popitem()[1])

    def _close(self, fd: int) -> None:
        self.bbr.pop(fd, None)
        secured = self.secured.pop(fd, None)
        if secured is None:
            os.close(fd)
        else:
            secured.close()

    def shutdown(self) -> None:
        """End all connections, here and at the other ranks, so that waiting threads return."""
        if self.stalls is not None:
            self.stalls.ended = True
        for fd in self.values():
            with borrowed(fd) as connection, contextlib.suppress(OSError):  # it has ended already
                connection.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        self.close()


class Traffic:
    """Messages under way over some connections, in the order in which they began. Every message
    follows the one before it on the same connection in the same direction."""

    def __init__(self) -> None:
        self.messages = frames.array(0)()
        self.ranks: list[int] = []
        """The rank that each message is for, or comes from."""
        self.starts: list[int] = []
        """How many bytes were sent to that rank, or came from it, before each message."""
        self.ends: dict[tuple[int, bool], int] = {}
        """How many will have been after all of these messages, as in `Connections.totals`."""
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
