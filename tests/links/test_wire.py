"""Messages over connections of laconic's own: compiled and interpreted, over local sockets."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from laconic.errors import LinkError
from laconic.links import frames
from laconic.links.wire import (
    Connections,
    LostError,
    Transfer,
    Wire,
    configure,
)

MORE_THAN_BUFFERS = 2**23
HERE, THERE = (3, 7), (4, 7)
SECRET = bytes(range(32))


@pytest.fixture(params=["compiled", "interpreted"])
def moves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "interpreted":
        monkeypatch.setattr(frames, "library", lambda: None)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def transfer(
    end: socket.socket,
    out: Tensor | None = None,
    room: Tensor | None = None,
    place: tuple[int, int] = HERE,
    timeout: float = 10,
) -> Transfer:
    """Between this rank and rank 5."""
    sends = {} if out is None else {5: out}
    receives = {} if room is None else {5: room}
    connections = Connections()
    connections.keep(5, end.dup())
    return Transfer(connections, sends, receives, place, timeout, range(9))


def said(place: tuple[int, int], payload: bytes, digest: int = 0) -> bytes:
    """A message as it travels, built by hand."""
    out = struct.pack("=QQQQ", *place, len(payload), digest)
    total = zlib.crc32(out)
    out += struct.pack("=I", total)
    for start in range(0, len(payload), 16384):
        frame = payload[start : start + 16384]
        total = zlib.crc32(frame, total)
        out += frame + struct.pack("=I", total)
    return out


def random(numel: int) -> Tensor:
    return torch.randint(0, 256, (numel,), dtype=torch.uint8)


@pytest.mark.usefixtures("moves")
@pytest.mark.parametrize("numel", [0, 4097, MORE_THAN_BUFFERS])
def test_both_send_at_once(pair: tuple[socket.socket, socket.socket], numel: int) -> None:
    """More than any buffer holds: who sends must take in what comes."""
    messages = random(numel), random(numel)
    rooms = torch.zeros(2, numel, dtype=torch.uint8)

    def send(i: int) -> None:
        transfer(pair[i], messages[i], rooms[i]).wait()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(send, (0, 1)))
    assert torch.equal(rooms[0], messages[1]) and torch.equal(rooms[1], messages[0])


@pytest.mark.usefixtures("moves")
def test_what_is_not_ready_is_sent_when_it_is() -> None:
    """While nothing holds up what comes, nor what is ready before it."""
    ends = socket.socketpair(), socket.socketpair()
    connections, room = Connections(), torch.zeros(1, dtype=torch.uint8)
    for rank, (ours, _) in enumerate(ends):
        connections.keep(rank, ours)
    first, second = random(3), torch.zeros(3, dtype=torch.uint8)
    with ends[0][1] as one, ends[1][1] as other:
        sends = {0: first, 1: second}
        transfer = Transfer(connections, sends, {0: room}, HERE, 5, range(2), ready=False)
        transfer.send(0, 3)
        one.send(said(HERE, b"x"))
        transfer.wait(0)
        assert bytes(room.tolist()) == b"x"
        assert one.recv(99) == said(HERE, bytes(first.tolist()))
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.recv(99)
        second += 7
        transfer.send(1, 2)
        assert other.recv(99) == said(HERE, b"\7\7\x08")[: 36 + 2]
        second[2] = 8
        with pytest.raises(AssertionError, match="not ready"):
            transfer.wait()
        transfer.send(1, 3)
        transfer.wait()
        assert other.recv(99) == said(HERE, b"\7\7\x08")[36 + 2 :]


@pytest.mark.usefixtures("moves")
def test_the_first_bytes_are_there_before_the_last(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """A frame can be used once its checksum has come."""
    ours, theirs = pair
    x, room = random(3 * 16384), torch.zeros(3 * 16384, dtype=torch.uint8)
    waits = transfer(ours, room=room, timeout=0.2)
    message = said(HERE, bytes(x.tolist()))
    theirs.send(message[: 36 + 2 * 16388])
    waits.wait(5, 16385)
    assert torch.equal(room[: 2 * 16384], x[: 2 * 16384])
    theirs.send(message[36 + 2 * 16388 : -1])
    with pytest.raises(LostError):
        waits.wait(5, 2 * 16384 + 1)


@pytest.mark.parametrize("x", [torch.zeros(8)[::2], torch.zeros(1).expand(4)])
def test_what_is_not_contiguous_is_refused(
    pair: tuple[socket.socket, socket.socket], x: Tensor
) -> None:
    with pytest.raises(ValueError, match="a message is contiguous and on the CPU"):
        transfer(pair[0], x)


@pytest.mark.usefixtures("moves")
def test_a_signal_is_handled_while_nothing_comes(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """As Ctrl-C is: by Python, in the thread that waits."""

    def handle(*_: object) -> None:
        raise InterruptedError("the user's wish")

    before = signal.signal(signal.SIGUSR1, handle)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(InterruptedError, match="the user's wish"):
            transfer(pair[0], room=torch.zeros(1)).wait()
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("moves")
def test_silence_is_an_error_but_slowness_is_not(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """Where bytes come, though slowly, the time-out begins anew with each, also while there are
    signals; and the connection serves nothing else afterward."""
    connections, room = Connections(), torch.zeros(4, dtype=torch.uint8)
    connections.keep(5, pair[0].dup())
    waits = Transfer(connections, {}, {5: room}, HERE, 1.0, range(9))

    def slowly() -> None:
        for byte in said(HERE, b"abcd")[:39]:  # and a fourth byte is missing
            pair[1].send(bytes([byte]))
            time.sleep(0.03)
            os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    thread = threading.Thread(target=slowly)
    thread.start()
    try:
        with pytest.raises(LostError, match=r"nothing was sent or received for 1 s"):
            waits.wait()
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert bytes(room[:3].tolist()) == b"abc"
    with pytest.raises(LinkError, match="was not completed"):
        Transfer(connections, {}, {5: room}, THERE, 0.05, range(9))


@pytest.mark.usefixtures("moves")
def test_signals_do_not_put_off_the_end_of_waiting(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """As those of a profiler's timer, that come faster than the time-out runs."""
    done = threading.Event()
    sent: list[int] = []

    def interrupt() -> None:
        while not done.wait(0.1) and len(sent) < 50:
            os.kill(os.getpid(), signal.SIGUSR1)
            sent.append(1)

    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        start = time.monotonic()
        with pytest.raises(LostError, match=r"for 0\.5 s"):
            transfer(pair[0], room=torch.zeros(1), timeout=0.5).wait()
        assert time.monotonic() - start > 0.4 and len(sent) < 50, "it ended while they came"
    finally:
        done.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)


def fine() -> None:
    """Nobody has found anything wrong."""


def test_who_does_not_call_or_cannot_be_reached_is_named() -> None:
    first, second = (Wire(r, "127.0.0.1", (0.2, 60)[r], [5, 7]) for r in (0, 1))
    addresses = [first.address, second.address]
    with pytest.raises(LinkError, match=r"ranks \[7\] have not connected within 0\.2 s"):
        first.connect(addresses, SECRET, fine)  # which no longer listens then
    with pytest.raises(LinkError, match=r"rank 5 can't be reached at 127\.0\.0\.1, port \d+"):
        second.connect(addresses, SECRET, fine)


def test_who_waits_to_be_called_heeds_what_others_found() -> None:
    def told() -> None:
        raise LinkError("rank 7 is elsewhere")

    first = Wire(0, "127.0.0.1", 30, range(2))
    with pytest.raises(LinkError, match="rank 7 is elsewhere"):
        first.connect([first.address, "never called"], SECRET, told)


def test_a_dead_connection_ends_after_half_a_minute() -> None:
    """The kernel probes it while nothing is sent."""
    with socket.socket() as connection:
        configure(connection)
        names = socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT
        idle, interval, count = (connection.getsockopt(socket.IPPROTO_TCP, n) for n in names)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert idle + interval * count == 30
