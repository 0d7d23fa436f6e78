"""Who is still there: a beacon in every process that tells others what it is doing.

A back end reports a lost peer as a closed connection or a time-out, on some ranks at once and on
others late, and never by rank. After such an error each rank asks the others' beacons, so that
the message can name who is gone, who hangs and who is somewhere else.
"""

from __future__ import annotations

import functools
import os
import socket
import threading
import time

ANSWER_SECONDS = 2.0
"""How long a beacon is given to answer; it does nothing else."""


def own_address() -> str:
    """This host's address on the network that leads to the rendezvous (MASTER_ADDR)."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        family, _, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing: asks the routing table
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


class Beacon:
    """Answers every connection with this process's status, from a thread of its own."""

    def __init__(self) -> None:
        host = own_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family)
        self.address = f"{host}|{self._server.getsockname()[1]}"
        self.status = "starting"
        self._since = time.monotonic()
        threading.Thread(target=self._serve, daemon=True, name="laconic-beacon").start()

    def set(self, status: str) -> None:
        """What this process is doing from now on."""
        self.status, self._since = status, time.monotonic()

    def _serve(self) -> None:
        while True:
            connection, _ = self._server.accept()
            with connection:
                seconds = time.monotonic() - self._since
                try:
                    connection.sendall(f"{self.status}, for {seconds:.0f} s".encode())
                except OSError:
                    continue  # who asked has gone


@functools.cache
def beacon() -> Beacon:
    """This process's own, lit at the first call and as long as the process lives."""
    return Beacon()


def ask(address: str) -> str:
    """What the process at ``address`` says, or what its silence means."""
    host, port = address.rsplit("|", 1)
    try:
        with socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS) as connection:
            answer = connection.recv(256).decode()
            return answer or "is gone (its process is ending)"
    except ConnectionError:
        return "is gone (its process has ended)"
    except OSError:
        return "does not answer (hung, or its host is unreachable)"
