"""Connections that threads can share, and messages that explain failed handshakes of TLS."""

from __future__ import annotations

import contextlib
import errno
import math
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")
LOOK_SECONDS = 1.0
"""After so long a thread that waits looks whether another one has closed its connection."""

_REASONS = {
    "CERTIFICATE_REQUIRED": "the other side asks for a certificate, and this one has sent none",
    "UNKNOWN_CA": "the other side does not accept this side's certificate: another authority has "
    "signed it",
    "CERTIFICATE_EXPIRED": "the other side does not accept this side's certificate: it has expired",
    "BAD_CERTIFICATE": "the other side does not accept this side's certificate",
    "CERTIFICATE_UNKNOWN": "the other side does not accept this side's certificate",
    "DECRYPT_ERROR": "the other side does not accept this side's certificate",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it has sent no certificate",
    "WRONG_VERSION_NUMBER": "it does not speak TLS",
    "HTTP_REQUEST": "it does not speak TLS",
    "UNSUPPORTED_PROTOCOL": "it speaks an older version of TLS",
}
"""Explanations, by the last part of OpenSSL's name for a reason."""


def reason(error: Exception) -> str:
    """Why a TLS handshake failed, in words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not valid: {error.verify_message}"
    if isinstance(error, ssl.SSLEOFError):
        return "it has closed the connection: perhaps it does not speak TLS"
    name = str(getattr(error, "reason", None) or "")
    for end, words in _REASONS.items():
        if name.endswith(end):
            return words
    return name.replace("_", " ").lower() or str(error)


def about_certificates(error: Exception | None) -> bool:
    """Whether one side rejects the other's certificate, so that connecting again would fail,
    too."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return True
    name = str(getattr(error, "reason", None) or "")
    return "ALERT" in name and name.endswith(tuple(_REASONS))


class Stream:
    """A connection that one thread may read, another one write, and a third one close. OpenSSL
    itself allows only one call at a time, and a file descriptor that is closed during a call may
    be another connection's by the time that it reads or writes. Raises `OSError` as a socket does.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._lock = threading.Lock()

    def sendall(self, data: bytes | memoryview, seconds: float = math.inf) -> None:
        """As `socket.socket.sendall`, for at most so many ``seconds``."""
        left, deadline = memoryview(data), time.monotonic() + seconds
        while len(left):
            left = left[self._do(partial(self._connection.send, left), select.POLLOUT, deadline) :]

    def recv(self, size: int, seconds: float = math.inf) -> bytes:
        """As `socket.socket.recv`, for at most so many ``seconds``."""
        deadline = time.monotonic() + seconds
        return self._do(partial(self._connection.recv, size), select.POLLIN, deadline)

    def _do(self, call: Callable[[], T], event: int, deadline: float) -> T:
        """Repeat ``call`` until it need not wait, usually for ``event``."""
        while True:
            if (fd := self._connection.fileno()) < 0:
                raise OSError(errno.EBADF, "closed by another thread")
            try:
                with self._lock:
                    return call()
            except BlockingIOError:
                awaited = event
            except ssl.SSLWantReadError:
                awaited = select.POLLIN
            except ssl.SSLWantWriteError:
                awaited = select.POLLOUT
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            poll = select.poll()
            poll.register(fd, awaited)
            poll.poll(1000 * min(left, LOOK_SECONDS))

    def close(self) -> None:
        """End the connection, without TLS's closing message: another thread may be in a call."""
        with contextlib.suppress(OSError):  # it has ended already
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)
        with self._lock:
            self._connection.close()
