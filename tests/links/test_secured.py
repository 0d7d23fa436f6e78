"""Connections with TLS: nothing can be read or changed on the way, and strangers are refused."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from laconic.errors import LinkError
from laconic.links import health, secured, talks, tls
from laconic.links.addresses import Address
from laconic.links.wire import ChangedError, LostError, Wire

from tests.support.job_keys import Jobs, turn_off, turn_on, variables

HERE = (3, 7)
SECRET = bytes(range(32))
MANY = 2**21 + 5


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("keys"))


@pytest.fixture
def job(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    turn_on(monkeypatch, jobs.one)
    monkeypatch.setattr(talks, "_reasons", set())
    return jobs


class Between:
    """Forwards a connection to ``port``, and keeps what passes. ``change``: of what the caller
    sends, by how many bytes it has sent before."""

    def __init__(self, port: int, change: Callable[[bytes, int], bytes] | None = None) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self.passed = self.sent = b""
        """In both directions, and by the caller."""
        self._to, self._change = port, change
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with self._server:
            caller, _ = self._server.accept()
        self._caller = caller
        called = socket.create_connection(("127.0.0.1", self._to))
        back = threading.Thread(target=self._pump, args=(called, caller, None))
        back.start()
        self._pump(caller, called, self._change)
        back.join()
        for end in (caller, called):
            end.close()

    def close(self) -> None:
        """Wait for the connection to end."""
        self._thread.join()

    def _pump(
        self, source: socket.socket, to: socket.socket, change: Callable[[bytes, int], bytes] | None
    ) -> None:
        count = 0
        try:
            while data := source.recv(2**16):
                to.sendall(data if change is None else change(data, count))
                count += len(data)
                self.passed += data
                if source is self._caller:
                    self.sent += data
            to.shutdown(socket.SHUT_WR)
        except OSError:
            return


Connected = tuple[Wire, Wire, Between]


@pytest.fixture
def connected() -> Iterator[Callable[..., Connected]]:
    """Makes two ranks, the second of which calls the first through a `Between`."""
    made: list[Connected] = []

    def make(change: Callable[[bytes, int], bytes] | None = None) -> Connected:
        made.append(connect_two(change))
        return made[-1]

    yield make
    for first, second, between in made:
        first.close()
        second.close()
        between.close()


def connect_two(change: Callable[[bytes, int], bytes] | None) -> Connected:
    wires = [Wire(rank, "127.0.0.1", 10, range(2)) for rank in range(2)]
    host, port, key = Address.parse(wires[0].address)
    between = Between(port, change)
    addresses = [str(Address(host, between.port, key)), wires[1].address]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda w: w.connect(addresses, SECRET, lambda: None), wires))
    return wires[0], wires[1], between


def both_send(first: Wire, second: Wire, numel: int) -> None:
    x = torch.randint(0, 256, (2, numel), dtype=torch.uint8)
    rooms = torch.zeros_like(x)
    with ThreadPoolExecutor(2) as pool:
        a = pool.submit(first.post({1: x[0]}, {1: rooms[0]}, HERE).wait)
        b = pool.submit(second.post({0: x[1]}, {0: rooms[1]}, HERE).wait)
        a.result(), b.result()
    assert torch.equal(rooms[0], x[1]) and torch.equal(rooms[1], x[0])


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("numel", [0, 1, 16384, MANY])
def test_both_send_at_once(numel: int, connected: Callable[..., Connected]) -> None:
    first, second, _ = connected()
    for _ in range(2):
        both_send(first, second, numel)
    assert first.closed() == {} and first.heard(1) < 5


def test_nothing_can_be_read_on_the_way(
    job: Jobs, monkeypatch: pytest.MonkeyPatch, connected: Callable[..., Connected]
) -> None:
    pattern = torch.arange(4096, dtype=torch.float32)

    def seen() -> bool:
        first, second, between = connected()
        with ThreadPoolExecutor(2) as pool:
            sent = pool.submit(second.post({0: pattern}, {}, HERE).wait)
            room = torch.zeros_like(pattern)
            first.post({}, {1: room}, HERE).wait()
            sent.result()
        assert torch.equal(room, pattern)
        return pattern.numpy().tobytes()[64:128] in between.passed

    assert not seen()
    turn_off(monkeypatch)
    assert seen(), "without TLS it can: the test looks at the right bytes"


@pytest.mark.usefixtures("job")
def test_what_was_changed_on_the_way_is_not_used(connected: Callable[..., Connected]) -> None:
    begun = threading.Event()

    def flip(data: bytes, _: int) -> bytes:
        return bytes([*data[:-9], data[-9] ^ 4, *data[-8:]]) if begun.is_set() else data

    first, second, _ = connected(flip)
    begun.set()
    room = torch.zeros(5000, dtype=torch.uint8)
    waits = first.post({}, {1: room}, HERE)
    second.post({0: torch.ones(5000, dtype=torch.uint8)}, {}, HERE).wait()
    with pytest.raises(ChangedError, match="from rank 1 was changed in transit"):
        waits.wait()
    assert waits._traffic.messages[0].done == 0


@pytest.mark.usefixtures("job")
def test_a_connection_that_ends(connected: Callable[..., Connected]) -> None:
    first, second, _ = connected()
    room = torch.zeros(50, dtype=torch.uint8)
    waits = first.post({}, {1: room}, HERE)
    second.shutdown()
    with pytest.raises(LostError, match="connection to rank 1: closed by it"):
        waits.wait()
    assert first.closed() == {1: False}


def test_another_authority_is_an_error_at_once(job: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    wires = [Wire(rank, "127.0.0.1", 30, range(2)) for rank in range(2)]
    addresses = [w.address for w in wires]
    failed, waiting = threading.Event(), threading.Event()

    def check() -> None:
        waiting.set()
        if failed.is_set():
            raise LinkError("rank 1 has failed")

    def call_first() -> None:
        wires[0].connect(addresses, SECRET, check)

    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(call_first)
        assert waiting.wait(60)  # it has read its settings
        turn_on(monkeypatch, job.other)
        with pytest.raises(LinkError, match="no TLS connection to rank 0: its certificate is not"):
            wires[1].connect(addresses, SECRET, check)
        failed.set()
        with pytest.raises(LinkError, match="rank 1 has failed"):
            waits.result()


def shake(port: int, files: dict[str, str] | None) -> Exception | None:
    """A stranger's handshake with TLS; returns its error."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if files is not None:
        context.load_cert_chain(files[tls.CERTIFICATE], files[tls.KEY])
    try:
        with (
            socket.create_connection(("127.0.0.1", port), 5) as plain,
            context.wrap_socket(plain) as made,
        ):
            made.sendall(b"x" * 100)
            assert made.recv(1) == b"", "nothing for strangers"
    except OSError as error:
        return error
    return None


def test_strangers_are_refused_with_one_line_each(
    job: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    """While the ranks connect."""
    wires = [Wire(rank, "127.0.0.1", 30, range(2)) for rank in range(2)]
    addresses = [w.address for w in wires]
    port = Address.parse(addresses[0]).port
    expired, other = variables(job.expired), variables(job.other)
    with caplog.at_level(logging.WARNING, "laconic"), ThreadPoolExecutor(1) as pool:
        waits = pool.submit(wires[0].connect, addresses, SECRET, lambda: None)
        for _ in range(3):
            for files in (None, expired, other):
                assert isinstance(shake(port, files), OSError)
            with socket.create_connection(("127.0.0.1", port)) as plain:
                plain.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
                assert receive(plain)[:1] in (b"", b"\x15")  # a TLS alert
        assert not waits.done()
        wires[1].connect(addresses, SECRET, lambda: None)
        waits.result()
    both_send(*wires, 100)
    lines = sorted(record.getMessage() for record in caplog.records)
    assert len(lines) == 4, lines
    assert all(line.startswith("refused a caller at 127.0.0.1: ") for line in lines)
    for part in ("has expired", "no certificate", "does not speak TLS", "unable to get local"):
        assert any(part in line for line in lines), (part, lines)


def test_a_handshake_cannot_be_replayed(
    job: Jobs, monkeypatch: pytest.MonkeyPatch, connected: Callable[..., Connected]
) -> None:
    """With TLS and without: what was recorded of one connection opens no other."""
    for switch in ("1", "0"):
        monkeypatch.setenv(tls.SWITCH, switch)
        first, second, between = connected()
        both_send(first, second, 10)
        recorded = between.sent
        again = Wire(0, "127.0.0.1", 1, range(2))
        again._key = bytes.fromhex(Address.parse(first.address).key)
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(again.connect, [again.address] * 2, SECRET, lambda: None)
            with socket.create_connection(("127.0.0.1", Address.parse(again.address).port)) as s:
                s.settimeout(5)
                s.sendall(recorded)
                while answer := receive(s):
                    assert len(answer) < 5000
            with pytest.raises(LinkError, match=r"ranks \[1\] have not connected"):
                waits.result()


def receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(2**16)
    except OSError:
        return b""


@pytest.mark.usefixtures("job")
def test_beacons_answer_over_tls() -> None:
    beacon = health.Beacon("127.0.0.1")
    try:
        address = beacon.enroll(SECRET)
        answer = health.ask(address, SECRET)
        assert not answer.lost and answer.status.startswith("starting")
        assert health.ask(address, bytes(32)).lost
    finally:
        beacon.close()


@pytest.fixture
def shared(job: Jobs) -> Iterator[tuple[secured.Stream, secured.Stream]]:
    ours, theirs = socket.socketpair()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(secured.secure, theirs, server=True, seconds=5)
        pair = secured.secure(ours, server=False, seconds=5), other.result()
    yield pair
    for end in pair:
        end.close()


def test_one_thread_reads_while_another_writes(
    shared: tuple[secured.Stream, secured.Stream],
) -> None:
    messages = os.urandom(MANY), os.urandom(MANY)

    def read(end: secured.Stream) -> bytes:
        data, view = bytearray(MANY), 0
        while view < MANY:
            received = end.recv_into(memoryview(data)[view:])
            assert received
            view += received
        return bytes(data)

    with ThreadPoolExecutor(4) as pool:
        reads = [pool.submit(read, end) for end in shared]
        writes = [pool.submit(e.sendall, m) for e, m in zip(shared, messages, strict=True)]
        assert [r.result() for r in reads] == [messages[1], messages[0]]
        assert [w.result() for w in writes] == [None, None]


def test_a_shared_connection_heeds_its_timeout_and_its_end(
    shared: tuple[secured.Stream, secured.Stream],
) -> None:
    ours, theirs = shared
    assert isinstance(ours, secured.SharedSocket)
    ours.settimeout(0.2)
    with pytest.raises(TimeoutError):
        ours.recv(1)
    ours.settimeout(None)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(ours.recv, 1)
        time.sleep(0.1)
        theirs.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(ssl.SSLEOFError):
            assert waits.result() == b""
    ours.close()
    with pytest.raises(OSError, match="closed"):
        ours.recv(1)
