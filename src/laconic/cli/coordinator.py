"""``laconic coordinator``: keep the views of runs whose workers come and go."""

from __future__ import annotations

import argparse
import signal
import threading
from typing import Any

from laconic.cli.options import declare
from laconic.errors import check_int

OPTIONS = """
--host HOST  the address to listen at
--port N  a free one
"""


def add(parser: Any) -> None:
    """Add the description and the options of the command."""
    parser.description = (
        "Keeps who takes part in the runs whose workers come and go: "
        'laconic.attach(..., elastic=laconic.Elastic("host:29400")). It carries no training data. '
        "While it is down, training goes on with the same workers; it can be started again at the "
        "same address. Without one, a worker on the address's host does the same. With the "
        "variables that `laconic keys` prints it uses TLS, and admits only workers with a "
        "certificate of the same CA."
    )
    declare(parser, OPTIONS, host="127.0.0.1", port=29400)


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    from laconic.links import tls
    from laconic.links.elastic.coordinator import Coordinator

    check_int("--port", arguments.port, 1)
    if arguments.port >= 2**16:
        raise ValueError(f"--port must be below {2**16}, not {arguments.port}")
    try:
        coordinator = Coordinator(arguments.host, arguments.port)
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]  # Python adds the address
        raise ValueError(
            f"cannot listen at {arguments.host}:{arguments.port}: {reason}; give an "
            "address of this host as --host, and a free --port; if a worker serves this one, "
            "no other coordinator is needed"
        ) from error
    how = "" if tls.contexts() is None else ", with TLS"
    at = f"{arguments.host}:{arguments.port}"
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    print(f"coordinator at {at}{how}; end it with Ctrl-C", flush=True)
    try:
        ended.wait()
    finally:
        coordinator.close()
    return 0
