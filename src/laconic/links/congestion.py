"""Selects the congestion control of a connection.

Most systems default to cubic, which interprets every lost packet as congestion. At a round trip of
100 ms, with one packet in a thousand lost, it sends a few Mbit/s, whatever the network's rate. BBR
measures the rate and the round trip instead. On a network without latency and loss, it is a few
percent slower. Therefore connections with a long round trip use BBR, if the system has it.

BBR expects transfers that do not pause. Messages of a training suffer from it in two ways, so `Bbr`
restarts it before some of them. Both are properties of version 1 (Cardwell et al., "BBR:
Congestion-Based Congestion Control", ACM Queue 14(5), 2016), which is in Linux.

- After 10 s without a shorter round trip it sends 4 packets per round trip for 0.2 s.
- Its estimate of the rate is the maximum over 10 round trips, but packets that had nothing behind
  them in the queue do not count. With short messages the maximum may have nothing left in it.
  Then one packet that was sent again is enough to set the estimate to one packet per round trip.
  It takes more than a second to grow back.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from laconic.links.sockets import limit_unsent, tcp_info

LONG = "bbr"
LONG_SECONDS = 0.005
"""The least round trip with which `LONG` is used."""
_AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
UNSENT = 2**19
"""The most bytes that the system takes in for a connection with BBR before it can send them."""
_ANEW = "reno"
"""Every Linux has it. Setting the same congestion control again would change nothing."""
_STATE, _OPEN = struct.Struct("=xB"), 0  # struct tcp_info up to tcpi_ca_state; no packet is lost
_CC_INFO, _ESTIMATE = 26, struct.Struct("=Q")  # TCP_CC_INFO; struct tcp_bbr_info up to bbr_bw_hi
_RTT = struct.Struct("=68xI")  # struct tcp_info up to tcpi_rtt, in microseconds
_OPTION = getattr(socket, "TCP_CONGESTION", 13)  # used where names are available: on Linux


def available() -> Sequence[str]:
    """The names that this user's programs can choose; empty if the system does not report them."""
    try:
        names = (_AVAILABLE if os.geteuid() == 0 else _ALLOWED).read_text().split()
    except (OSError, AttributeError):  # not Linux
        return []
    return sorted(names)


def choose(connection: socket.socket) -> Bbr | None:
    """Use `LONG` for an open connection with a long round trip, if this process may. None: the
    connection keeps the system's."""
    round_trip = tcp_info(connection, _RTT)
    if not round_trip or round_trip[0] / 1e6 < LONG_SECONDS or LONG not in available():
        return None
    try:
        connection.setsockopt(socket.IPPROTO_TCP, _OPTION, LONG.encode())
    except OSError:  # root in a container may set only allowed ones
        return None
    return Bbr(connection)


class Bbr:
    """Restarts the BBR of a connection before a message where it would be slow otherwise: when
    its estimate of the rate has fallen by half, or it was last restarted `RENEWED` seconds ago. It
    keeps its window, so it begins with the rate that the window allows.

    Example: 50 Mbit/s, 80 ms, 0.1% of packets lost, messages of 0.1 MB every 0.2 s. Without this,
    ranks wait for more than a second about once in 100 steps.
    """

    RENEWED = 5.0
    KEPT = 0.98
    """The share of the best estimate that counts for the next message, so that a network that has
    become slower is accepted after 35 of them."""

    def __init__(self, connection: socket.socket) -> None:
        """For a new ``connection``. Limits how much the system takes in before it can be sent,
        because `Transfer.wait_sent` has to know when a message is on its way."""
        limit_unsent(connection, UNSENT)
        self._connection = connection
        self._since = time.monotonic()
        self._best = 0.0

    def before_message(self) -> None:
        """To be called before a message is sent over the connection."""
        try:
            info = self._connection.getsockopt(socket.IPPROTO_TCP, _CC_INFO, _ESTIMATE.size)
            (estimate,) = _ESTIMATE.unpack(info)
        except (OSError, struct.error):  # closed; or not what Linux reports
            return
        self._best = max(estimate, self._best * self.KEPT)
        now = time.monotonic()
        old = now - self._since > self.RENEWED
        if (old or estimate < self._best / 2) and renew(self._connection):
            self._since = now


def renew(connection: socket.socket) -> bool:
    """Restart the BBR of a connection. Returns False if it cannot be done yet: while packets are
    sent again, BBR would forget its window."""
    if tcp_info(connection, _STATE) != (_OPEN,):
        return False
    try:
        for name in (_ANEW, LONG):
            connection.setsockopt(socket.IPPROTO_TCP, _OPTION, name.encode())
    except OSError:  # closed; or in a container that does not allow it
        return False
    return True
