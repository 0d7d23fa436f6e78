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

import asyncio
import contextlib
import json
import logging
import re
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from laconic.links import handshake, job_secret, tls
from laconic.links.addresses import listening
from laconic.links.elastic.leases import Beat, Job, Need, RefusedError
from laconic.links.elastic.view import NONCE_BITS, View, unpack_member
from laconic.links.strangers import (
    AT_ONCE,
    MOST_STRANGERS,
    PAUSE,
    accepted,
    log_refused,
    superfluous,
)
from laconic.links.texts import clean

log = logging.getLogger("laconic")

PORT = 29400
"""The coordinator's port where none is given."""
PURPOSE = b"member"
KEY = bytes(handshake.KEY_BYTES)
REFUSAL = b"\xff" * 4
"""The length of no text: that a caller does not know the secret, and need not try again."""
HELLO_SECONDS = 5.0
"""How long a caller may take in all to prove who it is."""
TICK = 0.1
MOST_LINE = 2**22
"""The longest line in bytes, and the most that wait to be sent to a worker."""
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
    """A worker's connection, and what was sent over it."""

    def __init__(
        self, writer: asyncio.StreamWriter, job: Job, at: tuple[str, str], known: View | None
    ) -> None:
        self._writer, self.job, self.at, self.salt = writer, job, at, job.salt
        latest = job.view.epoch - 1 if job.view is not None else 0
        self._epoch = latest if known is None else known.epoch
        self._said: dict[str, Any] = {}

    def send(self, value: object) -> None:
        transport = self._writer.transport
        if transport.is_closing():
            return
        if transport.get_write_buffer_size() > MOST_LINE:
            self.abort()  # it reads nothing: it joins again
        else:
            self._writer.write(json.dumps(value).encode() + b"\n")

    def push(self, come: int) -> None:
        """Send what is new."""
        if self.salt != self.job.salt:
            self.send({"again": True})
            self._writer.close()
            return
        for view in self.job.newer(self._epoch):
            self.send({"view": view.pack()})
            self._epoch = view.epoch
        new = {"come": come, "short": self.job.short}
        if new != self._said:
            self._said = new
            self.send(new)

    def abort(self) -> None:
        self._writer.transport.abort()


class Coordinator:
    """A coordinator at ``host`` and ``port``, in a thread of its own, until `close`; with TLS if
    the variables of `laconic.links.tls` say so. ``embedded``: in a worker's process, with which
    it ends. Raises `OSError` where the port is taken, and ``ValueError`` where the settings are
    wrong."""

    def __init__(self, host: str, port: int, embedded: bool = False) -> None:
        self._embedded = embedded
        contexts = tls.contexts()
        self._context = None if contexts is None else contexts.server
        self._secret = secret_of_callers()
        self._servers = _listen(host, port)
        self._begun = time.monotonic()
        self._nonce = secrets.randbits(NONCE_BITS)
        self._jobs: dict[str, Job] = {}
        self._clients: dict[tuple[str, str], _Client] = {}
        """By job and worker."""
        self._strangers: dict[asyncio.Task[None], str] = {}
        """Callers that have not proved who they are, and their addresses."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="laconic-coordinator")
        self._thread.start()

    def close(self) -> None:
        """End all connections."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            for server in self._servers:
                server.close()
            self._loop.close()

    async def _serve(self) -> None:
        for server in self._servers:
            self._loop.add_reader(server, self._accept, server)
        while not self._ended.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ended.wait(), TICK)
            self._decide()
        for server in self._servers:
            self._loop.remove_reader(server)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

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

    def _accept(self, server: socket.socket) -> None:
        for _ in range(AT_ONCE):
            try:
                found = accepted(server)
            except OSError:  # no file descriptors are left
                self._loop.remove_reader(server)
                again = partial(self._loop.add_reader, server, self._accept, server)
                self._loop.call_later(PAUSE, again)
                return
            if found is None:
                return
            connection, caller = found
            if len(self._strangers) >= MOST_STRANGERS:
                other = superfluous(self._strangers)
                del self._strangers[other]
                other.cancel()
            task = self._loop.create_task(self._answer(connection, caller))
            self._strangers[task] = caller
            self._tasks.add(task)
            task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._strangers.pop(task, None)
        self._tasks.discard(task)

    async def _answer(self, connection: socket.socket, caller: str) -> None:
        writer = None
        try:
            reader = asyncio.StreamReader(MOST_LINE, self._loop)
            protocol = asyncio.StreamReaderProtocol(reader, loop=self._loop)
            limit: Any = {} if self._context is None else {"ssl_handshake_timeout": HELLO_SECONDS}
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=self._context, **limit
            )
            writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
            await asyncio.wait_for(self._meet(reader, writer), HELLO_SECONDS)
            task = asyncio.current_task()
            assert task is not None
            self._strangers.pop(task, None)
            await self._converse(reader, writer)
        except (ssl.SSLError, ValueError, RecursionError) as error:
            log_refused(caller, error)
            if writer is not None and isinstance(error, handshake.RefusedError):
                writer.write(REFUSAL)
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError) as error:
            log.debug("a caller of the coordinator has ended: %s", error)
        finally:
            if writer is not None:
                writer.close()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The handshake."""
        exchange = handshake.answer(PURPOSE, lambda key: self._secret, lambda hello, text: b"")
        with contextlib.suppress(StopIteration):
            out, wanted = next(exchange)
            while True:
                writer.write(out)
                out, wanted = exchange.send(await reader.readexactly(wanted))

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await asyncio.wait_for(reader.readline(), HELLO_SECONDS)
        client = self._join(json.loads(line), writer)
        if client is None:
            return
        by_system, why = False, ""
        try:
            while line := await reader.readline():
                match json.loads(line):
                    case {"over": str(said)}:
                        why = clean(said)[:200]
                        break
                    case value if not self._is_present(client):
                        break
                    case value:
                        beat = Beat.unpack(value)
                        if client.job.renew(client.at[1], beat, time.monotonic()):
                            self._decide()
                        client.send({})
            by_system = not line and self._is_present(client)
        except (ConnectionResetError, BrokenPipeError):  # it ended before it had read all
            by_system = self._is_present(client)
            raise
        finally:
            if self._clients.get(client.at) is client:
                present = self._is_present(client)
                del self._clients[client.at]
                if present:
                    client.job.close(client.at[1], time.monotonic(), why=why, by_system=by_system)
                    self._decide()

    def _is_present(self, client: _Client) -> bool:
        """Whether it is the latest connection of a worker that holds a lease."""
        latest = self._clients.get(client.at) is client and client.salt == client.job.salt
        return latest and client.at[1] in client.job.leases

    def _join(self, said: Mapping[str, Any], writer: asyncio.StreamWriter) -> _Client | None:
        now = time.monotonic()
        match said:
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
            answer = {"refused": str(error), "about": error.about, "removed": error.removed}
            writer.write(json.dumps(answer).encode() + b"\n")
            self._decide()
            return None
        id = worker.member.id
        before = self._clients.pop((name, id), None)
        if before is not None:
            before.abort()
        client = self._clients[name, id] = _Client(writer, job, (name, id), known)
        welcome = {"salt": job.salt, "number": worker.number, "embedded": self._embedded}
        client.send(welcome)
        self._decide()
        return client


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
    for server in found:
        server.setblocking(False)
    return found
