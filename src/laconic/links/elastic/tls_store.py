"""The coordinator's store under TLS.

torch's ``TCPStore`` has no TLS, and a forwarder in front of it would leave a port that every user
of the host can open. So the store under TLS is a dictionary of the coordinator's process, with the
operations of ``TCPStore`` that `laconic.links.elastic.registry` uses, and their results:

    coordinator -> client   a greeting, once the client's certificate is verified
    client -> coordinator   a list: the operation and its arguments, which are strings
    coordinator -> client   a list: "ok" and the result, or "error" and a text

Each is JSON after its length in 4 bytes. Nothing that a client sends is read before its
certificate is verified, except the handshake.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import select
import socket
import ssl
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from enum import Enum
from typing import Any

from laconic.links import forks, tls
from laconic.links.addresses import connect
from laconic.links.sockets import watch
from laconic.links.talks import log_refused
from laconic.links.texts import clean

log = logging.getLogger("laconic")

GREETING = ["laconic coordinator", 1]
HELLO_SECONDS = 5.0
"""How long a client may take in all for its handshake."""
MOST_STRANGERS = 128
"""The most handshakes at a time. The next client replaces the oldest."""
MOST_BYTES = 2**24
"""The longest request and reply."""
PIECE = 2**16
PROBE_SECONDS = 1.0
_PAUSE = 0.1
"""Seconds without new clients after the process has run out of file descriptors."""
_LENGTH = struct.Struct(">I")
_TORCH_PING, _NONCE_BYTES = struct.pack("=BIB", 0, 0x3C85F7CE, 13), 4
"""How torch's client begins: VALIDATE with its magic number, and PING, which is followed by a nonce
that the store sends back."""


class UntrustedError(RuntimeError):
    """The two sides do not agree on TLS, or one does not trust the other's certificate. Its text is
    a sentence without a subject, about the coordinator."""


class _Values:
    """What is stored, with ``TCPStore``'s operations. Raises ``ValueError``."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def perform(self, request: object) -> object:
        """Do what a client asks for."""
        match request:
            case ["check", str(key)]:
                return key in self._values
            case ["get", str(key)] if key in self._values:
                return self._values[key]
            case ["set", str(key), str(value)]:
                self._values[key] = value
                return None
            case ["compare_set", str(key), str(expected), str(desired)]:
                # as TCPStore: a key without a value counts as equal to "", and stays without one
                # where another value was expected
                found = self._values.get(key, "")
                if found == expected:
                    self._values[key] = desired
                    return desired
                return found if key in self._values else expected
            case ["add", str(key), int(amount)]:
                total = int(self._values.get(key, "0")) + amount
                self._values[key] = str(total)
                return total
        raise ValueError("no such operation, or no such key")


class Server:
    """A coordinator with TLS that listens at ``host`` and ``port``, in threads of its own: one for
    each client, since a client that is slow to read or to shake hands must not delay another one.
    It ends with `close`, or with this object. Raises `OSError` where the port is taken."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext) -> None:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with forks.guard:
            listening = socket.create_server(
                address[4][:2], family=address[0], backlog=socket.SOMAXCONN
            )
            forks.close_in_child(listening)
        watch(listening)
        serving = _Serving(listening, context)
        thread = threading.Thread(target=serving.run, daemon=True, name="laconic-coordinator")
        thread.start()
        self.close = weakref.finalize(self, _stop, serving, thread)


def _stop(serving: _Serving, thread: threading.Thread) -> None:
    serving.stop()
    if thread is not threading.current_thread():
        thread.join(HELLO_SECONDS)


class _Serving:
    """What the threads of a `Server` do. Does not know the server, which can so be freed."""

    def __init__(self, listening: socket.socket, context: ssl.SSLContext) -> None:
        self._listening, self._context = listening, context
        self._values = _Values()
        self._lock = threading.Lock()
        self._clients: dict[ssl.SSLSocket, bool] = {}
        """The connections, the oldest first, and whether they are strangers': their certificate is
        not verified yet."""
        self._ended = False

    def run(self) -> None:
        """Accept clients until `stop`."""
        with self._listening:
            while not self._ended:
                self._wait()
                try:
                    client, address = self._accept()
                except (BlockingIOError, ConnectionAbortedError):  # nobody, or one that has gone
                    continue
                except OSError:  # no file descriptors are left
                    time.sleep(0 if self._ended else _PAUSE)
                    continue
                at = client, address
                thread = threading.Thread(target=self._converse, args=at, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no threads are left
                    self._forget(client)
                    time.sleep(_PAUSE)

    def stop(self) -> None:
        """End all connections."""
        self._ended = True
        with self._lock:
            for end in (self._listening, *self._clients):
                _shutdown(end)

    def _accept(self) -> tuple[ssl.SSLSocket, str]:
        """A client, and its address."""
        with forks.guard:  # does not block any more
            connection, address = self._listening.accept()
            connection.settimeout(HELLO_SECONDS)
            try:
                client = self._context.wrap_socket(connection, True, do_handshake_on_connect=False)
            except OSError:
                connection.close()
                raise
            forks.close_in_child(client)
        with self._lock:
            strangers = [c for c, stranger in self._clients.items() if stranger]
            if len(strangers) >= MOST_STRANGERS:
                _shutdown(strangers[0])
                self._clients[strangers[0]] = False  # its thread closes it
            self._clients[client] = True
        return client, str(address[0])

    def _wait(self) -> None:
        """Until a client calls, or `stop`."""
        poll = select.poll()
        poll.register(self._listening, select.POLLIN)
        poll.poll(1000)  # not every system reports that it was shut down
        self._listening.setblocking(False)

    def _forget(self, client: ssl.SSLSocket) -> None:
        with self._lock:
            self._clients.pop(client, None)
        client.close()

    def _converse(self, client: ssl.SSLSocket, address: str) -> None:
        try:
            try:
                client.do_handshake()  # the timeout is for all of it
            except ssl.SSLError as error:
                log_refused(address, error)
                return
            with self._lock:
                self._clients[client] = False
            if self._ended:
                return
            client.settimeout(None)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.sendall(_packed(GREETING))
            while True:
                (length,) = _LENGTH.unpack(_read(client, _LENGTH.size))
                if length > MOST_BYTES:
                    return
                reply = self._reply(_read(client, length))
                client.sendall(_packed(reply))
        except OSError as error:
            log.debug("a client of the coordinator has ended: %s", error)
        finally:
            self._forget(client)

    def _reply(self, data: bytes) -> Sequence[object]:
        try:
            request = json.loads(data)
            with self._lock:
                return ["ok", self._values.perform(request)]
        except (ValueError, RecursionError) as error:
            return ["error", str(error)]


class Client:
    """A connection to a `Server`, with the methods of ``TCPStore``. Keys begin with ``prefix``.
    No operation takes more than ``seconds``. Raises `UntrustedError`, `OSError`, and
    ``RuntimeError`` where the server refuses an operation."""

    def __init__(
        self, host: str, port: int, prefix: str, contexts: tls.Contexts, seconds: float
    ) -> None:
        self._prefix = prefix
        connection = connect(host, port, seconds)
        try:
            with forks.guard:  # wraps it without a handshake, which would block
                self._connection = contexts.client.wrap_socket(
                    connection, do_handshake_on_connect=False
                )
                forks.close_in_child(self._connection)
        except BaseException:
            connection.close()
            raise
        try:
            _handshake(self._connection)
            self._greet()
        except BaseException:
            self.close()
            raise

    def _greet(self) -> None:
        try:
            greeting = self._receive()
        except ssl.SSLError as error:  # under TLS 1.3 the answer to the client's certificate
            raise UntrustedError(
                "refuses this worker's certificate: the coordinator and all workers need "
                f"certificates of one CA ({_reason(error)})"
            ) from error
        except ValueError:
            greeting = None
        if greeting != GREETING:
            raise UntrustedError("is another program with a certificate of this job's CA")
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all ``keys`` have values."""
        return all(self._ask("check", self._prefix + key) for key in keys)

    def get(self, key: str) -> bytes:
        """The value of ``key``, which must have one."""
        return str(self._ask("get", self._prefix + key)).encode(errors="replace")

    def set(self, key: str, value: str) -> None:
        """Set the value of ``key``."""
        self._ask("set", self._prefix + key, value)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set ``key`` to ``desired`` if its value is ``expected``, which is "" for none; returns
        its value."""
        found = str(self._ask("compare_set", self._prefix + key, expected, desired))
        return found.encode(errors="replace")  # JSON may hold half a surrogate pair

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the number ``key``, which begins at 0; returns the sum."""
        return int(self._ask("add", self._prefix + key, amount))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _ask(self, *request: object) -> Any:
        try:
            self._connection.sendall(_packed(request))
            answer = self._receive()
        except BaseException:
            self.close()  # what comes next would answer an earlier request
            raise
        match answer:
            case ["ok", result]:
                return result
            case ["error", str(text)]:
                raise RuntimeError(clean(text)[:200])
        raise RuntimeError("an answer that is none")

    def _receive(self) -> object:
        (length,) = _LENGTH.unpack(_read(self._connection, _LENGTH.size))
        if length > MOST_BYTES:
            raise ValueError("an answer that is too long")
        return json.loads(_read(self._connection, length))


class Probed(Enum):
    """What listens at a coordinator's address: torch's store, a program with TLS, or neither."""

    PLAIN, TLS, UNKNOWN = range(3)


def probe(host: str, port: int, seconds: float) -> Probed:
    """Ask what listens there. Raises `OSError` where nothing does.

    torch's own client takes seconds to give up a server with TLS, and writes its C++ stack to the
    standard error. So the question is what this client would say first: torch's store answers it,
    and a server with TLS ends the connection. If the answer is neither, as of another version of
    torch, its own client has the last word."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    with connect(host, port, seconds) as connection:
        connection.settimeout(PROBE_SECONDS)
        try:
            connection.sendall(_TORCH_PING + nonce)
            if _read(connection, _NONCE_BYTES) == nonce:
                return Probed.PLAIN
        except OSError:
            pass
    return Probed.TLS if speaks_tls(host, port) else Probed.UNKNOWN


def speaks_tls(host: str, port: int) -> bool:
    """Whether a program with TLS listens there. Trusts nobody and sends nothing but a handshake."""
    asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asking.check_hostname = False
    asking.verify_mode = ssl.CERT_NONE
    try:
        with (
            socket.create_connection((host, port), PROBE_SECONDS) as connection,
            asking.wrap_socket(connection),
        ):
            return True
    except OSError:
        return False


def _handshake(connection: ssl.SSLSocket) -> None:
    try:
        connection.do_handshake()
    except ssl.SSLCertVerificationError as error:
        raise UntrustedError(
            "has a certificate that this worker does not trust: the coordinator and all workers "
            f"need certificates of one CA ({error.verify_message})"
        ) from error
    except ssl.SSLEOFError:
        raise  # it may be ending
    except ssl.SSLError as error:
        raise UntrustedError(
            f"does not speak TLS 1.3: set the same variables for it ({_reason(error)})"
        ) from error


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(min(size - len(data), PIECE))
        if not piece:
            raise ConnectionResetError("the other side has closed the connection")
        data += piece
    return bytes(data)


def _shutdown(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended already
        # not SSLSocket's, which would have the thread that uses it send without TLS
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _packed(value: object) -> bytes:
    data = json.dumps(value).encode()
    return _LENGTH.pack(len(data)) + data


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
