"""Measure the network between two hosts: reachability, latency and bandwidth."""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from laconic.links import congestion

CONNECT_SECONDS = 3.0
ANSWER_SECONDS = 10.0
PINGS = 10
SEND_SECONDS, SEND_TRIPS, SEND_MOST_SECONDS = 1.0, 20, 5.0
"""How long to send: so many seconds, and round trips on top, but no longer than the last."""
SEND_MOST = 64 << 20
PIECE = 64 << 10
PING, SINK = b"P", b"S"


@dataclass(frozen=True)
class HostInfo:
    """What a host announces to the others. ``settings`` should be equal on all: its versions, and
    those of its connections."""

    rank: int
    host: str
    address: str
    port: int
    settings: Mapping[str, str]

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, {self.address})"


@dataclass(frozen=True)
class Pair:
    """The connection from ``source`` to ``target``.

    ``latency`` is a round trip in seconds. ``error`` says why the target could not be reached, if
    so.
    """

    source: int
    target: int
    latency: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Rate:
    """Bits per second from ``source`` to its neighbor in a ring, with all hosts sending at once.

    ``congestion`` is the congestion control that the connection used, empty if the system does not
    report it.
    """

    source: int
    target: int
    rate: float
    error: str = ""
    congestion: str = ""


class Listener:
    """Answers pings, and counts the bytes that other hosts send. Listens at the address
    ``host``."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family, backlog=256)
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True, name="laconic-doctor-port").start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(ANSWER_SECONDS)
            kind = connection.recv(1)
            if kind == PING:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while connection.recv(1):
                    connection.sendall(PING)
            elif kind == SINK:
                size, came = 0, [(0, time.perf_counter())]
                while piece := connection.recv(PIECE):
                    size += len(piece)
                    came.append((size, time.perf_counter()))
                connection.sendall(struct.pack("!Qd", *_second_half(came)))

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
        self._server.close()


def ping(source: int, target: HostInfo) -> Pair:
    """Measure the latency to a host: the fastest of `PINGS` round trips."""
    trips = []
    try:
        address = target.address, target.port
        with socket.create_connection(address, CONNECT_SECONDS) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(PING)
            for _ in range(PINGS):
                start = time.perf_counter()
                connection.sendall(b".")
                _receive(connection, 1)
                trips.append(time.perf_counter() - start)
    except OSError as error:
        return Pair(source, target.rank, error=reason(error))
    return Pair(source, target.rank, min(trips))


def send(source: int, target: HostInfo) -> Rate:
    """Measure bits per second to a host, as it counts them, for `SEND_SECONDS` and
    some round trips, or `SEND_MOST` bytes."""
    piece = bytes(PIECE)
    family = socket.AF_INET6 if ":" in target.address else socket.AF_INET
    try:
        with socket.socket(family) as connection:
            connection.settimeout(CONNECT_SECONDS)
            connection.connect((target.address, target.port))
            connection.settimeout(ANSWER_SECONDS)
            connection.sendall(SINK)
            congestion.choose(connection)
            trip = congestion.round_trip(connection)
            if trip < congestion.LONG_SECONDS:  # so that little is left when the time is over
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * PIECE)
            trips = SEND_TRIPS * trip
            size, end = 0, time.monotonic() + min(SEND_SECONDS + trips, SEND_MOST_SECONDS)
            while size < SEND_MOST and time.monotonic() < end:
                connection.sendall(piece)
                size += PIECE
            connection.shutdown(socket.SHUT_WR)
            received, seconds = struct.unpack("!Qd", _receive(connection, 16))
            control = congestion.name_of(connection)
    except OSError as error:
        return Rate(source, target.rank, 0.0, reason(error))
    return Rate(source, target.rank, 8 * received / seconds, congestion=control)


def _second_half(came: Sequence[tuple[int, float]]) -> tuple[int, float]:
    """The bytes that came in the second half of the time, and how long that was: in the first,
    congestion control finds the rate. All of it, if it was short. ``came``: how many had come, and
    when."""
    (_, start), (size, end) = came[0], came[-1]
    if end - start < SEND_SECONDS / 2:
        return size, end - start
    before, since = next((s, t) for s, t in came if t >= (start + end) / 2)
    return (size - before, end - since) if size > before else (size, end - start)


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionResetError(
                errno.ECONNRESET, "the connection closed before the answer was complete"
            )
        data += piece
    return data


def reason(error: OSError) -> str:
    """Return why a connection failed."""
    if isinstance(error, socket.gaierror):
        return "the name does not resolve"
    if isinstance(error, TimeoutError):
        return "no answer"
    return (error.strerror or str(error)).lower()
