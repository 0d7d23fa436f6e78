"""``laconic coordinator``: keep the views of runs whose workers come and go."""

from __future__ import annotations

import argparse
import signal
import threading
from typing import Any

from laconic.cli.options import declare


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
    declare(parser, "--address", address="127.0.0.1:29400")


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    from laconic.links import tls
    from laconic.links.elastic.coordinator import Coordinator

    host, port = arguments.address
    at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        coordinator = Coordinator(host, port)
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]  # Python adds the address
        raise ValueError(
            f"cannot listen at {at}: {reason}; give an --address of this host with a free port; if "
            "a worker serves this one, no other coordinator is needed"
        ) from error
    how = "" if tls.contexts() is None else ", with TLS"
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    print(f"coordinator at {at}{how}; end it with Ctrl-C", flush=True)
    try:
        ended.wait()
    finally:
        coordinator.close()
    return 0
