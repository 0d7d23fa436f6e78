"""Who is still there, and where: a beacon in every process that tells others what it is doing.

A back end reports a lost peer as a closed connection or a time-out, on some ranks at once and on
others late, and never by rank; ranks in different calls it does not report at all. So a rank that
waits long, or whose connection broke, asks the others' beacons, and the message can name who is
gone, who hangs and who is somewhere else.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

ANSWER_SECONDS = 2.0
"""How long a beacon is given to answer; it does nothing else."""
MOST_BYTES = 2**20


def address_towards(host: str) -> str | None:
    """This host's address on the way to ``host``; None where there is no way."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing: asks the routing table
            return str(probe.getsockname()[0])
    except OSError:
        return None


def address_of(interface: str) -> str | None:
    """The IPv4 address of a network interface of this host, on Linux; None where it has none."""
    try:
        import fcntl  # not on Windows

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            request = struct.pack("256s", interface.encode()[:15])
            said = fcntl.ioctl(asking, 0x8915, request)  # SIOCGIFADDR
        return socket.inet_ntoa(said[20:24])
    except (ImportError, OSError):
        return None


def own_address() -> str:
    """This host's address for other ranks: that of the interface that GLOO_SOCKET_IFNAME names, as
    for gloo (the first where it names several); else the one on the network that leads to the
    rendezvous (MASTER_ADDR); else, where there is no such variable, or it leads nowhere but to this
    host though there are several, the one that the host's name stands for."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0].strip()
    named = address_of(interface) if interface else None
    master = os.environ.get("MASTER_ADDR")
    found = named or (address_towards(master) if master else None)
    world = os.environ.get("WORLD_SIZE")
    several = os.environ.get("LOCAL_WORLD_SIZE", world) != world
    if found is None or (found.startswith("127.") and several and not named):
        found = _address_of_name() or found
    return found or "127.0.0.1"


def _address_of_name() -> str | None:
    try:
        return address_towards(socket.gethostbyname(socket.gethostname()))
    except OSError:
        return None


class Place(NamedTuple):
    """Where a rank is in its sequence of calls: the number of calls so far, the word that says
    which one the last is, whether no more will come, and whether not even that one is made to its
    end."""

    serial: int = 0
    word: int = 0
    left: bool = False
    broken: bool = False


@dataclass(frozen=True)
class Answer:
    """What a beacon said: the process's status, and its place in each of its sequences of calls;
    or, with no places, what its silence means."""

    status: str
    places: dict[str, Place] = field(default_factory=dict)

    @property
    def lost(self) -> bool:
        return not self.places


class Beacon:
    """Answers every connection with what this process is doing, from a thread of its own, and
    takes in what others found out: `verdicts`, one for each sequence of calls."""

    def __init__(self) -> None:
        host = own_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family)
        self._address = f"{host}|{self._server.getsockname()[1]}"
        self.status = "starting"
        self.places: dict[str, Place] = {}
        self.verdicts: dict[str, str] = {}
        self._since = time.monotonic()
        threading.Thread(target=self._serve, daemon=True, name="laconic-beacon").start()

    def enroll(self) -> str:
        """The address under which others ask for a new sequence of calls of this process."""
        key = secrets.token_hex(4)  # whoever knows it is of this run
        self.places[key] = Place()
        return f"{self._address}|{key}"

    def set(self, status: str) -> None:
        """What this process is doing from now on."""
        self.status, self._since = status, time.monotonic()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
                with connection:
                    self._answer(connection)
            except Exception:
                time.sleep(0.01)  # who asked has gone, or is none of ours, or files have run out

    def _answer(self, connection: socket.socket) -> None:
        seconds = time.monotonic() - self._since
        answer = [f"{self.status}, for {seconds:.0f} s", dict(self.places)]
        connection.settimeout(ANSWER_SECONDS)
        connection.sendall(json.dumps(answer).encode())
        connection.shutdown(socket.SHUT_WR)
        if told := _read(connection):
            key, verdict = json.loads(told)
            if key in self.places:
                self.verdicts.setdefault(key, str(verdict))


@functools.cache
def beacon() -> Beacon:
    """This process's own, lit at the first call and as long as the process lives."""
    return Beacon()


def key_of(address: str) -> str:
    """The last part of what `Beacon.enroll` returned."""
    return address.rpartition("|")[2]


def _read(connection: socket.socket) -> bytes:
    """What comes until the other side has said all."""
    said = b""
    while len(said) < MOST_BYTES and (piece := connection.recv(4096)):
        said += piece
    return said


def ask(address: str, verdict: str = "") -> Answer:
    """What the process at ``address`` says, or what its silence means; and, if there is one, tell
    it the verdict on the calls enrolled under this address."""
    host, port, key = address.rsplit("|", 2)
    try:
        with socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS) as connection:
            connection.sendall(json.dumps([key, verdict]).encode() if verdict else b"")
            connection.shutdown(socket.SHUT_WR)
            text = _read(connection)
        if not text:
            return Answer("is gone (its process is ending)")
        status, places = json.loads(text)
        return Answer(status, {key: Place(*place) for key, place in places.items()})
    except ConnectionError:
        return Answer("is gone (its process has ended)")
    except (OSError, ValueError, TypeError):
        return Answer("does not answer (hung, or its host is unreachable)")


def ask_all(addresses: Iterable[str], verdict: str = "") -> list[Answer]:
    """All at once."""
    asked = list(addresses)
    with ThreadPoolExecutor(max(len(asked), 1)) as pool:
        return list(pool.map(functools.partial(ask, verdict=verdict), asked))
