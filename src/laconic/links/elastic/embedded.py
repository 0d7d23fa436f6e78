"""A coordinator inside a worker, where nobody else serves its address.

Of the workers on the address's host, the first one that finds nobody there serves it, until its
process ends; then another one does. So a run needs no process beside its workers. While no worker
is left on that host, nobody can join, and a loss stops the run until one is started there again.
"""

from __future__ import annotations

import logging
import threading

from laconic.links.attempts import is_here_only
from laconic.links.elastic.coordinator import Coordinator

log = logging.getLogger("laconic")

_guard = threading.Lock()
_served: dict[tuple[str, int], Coordinator] = {}
"""Of this process, until it ends: the runs of others may go on longer than its own."""


def serve(host: str, port: int) -> bool:
    """Serve ``host`` and ``port`` from this process. False where that is not possible: the address
    is another host's, or a name for this one that means the loopback interface, where no other host
    would reach it; or a program has it, perhaps this one."""
    with _guard:
        try:
            if (host, port) in _served or is_here_only(host):
                return False
            _served[host, port] = Coordinator(host, port, embedded=True)
        except OSError:
            return False
    log.info("this worker serves the coordinator's address, %s:%d", host, port)
    return True
