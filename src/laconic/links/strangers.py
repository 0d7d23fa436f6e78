"""Callers that have not proved who they are."""

from __future__ import annotations

import logging
import random
import re
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

from laconic.links import forks, secured

T = TypeVar("T")
log = logging.getLogger("laconic")

MOST_STRANGERS = 128
"""The most at a time. The next one replaces another one."""
AT_ONCE = 32
"""The most callers accepted at once, before other conversations continue."""
PAUSE = 0.1
"""Seconds without new callers after the process has run out of file descriptors."""
_MOST_REASONS = 20
_reasons: set[str] = set()
"""Why callers were refused. Each reason is logged once, so that strangers cannot fill a log."""
_logging = threading.Lock()
_random = random.SystemRandom()  # programs seed the other generator


def accepted(listening: socket.socket) -> tuple[socket.socket, str] | None:
    """The next caller of ``listening``, and its address; None if nobody calls. Raises `OSError` if
    no file descriptors are left: pause for `PAUSE` seconds."""
    try:
        with forks.guard:
            connection, address = listening.accept()
            forks.close_in_child(connection)
    except (BlockingIOError, ConnectionAbortedError):
        return None
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection, str(address[0])


def superfluous(strangers: Mapping[T, str]) -> T:
    """Whom to drop of these ``strangers``, given with their addresses, where they are too many: one
    at random of those at the address from which most have come. So a flood from some addresses
    delays nobody else's calls, and every caller from a flooding address has its chance."""
    addresses = Counter(strangers.values())
    most = max(addresses.values())
    crowd = [s for s, address in strangers.items() if addresses[address] == most]
    return _random.choice(crowd)


def log_refused(caller: str, error: Exception) -> None:
    """Log that the caller at an address was refused, once for each reason."""
    why = secured.reason(error) if isinstance(error, ssl.SSLError) else str(error)
    kind = re.sub(r"\d+", "", why)
    with _logging:
        if kind in _reasons or len(_reasons) >= _MOST_REASONS:
            return
        _reasons.add(kind)
    log.warning("refused a caller at %s: %s (further ones are not logged)", caller, why)
