"""Sockets that are known by their file descriptor."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def borrowed(fd: int) -> Iterator[socket.socket]:
    """The socket of a file descriptor, which remains open."""
    connection = socket.socket(fileno=fd)
    try:
        yield connection
    finally:
        connection.detach()


def tcp_info(fd: int, layout: struct.Struct) -> tuple[int, ...]:
    """The system's ``tcp_info`` of a TCP connection; empty if the system does not report it."""
    if not sys.platform.startswith("linux"):
        return ()
    try:
        with borrowed(fd) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, layout.size)
    except OSError:  # not TCP
        return ()
    return layout.unpack(info) if len(info) == layout.size else ()
