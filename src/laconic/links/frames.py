"""The wire format of messages, and moving them between memory and sockets.

A message is a header and a payload. The header contains the sender's call (serial number and id),
the number of bytes in the payload, a digest that the sender adds, and a checksum of these fields.
The payload is split into frames of `FRAME` bytes; the last one may be shorter. After each frame
comes a checksum of all header fields and payload bytes so far. The receiver knows which call and
how many bytes to expect. It uses no frame before it has verified the frame's checksum.

The checksums are zlib's CRC-32. They detect every change within 32 consecutive bits, and miss one
in four billion other changes. TCP's own checksum has only 16 bits.
"""

from __future__ import annotations

import ctypes
import os
import select
import ssl
import struct
import sys
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence

from laconic.links import congestion

FIELDS = struct.Struct("=QQQQ")  # the call's serial and id, bytes that follow, the digest
CALL_BYTES = 24
"""The fields that must be as expected: all but the digest."""
HEADER_BYTES = FIELDS.size + 4
FRAME, CHECK_BYTES = 2**16, 4
AT_ONCE = 8
"""The most frames that one system call moves."""

FINE, SILENT, CLOSED, OTHER, FAILED, CHANGED = range(6)
"""The outcomes of `move`. `SILENT`: no byte moved for too long. `CLOSED`: the other side has closed
the connection. `OTHER`: a message of another call has arrived. `FAILED`: a system call failed.
`CHANGED`: a checksum is wrong."""
ALL, WITHOUT_WAITING, ALL_SENT = -1, -2, -3
LEFT = 2**19
"""Bytes left on a connection for which it pays to find the rate again, when another connection has
nothing more to send: otherwise BBR tries a quarter more every 8 round trips."""

Secured = Mapping[int, ssl.SSLSocket]
"""Connections that use TLS, by file descriptor."""


class Message:
    """One message of ``size`` bytes at the ``address``, and how many of its bytes have ``moved``.

    ``place``: the call's serial number and id. ``fd``: the connection. ``comes``: it is received,
    and not sent. ``after``: the preceding message on the same connection in the same direction.
    ``ready``: how many bytes can be sent; -1: not even the header. ``bbr``: it is sent over a
    connection with BBR, which is to be restarted if it ``renews``.
    """

    renews = False

    def __init__(
        self,
        place: tuple[int, int],
        digest: int,
        address: int,
        size: int,
        fd: int,
        comes: bool,
        after: Message | None = None,
        ready: int = -1,
        bbr: bool = False,
    ) -> None:
        fields = FIELDS.pack(*place, size, digest)
        self.header = fields + _bytes(zlib.crc32(fields))
        """What is sent, or expected, before the payload."""
        self.got = bytearray(HEADER_BYTES if comes else 0)
        self.payload = memory(address, size)
        self.checks = memoryview(bytearray(-(-size // FRAME) * CHECK_BYTES))
        self.size, self.fd, self.comes, self.after, self.bbr = size, fd, comes, after, bbr
        self.length = on_wire(size)
        """Bytes of header, payload and checksums."""
        self.moved = 0
        """How many of these were moved."""
        self.done = 0
        """Bytes of the payload that have come and were checked."""
        self._sum, self._summed = zlib.crc32(fields), 0
        """Of the header's fields and so many bytes of the payload."""
        self.allow(size if comes else ready)

    def allow(self, ready: int) -> None:
        """The first ``ready`` bytes can be sent; -1: not even the header."""
        self.ready, self._until = ready, self.length
        if ready < self.size:  # only whole frames end with a checksum
            before = HEADER_BYTES + ready + ready // FRAME * CHECK_BYTES
            self._until = before if ready >= 0 else 0

    @property
    def complete(self) -> bool:
        """Whether all of it has moved."""
        return self.moved == self.length

    @property
    def unfinished(self) -> bool:
        """Whether it is not complete, as far as it is ready."""
        return self.moved < self._until

    @property
    def active(self) -> bool:
        """Whether bytes of it can be moved now."""
        return self.unfinished and (self.after is None or self.after.complete)

    def describe(self, moved: int, most: int = AT_ONCE) -> list[memoryview]:
        """What can be moved next, once so many bytes have ``moved``: at most so many frames."""
        parts = []
        if moved < HEADER_BYTES:
            parts.append(memoryview(self.got if self.comes else self.header)[moved:])
        first, within = divmod(max(moved - HEADER_BYTES, 0), FRAME + CHECK_BYTES)
        for frame in range(first, first + most):
            start = frame * FRAME
            end = min(start + FRAME, self.size)
            until = min(end, self.ready)
            if start + within < until:
                parts.append(self.payload[start + within : until])
            if until < end or start >= end:
                break
            check = self.checks[frame * CHECK_BYTES : (frame + 1) * CHECK_BYTES]
            if not self.comes and self._summed < end:
                self._sum_to(end)
                check[:] = _bytes(self._sum)
            parts.append(check[max(within - (end - start), 0) :])
            within = 0
        return parts

    def _sum_to(self, end: int) -> None:
        self._sum = zlib.crc32(self.payload[self._summed : end], self._sum)
        self._summed = end

    def advance(self, moved: int) -> int:
        """Record that ``moved`` more bytes have moved, and verify what was received. Returns the
        outcome."""
        before, self.moved = self.moved, self.moved + moved
        if not self.comes or self.moved < HEADER_BYTES:
            return FINE
        if before < HEADER_BYTES:
            fields, check = self.got[: FIELDS.size], self.got[FIELDS.size :]
            self._sum = zlib.crc32(fields)
            if check != _bytes(self._sum):
                return CHANGED
            if fields[:CALL_BYTES] != self.header[:CALL_BYTES]:
                return OTHER
        frame, body = self.done // FRAME, self.moved - HEADER_BYTES
        while self.done < self.size:
            start, end = frame * FRAME, min((frame + 1) * FRAME, self.size)
            within = body - frame * (FRAME + CHECK_BYTES)
            if (come := min(start + within, end)) > self._summed:
                self._sum_to(come)
            if within < end - start + CHECK_BYTES:
                break
            if self.checks[frame * CHECK_BYTES : (frame + 1) * CHECK_BYTES] != _bytes(self._sum):
                return CHANGED
            self.done, frame = end, frame + 1
        return FINE

    def feed(self, data: bytearray) -> int:
        """Take in the first bytes of ``data``, which have come already. Returns the outcome."""
        while data and self.unfinished:
            taken = 0
            for part in self.describe(self.moved):
                piece = data[taken : taken + len(part)]
                part[: len(piece)] = piece
                taken += len(piece)
            del data[:taken]
            if (outcome := self.advance(taken)) != FINE:
                return outcome
        return FINE

    def step(self, secured: ssl.SSLSocket | None) -> tuple[int, int]:
        """Move what can move without waiting. Returns the outcome, and the system's error."""
        while self.unfinished:
            try:
                if secured is not None:
                    moved = self._step_secured(secured)
                else:
                    move = os.readv if self.comes else os.writev
                    moved = move(self.fd, self.describe(self.moved))
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return CLOSED, 0
            except ssl.SSLError:
                return CHANGED, 0
            except OSError as error:
                return FAILED, error.errno or 0
            if not moved:
                return CLOSED, 0
            if (outcome := self.advance(moved)) != FINE:
                return outcome, 0
        return FINE, 0

    def _step_secured(self, connection: ssl.SSLSocket) -> int:
        """As ``readv`` or ``writev``. If TLS could not send some bytes, the next call must begin
        with the same bytes. It does, because a message's bytes are sent in order."""
        parts = self.describe(self.moved, 1)
        if not self.comes:
            return connection.send(b"".join(parts))
        return connection.recv_into(next(part for part in parts if len(part)))


def move(
    messages: Sequence[Message], secured: Secured, until: int, enough: int, seconds: float
) -> tuple[int, int, int]:
    """Move bytes until ``enough`` payload bytes of message ``until`` have arrived. If ``until`` is
    `ALL`, until the first ``enough`` messages are complete; if `ALL_SENT`, until those of them are
    that are sent; if `WITHOUT_WAITING`, move whatever can move without waiting. Bytes of all
    messages move meanwhile. Gives up when no byte has moved for so many ``seconds``. Returns the
    outcome, the index of the message concerned (`SILENT`: 1 if bytes moved, else 0), and the
    system's error number."""
    moved = False
    while True:
        waiting = [(i, m) for i, m in enumerate(messages) if m.active]
        if not waiting or _reached(messages, until, enough):
            return FINE, 0, 0
        wait = 0.0 if until == WITHOUT_WAITING else seconds
        ready = _ready([m for _, m in waiting], secured, wait)
        for i, m in waiting:
            if m.fd in ready:
                outcome, error = m.step(secured.get(m.fd))
                if outcome != FINE:
                    return outcome, i, error
                if m.renews and congestion.renew(m.fd):
                    m.renews = False
                if m.bbr and m.complete:
                    _renew_others(messages, m.fd)
        if until == WITHOUT_WAITING:
            return FINE, 0, 0
        if not ready:
            return SILENT, int(moved), 0
        moved = True


def _renew_others(messages: Sequence[Message], fd: int) -> None:
    """A message over a connection with BBR was sent: restart BBR on those with much left to send,
    if that connection has nothing left."""
    left = Counter[int]()
    for m in messages:
        left[m.fd] += 0 if m.comes else m.size - min(m.moved, m.size)
    for m in messages if not left[fd] else ():
        m.renews = m.renews or (m.bbr and m.active and left[m.fd] > LEFT)


def _reached(messages: Sequence[Message], until: int, enough: int) -> bool:
    if until >= 0:
        return messages[until].done >= enough
    counting = (m for m in messages[:enough] if until == ALL or not m.comes)
    return until != WITHOUT_WAITING and not any(m.unfinished for m in counting)


def _ready(waiting: Sequence[Message], secured: Secured, seconds: float) -> set[int]:
    """The file descriptors over which bytes can move now; waits for one. TLS may have received
    bytes that were not read yet."""
    at_hand = {m.fd for m in waiting if m.comes and m.fd in secured and secured[m.fd].pending() > 0}
    asked: dict[int, int] = {}
    for m in waiting:
        asked[m.fd] = asked.get(m.fd, 0) | (select.POLLIN if m.comes else select.POLLOUT)
    poll = select.poll()
    for fd, events in asked.items():
        poll.register(fd, events)
    found = poll.poll(0 if at_hand else 1000 * seconds)
    return at_hand | {fd for fd, _ in found}


def on_wire(size: int) -> int:
    """Bytes of a message of ``size`` bytes, with its header and checksums."""
    return HEADER_BYTES + size + -(-size // FRAME) * CHECK_BYTES


def memory(address: int, size: int) -> memoryview:
    """The ``size`` bytes at the ``address``."""
    if not size:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


def _bytes(checksum: int) -> bytes:
    return checksum.to_bytes(CHECK_BYTES, sys.byteorder)
