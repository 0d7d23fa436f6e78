"""What the system is told, and reports, of connections."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys

KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 5}
"""A connection ends after 30 s in which the other host acknowledged none of 5 probes. That is long
enough for a saturated network. The kernel of a stopped process still acknowledges them."""
UNACKNOWLEDGED_MS = 30_000
_USER_TIMEOUT = getattr(socket, "TCP_USER_TIMEOUT", None)  # only Linux has it
_NOT_SENT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)  # Linux's, where Python does not name it


def watch(connection: socket.socket, *, reads_at_once: bool = True) -> None:
    """Have the system send short messages at once over ``connection``, or over those that a
    listening socket accepts, and end it after 30 s in which the other host has acknowledged
    nothing. ``reads_at_once``: the other side reads whatever comes. One that need not may be slow,
    and have full buffers. Linux would end the connection to it, too, so what was sent and not
    acknowledged does not count then."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if name in vars(socket):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, vars(socket)[name], value)
    if _USER_TIMEOUT is not None:
        limit = UNACKNOWLEDGED_MS if reads_at_once else 0
        connection.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, limit)


def limit_unsent(connection: socket.socket, most: int) -> None:
    """Have the system take in ``most`` bytes for ``connection`` before it can send them."""
    with contextlib.suppress(OSError):  # it has ended already
        connection.setsockopt(socket.IPPROTO_TCP, _NOT_SENT, most)


def tcp_info(connection: socket.socket, layout: struct.Struct) -> tuple[int, ...]:
    """The system's ``tcp_info`` of a TCP connection; empty if the system does not report it."""
    if not sys.platform.startswith("linux"):
        return ()
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, layout.size)
    except OSError:  # closed, or not TCP
        return ()
    return layout.unpack(info) if len(info) == layout.size else ()
