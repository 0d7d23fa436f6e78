"""Many conversations over sockets, at once and in one thread.

Short ones (`Talk`) prove who the other side is, and say one thing each. Each has one deadline for
the whole conversation, so a caller that sends nothing, or one byte at a time, does not delay the
others. A connection may go on after that, as `Lines`. If the job uses TLS (`laconic.links.tls`),
every conversation begins with a TLS handshake.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import random
import re
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from laconic.links import forks, secured, tls
from laconic.links.handshake import Exchange
from laconic.links.sockets import watch

T = TypeVar("T")
log = logging.getLogger("laconic")

MOST_STRANGERS = 128
"""The most callers at a time that have not proved who they are. The next one replaces another."""
AT_ONCE = 32
"""The most callers accepted at once, before other conversations continue."""
GATHER_SECONDS = 0.02
"""How long a turn waits for more callers while half of `MOST_STRANGERS` are there: a turn for each
of a flood would take the processor from training."""
PAUSE = 0.1
"""Seconds without new callers after the process has run out of file descriptors."""
MOST_LINE = 2**22
"""The longest of `Lines` in bytes, and the most that wait to be sent."""
RETRY_SECONDS = 0.05
"""The pause before a call is made again."""
CLOSE_SECONDS = 2.0
"""How long the end of `Lines` waits until all was sent, and that of a `Service` for its thread."""
_WOULD_WAIT = BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError
_MOST_REASONS = 20
_reasons: set[str] = set()
"""Why callers were refused. Each reason is logged once, so that strangers cannot fill a log."""
_logging = threading.Lock()
_random = random.SystemRandom()  # programs seed the other generator


class EndedError(ConnectionError):
    """The other side closed the connection too early."""


class UnreachableError(OSError):
    """No connection could be made."""


def superfluous(strangers: Mapping[str, Sequence[T]]) -> T:
    """Whom to drop of these ``strangers``, by address, where they are too many: one at random of
    those at the address from which most have come. So a flood from some addresses delays nobody
    else's calls, and every caller from a flooding address has its chance."""
    most = max(strangers.values(), key=lambda each: (len(each), _random.random()))
    return _random.choice(most)


def _log_refused(caller: str, error: Exception) -> None:
    """Log that the caller at an address was refused, once for each reason."""
    why = secured.reason(error) if isinstance(error, ssl.SSLError) else str(error)
    kind = re.sub(r"\d+", "", why)
    with _logging:
        if kind in _reasons or len(_reasons) >= _MOST_REASONS:
            return
        _reasons.add(kind)
    log.warning("refused a caller at %s: %s (further ones are not logged)", caller, why)


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
                raise UnreachableError(number, os.strerror(number))
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
            if self.inbound and not self.connection.recv(1, socket.MSG_PEEK):
                raise EndedError("closed by the other side")  # and who says nothing costs nothing
            with forks.guard:
                self.connection = self._context.wrap_socket(
                    self.connection, server_side=self.inbound, do_handshake_on_connect=False
                )
                forks.close_in_child(self.connection)
        self.connection.do_handshake()
        self._context = None  # it is complete


class Lines:
    """A connection that goes on after its `Talk`: lines of JSON, in both directions. ``heard`` is
    called with each that comes; what it raises ends the connection. ``ended`` is called once, with
    the error, or with None once `close_soon` has closed it."""

    connecting = inbound = kept = False

    def __init__(
        self,
        talk: Talk,
        deadline: float,
        heard: Callable[[bytes], None],
        ended: Callable[[Lines, Exception | None], None],
    ) -> None:
        self.connection, self.number, self.caller = talk.connection, talk.number, talk.caller
        self.deadline = deadline
        self.heard, self.ended = heard, ended
        self._in = self._out = b""
        self._closing = False

    @property
    def events(self) -> int:
        """The events to poll for."""
        if self._closing:
            return select.POLLOUT
        return select.POLLIN | (select.POLLOUT if self._out else 0)

    def send(self, value: object) -> None:
        """Send ``value`` as a line, as soon as possible."""
        if self._closing:
            return
        self._out += json.dumps(value).encode() + b"\n"
        if len(self._out) > MOST_LINE:
            self.abort()  # it reads nothing

    def close_soon(self) -> None:
        """Close the connection once all was sent. Nothing is heard any more."""
        self._closing = True
        self.deadline = min(self.deadline, time.monotonic() + CLOSE_SECONDS)

    def abort(self) -> None:
        """Have the connection end at the next turn."""
        self.deadline = 0.0

    def advance(self) -> bool:
        """Send and receive what is possible without waiting; returns whether the connection is to
        be closed. Raises `OSError`, and what `heard` does."""
        if not self._closing:
            with contextlib.suppress(*_WOULD_WAIT):
                self._receive()  # first: what came counts even where nothing can be sent any more
        with contextlib.suppress(*_WOULD_WAIT):
            while self._out:
                self._out = self._out[self.connection.send(self._out) :]
        return self._closing and not self._out

    def _receive(self) -> None:
        piece = self.connection.recv(2**16)
        if not piece:
            raise EndedError("closed by the other side")
        *lines, self._in = (self._in + piece).split(b"\n")
        for line in lines:
            if not self._closing:
                self.heard(line)
        if len(self._in) > MOST_LINE:
            raise ValueError("a line that is too long")


class Talks:
    """Conversations under way. `turn` advances them."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._talks: dict[int, Talk | Lines] = {}
        self._strangers: dict[str, list[Talk | Lines]] = {}
        """The callers that have not proved who they are, by address."""
        self._servers: dict[int, socket.socket] = {}
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._contexts = tls.contexts()

    def serve(
        self,
        servers: Sequence[socket.socket],
        exchange: Callable[[], Exchange],
        seconds: float,
        ended: Callable[[Talk, Exception | None], None],
    ) -> None:
        """Answer all callers of ``servers``, each within ``seconds``."""
        self._answers = exchange, seconds, ended
        for server in servers:
            server.setblocking(False)
            self._servers[server.fileno()] = server
        self._listen()

    def _listen(self) -> None:
        for number in self._servers:
            self._poll.register(number, select.POLLIN)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Have `turn` call ``action`` after so many ``seconds``."""
        self._later.append((time.monotonic() + seconds, action))

    def call(
        self,
        host: str,
        port: int,
        exchange: Callable[[], Exchange],
        deadline: float,
        end: Callable[[Talk | Exception], None],
        *,
        again: bool = False,
    ) -> None:
        """Call ``host``, a numeric address. ``end`` is called with the conversation, or with an
        error: an `UnreachableError` where no connection was made. ``again``: where a connection
        ends before the ``deadline``, make another one: strangers may have flooded the other
        side."""

        def ended(talk: Talk, error: Exception | None) -> None:
            early = again and error is not None and _ends_early(error)
            if early and time.monotonic() + RETRY_SECONDS < deadline:
                at = host, port, exchange, deadline, end
                self.later(RETRY_SECONDS, partial(self.call, *at, again=True))
            else:
                end(talk if error is None else error)

        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with forks.guard:
                connection = socket.socket(family, socket.SOCK_STREAM)
                forks.close_in_child(connection)
            watch(connection)
            connection.setblocking(False)
            number = connection.connect_ex((host, port))
            if number not in (0, errno.EINPROGRESS):
                connection.close()
                raise OSError(number, os.strerror(number))
        except OSError as error:
            end(UnreachableError(*error.args))
            return
        context = None if self._contexts is None else self._contexts.client
        self.begin(Talk(connection, exchange(), deadline, ended, connecting=True, context=context))

    def turn(self, seconds: float | None = None) -> None:
        """Wait for the next event, at most ``seconds``, and advance all conversations."""
        if 2 * sum(map(len, self._strangers.values())) > MOST_STRANGERS:
            time.sleep(GATHER_SECONDS)
        now, times = time.monotonic(), [at for at, _ in self._later]
        for talk in self._talks.values():
            times.append(talk.deadline)
            if isinstance(talk, Lines):  # it may have been told to send something
                self._poll.modify(talk.number, talk.events)
        wait = min(min(times, default=math.inf) - now, math.inf if seconds is None else seconds)
        for number, _ in self._poll.poll(None if wait == math.inf else max(1000 * wait, 0) + 1):
            if number in self._servers:
                self._accept(self._servers[number])
            elif number in self._talks:
                self._move(self._talks[number])
        now = time.monotonic()
        for talk in [t for t in self._talks.values() if t.deadline <= now]:
            kind = UnreachableError if talk.connecting else TimeoutError
            self._end(talk, kind("took too long"))
        due = [action for at, action in self._later if at <= now]
        self._later = [(at, action) for at, action in self._later if at > now]
        for action in due:
            action()

    def _accept(self, server: socket.socket) -> None:
        exchange, seconds, ended = self._answers
        for _ in range(AT_ONCE):
            try:
                with forks.guard:
                    connection, address = server.accept()
                    forks.close_in_child(connection)
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:  # no file descriptors are left
                for number in self._servers:
                    self._poll.modify(number, 0)
                self.later(PAUSE, self._listen)
                return
            connection.setblocking(False)
            if sum(map(len, self._strangers.values())) >= MOST_STRANGERS:
                error = TimeoutError("made room for another caller")
                self._end(superfluous(self._strangers), error)
            deadline = time.monotonic() + seconds
            context = None if self._contexts is None else self._contexts.server
            at = connection, exchange(), deadline, ended
            self.begin(Talk(*at, context=context, caller=str(address[0])))

    def begin(self, talk: Talk | Lines) -> None:
        """Take care of ``talk``; of `Lines` when their `Talk` has ended, and was kept."""
        self._talks[talk.number] = talk
        if talk.inbound:
            self._strangers.setdefault(talk.caller, []).append(talk)
        self._poll.register(talk.number, talk.events)
        if not talk.connecting:
            self._move(talk)  # its first message has often come already

    def _move(self, talk: Talk | Lines) -> None:
        try:
            said = talk.advance()
        except Exception as error:  # whatever one caller sends, the others' conversations go on
            self._end(talk, error)
        else:
            if said:
                self._end(talk, None)
            else:
                self._poll.modify(talk.number, talk.events)

    def _end(self, talk: Talk | Lines, error: Exception | None) -> None:
        self._poll.unregister(talk.number)
        del self._talks[talk.number]
        if talk.inbound:
            others = self._strangers[talk.caller]
            others.remove(talk)
            if not others:
                del self._strangers[talk.caller]
        lost = isinstance(error, OSError) and not isinstance(error, ssl.SSLError)
        if talk.caller and error is not None and not lost:
            _log_refused(talk.caller, error)
        try:
            talk.ended(talk, error)  # type: ignore[arg-type]  # each has its own kind
        finally:
            if not talk.kept:
                talk.connection.close()

    def close(self) -> None:
        """End all conversations."""
        for talk in list(self._talks.values()):
            self._poll.unregister(talk.number)
            talk.connection.close()
        self._talks.clear()
        self._strangers.clear()


class Service(Talks):
    """Answers all callers of ``servers`` from a thread called ``name``, from `open` to `close`; see
    `Talks.serve`. ``look()`` is called in it, every ``pause`` seconds."""

    def __init__(
        self,
        name: str,
        servers: Sequence[socket.socket],
        exchange: Callable[[], Exchange],
        seconds: float,
        ended: Callable[[Talk, Exception | None], None],
        look: Callable[[], None] = lambda: None,
        pause: float = 1.0,
    ) -> None:
        super().__init__()
        self.serve(servers, exchange, seconds, ended)
        self._look, self._pause = look, pause
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)

    def open(self) -> None:
        """Answer callers from now on."""
        self._thread.start()

    def _run(self) -> None:
        look_at = time.monotonic()
        try:
            while not self._closed:
                if (now := time.monotonic()) >= look_at:
                    self._look()
                    look_at = now + self._pause
                self.turn(look_at - now)
        finally:
            super().close()
            for server in self._servers.values():
                server.close()

    def close(self) -> None:
        """Answer nobody from now on."""
        self._closed = True
        for server in self._servers.values():
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)  # wakes the thread, on most systems
        self._thread.join(CLOSE_SECONDS)


def _ends_early(error: Exception) -> bool:
    """Whether the other side may have dropped a caller whom it would accept."""
    late = isinstance(error, (UnreachableError, TimeoutError))
    return not (late or secured.about_certificates(error))


def converse(
    host: str, port: int, exchange: Callable[[], Exchange], seconds: float
) -> secured.Stream:
    """Call a listener. Returns the connection after the handshake of ``exchange()``, whose calls
    wait. All of that takes at most so many ``seconds``. Raises `UnreachableError`, `OSError` and
    `RefusedError`."""
    ends: list[Talk | Exception] = []

    def ended(end: Talk | Exception) -> None:
        if isinstance(end, Talk):
            end.kept = True
        ends.append(end)

    deadline, why = time.monotonic() + seconds, UnreachableError(f"{host} has no address")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UnreachableError(str(error)) from error
    for *_, address in found:
        talks = Talks()
        talks.call(str(address[0]), port, exchange, deadline, ended)
        while not ends:
            talks.turn()
        end = ends.pop()
        if isinstance(end, Talk):
            return secured.Stream(end.connection)
        if not isinstance(end, UnreachableError):
            raise end
        why = end
    raise why
