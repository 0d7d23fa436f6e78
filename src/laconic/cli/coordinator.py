"""``laconic coordinator``: keep the views of runs whose workers come and go."""

from __future__ import annotations

import argparse
import signal
import threading
from typing import Any

from laconic.errors import check_int


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "coordinator",
        description="Keeps who takes part in the runs whose workers come and go: "
        'laconic.attach(..., elastic=laconic.Elastic("host:29400")). It carries no training data. '
        "While it is down, training goes on with the same workers; it can be started again at the "
        "same address. With the variables that `laconic keys` prints it uses TLS, and admits only "
        "workers with a certificate of the same CA.",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="the address to listen at (default: %(default)s)"
    )
    parser.add_argument("--port", type=int, default=29400, help="default: %(default)s")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    from laconic.links import tls
    from laconic.links.elastic.registry import serve  # imports torch

    check_int("--port", arguments.port, 1)
    if arguments.port >= 2**16:
        raise ValueError(f"--port must be below {2**16}, not {arguments.port}")
    try:
        store = serve(arguments.host, arguments.port)
    except OSError as error:
        raise ValueError(
            f"cannot listen at {arguments.host}:{arguments.port}: {error.strerror}; give an "
            "address of this host as --host, and a free --port"
        ) from error
    how = "" if tls.contexts() is None else ", with TLS"
    at = f"{arguments.host}:{arguments.port}"
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    print(f"coordinator at {at}{how}; end it with Ctrl-C", flush=True)
    try:
        ended.wait()
    finally:
        del store
    return 0
