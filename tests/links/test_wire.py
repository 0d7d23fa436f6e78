"""Messages over connections of laconic's own: compiled and interpreted, over local sockets."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from laconic.errors import LinkError
from laconic.links import frames
from laconic.links.connections import Connections
from laconic.links.sockets import watch
from laconic.links.wire import LostError, Transfer, Wire

HERE, THERE = (3, 7), (4, 7)
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture(params=["compiled", "interpreted"])
def moves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "interpreted":
        monkeypatch.setattr(frames, "library", lambda: None)


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def transfer(
    end: socket.socket, out: Tensor | None = None, room: Tensor | None = None, timeout: float = 10
) -> Transfer:
    """Between this rank and rank 5."""
    connections = Connections(range(9), timeout)
    connections.keep(5, end.dup())
    sends, receives = ({} if x is None else {5: x} for x in (out, room))
    return Transfer(connections, sends, receives, HERE)


def as_sent(place: tuple[int, int], payload: bytes, digest: int = 0) -> bytes:
    """A message as it travels, built by hand."""
    out = struct.pack("=QQQQ", *place, len(payload), digest)
    total = zlib.crc32(out)
    return out + struct.pack("=I", total) + payload + struct.pack("=I", zlib.crc32(payload, total))


def random(numel: int) -> Tensor:
    return torch.randint(0, 256, (numel,), dtype=torch.uint8)


@pytest.mark.usefixtures("moves")
@pytest.mark.parametrize("numel", [0, 2**22])
def test_both_send_at_once(pair: Pair, numel: int) -> None:
    """More than any buffer holds: who sends must take in what comes."""
    messages = random(numel), random(numel)
    rooms = torch.zeros(2, numel, dtype=torch.uint8)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda i: transfer(pair[i], messages[i], rooms[i]).wait(), (0, 1)))
    assert torch.equal(rooms[0], messages[1]) and torch.equal(rooms[1], messages[0])


@pytest.mark.usefixtures("moves")
def test_a_message_is_there_once_its_checksum_has_come() -> None:
    """Whether or not those of other ranks have."""
    ends = socket.socketpair(), socket.socketpair()
    connections, x = Connections(range(2), 0.2), random(5)
    rooms = {rank: torch.zeros(5, dtype=torch.uint8) for rank in range(2)}
    for rank, (ours, _) in enumerate(ends):
        connections.keep(rank, ours)
    message = as_sent(HERE, bytes(x.tolist()))
    with ends[0][1] as one, ends[1][1] as other:
        waits = Transfer(connections, {}, rooms, HERE)
        one.send(message)
        other.send(message[:-1])
        waits.wait(0)
        assert torch.equal(rooms[0], x)
        with pytest.raises(LostError):
            waits.wait(1)


@contextmanager
def signals(handle: Callable[..., object], between: Callable[[], bool]) -> Iterator[None]:
    """This process gets a signal whenever ``between()`` returns, until that is False."""

    def send() -> None:
        while between():
            os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handle)
    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("moves")
def test_a_signal_is_handled_while_nothing_comes(pair: Pair) -> None:
    """As Ctrl-C is: by Python, in the thread that waits."""
    over = threading.Event()

    def handle(*_: object) -> None:
        over.set()
        raise InterruptedError("the user's wish")

    with (
        pytest.raises(InterruptedError, match="the user's wish"),
        signals(handle, lambda: not over.wait(0.3)),
    ):
        transfer(pair[0], room=torch.zeros(1)).wait()


@pytest.mark.usefixtures("moves")
def test_silence_is_an_error_but_slowness_is_not(pair: Pair) -> None:
    """Where bytes come, though slowly, the time-out begins anew with each. Signals, as those of a
    profiler's timer, neither end a wait nor prolong it. The connection serves nothing else
    afterward."""
    connections, room = Connections(range(9), 1.0), torch.zeros(4, dtype=torch.uint8)
    connections.keep(5, pair[0].dup())
    waits = Transfer(connections, {}, {5: room}, HERE)
    over, sent = threading.Event(), list[int]()
    coming = iter(as_sent(HERE, b"abcd")[:39])  # and a fourth byte is missing

    def between() -> bool:
        for byte in coming:
            pair[1].send(bytes([byte]))
            return not over.wait(0.03)
        sent.append(1)
        return not over.wait(0.1) and len(sent) < 600

    with signals(lambda *_: None, between):
        try:
            with pytest.raises(LostError, match=r"nothing was sent or received for 1 s"):
                waits.wait()
        finally:
            over.set()
    assert bytes(room[:3].tolist()) == b"abc" and 0 < len(sent) < 600, "it ended while they came"
    with pytest.raises(LinkError, match="was not completed"):
        Transfer(connections, {}, {5: room}, THERE)


# -- connecting ----


def test_who_does_not_call_or_cannot_be_reached_is_named() -> None:
    """Who waits to be called also heeds what others have found."""

    def told() -> None:
        raise LinkError("rank 7 is elsewhere")

    secret = bytes(32)
    first, second = (Wire(r, "127.0.0.1", (0.2, 60)[r], [5, 7]) for r in (0, 1))
    addresses = [first.address, second.address]
    with pytest.raises(LinkError, match=r"ranks \[7\] have not connected within 0\.2 s"):
        first.connect(addresses, secret, lambda: None)  # which no longer listens then
    with pytest.raises(LinkError, match=r"rank 5 can't be reached at 127\.0\.0\.1, port \d+"):
        second.connect(addresses, secret, lambda: None)
    patient = Wire(0, "127.0.0.1", 30, range(2))
    with pytest.raises(LinkError, match="rank 7 is elsewhere"):
        patient.connect([patient.address, "never called"], secret, told)


def test_a_dead_connection_ends_after_half_a_minute() -> None:
    """The kernel probes it while nothing is sent."""
    with socket.socket() as connection:
        watch(connection, reads_at_once=False)
        names = socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT
        idle, interval, count = (connection.getsockopt(socket.IPPROTO_TCP, n) for n in names)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert idle + interval * count == 30
