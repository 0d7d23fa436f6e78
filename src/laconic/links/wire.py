"""Messages between the ranks of a link: one TCP connection for each pair of ranks, and no thread.

The thread that makes a link's calls copies the bytes itself, between tensors and the kernel's
buffers, and sleeps while there is nothing to copy. gloo has a thread for this, which wakes up
several times for each message and then wakes the caller. With 4 ranks on 2 cores that was half of
the processor time of a round.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import ClassVar

from torch import Tensor

from laconic import native
from laconic.errors import LinkError
from laconic.links import forks, handshake
from laconic.links.addresses import Address
from laconic.links.connect import Connecting

VERSION = 4
"""The version that ``wire.c`` must have."""

_HEADER = struct.Struct("=QQQ")  # the sender's call (serial, id), and how many bytes follow
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 5}
"""A connection ends after 30 s in which the other host acknowledged none of 5 probes. That is long
enough for a saturated network. The kernel of a stopped process still acknowledges them."""
_HANG_UP = getattr(select, "POLLRDHUP", 0)  # only Linux reports it before everything was read
_INFO = struct.Struct("=52x2I")  # struct tcp_info up to tcpi_last_data_recv, tcpi_last_ack_recv

_FINE, _SILENT, _CLOSED, _OTHER, _FAILED, _INTERRUPTED = range(6)
_ALL, _AT_ONCE = -1, -2


class OtherCallError(LinkError):
    """A message from ``rank``, called ``name``, is of another call than this rank is in, according
    to its ``header``, or of another length."""

    def __init__(
        self, rank: int, name: int, header: tuple[int, int], size: int, expected: int
    ) -> None:
        super().__init__(f"rank {name} has sent {size} bytes where {expected} are due")
        self.rank = rank
        self.header = header


class LostError(RuntimeError):
    """A connection is closed, or nothing came over it for too long. Not an ``OSError``: a signal
    handler that runs during the wait may raise one for reasons of its own."""


class _Message(ctypes.Structure):
    """One message, and how many of its bytes have moved; ``struct message`` in ``wire.c``."""

    _fields_: ClassVar = [
        ("header", ctypes.c_ubyte * _HEADER.size),
        ("got", ctypes.c_ubyte * _HEADER.size),
        ("payload", ctypes.c_void_p),
        ("end", ctypes.c_int64),
        ("ready", ctypes.c_int64),
        ("done", ctypes.c_int64),
        ("fd", ctypes.c_int32),
        ("comes", ctypes.c_int32),
    ]


_BEGUN = struct.Struct(f"@QQQ{_HEADER.size}xPqqqii")
"""Writes all fields of a `_Message` at once, in a tenth of the time."""
assert _BEGUN.size == ctypes.sizeof(_Message), "laid out as the compiler does"


class Connections(dict[int, int]):
    """The file descriptors of connected sockets, by rank. Closed when this object is freed."""

    busy = False
    """Whether a message has begun and not ended: no other can follow."""

    def __init__(self) -> None:
        super().__init__()
        self._process = os.getpid()
        forks.close_in_child(self)

    @property
    def forked(self) -> bool:
        """Whether this is a forked child's copy, which was closed."""
        return os.getpid() != self._process

    def keep(self, rank: int, connection: socket.socket) -> None:
        """Take over the connection to ``rank``, in place of an earlier one."""
        connection.setblocking(False)
        before = self.get(rank)
        with forks.guard:
            self[rank] = connection.detach()
        if before is not None:
            os.close(before)

    def close(self) -> None:
        """Close all connections."""
        while self:
            os.close(self.popitem()[1])

    def shutdown(self) -> None:
        """End all connections, here and at the other ranks, so that threads that wait return."""
        for fd in self.values():
            borrowed = socket.socket(fileno=fd)
            try:
                borrowed.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it has ended already
            finally:
                borrowed.detach()

    def __del__(self) -> None:
        self.close()


class Transfer:
    """Messages under way: ``sends[r]`` to rank r, and from rank r into ``receives[r]``. The tensors
    are contiguous and on the CPU, and must not be used meanwhile.

    If not ``ready``, `send` says how much of each can be sent. Bytes move inside `wait`, except
    those that the kernel accepts at once. The last `wait` must be for all messages. Raises
    `LinkError` if an earlier message was not completed.
    """

    def __init__(
        self,
        connections: Connections,
        sends: Mapping[int, Tensor],
        receives: Mapping[int, Tensor],
        header: tuple[int, int],
        timeout: float,
        names: Sequence[int],
        *,
        ready: bool = True,
    ) -> None:
        if connections.forked:
            raise LinkError("a forked process cannot use its parent's link: start it by spawn")
        if connections.busy:
            raise LinkError("a message on this link was left half-way: it cannot be used any more")
        self.connections = connections  # as all of these, held while messages are under way
        self._tensors = [*receives.values(), *sends.values()]
        self._ranks = [*receives, *sends]
        self._indices = {r: index for index, r in enumerate(receives)}
        self._timeout = timeout
        self.names = names
        self._messages = (_Message * len(self._ranks))()
        for index, (r, x) in enumerate(zip(self._ranks, self._tensors, strict=True)):
            if not x.is_contiguous() or x.device.type != "cpu":
                raise ValueError(
                    f"a message is contiguous and on the CPU, not {x.device} {x.stride()}"
                )
            size, comes = x.numel() * x.element_size(), index < len(receives)
            end = _HEADER.size + size
            begun = (*header, size, x.data_ptr(), end, end if ready or comes else 0, 0)
            _BEGUN.pack_into(self._messages, index * _BEGUN.size, *begun, connections[r], comes)
        connections.busy = True
        self._move(_AT_ONCE)

    def send(self, rank: int, size: int) -> None:
        """The first ``size`` bytes of what is for ``rank`` are ready now, and can be sent."""
        index = len(self._indices) + self._ranks[len(self._indices) :].index(rank)
        self._messages[index].ready = _HEADER.size + size
        self._move(_AT_ONCE)

    def wait(self, rank: int | None = None, size: int | None = None) -> None:
        """Wait for the first ``size`` bytes (None: all) from ``rank``; without a rank, until all
        messages have come and are sent. Raises `LostError` if a connection is lost, or no byte
        moves for ``timeout`` seconds, and `OtherCallError`."""
        if rank is None:
            assert all(m.ready == m.end for m in self._messages), "a message is not ready"
            self._move(_ALL)
            self.connections.busy = False
        else:
            index = self._indices[rank]
            end = self._messages[index].end
            self._move(index, end if size is None else _HEADER.size + size)

    def _move(self, until: int, enough: int = 0) -> None:
        outcome, left = _INTERRUPTED, self._timeout
        while outcome == _INTERRUPTED and left > 0:  # Python's own handlers run in between
            start = time.monotonic()
            milliseconds = min(max(round(1000 * left), 1), 2**31 - 1)
            outcome, index, error = _move(self._messages, until, enough, milliseconds)
            if outcome == _INTERRUPTED:
                moved = index  # whether any did
                left = self._timeout if moved else left - (time.monotonic() - start)
        if outcome == _FINE:
            return
        if outcome in (_SILENT, _INTERRUPTED):
            raise LostError(f"nothing was sent or received for {self._timeout:g} s")
        rank, message = self._ranks[index], self._messages[index]
        if outcome == _OTHER:
            serial, call_id, size = _HEADER.unpack(message.got)
            expected = message.end - _HEADER.size
            raise OtherCallError(rank, self.names[rank], (serial, call_id), size, expected)
        why = "closed by it" if outcome == _CLOSED else os.strerror(error)
        raise LostError(f"connection to rank {self.names[rank]}: {why}")


def _move(
    messages: ctypes.Array[_Message], until: int, enough: int, timeout: int
) -> tuple[int, int, int]:
    """Move bytes until ``enough`` of message ``until`` have moved; `_ALL`: all messages;
    `_AT_ONCE`: what can move without waiting. Gives up ``timeout`` ms after the last byte. Returns
    the outcome, the index of the message that it is about (`_INTERRUPTED`: 1 if bytes moved, else
    0), and the system's error number."""
    compiled = library()
    if compiled is None:
        return _move_interpreted(messages, until, enough, timeout)
    which, error = ctypes.c_int64(), ctypes.c_int()
    outcome = compiled.laconic_move(
        *(messages, len(messages), until, enough, timeout),
        *(ctypes.byref(which), ctypes.byref(error)),
    )
    return outcome, which.value, error.value


@cache
def library() -> ctypes.CDLL | None:
    """The compiled ``wire.c``, if there is one that can be used."""
    found = native.load("laconic.links._wire", VERSION)
    if found is not None:
        found.laconic_move.argtypes = [
            *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int),
            *(ctypes.c_void_p, ctypes.c_void_p),
        ]
    return found


def _move_interpreted(
    messages: ctypes.Array[_Message], until: int, enough: int, timeout: int
) -> tuple[int, int, int]:
    """As ``laconic_move``, where it was not compiled."""
    while True:
        waiting = [i for i, message in enumerate(messages) if message.done < message.ready]
        if not waiting or (until >= 0 and messages[until].done >= enough):
            return _FINE, 0, 0
        asked: dict[int, int] = {}
        for i in waiting:
            event = select.POLLIN if messages[i].comes else select.POLLOUT
            asked[messages[i].fd] = asked.get(messages[i].fd, 0) | event
        poll = select.poll()
        for fd, events in asked.items():
            poll.register(fd, events)
        ready = dict(poll.poll(0 if until == _AT_ONCE else timeout))
        for i in waiting:
            if messages[i].fd in ready:
                outcome, error = _step(messages[i])
                if outcome != _FINE:
                    return outcome, i, error
        if until == _AT_ONCE or not ready:
            return (_FINE if until == _AT_ONCE else _SILENT), 0, 0


def _step(message: _Message) -> tuple[int, int]:
    """Move what can move without waiting."""
    size = message.ready - _HEADER.size
    payload = (ctypes.c_ubyte * size).from_address(message.payload) if size else bytearray()
    parts = (memoryview(message.got if message.comes else message.header), memoryview(payload))
    both = [part.cast("B") for part in parts]
    while message.done < message.ready:
        start = message.done
        left = [both[0][start:], both[1][max(start - _HEADER.size, 0) :]]
        try:
            moved = (os.readv if message.comes else os.writev)(message.fd, left)
        except BlockingIOError:
            break
        except OSError as error:
            return _FAILED, error.errno or 0
        if not moved:
            return _CLOSED, 0
        message.done += moved
        if (
            message.comes
            and start < _HEADER.size <= message.done
            and bytes(both[0]) != bytes(message.header)
        ):
            return _OTHER, 0
    return _FINE, 0


def configure(connection: socket.socket) -> None:
    """Set the options of a connection for messages."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if name in vars(socket):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, vars(socket)[name], value)


class Wire:
    """The connections of rank ``rank`` of a link to all other ranks. ``host``: its own address;
    ``names``: what ranks are called in errors. Every rank sends the others its `address` before it
    calls `connect`."""

    def __init__(self, rank: int, host: str, timeout: float, names: Sequence[int]) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with forks.guard:
            self._server = socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN)
            forks.close_in_child(self._server)
        self._rank = rank
        self.timeout = timeout
        self.names = names
        self._key = secrets.token_bytes(handshake.KEY_BYTES)
        self.connections = Connections()
        self.address = str(Address(host, self._server.getsockname()[1], self._key.hex()))

    def connect(self, addresses: Sequence[str], secret: bytes, check: Callable[[], None]) -> None:
        """Connect to all ranks, at their ``addresses``. All of them know the ``secret``, and prove
        it to each other. ``check()`` is called every second, and raises where waiting is in
        vain."""
        at = self._rank, self.names, self._key, secret, self.timeout, self._keep
        try:
            with self._server:
                Connecting(*at).run(self._server, addresses, check)
        except BaseException:
            self.connections.close()  # else other ranks wait as long as the error lives
            raise

    def _keep(self, rank: int, connection: socket.socket) -> None:
        configure(connection)
        self.connections.keep(rank, connection)

    @property
    def forked(self) -> bool:
        """Whether this is a child's copy, whose connections were closed."""
        return self.connections.forked

    def closed(self) -> dict[int, bool]:
        """The ranks whose connections have ended, and whether by an error. Does not wait, and does
        not read, so messages under way are not disturbed."""
        poll, ranks = select.poll(), {}
        for rank, fd in self.connections.items():
            poll.register(fd, _HANG_UP)
            ranks[fd] = rank
        ended = select.POLLHUP | select.POLLERR | _HANG_UP
        return {
            ranks[fd]: bool(events & select.POLLERR)
            for fd, events in poll.poll(0)
            if events & ended
        }

    def heard(self, rank: int) -> float:
        """Seconds since anything came from the host of ``rank``, acknowledgements included; 0 where
        the system does not report it."""
        fd = self.connections.get(rank)
        if fd is None or not sys.platform.startswith("linux"):
            return 0.0
        borrowed = socket.socket(fileno=fd)
        try:
            info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        finally:
            borrowed.detach()
        return min(_INFO.unpack(info)) / 1000 if len(info) == _INFO.size else 0.0

    def shutdown(self) -> None:
        """End all connections, here and at the other ranks, so that threads that wait return."""
        self.connections.shutdown()

    def post(
        self,
        sends: Mapping[int, Tensor],
        receives: Mapping[int, Tensor],
        header: tuple[int, int],
        *,
        ready: bool = True,
    ) -> Transfer:
        """Begin to send ``sends[r]`` to rank r, and to receive from it into ``receives[r]``; rank r
        must do so with the same ``header`` (the call's serial
        number and id), and as many bytes. What is not
        ``ready`` is sent one by one (`Transfer.send`)."""
        at = self.timeout, self.names
        return Transfer(self.connections, sends, receives, header, *at, ready=ready)

    def close(self) -> None:
        """Close the connections once no message is under way on them."""
        self.connections = Connections()
        self._server.close()
