"""The coordinator: a small server that keeps who takes part in the jobs of its address.

A worker keeps one connection to it. After the handshake of `laconic.links.handshake` (and TLS, if
the job uses it) both send lines of JSON:

    worker -> coordinator   the job, the worker, what it is about (`Job.join`), once
    coordinator -> worker   the run's salt, the worker's number, and whether the coordinator is
                            inside a worker; or why it is refused
    worker -> coordinator   a `Beat`, whenever something has changed, and every second
    coordinator -> worker   the latest view, and every later one; how many have come, or are left;
                            and an empty answer to each beat

One thread serves all. It carries no training data.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import secrets
import socket
import time
from functools import partial
from typing import Any

from laconic.links import handshake, job_secret
from laconic.links.addresses import listening
from laconic.links.elastic.leases import Beat, Job, Need, RefusedError
from laconic.links.elastic.view import NONCE_BITS, View, unpack_member
from laconic.links.talks import EndedError, Lines, Service, Talk
from laconic.links.texts import clean

log = logging.getLogger("laconic")

PORT = 29400
"""The coordinator's port where none is given."""
PURPOSE = b"member"
KEY = bytes(handshake.KEY_BYTES)
REFUSAL = b"\xff" * 5
"""The length of no text, and no record of TLS: a caller does not know the secret, or uses TLS, and
need not try again."""
HELLO_SECONDS = 5.0
"""How long a caller may take in all to prove who it is."""
TICK = 0.1
CLOSED = EndedError, ConnectionResetError, BrokenPipeError
"""How a connection ends that the worker's system has closed. The last two: before the worker had
read all."""
_ADDRESS = re.compile(r"\[([0-9a-fA-F:.]+)\](?::(\d{1,5}))?|([\w.-]+)(?::(\d{1,5}))?", re.ASCII)
"""A host name, an IPv4 address, or an IPv6 address in brackets; and a port."""


def parse_address(text: str) -> tuple[str, int]:
    """The host and port of ``"host:port"``, ``"host"`` or ``"[address]:port"``; raises
    ``ValueError``."""
    match = _ADDRESS.fullmatch(text)
    host, port = (match[1] or match[3], match[2] or match[4] or PORT) if match else ("", 0)
    if not host or not 0 < int(port) < 2**16:
        raise ValueError(
            f"a coordinator is given as host:port, such as 10.0.0.1:29400, not {text!r}"
        )
    return host, int(port)


def secret_of_callers() -> bytes:
    """What a worker and its coordinator prove to each other that they know. Without
    LACONIC_SECRET_FILE, everybody knows it."""
    shared = job_secret.read()
    return bytes(handshake.SECRET_BYTES) if shared is None else job_secret.derive(shared, "member")


class _Client:
    """A worker's connection, and what was sent over it. ``why``: how the worker says that it has
    ended."""

    def __init__(self, lines: Lines, job: Job, at: tuple[str, str], known: View | None) -> None:
        self.lines, self.job, self.at, self.salt = lines, job, at, job.salt
        latest = job.view.epoch - 1 if job.view is not None else 0
        self._epoch = latest if known is None else known.epoch
        self._said: dict[str, Any] = {}
        self.why = ""

    def push(self, come: int) -> None:
        """Send what is new."""
        if self.salt != self.job.salt:
            self.lines.send({"again": True})
            self.lines.close_soon()
            return
        for view in self.job.views:
            if view.epoch > self._epoch:
                self.lines.send({"view": view.pack()})
                self._epoch = view.epoch
        new = {"come": come, "short": self.job.short}
        if new != self._said:
            self._said = new
            self.lines.send(new)


class Coordinator:
    """A coordinator at ``host`` and ``port``, in a thread of its own, until `close`; with TLS if
    the variables of `laconic.links.tls` say so. ``embedded``: in a worker's process, with which
    it ends. Raises `OSError` where the port is taken, and ``ValueError`` where the settings are
    wrong."""

    def __init__(self, host: str, port: int, embedded: bool = False) -> None:
        self._embedded = embedded
        self._secret = secret_of_callers()
        self._begun = time.monotonic()
        self._nonce = secrets.randbits(NONCE_BITS)
        self._jobs: dict[str, Job] = {}
        self._clients: dict[tuple[str, str], _Client] = {}
        """By job and worker."""
        at = "laconic-coordinator", _listen(host, port), self._exchange, HELLO_SECONDS
        self._service = Service(*at, self._answered, self._decide, TICK)
        self._service.open()

    def close(self) -> None:
        """End all connections."""
        self._service.close()

    def _decide(self) -> None:
        now = time.monotonic()
        for name, job in list(self._jobs.items()):
            try:
                job.decide(now)
            except Exception:  # the other jobs, and this one's later decisions, go on
                log.exception("the coordinator could not decide about the job %s", clean(name))
            clients = [c for (of, _), c in self._clients.items() if of == name]
            come = len(job.founders(now))
            for client in clients:
                client.push(come)
            if not clients and job.is_over(now):
                del self._jobs[name]

    # -- callers ----

    def _exchange(self) -> handshake.Exchange:
        return handshake.answer([PURPOSE], lambda key: self._secret, lambda hello, text: b"")

    def _answered(self, talk: Talk, error: Exception | None) -> None:
        talk.kept = error is None
        if talk.kept:
            until = time.monotonic() + HELLO_SECONDS
            lines = Lines(talk, until, lambda line: self._join(lines, line), lambda *_: None)
            self._service.begin(lines)
        elif isinstance(error, handshake.RefusedError):
            with contextlib.suppress(OSError):
                talk.connection.send(REFUSAL)

    def _join(self, lines: Lines, line: bytes) -> None:
        """The first line of a worker's."""
        now = time.monotonic()
        match json.loads(line):
            case {
                "job": str(name),
                "member": member,
                "about": str(about),
                "need": [int(start), int() | None as expected, int() | None as least],
                "number": int(number),
                "salt": str(salt),
                "view": view,
            }:
                known = None if view is None else View.unpack(view)
                at = unpack_member(member), about, Need(start, expected, least), now
            case _:
                raise ValueError("not a worker of laconic's")
        job = self._jobs.setdefault(name, Job(self._nonce, self._begun))
        try:
            worker = job.join(*at, number=number, salt=salt, view=known)
        except RefusedError as error:
            lines.send({"refused": str(error), "about": error.about, "removed": error.removed})
            lines.close_soon()
            self._decide()
            return
        id = worker.member.id
        before = self._clients.pop((name, id), None)
        if before is not None:
            before.lines.abort()
        client = self._clients[name, id] = _Client(lines, job, (name, id), known)
        lines.deadline = math.inf
        lines.heard, lines.ended = partial(self._heard, client), partial(self._ended, client)
        lines.send({"salt": job.salt, "number": worker.number, "embedded": self._embedded})
        self._decide()

    def _heard(self, client: _Client, line: bytes) -> None:
        match json.loads(line):
            case {"over": str(said)}:
                client.why = clean(said)[:200]
                client.lines.close_soon()
            case _ if not self._is_present(client):
                client.lines.close_soon()
            case value:
                if client.job.renew(client.at[1], Beat.unpack(value), time.monotonic()):
                    self._decide()
                client.lines.send({})

    def _ended(self, client: _Client, lines: Lines, error: Exception | None) -> None:
        if self._clients.get(client.at) is client:
            present = self._is_present(client)
            del self._clients[client.at]
            if present:
                now, by_system = time.monotonic(), isinstance(error, CLOSED)
                client.job.close(client.at[1], now, why=client.why, by_system=by_system)
                self._decide()

    def _is_present(self, client: _Client) -> bool:
        """Whether it is the latest connection of a worker that holds a lease."""
        latest = self._clients.get(client.at) is client and client.salt == client.job.salt
        return latest and client.at[1] in client.job.leases


def _listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen at all addresses of ``host``."""
    found, error = list[socket.socket](), OSError(f"{host} has no address")
    for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            found.append(listening(str(address[0]), port))
        except OSError as failed:  # such as the IPv6 address of "localhost" on a host without it
            error = failed
    if not found:
        raise error
    return found
