"""Messages over connections of laconic's own: compiled and interpreted, over local sockets."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from laconic.errors import LinkError
from laconic.links import addresses, connect, frames, handshake
from laconic.links.addresses import Address
from laconic.links.talks import Talks
from laconic.links.wire import (
    ChangedError,
    Connections,
    LostError,
    OtherCallError,
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


def send_until_closed(to: socket.socket, data: bytes) -> None:
    with suppress(OSError):
        to.sendall(data)


def random(numel: int) -> Tensor:
    return torch.randint(0, 256, (numel,), dtype=torch.uint8)


def test_it_was_compiled_where_there_is_a_compiler() -> None:
    assert frames.library() is not None, "install again: pip install -e ."


def test_the_compiled_checksum_is_crc_32() -> None:
    """Of any length, wherever it begins, and continued from an earlier one."""
    library = frames.library()
    assert library is not None
    numbers = Random(1)
    data = bytes(numbers.randrange(256) for _ in range(2**15))
    room = ctypes.create_string_buffer(data, len(data))
    lengths = [*range(300), *(numbers.randrange(2**14) for _ in range(200)), len(data)]
    for length in lengths:
        first = numbers.randrange(min(len(data) - length, 70) + 1)
        start = numbers.getrandbits(32)
        found = library.laconic_crc32(start, ctypes.addressof(room) + first, length)
        assert found == zlib.crc32(data[first : first + length], start), (first, length)


@pytest.mark.usefixtures("moves")
@pytest.mark.parametrize("numel", [0, 1, 4097, MORE_THAN_BUFFERS])
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
def test_what_comes_early_waits_its_turn(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    first, second, room = random(10), random(20), torch.zeros(30, dtype=torch.uint8)
    for x, place in ((first, HERE), (second, THERE)):
        transfer(theirs, x, place=place).wait()
    transfer(ours, room=room[:10]).wait()
    transfer(ours, room=room[10:], place=THERE).wait(5)
    assert torch.equal(room, torch.cat((first, second)))


@pytest.mark.usefixtures("moves")
def test_nobody_waits_for_more_than_was_asked_for() -> None:
    """Of two others one has sent its message, and the other is silent."""
    ends = socket.socketpair(), socket.socketpair()
    connections, rooms = Connections(), {r: torch.zeros(1, dtype=torch.uint8) for r in (0, 1)}
    for rank, (ours, _) in enumerate(ends):
        connections.keep(rank, ours)
    with ends[0][1] as speaks, ends[1][1]:
        waits = Transfer(connections, {}, rooms, HERE, 0.2, range(2))
        speaks.send(said(HERE, b"x"))
        waits.wait(0)
        assert bytes(rooms[0].tolist()) == b"x"
        with pytest.raises(LostError):
            waits.wait()


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


@pytest.mark.usefixtures("moves")
def test_bytes_that_come_one_by_one(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    x, room = random(9), torch.zeros(9, dtype=torch.uint8)

    def dribble() -> None:
        for byte in said(HERE, bytes(x.tolist())):
            theirs.send(bytes([byte]))
            time.sleep(0.001)

    thread = threading.Thread(target=dribble)
    thread.start()
    transfer(ours, room=room).wait()
    thread.join()
    assert torch.equal(room, x)


@pytest.mark.usefixtures("moves")
@pytest.mark.parametrize(("place", "numel"), [(THERE, 8), (HERE, 9)])
def test_a_message_of_another_call(
    pair: tuple[socket.socket, socket.socket], place: tuple[int, int], numel: int
) -> None:
    ours, theirs = pair
    transfer(theirs, random(numel), place=place).wait()
    with pytest.raises(OtherCallError, match=f"rank 5 has sent {numel} bytes where 8") as raised:
        transfer(ours, room=torch.zeros(8, dtype=torch.uint8)).wait()
    assert (raised.value.rank, raised.value.header) == (5, place)


@pytest.mark.usefixtures("moves")
def test_a_flipped_bit_is_noticed() -> None:
    """Wherever it is in the header, the payload or a checksum. What is used is what was sent."""
    x = random(3 * 16384 + 100)
    message = said(HERE, bytes(x.tolist()))
    draw = Random(0)
    header = draw.sample(range(8 * 36), 100)
    payload = [8 * 36 + draw.randrange(8 * (len(message) - 36)) for _ in range(100)]
    checksums = [8 * (36 + 16388 * k + 16384) + draw.randrange(32) for k in range(3)]
    for place in [*header, *payload, *checksums, 8 * len(message) - 1]:
        changed = bytearray(message)
        changed[place // 8] ^= 1 << place % 8
        left, right = socket.socketpair()
        with left, right:
            room = torch.zeros_like(x)
            waits = transfer(right, room=room, timeout=60)
            thread = threading.Thread(target=send_until_closed, args=(left, changed))
            thread.start()
            with pytest.raises(ChangedError, match="from rank 5 was changed in transit"):
                waits.wait()
            usable = waits._traffic.messages[0].done
            assert usable == max(place // 8 - 36, 0) // 16388 * 16384
            assert torch.equal(room[:usable], x[:usable])
            right.close()
            waits.connections.close()
            thread.join()


@pytest.mark.usefixtures("moves")
def test_a_digest_travels_in_the_header(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.send(said(HERE, b"x", digest=2**64 - 5))
    waits = transfer(ours, room=torch.zeros(1, dtype=torch.uint8))
    waits.wait()
    assert waits.digests() == {5: 2**64 - 5}


@pytest.mark.usefixtures("moves")
def test_a_connection_that_closes_halfway(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.send(said(HERE, b"abcdefgh")[:39])
    theirs.close()
    with pytest.raises(LostError, match="connection to rank 5: closed by it"):
        transfer(ours, room=torch.zeros(8, dtype=torch.uint8)).wait()
    with pytest.raises(LostError, match="connection to rank 5: Broken pipe"):
        transfer(ours, random(8)).wait()


@pytest.mark.usefixtures("moves")
def test_silence_is_an_error_but_slowness_is_not(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    room = torch.zeros(4, dtype=torch.uint8)
    waits = transfer(ours, room=room, timeout=1.0)

    def slowly() -> None:
        for byte in said(HERE, b"abcd")[:39]:  # and a fourth byte is missing
            theirs.send(bytes([byte]))
            time.sleep(0.03)

    thread = threading.Thread(target=slowly)
    thread.start()
    start = time.monotonic()
    with pytest.raises(LostError, match=r"nothing was sent or received for 1 s"):
        waits.wait()
    thread.join()
    assert bytes(room[:3].tolist()) == b"abc"
    assert time.monotonic() - start > 38 * 0.03 + 0.9  # while something came, and the time-out


def test_nothing_comes_after_a_message_that_was_left_half_way(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    connections, room = Connections(), torch.zeros(4, dtype=torch.uint8)
    connections.keep(5, pair[0].dup())
    left = Transfer(connections, {}, {5: room}, HERE, 0.05, range(9))
    with pytest.raises(LostError):
        left.wait()
    with pytest.raises(LinkError, match="was not completed"):
        Transfer(connections, {}, {5: room}, THERE, 0.05, range(9))


@pytest.mark.usefixtures("moves")
def test_messages_that_join_follow_those_under_way(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """In both directions; what the first one waits for moves the second one's bytes, too."""
    connections, rooms = Connections(), torch.zeros(2, 3, dtype=torch.uint8)
    connections.keep(5, pair[0].dup())
    x, y = random(3), random(4)
    first = Transfer(connections, {5: x}, {5: rooms[0]}, HERE, 5, range(9), ready=False)
    second = Transfer(connections, {5: y}, {5: rooms[1]}, HERE, 5, range(9), joins=True)
    pair[1].setblocking(False)
    with pytest.raises(BlockingIOError):  # the second is ready, and waits for its turn
        pair[1].recv(999)
    first.send(5, 3)
    expected = said(HERE, bytes(x.tolist())) + said(HERE, bytes(y.tolist()))
    pair[1].sendall(said(HERE, b"abc") + said(HERE, b"xyz"))
    first.wait()
    second.wait_sent()
    assert pair[1].recv(999) == expected
    second.wait()
    assert bytes(rooms.flatten().tolist()) == b"abcxyz"
    third = Transfer(connections, {5: x}, {}, THERE, 5, range(9))  # nothing is left under way
    third.wait()
    assert pair[1].recv(999) == said(THERE, bytes(x.tolist()))


@pytest.mark.usefixtures("moves")
def test_who_waits_until_its_messages_are_sent_takes_in_what_comes(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """More than any buffer holds, and nothing is to come: it does not wait for that."""
    message, got = random(MORE_THAN_BUFFERS), bytearray()
    connections, room = Connections(), torch.zeros(2, dtype=torch.uint8)
    connections.keep(5, pair[0].dup())
    sent = Transfer(connections, {5: message}, {5: room}, HERE, 5, range(9))

    expected = said(HERE, bytes(message.numpy()))

    def receive() -> None:
        while len(got) < len(expected):
            got.extend(pair[1].recv(2**20))

    thread = threading.Thread(target=receive)
    thread.start()
    sent.wait_sent()
    thread.join()
    assert bytes(got) == expected
    pair[1].sendall(said(HERE, b"ab"))
    sent.wait()
    assert bytes(room.tolist()) == b"ab"


@pytest.mark.usefixtures("moves")
def test_after_a_failure_none_of_the_messages_under_way_goes_on(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    connections, room = Connections(), torch.zeros(2, dtype=torch.uint8)
    connections.keep(5, pair[0].dup())
    first = Transfer(connections, {}, {5: room[:1]}, HERE, 5, range(9))
    second = Transfer(connections, {}, {5: room[1:]}, HERE, 5, range(9), joins=True)
    pair[1].sendall(said(THERE, b"a") + said(HERE, b"b"))
    for each in (first, second):
        with pytest.raises(OtherCallError):
            each.wait()
    with pytest.raises(LinkError, match="was not completed"):
        Transfer(connections, {}, {5: room}, THERE, 0.05, range(9), joins=True)
    assert not room[1], "what follows stays where it is"


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


@pytest.mark.usefixtures("moves")
def test_signals_do_not_bring_the_end_of_waiting_forward(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """Where bytes come, though slowly, the time-out begins anew with each."""
    ours, theirs = pair
    room = torch.zeros(5, dtype=torch.uint8)
    waits = transfer(ours, room=room, timeout=1.0)

    def slowly() -> None:
        for byte in said(HERE, b"abcde"):
            theirs.send(bytes([byte]))
            time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.01)

    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    thread = threading.Thread(target=slowly)
    thread.start()
    try:
        waits.wait()
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert bytes(room.tolist()) == b"abcde"


def fine() -> None:
    """Nobody has found anything wrong."""


def connected(size: int) -> list[Wire]:
    wires = [Wire(rank, "127.0.0.1", 60, range(4)) for rank in range(size)]
    addresses = [w.address for w in wires]
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(lambda w: w.connect(addresses, SECRET, fine), wires))
    return wires


@pytest.mark.usefixtures("moves")
def test_ranks_call_each_other() -> None:
    wires = connected(4)
    rooms = torch.zeros(4, 4, 3)

    def say(rank: int) -> None:
        others = [r for r in range(4) if r != rank]
        sends = {r: torch.tensor([float(rank), float(r), 0.5]) for r in others}
        wires[rank].post(sends, {r: rooms[rank, r] for r in others}, HERE).wait()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(say, range(4)))
    for rank in range(4):
        for r in {0, 1, 2, 3} - {rank}:
            assert rooms[rank, r].tolist() == [r, rank, 0.5]


def test_a_stranger_is_turned_away_and_nobody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connect, "HELLO_SECONDS", 0.1)
    wires = [Wire(rank, "127.0.0.1", 10, range(4)) for rank in range(2)]
    port = int(wires[0].address.split("|")[1])
    wrong = struct.pack("<16sQ", b"0" * 16, 1)
    with (
        ThreadPoolExecutor(2) as pool,
        socket.create_connection(("127.0.0.1", port)),  # says nothing
        socket.create_connection(("127.0.0.1", port)) as knows_no_key,
    ):
        knows_no_key.sendall(wrong)
        list(pool.map(lambda w: w.connect([x.address for x in wires], SECRET, fine), wires))
        assert knows_no_key.recv(1) == b""
    wires[0].post({1: torch.ones(2)}, {}, HERE).wait()
    room = torch.zeros(2)
    wires[1].post({}, {0: room}, HERE).wait()
    assert room.tolist() == [1, 1]


def test_a_rank_that_has_no_business_here_is_refused() -> None:
    """Though it knows the secret: rank 0 calls nobody."""
    called = Wire(1, "127.0.0.1", 0.5, range(4))
    host, port, key = Address.parse(called.address)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        nobody = str(Address("127.0.0.1", silent.getsockname()[1], key))
        check_refused(called, nobody, (host, port, key))


def check_refused(called: Wire, nobody: str, at: tuple[str, int, str]) -> None:
    host, port, key = at
    refused: list[Exception | None] = []
    talks = Talks()
    exchange = handshake.call(SECRET, connect.PURPOSE, bytes.fromhex(key), 0, b"", most=0)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(called.connect, [nobody, called.address, nobody], SECRET, fine)
        talks.call(host, port, exchange, time.monotonic() + 60, lambda _, e: refused.append(e))
        while not refused:
            talks.turn(5)
        with pytest.raises(LinkError, match=r"ranks \[0, 2\] have not connected"):
            waits.result()
    assert isinstance(refused[0], ConnectionError)


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


def test_it_refuses_to_be_compiled_differently() -> None:
    """The two that describe a message, and the two versions."""
    source = (Path(frames.__file__).parent / "wire.c").read_text()
    assert f"return {frames.VERSION};" in source
    for name, value in {
        "HEADER": frames.HEADER_BYTES,
        "FIELDS": frames.FIELDS.size,
        "CALL": frames.CALL_BYTES,
        "FRAME": frames.FRAME,
        "CHECK": frames.CHECK_BYTES,
        "AT_ONCE": frames.AT_ONCE,
    }.items():
        assert re.search(rf"#define {name} {value}\b", source), name


def test_the_interface_is_the_one_that_gloo_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "address_toward", lambda host: f"toward {host}")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    for named, address in [
        ("", "toward 10.0.0.1"),
        ("lo", "127.0.0.1"),
        ("lo,eth7", "127.0.0.1"),
        ("none-such", "toward 10.0.0.1"),
    ]:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
        assert addresses.own_address() == address


@pytest.mark.parametrize(
    ("environ", "address"),
    [
        ({}, "name"),  # init_method="tcp://...": nobody says where the others are
        ({"MASTER_ADDR": "10.0.0.1"}, "10.0.0.9"),
        ({"MASTER_ADDR": "127.0.0.1"}, "127.0.0.1"),
        ({"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, "127.0.0.1"),
        ({"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "name"),
    ],
)
def test_the_address_without_an_interface(
    environ: dict[str, str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def toward(host: str) -> str:
        return {"10.0.0.1": "10.0.0.9"}.get(host, host)

    for name in ("GLOO_SOCKET_IFNAME", "MASTER_ADDR", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(addresses, "address_toward", toward)
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "name")
    assert addresses.own_address() == address


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="the system has other options")
def test_a_dead_connection_ends_after_half_a_minute() -> None:
    """The kernel probes it while nothing is sent."""
    with socket.socket() as connection:
        configure(connection)
        names = socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT
        idle, interval, count = (connection.getsockopt(socket.IPPROTO_TCP, n) for n in names)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert idle + interval * count == 30
