"""Selects the congestion control of a connection.

Most systems default to cubic, which interprets every lost packet as congestion. At a round trip of
100 ms, with one packet in a thousand lost, it sends a few Mbit/s, whatever the network's rate. BBR
measures the rate and the round trip instead. On a network without latency and loss, it is a few
percent slower. Therefore connections with a long round trip use BBR, if the system has it.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "LACONIC_CONGESTION"
"""The environment variable that selects a congestion control; ``system`` keeps the system's."""
SYSTEM, LONG = "system", "bbr"
LONG_SECONDS = 0.005
"""The least round trip with which `LONG` is used."""
_AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
_RTT = struct.Struct("=68xI")  # struct tcp_info up to tcpi_rtt, in microseconds
_OPTION = getattr(socket, "TCP_CONGESTION", None)  # not on every system


def available() -> Sequence[str]:
    """The names that this user's programs can choose; empty if the system does not report them."""
    try:
        names = (_AVAILABLE if os.geteuid() == 0 else _ALLOWED).read_text().split()
    except (OSError, AttributeError):  # not Linux
        return []
    return sorted(names)


def chosen() -> str:
    """What `VARIABLE` names; the empty string where it is not set. Raises ``ValueError``."""
    name = os.environ.get(VARIABLE, "").strip()
    if name and name != SYSTEM and name not in available():
        choices = ", ".join([SYSTEM, *available()])
        raise ValueError(f"{VARIABLE} must be one of {choices}, not {name!r}")
    return name


def name_for(round_trip: float) -> str:
    """The name for a connection with a ``round_trip`` in seconds; empty for the system's."""
    name = chosen()
    if name:
        return "" if name == SYSTEM else name
    return LONG if round_trip >= LONG_SECONDS and LONG in available() else ""


def round_trip(connection: socket.socket) -> float:
    """The round trip of an open TCP connection, in seconds; 0 where the system does not report
    it."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT.size)
    except (OSError, AttributeError):  # no TCP, or not Linux
        return 0.0
    return float(_RTT.unpack(info)[0]) / 1e6 if len(info) == _RTT.size else 0.0


def name_of(connection: socket.socket) -> str:
    """The congestion control of an open TCP connection; empty if the system does not report it."""
    if _OPTION is None:
        return ""
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, _OPTION, 16).rstrip(b"\0").decode()
    except OSError:  # no TCP
        return ""


def choose(connection: socket.socket) -> str:
    """Set the congestion control of an open connection; returns its name, empty if it is the
    system's."""
    name = name_for(round_trip(connection)) if _OPTION is not None else ""
    if name and _OPTION is not None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, _OPTION, name.encode())
        except OSError as error:  # root in a container may set only allowed ones
            if chosen():
                raise ValueError(
                    f"{VARIABLE}={name}: this process may not set it ({error}): allow it by "
                    f"sysctl net.ipv4.tcp_allowed_congestion_control, or leave {VARIABLE} out"
                ) from error
            return ""
    return name
