"""The coordinator's store, as the workers of one job use it.

The store (torch's ``TCPStore``) keeps a chain of views. A view is decided by the first worker that
writes it: `Registry.propose`. The store is not on the data path. Where it can't be reached, only
changes of the membership stop. A store that was started again, and is empty, gets what the workers
know: `Registry.restore`. Under TLS the store is another one (`laconic.links.elastic.tls_store`).
"""

from __future__ import annotations

import atexit
import json
import logging
import queue
import re
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection, Container
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from laconic.errors import LinkError
from laconic.links import attempts, job_secret, tls
from laconic.links.elastic import tls_store
from laconic.links.elastic.view import MOST_MEMBERS, Member, View, unpack_member
from laconic.links.handshake import SECRET_BYTES
from laconic.links.sockets import watch
from laconic.links.texts import clean

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")
Entered = dict[int, tuple[Member, str]]
"""By number: a worker, and what it is about."""

log = logging.getLogger("laconic")

PORT = 29400
"""The coordinator's port where none is given."""
CALL_SECONDS = 5.0
"""How long one call of the store may take. A store that was stopped never answers."""
RETRY_SECONDS = 0.5
SAY_SECONDS = 5.0
"""After so long a worker that waits says what for."""
EXIT_SECONDS = CALL_SECONDS + 1
"""How long a process that ends waits for a call of the store to return."""
_ADDRESS = re.compile(r"\[([0-9a-fA-F:.]+)\](?::(\d{1,5}))?|([\w.-]+)(?::(\d{1,5}))?", re.ASCII)
"""A host name, an IPv4 address, or an IPv6 address in brackets; and a port."""
SECRET, ABOUT, LATEST = "secret", "about", "latest"
ENTERED, NUMBERS = "entered", "numbers"
"""The workers that want to take part and those that do, in one value, which takes one call to read;
and how many there have ever been."""


class CoordinatorError(LinkError):
    """The coordinator can't be reached."""


class UntrustedError(CoordinatorError):
    """What is at the coordinator's address and this worker do not trust each other. To try again is
    of no use."""


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


def serve(host: str, port: int) -> Store | tls_store.Server:
    """Start a coordinator in this process, on the interface of ``host``; with TLS if the variables
    of `laconic.links.tls` say so. It ends with the returned object. Raises `OSError` where the port
    is taken, and ``ValueError`` where the TLS settings are wrong."""
    contexts = tls.contexts()
    if contexts is not None:
        return tls_store.Server(host, port, contexts.server)
    address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listening = socket.create_server(address[4][:2], family=address[0], backlog=socket.SOMAXCONN)
    watch(listening)
    return attempts.serve(listening, host, port, None, wait=False)


class _Client:
    """A connection to the store, used by a thread of its own, since a call of the store may block
    for good."""

    def __init__(self, host: str, port: int, job: str, contexts: tls.Contexts | None) -> None:
        self._contexts = contexts
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._at = host, port, job
        self._store: Any = None
        self._thread = threading.Thread(target=self._work, daemon=True, name="laconic-registry")
        self._thread.start()
        _open.add(self)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
        if isinstance(self._store, tls_store.Client):
            self._store.close()
        self._store = None

    def call(self, operation: Callable[[Any], T]) -> T:
        """``operation`` on the store; raises `CoordinatorError`."""
        result: list[T] = []
        errors: list[Exception] = []
        done = threading.Event()

        def run() -> None:
            try:
                if self._store is None:
                    self._store = self._connect()
                result.append(operation(self._store))
            except (OSError, RuntimeError) as error:  # torch's errors are RuntimeErrors
                errors.append(error)
            done.set()

        self._jobs.put(run)
        host, port, _ = self._at
        if not done.wait(CALL_SECONDS + 1):
            raise CoordinatorError(f"the coordinator at {host}:{port} does not answer")
        if errors and isinstance(errors[0], tls_store.UntrustedError):
            raise UntrustedError(f"the coordinator at {host}:{port} {errors[0]}") from errors[0]
        if errors:
            reason = clean(str(errors[0]).splitlines()[0] if str(errors[0]) else "no reason given")
            raise CoordinatorError(
                f"no coordinator answers at {host}:{port}: start one by "
                f"`laconic coordinator --port {port}` on that host, or correct the address "
                f"({reason})"
            ) from errors[0]
        return result[0]

    def _connect(self) -> Any:
        host, port, job = self._at
        prefix = f"laconic/{job}"
        if self._contexts is not None:
            return self._connect_by_tls(f"{prefix}/", self._contexts)
        if tls_store.probe(host, port, CALL_SECONDS) == tls_store.Probed.TLS:
            raise tls_store.UntrustedError(
                "uses TLS, and this worker does not: set the variables that `laconic keys` prints"
            )
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, None, False, timedelta(seconds=CALL_SECONDS), False
        )
        return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]

    def _connect_by_tls(self, prefix: str, contexts: tls.Contexts) -> tls_store.Client:
        host, port, _ = self._at
        try:
            return tls_store.Client(host, port, prefix, contexts, CALL_SECONDS / 2)
        except ConnectionRefusedError:
            raise
        except OSError:  # it ends, or hangs, or has no TLS
            if self._is_plain():
                raise tls_store.UntrustedError(
                    "has no TLS, and this worker uses it: set the variables that `laconic keys` "
                    "prints there too"
                ) from None
            raise

    def _is_plain(self) -> bool:
        host, port, _ = self._at
        try:
            return tls_store.probe(host, port, CALL_SECONDS / 4) == tls_store.Probed.PLAIN
        except OSError:
            return False

    def close(self, until: float = 0.0) -> None:
        """Let the thread end, once the call that it is in returns. Wait for that until the time
        ``until``."""
        self._jobs.put(None)
        self._thread.join(max(until - time.monotonic(), 0))


class Registry:
    """What the workers of ``job`` share through the coordinator at ``address``. Every method raises
    `CoordinatorError` where it can't be reached; the next one connects again."""

    def __init__(self, address: str, job: str) -> None:
        self.host, self.port = parse_address(address)
        self._job, self._contexts = job, tls.contexts()
        self._shared = job_secret.read()
        self._stored: dict[bytes, str] = {}
        """What is stored for each secret that was derived."""
        self.number = 1
        """Of this process, once it has entered."""
        self.program = ""
        """A digest of what this worker is about."""
        self.strangers: set[str] = set()
        """The ids of workers that have entered and are about something else."""
        self._replaced = ("", "")
        self._client: _Client | None = None
        self._lock = threading.Lock()

    def _call(self, operation: Callable[[Any], T]) -> T:
        with self._lock:
            if self._client is None:
                self._client = _Client(self.host, self.port, self._job, self._contexts)
            try:
                return self._client.call(operation)
            except CoordinatorError:
                self._client.close()
                self._client = None
                raise

    def close(self, until: float) -> None:
        """Close the connection; wait for that until the time ``until``."""
        if self._client is not None:
            self._client.close(until)

    def connect(self, until: float) -> None:
        """Wait for the coordinator, at most until the time ``until`` (`time.monotonic`)."""
        say = time.monotonic() + SAY_SECONDS
        while True:
            try:
                self._call(lambda store: store.check([SECRET]))
                return
            except UntrustedError:
                raise
            except CoordinatorError as error:
                now = time.monotonic()
                if now >= until:
                    raise
                if now >= say:
                    log.warning("%s; trying again for %.0f s", error, until - now)
                    say = until
            time.sleep(RETRY_SECONDS)

    def _first(self, key: str, value: str, *, instead_of: str = "") -> str:
        """Write ``value`` unless there is another one than ``instead_of``; returns what is
        there."""
        found: bytes = self._call(lambda store: store.compare_set(key, instead_of, value))
        return found.decode(errors="replace")

    def _read(self, key: str) -> str | None:
        def read(store: Any) -> str | None:
            if not store.check([key]):
                return None
            value: bytes = store.get(key)
            return value.decode(errors="replace")

        return self._call(read)

    def secret(self) -> bytes:
        """The job's secret, which the first worker draws. Where all workers have one already, the
        first worker draws a salt, from which they derive it, and the secret is not stored. Raises
        ``ValueError`` if this worker's is not that of the first one."""
        return self._secret_of(self._first(SECRET, self._drawn()))

    def _drawn(self) -> str:
        """A secret or a salt as it is stored."""
        drawn = secrets.token_hex(SECRET_BYTES)
        return f"{drawn}/{self._fingerprint(drawn)}" if self._shared else drawn

    def _fingerprint(self, salt: str) -> str:
        assert self._shared is not None
        return job_secret.derive(self._shared, "elastic", self._job, salt.encode()).hex()

    def _secret_of(self, stored: str) -> bytes:
        """The secret that is ``stored``, or that follows from what is."""
        drawn, _, fingerprint = stored.partition("/")
        try:
            secret = bytes.fromhex(drawn)
        except ValueError:
            secret = b""
        if len(secret) != SECRET_BYTES:
            raise LinkError(f"what is at {self.host}:{self.port} is no coordinator of laconic's")
        own = self._fingerprint(drawn) if self._shared else ""
        if own != fingerprint:
            text = job_secret.difference("this worker", own, fingerprint)
            raise ValueError(
                f"{text}. If this worker's is right, start the coordinator at "
                f"{self.host}:{self.port} again, or pass another job= than {self._job!r}"
            )
        if self._shared is None:
            return secret
        secret = job_secret.derive(self._shared, "elastic run", self._job, secret)
        self._stored[secret] = stored
        return secret

    def about(self, text: str, instead_of: str = "") -> str:
        """What the job is about: ``text``, unless another worker has said it before, and not what
        it is said ``instead_of``."""
        said = self._first(ABOUT, text, instead_of=instead_of)
        if instead_of and said == text:
            self._replaced = instead_of, text
        return said

    def put_back(self) -> None:
        """Undo what `about` has replaced, if anything."""
        before, now = self._replaced
        if before:
            self.about(before, instead_of=now)

    def restore(self, secret: bytes, about: str, view: View) -> View | None:
        """Write what this worker knows into a store that has lost it. Returns the view that counts
        for the epoch of ``view``; None if the store is of another job."""
        own = secret.hex() if self._shared is None else self._stored[secret]
        said = self._first(SECRET, own)
        if said != own and self._read(LATEST) is None:
            # workers have come that would begin a run: they notice (`Members.found`)
            def replace(store: Any) -> str:
                store.set(ABOUT, about)
                found: bytes = store.compare_set(SECRET, said, own)
                return found.decode(errors="replace")

            said = self._call(replace)
        if said != own or self._first(ABOUT, about) != about:
            return None
        return self.propose(view)

    # -- workers that come ----

    def enter(self, member: Member) -> int:
        """Add ``member`` to those that want to take part; returns its number, from 1."""
        self.number = number = int(self._call(lambda store: store.add(NUMBERS, 1)))
        self._change_entered(lambda entered: {**entered, number: (member, self.program)})
        return number

    def entered(self, known: Container[int] = ()) -> dict[int, Member]:
        """The members that have entered, by number, without those ``known``, and without those that
        are about something else."""
        entered = self._unpack_entered(self._read(ENTERED) or "[]")
        self.strangers.update(m.id for m, program in entered.values() if program != self.program)
        new = ((n, m) for n, (m, program) in entered.items() if program == self.program)
        return {n: m for n, m in new if n not in known}

    def _unpack_entered(self, text: str) -> Entered:
        try:
            return {int(n): (unpack_member(m), str(program)) for n, m, program in json.loads(text)}
        except (TypeError, ValueError, RecursionError) as error:
            raise self._damaged(ENTERED, str(error)) from None

    def _change_entered(self, change: Callable[[Entered], Entered]) -> None:
        text = self._read(ENTERED) or ""
        while True:
            changed = change(self._unpack_entered(text or "[]"))
            new = json.dumps([[n, *each] for n, each in sorted(changed.items())])
            found = self._first(ENTERED, new, instead_of=text)
            if found == new:
                return
            text = "" if found == text else found  # the store was started again, or is ahead

    # -- views ----

    def view(self, epoch: int) -> View | None:
        """The view that was decided for ``epoch``, if one was."""
        view = self._view_at(f"view/{epoch}")
        if view is not None and view.epoch != epoch:
            raise self._damaged(f"view/{epoch}", f"it is of epoch {view.epoch}")
        return view

    def _view_at(self, key: str) -> View | None:
        text = self._read(key)
        try:
            return None if text is None else View.unpack(text)
        except ValueError as error:
            raise self._damaged(key, str(error)) from None

    def _damaged(self, key: str, why: str) -> LinkError:
        return LinkError(f"what the coordinator at {self.host}:{self.port} has as {key}: {why}")

    def latest(self) -> View | None:
        """The latest view, if there is any."""
        text = self._read(LATEST)
        if text is None:
            return None
        epoch, found = _number(text), None
        while (view := self.view(epoch)) is not None:  # the number may be late
            found, epoch = view, epoch + 1
        return found

    def propose(self, view: View, gone: Collection[str] = ()) -> View:
        """Decide ``view`` for its epoch, unless another one was; returns the one that counts.
        ``gone``: the ids of workers that have ended, to be forgotten."""
        assert 0 < len(view.members) <= MOST_MEMBERS, "else nobody could read it"
        self._first(f"view/{view.epoch}", view.pack())
        decided = self.view(view.epoch)
        assert decided is not None, "views stay"

        def note(store: Any) -> None:
            before = store.get(LATEST).decode(errors="replace") if store.check([LATEST]) else ""
            if _number(before) < view.epoch:
                store.set(LATEST, str(view.epoch))

        self._call(note)
        if gone:
            self._change_entered(lambda old: {n: e for n, e in old.items() if e[0].id not in gone})
        return decided


_open: weakref.WeakSet[_Client] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """The interpreter stops threads wherever they are. If one of them is inside torch's store, the
    process ends with SIGABRT."""
    until = time.monotonic() + EXIT_SECONDS
    for client in list(_open):
        client.close(until)


def _number(text: str) -> int:
    """The epoch in ``text``, 0 if there is none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else 0
