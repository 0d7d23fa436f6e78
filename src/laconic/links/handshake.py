"""How two processes prove to each other that they belong to one job.

Both know the job's secret, which is never sent over these connections. There are four messages. The
receiver knows the size of each before it reads it:

    caller -> hello      the purpose, the key of a link, the caller's number, a nonce
    callee -> challenge  a nonce
    caller -> frame      a text, and HMAC-SHA256 of (role, hello, challenge, text)
    callee -> frame      a text, and the same with the callee's role

The nonces make every proof valid for one connection only. The roles keep a proof from being sent
back to its author. A caller without a proof receives nothing but a random number, and its text is
not read. Nothing here reads a socket: a handshake is a generator that yields what to send and how
many bytes to wait for, and is sent these bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable, Collection, Generator
from typing import NamedTuple

SECRET_BYTES = 32
KEY_BYTES = 8
NONCE_BYTES = 16
MOST_BYTES = 2**16
"""The longest text of a frame."""
_MAGIC = b"laconic1"
_HELLO = struct.Struct(f">8s8s{KEY_BYTES}sI{NONCE_BYTES}s")
_LENGTH = struct.Struct(">I")
_MAC_BYTES = hashlib.sha256().digest_size

Exchange = Generator[tuple[bytes, int], bytes, bytes]
"""Yields what to send and how many bytes to wait for; returns the other side's text."""


class RefusedError(ValueError):
    """The other side does not belong to this job, or violates the protocol."""


class Hello(NamedTuple):
    """What a caller claims about itself, before it proves it."""

    purpose: bytes
    key: bytes
    number: int
    nonce: bytes

    def pack(self) -> bytes:
        """As bytes."""
        return _HELLO.pack(_MAGIC, *self)

    @classmethod
    def unpack(cls, data: bytes) -> Hello:
        """From bytes; raises `RefusedError`."""
        magic, purpose, key, number, nonce = _HELLO.unpack(data)
        if magic != _MAGIC:
            raise RefusedError("not a hello of laconic")
        return cls(purpose.rstrip(b"\0"), key, number, nonce)


HELLO_BYTES = _HELLO.size


def _proof(secret: bytes, role: bytes, hello: bytes, challenge: bytes, text: bytes) -> bytes:
    assert len(role) == 6, "all parts before the text have fixed lengths"
    return hmac.digest(secret, role + hello + challenge + text, "sha256")


def _frame(secret: bytes, role: bytes, hello: bytes, challenge: bytes, text: bytes) -> bytes:
    assert len(text) <= MOST_BYTES, "clipped before"
    return _LENGTH.pack(len(text)) + text + _proof(secret, role, hello, challenge, text)


def _read_frame(
    secret: bytes, role: bytes, hello: bytes, challenge: bytes, sends: bytes, most: int
) -> Exchange:
    """Send ``sends``, then the text of the frame that comes; raises `RefusedError`."""
    (length,) = _LENGTH.unpack((yield sends, _LENGTH.size))
    if length > most:
        raise RefusedError(f"a text of {length} bytes, where {most} are the most")
    rest = yield b"", length + _MAC_BYTES
    text, proof = rest[:length], rest[length:]
    if not hmac.compare_digest(proof, _proof(secret, role, hello, challenge, text)):
        raise RefusedError("the other side does not know this job's secret")
    return text


def call(
    secret: bytes, purpose: bytes, key: bytes, number: int, text: bytes, most: int = MOST_BYTES
) -> Exchange:
    """The caller's side: sends ``text`` about the link of ``key``, returns the callee's text."""
    hello = Hello(purpose, key, number, secrets.token_bytes(NONCE_BYTES)).pack()
    challenge = yield hello, NONCE_BYTES
    own = _frame(secret, b"caller", hello, challenge, text)
    return (yield from _read_frame(secret, b"callee", hello, challenge, own, most))


def answer(
    purposes: Collection[bytes],
    secret_of: Callable[[bytes], bytes | None],
    reply: Callable[[Hello, bytes], bytes],
    most: int = MOST_BYTES,
) -> Exchange:
    """The callee's side, for callers with one of the ``purposes``. ``secret_of(key)``: that link's
    secret, if there is such a link. ``reply`` receives what the caller has proved, and returns the
    text for it or raises `RefusedError`."""
    data = yield b"", HELLO_BYTES
    hello = Hello.unpack(data)
    # a caller with an unknown key fails later, like one that does not know the secret
    secret = secret_of(hello.key) or secrets.token_bytes(SECRET_BYTES)
    if hello.purpose not in purposes:
        raise RefusedError("called for something else")
    challenge = secrets.token_bytes(NONCE_BYTES)
    text = yield from _read_frame(secret, b"caller", data, challenge, challenge, most)
    yield _frame(secret, b"callee", data, challenge, reply(hello, text)), 0
    return data + text
