"""TLS: mistakes in its settings are errors that name the variable and the file, before anything
connects; nothing can be read or changed on the way, and strangers are refused."""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.links import forks, handshake, secured, talks, tls
from laconic.links.addresses import Address
from laconic.links.elastic import relay
from laconic.links.handshake import RefusedError
from laconic.links.wire import ChangedError, Transfer, Wire

from tests.support.job_keys import Jobs, turn_off, turn_on
from tests.support.strangers import anybody

HERE = (3, 7)
SECRET = bytes(range(32))


@pytest.fixture
def job(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    turn_on(monkeypatch, jobs.one)
    monkeypatch.setattr(talks, "_reasons", set())
    return jobs


class Between:
    """Forwards connections to ``port``, and keeps what passes. ``change``: of what a caller
    sends."""

    def __init__(self, port: int, change: Callable[[bytes], bytes] = bytes) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self.passed = self.sent = b""
        """In both directions, and by callers."""
        self._to, self._change = port, change
        self._threads, self._ends = list[threading.Thread](), [self._server]
        self._begin(self._run)

    def _begin(self, work: Callable[..., None], *at: object) -> None:
        self._threads.append(threading.Thread(target=work, args=at))
        self._threads[-1].start()

    def _run(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                caller = self._server.accept()[0]
                called = socket.create_connection(("127.0.0.1", self._to))
                self._ends += caller, called
                self._begin(self._pump, caller, called, True)
                self._begin(self._pump, called, caller, False)

    def close(self) -> None:
        """End all connections."""
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()

    def _pump(self, source: socket.socket, to: socket.socket, forth: bool) -> None:
        with suppress(OSError):
            while data := source.recv(2**16):
                to.sendall(self._change(data) if forth else data)
                self.passed += data
                self.sent += data if forth else b""
        with suppress(OSError):
            to.shutdown(socket.SHUT_WR)


@contextmanager
def connected(change: Callable[[bytes], bytes] = bytes) -> Iterator[tuple[Wire, Wire, Between]]:
    """Two ranks, the second of which calls the first through a `Between`."""
    wires = [Wire(rank, "127.0.0.1", 10, range(2)) for rank in range(2)]
    host, port, key = Address.parse(wires[0].address)
    between = Between(port, change)
    addresses = [str(Address(host, between.port, key)), wires[1].address]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda w: w.connect(addresses, SECRET, lambda: None), wires))
    try:
        yield wires[0], wires[1], between
    finally:
        for wire in wires:
            wire.close()
        between.close()


def post(wire: Wire, sends: Any, receives: Any) -> Transfer:
    return Transfer(wire.connections, sends, receives, HERE)


def both_send(first: Wire, second: Wire, *x: torch.Tensor) -> None:
    rooms = [torch.zeros_like(each) for each in x]
    with ThreadPoolExecutor(2) as pool:
        a = pool.submit(post(first, {1: x[0]}, {1: rooms[0]}).wait)
        b = pool.submit(post(second, {0: x[1]}, {0: rooms[1]}).wait)
        a.result(), b.result()
    assert torch.equal(rooms[0], x[1]) and torch.equal(rooms[1], x[0])


def test_nothing_can_be_read_on_the_way(job: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both send at once, and without TLS it can: the test looks at the right bytes."""
    pattern = torch.arange(2**18 + 5, dtype=torch.float32)

    def seen() -> bool:
        with connected() as (first, second, between):
            for each in (pattern, pattern[:0], pattern):
                both_send(first, second, each, each + 1)
            assert first.closed() == {} and first.connections.heard(1) < 60
            return pattern.numpy().tobytes()[64:128] in between.passed

    assert not seen()
    turn_off(monkeypatch)
    assert seen()


@pytest.mark.usefixtures("job")
def test_what_was_changed_on_the_way_is_not_used() -> None:
    begun = threading.Event()

    def flip(data: bytes) -> bytes:
        return bytes([*data[:-9], data[-9] ^ 4, *data[-8:]]) if begun.is_set() else data

    with connected(flip) as (first, second, _):
        begun.set()
        room = torch.zeros(5000, dtype=torch.uint8)
        waits = post(first, {}, {1: room})
        post(second, {0: torch.ones(5000, dtype=torch.uint8)}, {}).wait()
        with pytest.raises(ChangedError, match="from rank 1 was changed in transit"):
            waits.wait()
        assert not room.any()
        del waits  # which uses the connection


# -- the handshake that begins a connection, with TLS or without ----

PURPOSE, KEY = b"wire", b"k" * 8


def answering() -> handshake.Exchange:
    callee = handshake.answer(
        [PURPOSE], lambda key: SECRET if key == KEY else None, lambda hello, text: b"reply"
    )
    next(callee)
    return callee


def says(side: handshake.Exchange, frame: bytes) -> bytes:
    side.send(frame[:4])  # the length
    return side.send(frame[4:])[0]


def test_a_handshake_cannot_be_replayed() -> None:
    """What one connection carried opens no other one, nor does it come back as an answer. Only who
    knows the secret hears more than a challenge."""
    rights = SECRET, PURPOSE, KEY
    wrongs = [(bytes(32), PURPOSE, KEY), (SECRET, b"beacon", KEY), (SECRET, PURPOSE, b"x" * 8)]
    for right in (rights, *wrongs):
        caller, callee, other = handshake.call(*right, 3, b"asks"), answering(), answering()
        hello, _ = next(caller)
        if right[1] != PURPOSE:
            with pytest.raises(RefusedError, match="called for something else"):
                callee.send(hello)
            continue
        frame, _ = caller.send(callee.send(hello)[0])
        other.send(hello)
        for side in (other, caller, *[callee] * (right != rights)):
            with pytest.raises(RefusedError, match="does not know this job's secret"):
                says(side, frame)
        if right == rights:
            assert b"reply" in says(callee, frame)


# -- settings ----

PREFIX = "GLOO_DEVICE_TRANSPORT_TCP_TLS_"


def test_on_by_either_variable(monkeypatch: pytest.MonkeyPatch, jobs: Jobs) -> None:
    turn_off(monkeypatch)
    for value in ("", "TCP", "UV"):
        monkeypatch.setenv(tls.TRANSPORT, value)
        assert tls.contexts() is None
    monkeypatch.setenv(tls.SWITCH, "yes")
    with pytest.raises(ValueError, match="LACONIC_TLS must be 1 or 0, not 'yes'"):
        tls.contexts()
    turn_on(monkeypatch, jobs.one)
    monkeypatch.setenv(tls.SWITCH, "0")
    assert tls.contexts() is None
    for variable, value in ((tls.TRANSPORT, tls.ON), (tls.SWITCH, "1")):
        turn_on(monkeypatch, jobs.one)
        monkeypatch.delenv(tls.SWITCH)
        monkeypatch.setenv(variable, value)
        contexts = tls.contexts()
        assert contexts is not None and contexts is tls.contexts(), "made once"
        turn_on(monkeypatch, jobs.other)
        assert tls.contexts() not in (None, contexts), "other settings"


@pytest.mark.parametrize("which", ["PKEY", "CERT", "CA_FILE"])
def test_a_file_is_missing_or_another(
    monkeypatch: pytest.MonkeyPatch, jobs: Jobs, which: str, tmp_path: Path
) -> None:
    path, kind = tmp_path / "file.pem", "PRIVATE KEY" if which == "PKEY" else "CERTIFICATE"
    named = rf"{path} \({PREFIX}{which}\)"
    for value, text, said in (
        ("", None, f"LACONIC_TLS=1 needs {PREFIX}{which} too: `lac"),
        (path, None, f"cannot read {named}: No such file"),
        (path, "something else", f"{named}.* cannot be used"),
        (
            path,
            f"-----BEGIN {kind}-----\nAAAA\n-----END {kind}-----\n",
            f"{named}.* cannot be used",
        ),
    ):
        turn_on(monkeypatch, jobs.one, **{which: value})
        if text is not None:
            path.write_text(text)
        with pytest.raises(ValueError, match=said):
            tls.contexts()


def test_files_that_do_not_go_together(
    monkeypatch: pytest.MonkeyPatch, jobs: Jobs, tmp_path: Path
) -> None:
    """A key of another certificate, or with a passphrase, which nobody is asked for; a certificate
    of another CA, and one that has expired."""
    from cryptography.hazmat.primitives import serialization as s

    key = s.load_pem_private_key((jobs.one / "key.pem").read_bytes(), None)
    coded = s.BestAvailableEncryption(b"1234")
    protected = tmp_path / "key.pem"
    protected.write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, coded))
    one = jobs.one
    for folder, changed, said in (
        (one, {"PKEY": jobs.other / "key.pem"}, rf"key.pem \({PREFIX}PKEY\) is not the key of the"),
        (one, {"PKEY": protected}, "is protected by a passphrase"),
        (one, {"CA_FILE": jobs.other / "ca.pem"}, rf"cert.pem \({PREFIX}CERT\): .*local issuer"),
        (jobs.expired, {}, rf"^the CA .*ca.pem \({PREFIX}CA_FILE\) .*certificate has expired"),
        (jobs.expired_ca, {}, rf"cert.pem \({PREFIX}CERT\): certificate has expired"),
    ):
        turn_on(monkeypatch, folder, **changed)
        with pytest.raises(ValueError, match=said):
            tls.contexts()


def connect(server: ssl.SSLContext, client: ssl.SSLContext) -> str:
    """What a client reads from a server; raises the client's error."""
    ours, theirs = socket.socketpair()

    def work() -> None:
        with suppress(OSError), server.wrap_socket(theirs, server_side=True) as connection:
            connection.sendall(b"hello")

    ours.settimeout(60)
    with ThreadPoolExecutor(1) as pool, theirs, ours:
        pool.submit(work)
        with client.wrap_socket(ours) as connection:
            return connection.recv(5).decode()


def test_only_workers_of_one_job_understand_each_other(
    monkeypatch: pytest.MonkeyPatch, jobs: Jobs
) -> None:
    turn_on(monkeypatch, jobs.one)
    one = tls.contexts()
    turn_on(monkeypatch, jobs.other)
    other = tls.contexts()
    assert one is not None and other is not None
    assert connect(one.server, one.client) == "hello"
    for server, client in ((one.server, other.client), (other.server, one.client)):
        with pytest.raises(ssl.SSLCertVerificationError):
            connect(server, client)
    nobody, old = anybody(), anybody()
    old.load_cert_chain(jobs.one / "cert.pem", jobs.one / "key.pem")
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    for client in (nobody, old):  # without a certificate, and with TLS 1.2
        with pytest.raises(OSError):
            connect(one.server, client)


@pytest.mark.fault("a closed connection's reader took bytes of another one at the same descriptor")
def test_a_connection_is_closed_between_two_calls() -> None:
    inside, found = threading.Event(), list[int]()

    class Slow(socket.socket):
        def recv(self, size: int, flags: int = 0) -> bytes:
            inside.set()
            time.sleep(0.2)
            found.append(self.fileno())
            return b"x"

    own, other = socket.socketpair()
    stream = secured.Stream(Slow(fileno=own.detach()))
    reader = threading.Thread(target=stream.recv, args=(1,))
    reader.start()
    assert inside.wait(10)
    stream.close()
    reader.join()
    other.close()
    assert found[0] >= 0


@pytest.mark.fault("a fork in a donor's process ended its connection to the newcomer")
def test_a_forked_child_leaves_a_donors_connection_open() -> None:
    own, other = socket.socketpair()
    forks.close_in_child(own)
    stream = relay.Stream(secured.Stream(own))
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    stream.say(relay.READY)
    assert other.recv(5) == relay.READY
    stream.close()
    other.close()


@pytest.mark.fault("strangers that said nothing took the processor from training")
def test_callers_that_say_nothing_cost_little(job: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """No state of TLS, and not a turn for each."""
    monkeypatch.setattr(ssl.SSLContext, "wrap_socket", lambda *_, **__: pytest.fail("for nothing"))
    pauses = list[float]()
    monkeypatch.setattr(time, "sleep", pauses.append)
    served = talks.Talks()
    with ExitStack() as closing:
        server = closing.enter_context(socket.create_server(("127.0.0.1", 0), backlog=100))
        exchange = partial(handshake.call, SECRET, b"", b"", 0, b"")
        served.serve([server], exchange, 60.0, lambda talk, error: None)
        closing.callback(served.close)
        for _ in range(talks.MOST_STRANGERS // 2 + 1):
            closing.enter_context(socket.create_connection(server.getsockname()))
        for _ in range(4):  # `AT_ONCE` are accepted in each of the first ones
            served.turn(0)
    assert pauses == [talks.GATHER_SECONDS]
