"""Many short conversations over sockets, at once and in one thread. Each has one deadline for the
whole conversation, so a caller that sends nothing, or one byte at a time, does not delay the
others. If the job uses TLS (`laconic.links.tls`), every conversation begins with a TLS
handshake."""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
import time
from collections.abc import Callable

from laconic.links import forks, secured, tls
from laconic.links.handshake import Exchange, RefusedError
from laconic.links.sockets import watch
from laconic.links.strangers import (
    AT_ONCE,
    MOST_STRANGERS,
    PAUSE,
    accepted,
    log_refused,
    superfluous,
)


class EndedError(ConnectionError):
    """The other side closed the connection too early."""


class Talk:
    """One conversation. ``ended`` is called once, with the error, or with None once `result` is
    set. It may set `kept`; otherwise the connection is closed. ``context``: the TLS context, if TLS
    is used. ``caller``: the caller's address, for the log."""

    def __init__(
        self,
        connection: socket.socket,
        exchange: Exchange,
        deadline: float,
        ended: Callable[[Talk, Exception | None], None],
        *,
        connecting: bool = False,
        context: ssl.SSLContext | None = None,
        caller: str = "",
    ) -> None:
        self.connection = connection
        self.number = connection.fileno()
        """The file descriptor, also once it is closed."""
        self.caller = caller
        self.kept = False
        self.deadline = deadline
        self.ended = ended
        self.connecting = connecting
        self.inbound = not connecting
        self.result = b""
        self._exchange = exchange
        self._context = context
        self._out, self._wanted = next(exchange)
        self._in = b""
        self._tls_needs = 0
        """The event that TLS waits for, whatever the conversation does; 0: none."""

    @property
    def events(self) -> int:
        """The events to poll for."""
        if self._tls_needs:
            return self._tls_needs
        return select.POLLOUT if self.connecting or self._out else select.POLLIN

    def advance(self) -> bool:
        """Send and receive what is possible without waiting; returns whether the conversation is
        complete. Raises `RefusedError`, `OSError`."""
        if self.connecting:
            number = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if number:
                raise OSError(number, os.strerror(number))
            self.connecting = False
        self._tls_needs = 0
        try:
            self._secure()
            while True:
                while self._out:
                    self._out = self._out[self.connection.send(self._out) :]
                while len(self._in) < self._wanted:
                    piece = self.connection.recv(self._wanted - len(self._in))
                    if not piece:
                        raise EndedError("closed by the other side")
                    self._in += piece
                data, self._in = self._in, b""
                self._out, self._wanted = self._exchange.send(data)
        except BlockingIOError:
            return False
        except ssl.SSLWantReadError:
            self._tls_needs = select.POLLIN
            return False
        except ssl.SSLWantWriteError:
            self._tls_needs = select.POLLOUT
            return False
        except StopIteration as stop:
            self.result = stop.value
            return True

    def _secure(self) -> None:
        """Continue the TLS handshake, if there is one."""
        if self._context is None:
            return
        if not isinstance(self.connection, ssl.SSLSocket):
            with forks.guard:
                self.connection = self._context.wrap_socket(
                    self.connection, server_side=self.inbound, do_handshake_on_connect=False
                )
                forks.close_in_child(self.connection)
        self.connection.do_handshake()
        self._context = None  # it is complete


class Talks:
    """Conversations under way. `turn` advances them."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._talks: dict[int, Talk] = {}
        self._strangers = 0
        self._server: socket.socket | None = None
        self._paused_until = 0.0
        self._contexts = tls.contexts()

    def serve(
        self,
        server: socket.socket,
        exchange: Callable[[], Exchange],
        seconds: float,
        ended: Callable[[Talk, Exception | None], None],
    ) -> None:
        """Answer all callers of ``server``, each within ``seconds``."""
        server.setblocking(False)
        self._server = server
        self._answers = exchange, seconds, ended
        self._poll.register(server, select.POLLIN)

    def call(
        self,
        host: str,
        port: int,
        exchange: Exchange,
        deadline: float,
        ended: Callable[[Talk, Exception | None], None],
    ) -> None:
        """Call ``host``, a numeric address; raises `OSError` where that fails at once."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with forks.guard:
            connection = socket.socket(family, socket.SOCK_STREAM)
            forks.close_in_child(connection)
        watch(connection)
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        number = connection.connect_ex((host, port))
        if number not in (0, errno.EINPROGRESS):
            connection.close()
            raise OSError(number, os.strerror(number))
        context = None if self._contexts is None else self._contexts.client
        self._begin(Talk(connection, exchange, deadline, ended, connecting=True, context=context))

    def turn(self, seconds: float | None = None) -> None:
        """Wait for the next event, at most ``seconds``, and advance all conversations."""
        now = time.monotonic()
        times = [talk.deadline for talk in self._talks.values()]
        if self._paused_until:
            times.append(self._paused_until)
        if seconds is not None:
            times.append(now + seconds)
        wait = None if not times else max(1000 * (min(times) - now), 0) + 1
        for number, _ in self._poll.poll(wait):
            if self._server is not None and number == self._server.fileno():
                self._accept(self._server)
            elif number in self._talks:
                self._move(self._talks[number])
        now = time.monotonic()
        for talk in [t for t in self._talks.values() if t.deadline <= now]:
            self._end(talk, TimeoutError("took too long"))
        if self._server is not None and 0 < self._paused_until <= now:
            self._paused_until = 0.0
            self._poll.register(self._server, select.POLLIN)

    def _accept(self, server: socket.socket) -> None:
        exchange, seconds, ended = self._answers
        for _ in range(AT_ONCE):
            try:
                found = accepted(server)
            except OSError:  # no file descriptors are left
                self._poll.unregister(server)
                self._paused_until = time.monotonic() + PAUSE
                return
            if found is None:
                return
            connection, caller = found
            if self._strangers >= MOST_STRANGERS:
                callers = {talk: talk.caller for talk in self._talks.values() if talk.inbound}
                error = TimeoutError("made room for another caller")
                self._end(superfluous(callers), error)
            deadline = time.monotonic() + seconds
            context = None if self._contexts is None else self._contexts.server
            at = connection, exchange(), deadline, ended
            self._begin(Talk(*at, context=context, caller=caller))

    def _begin(self, talk: Talk) -> None:
        self._talks[talk.number] = talk
        self._strangers += talk.inbound
        self._poll.register(talk.number, talk.events)
        if not talk.connecting:
            self._move(talk)  # its first message has often come already

    def _move(self, talk: Talk) -> None:
        try:
            said = talk.advance()
        except (RefusedError, OSError) as error:
            self._end(talk, error)
        else:
            if said:
                self._end(talk, None)
            else:
                self._poll.modify(talk.number, talk.events)

    def _end(self, talk: Talk, error: Exception | None) -> None:
        self._poll.unregister(talk.number)
        del self._talks[talk.number]
        self._strangers -= talk.inbound
        if talk.inbound and isinstance(error, (RefusedError, ssl.SSLError)):
            log_refused(talk.caller, error)
        try:
            talk.ended(talk, error)
        finally:
            if not talk.kept:
                talk.connection.close()

    def close(self) -> None:
        """End all conversations."""
        for talk in list(self._talks.values()):
            self._poll.unregister(talk.number)
            talk.connection.close()
        self._talks.clear()
        self._strangers = 0


class UnreachableError(OSError):
    """No connection could be made."""


def converse(
    host: str, port: int, exchange: Callable[[], Exchange], seconds: float
) -> secured.Stream:
    """Call a listener. Returns the connection after the handshake of ``exchange()``, whose calls
    wait. All of that takes at most so many ``seconds``. Raises `UnreachableError`, `OSError` and
    `RefusedError`."""
    ends: list[tuple[Talk, Exception | None]] = []

    def ended(talk: Talk, error: Exception | None) -> None:
        talk.kept = error is None
        ends.append((talk, error))

    deadline, why = time.monotonic() + seconds, OSError(f"{host} has no address")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UnreachableError(str(error)) from error
    for *_, address in found:
        talks = Talks()
        try:
            talks.call(str(address[0]), port, exchange(), deadline, ended)
        except OSError as error:
            why = error
            continue
        while not ends:
            talks.turn()
        talk, failed = ends.pop()
        if failed is None:
            return secured.waiting(talk.connection)
        if not (talk.connecting and isinstance(failed, OSError)):
            raise failed
        why = failed
    raise UnreachableError(str(why)) from why
