"""A worker's connection to the coordinator (`laconic.links.elastic.coordinator`)."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from laconic.errors import LinkError
from laconic.links import handshake, job_secret, secured, tls
from laconic.links.elastic.coordinator import KEY, PURPOSE, secret_of_callers
from laconic.links.elastic.leases import Beat, Need
from laconic.links.elastic.view import Member, View
from laconic.links.talks import MOST_LINE, UnreachableError, converse
from laconic.links.texts import clean

log = logging.getLogger("laconic")

CALL_SECONDS = 5.0
"""How long the coordinator may say nothing. A process that was stopped never answers."""
LOOK_SECONDS = 0.5
RETRY_SECONDS = 0.5
SAY_SECONDS = 5.0
"""After so long a worker that waits says what for."""


class CoordinatorError(LinkError):
    """The coordinator can't be reached."""


class UntrustedError(CoordinatorError):
    """What is at the coordinator's address and this worker do not trust each other. To try again is
    of no use."""


class OtherProgramError(UntrustedError):
    """The job at the coordinator is ``about`` something else than this worker."""

    def __init__(self, about: str) -> None:
        super().__init__("the job is about something else")
        self.about = about


class RemovedError(LinkError):
    """The run goes on without this worker."""


class Client:
    """The connection of the worker ``member`` of ``job``, which is ``about`` this and has this
    ``need``, to the coordinator at ``host`` and ``port``. `connect` makes it, also again."""

    def __init__(
        self, host: str, port: int, job: str, member: Member, about: str, need: Need
    ) -> None:
        self.at = f"{host}:{port}"
        self.host, self.port = host, port
        self.embedded = True
        """Whether the coordinator was inside a worker, or is not known yet."""
        self._said = {
            "job": job,
            "member": member,
            "about": about,
            "need": list(vars(need).values()),
        }
        self._contexts, self._secret = tls.contexts(), secret_of_callers()
        self._job, self._shared = job, job_secret.read()
        self.number, self._salt = 0, ""
        """This worker's number, from 1, once it has joined."""
        self._stream: secured.Stream | None = None
        self._sending = threading.Lock()
        self._text = b""

    @property
    def secret(self) -> bytes:
        """What the workers of the run share."""
        salt = bytes.fromhex(self._salt)
        if self._shared is None:
            return salt
        return job_secret.derive(self._shared, "elastic run", self._job, salt)

    def connect(self, view: View | None) -> None:
        """Connect, and join. ``view``: the latest that this worker knows, once it follows a run.
        Raises `CoordinatorError` and `RemovedError`."""
        self.close()
        self._text = b""
        known = None if view is None else view.pack()
        joins = {**self._said, "number": self.number, "salt": self._salt, "view": known}
        stream = self._open()
        try:
            stream.sendall(json.dumps(joins).encode() + b"\n")
        except OSError as error:
            stream.close()
            raise self._failed(error) from error
        self._stream = stream  # beats follow
        match self.receive(CALL_SECONDS):
            case {"salt": str(salt), "number": int(number), "embedded": bool(embedded)}:
                self._salt, self.number, self.embedded = salt, number, embedded
                return
            case {"refused": str(), "about": str(about)} if about:
                raise OtherProgramError(about)
            case {"refused": str(text), "removed": True}:
                raise RemovedError(clean(text))
            case {"refused": str(text)}:
                raise CoordinatorError(f"the coordinator at {self.at}: {clean(text)}")
        raise CoordinatorError(f"what is at {self.at} is no coordinator of laconic's")

    def _open(self) -> secured.Stream:
        """A connection, after the handshake."""
        exchange = partial(handshake.call, self._secret, PURPOSE, KEY, 0, b"")
        try:
            return converse(self.host, self.port, exchange, CALL_SECONDS)
        except UnreachableError as error:
            raise CoordinatorError(
                f"no coordinator answers at {self.at}: start one by `laconic coordinator "
                f"--address {self.at}` on that host, or correct the address "
                f"({clean(secured.reason(error))})"
            ) from error
        except (OSError, handshake.RefusedError) as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> CoordinatorError:
        """What the failure of a connection, or of its handshake, means."""
        who = f"the coordinator at {self.at}"
        if isinstance(error, TimeoutError):
            return CoordinatorError(f"{who} does not answer")
        if isinstance(error, handshake.RefusedError):
            return UntrustedError(
                f"{who} has another secret in {job_secret.VARIABLE} than this worker, or is "
                "another program: give both the same file, or none"
            )
        begins = self._stream is None
        if begins and self._contexts is None and speaks_tls(self.host, self.port):
            return UntrustedError(
                f"{who} uses TLS, and this worker does not: set the variables that `laconic keys` "
                "prints"
            )
        if secured.about_certificates(error):
            return UntrustedError(
                f"{who} and this worker do not accept each other's certificates: the coordinator "
                f"and all workers need certificates of one CA ({secured.reason(error)})"
            )
        if begins and isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
            return UntrustedError(
                f"{who} does not use TLS as this worker does: set the variables that "
                f"`laconic keys` prints there, too ({secured.reason(error)})"
            )
        return CoordinatorError(f"the connection to {who} is lost ({clean(secured.reason(error))})")

    def beat(self, beat: Beat) -> None:
        """Send ``beat``. Raises `CoordinatorError`."""
        self._send(vars(beat))

    def over(self, why: str) -> None:
        """This worker ends: the others need not wait for it."""
        with contextlib.suppress(CoordinatorError):
            self._send({"over": why})

    def _send(self, value: object) -> None:
        with self._sending:
            stream = self._connected()
            try:
                stream.sendall(json.dumps(value).encode() + b"\n", CALL_SECONDS)
            except OSError as error:
                raise self._failed(error) from error

    def _connected(self) -> secured.Stream:
        if self._stream is None:
            raise CoordinatorError(f"the connection to the coordinator at {self.at} is lost")
        return self._stream

    def receive(self, seconds: float) -> Mapping[str, Any]:
        """The next message. Raises `CoordinatorError`, also if none comes within so many
        ``seconds``."""
        stream, end = self._connected(), time.monotonic() + seconds
        try:
            while b"\n" not in self._text:
                piece = stream.recv(2**16, end - time.monotonic())
                if not piece:
                    raise ConnectionResetError("it has closed the connection")
                self._text += piece
                if len(self._text) > MOST_LINE:
                    raise ValueError("a line that is too long")
            line, _, self._text = self._text.partition(b"\n")
            value = json.loads(line)
            if not isinstance(value, dict):
                raise ValueError("no object")
            return value
        except (OSError, ValueError, RecursionError) as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Close the connection. A thread that uses it raises `CoordinatorError`."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


def speaks_tls(host: str, port: int) -> bool:
    """Whether a program with TLS listens there. Trusts nobody and sends nothing but a handshake."""
    asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asking.check_hostname = False
    asking.verify_mode = ssl.CERT_NONE
    try:
        with (
            socket.create_connection((host, port), LOOK_SECONDS) as connection,
            asking.wrap_socket(connection),
        ):
            return True
    except OSError:
        return False
