"""Connections of this host that nothing passes over any more, as where a firewall forgets them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator

from laconic.links import connections, wire

HERE = "127.0.0.1"


def hasten() -> None:
    """Have this process ask soon, and not after 10 s."""
    connections.QUIET_SECONDS, wire.LOOK_SECONDS, wire.ASK_SECONDS = 1.0, 0.2, 0.5


@contextlib.contextmanager
def borrowed(fd: int) -> Iterator[socket.socket]:
    """The socket of a file descriptor, which remains open."""
    connection = socket.socket(fileno=fd)
    try:
        yield connection
    finally:
        connection.detach()


def _connections(port: int) -> Iterator[socket.socket]:
    """This process's connections of now, but for those with ``port``."""
    for name in os.listdir("/proc/self/fd"):
        try:
            with borrowed(int(name)) as end:
                if port not in (end.getsockname()[1], end.getpeername()[1]):
                    yield end
        except (OSError, IndexError, TypeError):  # not a connection of TCP's
            continue


def drop(connection: socket.socket) -> None:
    """Have the system drop all packets that come over it."""
    nothing = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))  # in BPF: return 0
    program = struct.pack("HxxxxxxP", 1, ctypes.addressof(nothing))
    connection.setsockopt(socket.SOL_SOCKET, 26, program)  # SO_ATTACH_FILTER


def drop_packets(port: int) -> None:
    """Have the system drop all packets that come over this process's connections of now, but for
    those with ``port``. For Linux."""
    for end in _connections(port):
        drop(end)


def close(port: int) -> None:
    """End these connections."""
    for end in _connections(port):
        end.shutdown(socket.SHUT_RDWR)
