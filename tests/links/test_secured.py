"""Connections with TLS: nothing can be read or changed on the way, and strangers are refused."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from laconic.errors import LinkError
from laconic.links import talks, tls
from laconic.links.addresses import Address
from laconic.links.wire import ChangedError, Wire

from tests.support.job_keys import Jobs, turn_off, turn_on

HERE = (3, 7)
SECRET = bytes(range(32))
MANY = 2**21 + 5


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
@pytest.mark.parametrize("numel", [0, MANY])
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
