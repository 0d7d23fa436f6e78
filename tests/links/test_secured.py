"""Connections with TLS: nothing can be read or changed on the way, and strangers are refused."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
import torch

from laconic.links import handshake, talks
from laconic.links.addresses import Address
from laconic.links.handshake import RefusedError
from laconic.links.wire import ChangedError, Wire

from tests.support.job_keys import Jobs, turn_off, turn_on

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


def both_send(first: Wire, second: Wire, *x: torch.Tensor) -> None:
    rooms = [torch.zeros_like(each) for each in x]
    with ThreadPoolExecutor(2) as pool:
        a = pool.submit(first.post({1: x[0]}, {1: rooms[0]}, HERE).wait)
        b = pool.submit(second.post({0: x[1]}, {0: rooms[1]}, HERE).wait)
        a.result(), b.result()
    assert torch.equal(rooms[0], x[1]) and torch.equal(rooms[1], x[0])


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("numel", [0, 2**21 + 5])
def test_both_send_at_once(numel: int) -> None:
    with connected() as (first, second, _):
        for _ in range(2):
            both_send(first, second, *torch.randint(0, 256, (2, numel), dtype=torch.uint8))
        assert first.closed() == {} and first.heard(1) < 5


def test_nothing_can_be_read_on_the_way(job: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = torch.arange(4096, dtype=torch.float32)

    def seen() -> bool:
        with connected() as (first, second, between):
            both_send(first, second, pattern, pattern)
            return pattern.numpy().tobytes()[64:128] in between.passed

    assert not seen()
    turn_off(monkeypatch)
    assert seen(), "without TLS it can: the test looks at the right bytes"


@pytest.mark.usefixtures("job")
def test_what_was_changed_on_the_way_is_not_used() -> None:
    begun = threading.Event()

    def flip(data: bytes) -> bytes:
        return bytes([*data[:-9], data[-9] ^ 4, *data[-8:]]) if begun.is_set() else data

    with connected(flip) as (first, second, _):
        begun.set()
        room = torch.zeros(5000, dtype=torch.uint8)
        waits = first.post({}, {1: room}, HERE)
        second.post({0: torch.ones(5000, dtype=torch.uint8)}, {}, HERE).wait()
        with pytest.raises(ChangedError, match="from rank 1 was changed in transit"):
            waits.wait()
        assert not room.any()
        del waits  # which uses the connection


# -- the handshake that begins a connection, with TLS or without ----

PURPOSE, KEY = b"wire", b"k" * 8


def answering() -> handshake.Exchange:
    callee = handshake.answer(
        PURPOSE, lambda key: SECRET if key == KEY else None, lambda hello, text: b"reply"
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
