"""The wire format of messages, and moving them between memory and sockets.

A message is a header, a payload, and a checksum of the header's fields and the payload. The header
contains the sender's call (serial number and id), the number of bytes in the payload, a digest that
the sender adds, and a checksum of these fields. The receiver knows which call and how many bytes to
expect. It uses nothing before it has verified the checksum, which it computes while bytes come.

The checksums are zlib's CRC-32. They detect every change within 32 consecutive bits, and miss one
in four billion other changes. TCP's own checksum has only 16 bits.

`move` calls the compiled ``wire.c``, or does the same in Python. Connections that use TLS are moved
in Python.
"""

from __future__ import annotations

import ctypes
import os
import select
import ssl
import struct
import sys
import zlib
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import ClassVar

from laconic import native

VERSION = 11
"""The version that ``wire.c`` must have."""

FIELDS = struct.Struct("=QQQQ")  # the call's serial and id, bytes that follow, the digest
CALL_BYTES = 24
"""The fields that must be as expected: all but the digest."""
HEADER_BYTES = FIELDS.size + 4
CHECK_BYTES = 4
AT_ONCE = 2**18
"""The most bytes of a payload that one system call moves."""

FINE, SILENT, CLOSED, OTHER, FAILED, INTERRUPTED, CHANGED = range(7)
"""The outcomes of `move`. `SILENT`: no byte moved for too long. `CLOSED`: the other side has closed
the connection. `OTHER`: a message of another call has arrived. `FAILED`: a system call failed.
`INTERRUPTED`: a signal may have to be handled. `CHANGED`: a checksum is wrong."""
ALL, WITHOUT_WAITING, ALL_SENT = -1, -2, -3

Secured = Mapping[int, ssl.SSLSocket]
"""Connections that use TLS, by file descriptor."""


class Message(ctypes.Structure):
    """One message, and how many of its bytes have moved; ``struct message`` in ``wire.c``."""

    _fields_: ClassVar = [
        ("header", ctypes.c_ubyte * HEADER_BYTES),
        ("got", ctypes.c_ubyte * HEADER_BYTES),
        ("payload", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("moved", ctypes.c_int64),
        ("summed", ctypes.c_int64),
        ("sum", ctypes.c_uint32),
        ("check", ctypes.c_uint32),
        ("fd", ctypes.c_int32),
        ("comes", ctypes.c_int32),
        ("after", ctypes.c_int32),
    ]


@lru_cache(maxsize=64)
def array(count: int) -> type[ctypes.Array[Message]]:
    """The type of arrays of ``count`` messages. ctypes makes a new type for a length whose type is
    no longer in use, which takes longer than the array, and leaves it to the garbage collector."""
    return Message * count


_BEGUN = struct.Struct(f"@{HEADER_BYTES}s{HEADER_BYTES}xPqqqIIiii0q")
"""Writes all fields of a `Message` at once, in a tenth of the time."""
assert _BEGUN.size == ctypes.sizeof(Message), "laid out as the compiler does"


def begin(
    messages: ctypes.Array[Message],
    index: int,
    header: tuple[int, int],
    digest: int,
    address: int,
    size: int,
    fd: int,
    comes: bool,
    after: int,
) -> None:
    """Begin ``messages[index]``, with ``size`` bytes at the ``address``. ``after``: the index of
    the preceding message on the same connection in the same direction; -1: none."""
    fields = FIELDS.pack(*header, size, digest)
    start, moved, summed = zlib.crc32(fields), 0, 0
    counts = size, moved, summed, start, 0
    at = index * _BEGUN.size
    _BEGUN.pack_into(messages, at, fields + _bytes(start), address, *counts, fd, comes, after)


def move(
    messages: ctypes.Array[Message], secured: Secured, until: int, end: int, timeout: int
) -> tuple[int, int, int]:
    """Move bytes until message ``until`` is complete. If ``until`` is `ALL`, until the first
    ``end`` messages are; if `ALL_SENT`, until those of them are that are sent; if
    `WITHOUT_WAITING`, move whatever can move without waiting. Bytes of all messages move meanwhile.
    Gives up when no byte has moved for ``timeout`` ms. Returns the outcome, the index of the
    message concerned (`INTERRUPTED` and `SILENT`: 1 if bytes moved, else 0), and the system's error
    number."""
    compiled = None if secured else library()
    if compiled is None:
        return _move_interpreted(messages, secured, until, end, timeout)
    which, error = ctypes.c_int64(), ctypes.c_int()
    outcome = compiled.laconic_move(
        *(messages, len(messages), until, end, timeout),
        *(ctypes.byref(which), ctypes.byref(error)),
    )
    return outcome, which.value, error.value


def is_complete(message: Message) -> bool:
    """Whether all of ``message`` has moved."""
    return bool(message.moved == HEADER_BYTES + message.size + CHECK_BYTES)


@cache
def library() -> ctypes.CDLL | None:
    """The compiled ``wire.c``, if there is one that can be used."""
    found = native.load("laconic.links._wire", VERSION)
    if found is not None:
        found.laconic_move.argtypes = [
            *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int),
            *(ctypes.c_void_p, ctypes.c_void_p),
        ]
        found.laconic_crc32.argtypes = [ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int64]
        found.laconic_crc32.restype = ctypes.c_uint32
    return found


def crc32(address: int, size: int, before: int = 0) -> int:
    """The CRC-32 of ``size`` bytes at the ``address``, after bytes whose CRC-32 is ``before``."""
    compiled = library()
    if compiled is not None:
        return int(compiled.laconic_crc32(before, address, size))
    return zlib.crc32((ctypes.c_ubyte * size).from_address(address), before)


# -- as wire.c, in Python ----


def _move_interpreted(
    messages: ctypes.Array[Message], secured: Secured, until: int, end: int, timeout: int
) -> tuple[int, int, int]:
    moved = False
    while True:
        waiting = [i for i in range(len(messages)) if _active(messages, i)]
        if not waiting or _reached(messages, until, end):
            return FINE, 0, 0
        ready = _ready([messages[i] for i in waiting], secured, until, timeout)
        for i in waiting:
            if messages[i].fd in ready:
                outcome, error = _step(messages[i], secured.get(messages[i].fd))
                if outcome != FINE:
                    return outcome, i, error
        if until == WITHOUT_WAITING:
            return FINE, 0, 0
        if not ready:
            return SILENT, int(moved), 0
        moved = True


def _reached(messages: ctypes.Array[Message], until: int, end: int) -> bool:
    if until >= 0:
        return is_complete(messages[until])
    counting = [m for m in messages[:end] if until == ALL or not m.comes]
    return until != WITHOUT_WAITING and all(map(is_complete, counting))


def _ready(waiting: list[Message], secured: Secured, until: int, timeout: int) -> set[int]:
    """The file descriptors over which bytes can move now; waits for one. TLS may have received
    bytes that were not read yet."""
    at_hand = {m.fd for m in waiting if m.comes and m.fd in secured and secured[m.fd].pending() > 0}
    asked: dict[int, int] = {}
    for m in waiting:
        asked[m.fd] = asked.get(m.fd, 0) | (select.POLLIN if m.comes else select.POLLOUT)
    poll = select.poll()
    for fd, events in asked.items():
        poll.register(fd, events)
    found = poll.poll(0 if until == WITHOUT_WAITING or at_hand else timeout)
    return at_hand | {fd for fd, _ in found}


def _active(messages: ctypes.Array[Message], index: int) -> bool:
    """Whether bytes of this message can be moved now."""
    message = messages[index]
    if is_complete(message):
        return False
    return message.after < 0 or is_complete(messages[message.after])


def _payload(message: Message, start: int, end: int) -> memoryview:
    """The bytes of the payload from ``start`` to ``end``."""
    return _view((ctypes.c_ubyte * (end - start)).from_address(message.payload + start))


def _bytes(checksum: int) -> bytes:
    return checksum.to_bytes(CHECK_BYTES, sys.byteorder)


def _view(array: ctypes.Array[ctypes.c_ubyte]) -> memoryview:
    return memoryview(array).cast("B")


def _sum_to(message: Message, end: int) -> None:
    if message.summed < end:
        message.sum = zlib.crc32(_payload(message, message.summed, end), message.sum)
        message.summed = end


def _describe(message: Message) -> list[memoryview]:
    """What can be moved next."""
    parts, moved = [], message.moved
    if moved < HEADER_BYTES:
        parts.append(_view(message.got if message.comes else message.header)[moved:])
    body = max(moved - HEADER_BYTES, 0)
    start = min(body, message.size)
    end = min(start + AT_ONCE, message.size)
    if start < end:
        parts.append(_payload(message, start, end))
    if not message.comes:
        _sum_to(message, end)
    if end == message.size:
        field = Message.check if message.comes else Message.sum
        at = ctypes.addressof(message) + field.offset
        check = _view((ctypes.c_ubyte * CHECK_BYTES).from_address(at))
        parts.append(check[body - start :])
    return parts


def _advance(message: Message, moved: int) -> int:
    """Record that ``moved`` more bytes have moved, and verify what was received."""
    before = message.moved
    message.moved += moved
    if not message.comes or message.moved < HEADER_BYTES:
        return FINE
    if before < HEADER_BYTES:
        got = bytes(message.got)
        message.sum = zlib.crc32(got[: FIELDS.size])
        if got[FIELDS.size :] != _bytes(message.sum):
            return CHANGED
        if got[:CALL_BYTES] != bytes(message.header)[:CALL_BYTES]:
            return OTHER
    _sum_to(message, min(message.moved - HEADER_BYTES, message.size))
    return CHANGED if is_complete(message) and message.check != message.sum else FINE


def _step(message: Message, secured: ssl.SSLSocket | None) -> tuple[int, int]:
    """Move what can move without waiting."""
    while not is_complete(message):
        parts = _describe(message)
        try:
            if secured is not None:
                moved = _move_secured(secured, parts, bool(message.comes))
            else:
                moved = (os.readv if message.comes else os.writev)(message.fd, parts)
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
        outcome = _advance(message, moved)
        if outcome != FINE:
            return outcome, 0
    return FINE, 0


def _move_secured(connection: ssl.SSLSocket, parts: list[memoryview], comes: bool) -> int:
    """Like ``readv`` or ``writev``. If TLS could not send some bytes, the next call must begin with
    the same bytes. It does, because a message's bytes are sent in order."""
    if not comes:
        return connection.send(b"".join(parts))
    return connection.recv_into(next(part for part in parts if len(part)))
