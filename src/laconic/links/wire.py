"""Messages between the ranks of a link: one TCP connection for each pair of them, and no thread.

The thread that makes a link's calls moves their bytes itself, between tensors and the kernel's
buffers, and sleeps while there are none to move. gloo has a thread for that, which is woken for
each message's announcement, for the answer that there is room for it, for the message, and then
wakes the one that waits. With 4 ranks on 2 cores that was half of what a round costs the processor.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import ClassVar

from torch import Tensor

from laconic import native
from laconic.errors import LinkError

VERSION = 4
"""What ``wire.c`` must be."""

_HEADER = struct.Struct("=QQQ")  # the place of the sender in its calls, and how many bytes follow
_HELLO = struct.Struct("<16sQ")  # the key of the rank that is called, and the number of who calls
HELLO_SECONDS = 5.0
"""How long a caller may take to say who it is."""

_FINE, _SILENT, _CLOSED, _OTHER, _FAILED, _INTERRUPTED = range(6)
_ALL, _AT_ONCE = -1, -2


class OtherCallError(LinkError):
    """What comes from ``rank``, called ``name``, is of another call than this rank is in, at
    ``place``, or of another length."""

    def __init__(
        self, rank: int, name: int, place: tuple[int, int], size: int, expected: int
    ) -> None:
        super().__init__(f"rank {name} has sent {size} bytes where {expected} are due")
        self.rank = rank
        self.place = place


class LostError(RuntimeError):
    """A connection is gone, or nothing came over it for too long. No ``OSError``, as a signal's
    handler, which runs while one waits, may raise such for reasons of its own."""


class _Message(ctypes.Structure):
    """One message, and how far it has come; as ``struct message`` in ``wire.c``."""

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
"""All of a `_Message` at once, which takes a tenth of the time."""
assert _BEGUN.size == ctypes.sizeof(_Message), "laid out as the compiler does"


class Connections(dict[int, int]):
    """Connected sockets' file descriptors by rank; closed when nobody uses them any more."""

    busy = False
    """Whether a message was begun and not ended: none can come after it."""

    def keep(self, rank: int, connection: socket.socket) -> None:
        """Take over the connection to ``rank``."""
        connection.setblocking(False)
        self[rank] = connection.detach()

    def close(self) -> None:
        """End them all."""
        while self:
            os.close(self.popitem()[1])

    def __del__(self) -> None:
        self.close()


class Transfer:
    """Messages under way: ``sends[r]`` to rank r, and what comes from rank r into ``receives[r]``,
    contiguous tensors in a CPU's memory that nobody touches meanwhile. Where they are not ``ready``
    each is sent as far as `send` says. Bytes move within `wait`, but for those that the kernel
    takes at once; the last `wait` is for all. Raises `LinkError` where a message before it was left
    half-way."""

    def __init__(
        self,
        connections: Connections,
        sends: Mapping[int, Tensor],
        receives: Mapping[int, Tensor],
        place: tuple[int, int],
        timeout: float,
        names: Sequence[int],
        *,
        ready: bool = True,
    ) -> None:
        if connections.busy:
            raise LinkError("a message on this link was left half-way: it cannot be used any more")
        self._connections = connections  # as all of these, held while messages are under way
        self._tensors = [*receives.values(), *sends.values()]
        self._ranks = [*receives, *sends]
        self._indices = {r: index for index, r in enumerate(receives)}
        self._timeout = timeout
        self._names = names
        self._messages = (_Message * len(self._ranks))()
        for index, (r, x) in enumerate(zip(self._ranks, self._tensors, strict=True)):
            if not x.is_contiguous() or x.device.type != "cpu":
                raise ValueError(
                    f"a message is contiguous and on the CPU, not {x.device} {x.stride()}"
                )
            size, comes = x.numel() * x.element_size(), index < len(receives)
            end = _HEADER.size + size
            begun = (*place, size, x.data_ptr(), end, end if ready or comes else 0, 0)
            _BEGUN.pack_into(self._messages, index * _BEGUN.size, *begun, connections[r], comes)
        connections.busy = True
        self._move(_AT_ONCE)

    def send(self, rank: int, size: int) -> None:
        """The first ``size`` bytes of what is for ``rank`` are ready now, and can be sent."""
        index = len(self._indices) + self._ranks[len(self._indices) :].index(rank)
        self._messages[index].ready = _HEADER.size + size
        self._move(_AT_ONCE)

    def wait(self, rank: int | None = None, size: int | None = None) -> None:
        """Until the first ``size`` bytes from ``rank`` are here, or None: all of them; without a
        rank until all messages are, and all are sent. Raises `LostError` where a connection is
        lost, or no byte moves for ``timeout`` seconds, and `OtherCallError`."""
        if rank is None:
            assert all(m.ready == m.end for m in self._messages), "a message is not ready"
            self._move(_ALL)
            self._connections.busy = False
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
            *place, size = _HEADER.unpack(message.got)
            expected = message.end - _HEADER.size
            raise OtherCallError(rank, self._names[rank], (place[0], place[1]), size, expected)
        why = "closed by it" if outcome == _CLOSED else os.strerror(error)
        raise LostError(f"connection to rank {self._names[rank]}: {why}")


def _move(
    messages: ctypes.Array[_Message], until: int, enough: int, timeout: int
) -> tuple[int, int, int]:
    """Move bytes until ``enough`` of message ``until`` were moved (`_ALL` messages, or `_AT_ONCE`:
    what can be moved without waiting), at most ``timeout`` ms after the last one. Returns the
    outcome, which message it is about (`_INTERRUPTED`: 1 if bytes were moved, else 0), and the
    system's number of the error."""
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
    """``wire.c``, if it was compiled and can be used."""
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
    """What ``laconic_move`` does, where it was not compiled."""
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
    """Move what can be moved at once."""
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


class Wire:
    """The connections of rank ``rank`` of a link to all others, from ``host``, its own address.
    Every rank tells the others its `address` before it calls `connect`. ``names``: what ranks are
    called in errors."""

    def __init__(self, rank: int, host: str, timeout: float, names: Sequence[int]) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN)
        self._rank = rank
        self._timeout = timeout
        self._names = names
        self._key = secrets.token_hex(8)
        self._connections = Connections()
        self.address = f"{host}|{self._server.getsockname()[1]}|{self._key}"

    def connect(self, addresses: Sequence[str], check: Callable[[], None]) -> None:
        """Call the ranks before this one, at their ``addresses``, and be called by those behind it;
        with no addresses, none. ``check()``, every second of waiting, raises if it is in vain."""
        try:
            with self._server:
                self._connect(addresses, check)
        except BaseException:
            self._connections.close()  # or the others would wait as long as the error is kept
            raise

    def _connect(self, addresses: Sequence[str], check: Callable[[], None]) -> None:
        deadline = time.monotonic() + self._timeout
        for r, address in enumerate(addresses[: self._rank]):
            self._call(r, address, deadline)
        while missing := set(range(len(addresses))) - {self._rank, *self._connections}:
            left = deadline - time.monotonic()
            if left <= 0:
                who = sorted(self._names[r] for r in missing)
                raise LinkError(f"ranks {who} have not called within {self._timeout:g} s")
            self._server.settimeout(min(left, 1.0))
            try:
                caller, _ = self._server.accept()
            except (TimeoutError, ConnectionAbortedError):
                check()
                continue
            rank = self._greet(caller)
            if rank in missing:
                self._keep(rank, caller)
            else:
                caller.close()  # none of ours

    def _call(self, rank: int, address: str, deadline: float) -> None:
        host, port, key = address.rsplit("|", 2)
        left = max(deadline - time.monotonic(), 0.001)
        try:
            called = socket.create_connection((host, int(port)), left)
            self._keep(rank, called, _HELLO.pack(key.encode(), self._rank))
        except OSError as error:
            raise LinkError(
                f"rank {self._names[rank]} can't be reached at {host}, port {port}: {error}; where "
                "a host has several networks GLOO_SOCKET_IFNAME names the interface to use"
            ) from error

    def _greet(self, caller: socket.socket) -> int:
        """Who calls; -1: someone who has no business here."""
        try:
            caller.settimeout(HELLO_SECONDS)
            said = b""
            while len(said) < _HELLO.size and (piece := caller.recv(_HELLO.size - len(said))):
                said += piece
            key, rank = _HELLO.unpack(said)
        except (OSError, struct.error):
            return -1
        return int(rank) if key == self._key.encode() else -1

    def _keep(self, rank: int, connection: socket.socket, hello: bytes = b"") -> None:
        try:
            connection.sendall(hello)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        except OSError:
            connection.close()
            raise
        self._connections.keep(rank, connection)

    def post(
        self,
        sends: Mapping[int, Tensor],
        receives: Mapping[int, Tensor],
        place: tuple[int, int],
        *,
        ready: bool = True,
    ) -> Transfer:
        """Begin to send ``sends[r]`` to rank r, and to take what comes from it into
        ``receives[r]``; rank r must do so at the same ``place``, with as many bytes. What is not
        ``ready`` is sent one by one (`Transfer.send`)."""
        at = self._timeout, self._names
        return Transfer(self._connections, sends, receives, place, *at, ready=ready)

    def close(self) -> None:
        """Let go of the connections; they end when no message on them is under way."""
        self._connections = Connections()
