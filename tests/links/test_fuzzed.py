"""Whatever strangers send to where ranks connect, and whatever comes over a connection that stands,
to the two movers of messages."""

from __future__ import annotations

import ctypes
import socket
import ssl
import struct
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import NamedTuple

import pytest
import torch
from hypothesis import strategies as st

from laconic.links import connect, frames, talks, tls
from laconic.links.addresses import Address
from laconic.links.collectives import Collectives
from laconic.links.connections import Connections
from laconic.links.frames import AT_ONCE, CHANGED, CLOSED, FINE, HEADER_BYTES, OTHER
from laconic.links.wire import ChangedError, Transfer, Wire

from tests.links.test_wire import HERE, THERE, as_sent, moves
from tests.support import job_keys
from tests.support import strangers as s
from tests.support.strangers import OURS, RAW, Attack, Stranger, Usage

SECRET = bytes(range(32))
PLAIN = ("not a hello of laconic", "does not know this job's secret")
SECURE = ("does not speak TLS", "no certificate", "certificate has expired", "local issuer")
EVERYBODY = (RAW, RAW, RAW, OURS, OURS, "none", "other", "expired", "old")


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("encrypted", [False, True])
def test_ranks_connect_and_agree(
    count: int,
    encrypted: bool,
    monkeypatch: pytest.MonkeyPatch,
    jobs: job_keys.Jobs,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Some strangers have come before, and gone. Then two ranks wait for the third one, while some
    stay, and others send a byte at a time. ``count``: how many are drawn besides."""
    job_keys.turn_off(monkeypatch)
    if encrypted:
        job_keys.turn_on(monkeypatch, jobs.one)
    monkeypatch.setattr(talks, "_reasons", set())
    certificates = EVERYBODY if encrypted else (RAW,)
    wires = [Wire(rank, "127.0.0.1", 100, range(3)) for rank in range(3)]
    addresses = [wire.address for wire in wires]
    at = Address.parse(addresses[0])
    genuine = [
        s.recorded(secret, connect.PURPOSE, bytes.fromhex(at.key), number)
        for secret, number in ((SECRET, 2), (bytes(32), 2), (SECRET, 0), (SECRET, 2**32 - 1))
    ]
    calls = Attack(at.port, s.contexts_of(jobs) if encrypted else {})
    for end in ("reset", "close"):
        for data in (b"", b"x" * 9, *genuine):
            Attack(at.port, {}).visit(Stranger(data, (), end))

    def come(rank: int) -> Collectives:
        wires[rank].connect(addresses, SECRET, lambda: None)
        return Collectives(rank, 3, wires[rank].connections, lambda: (3, 7), nullcontext)

    with ThreadPoolExecutor(3) as pool:
        coming = [pool.submit(come, rank) for rank in range(2)]
        time.sleep(0.1)
        before = Usage.of()
        with s.slow(at.port, genuine[0]):
            for certificate in dict.fromkeys(certificates):
                for end in ("reset", "close", "wait"):
                    for data in (b"", b"GET / HTTP/1.1\r\n\r\n" * 9, s.client_hello(), *genuine):
                        calls.visit(Stranger(data, (), end, certificate))
            s.drawn(s.strangers([*genuine, s.client_hello()], certificates), count, calls.visit)
        assert not any(rank.done() for rank in coming)
        calls.close()
        s.nothing_is_left(before)
        coming.append(pool.submit(come, 2))
        links = [rank.result() for rank in coming]
        for number in range(3):
            x = torch.arange(30_000.0).mul(number + 1)
            mine = [x + 3 * rank for rank in range(3)]
            list(pool.map(lambda link, mine: link.mean(mine), links, mine))
            assert all(torch.equal(each, x + 3) for each in mine)
    for wire in wires:
        wire.close()
    lines = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    s.check_lines(lines, *(SECURE if encrypted else PLAIN))


GUARD = 64
SIZES = (0, 1, 5, AT_ONCE - 1, AT_ONCE, AT_ONCE + 1, 2 * AT_ONCE + 3)


__all__ = ["moves"]


@pytest.fixture(params=[0.2, pytest.param(1.0, marks=pytest.mark.slow)])
def share(request: pytest.FixtureRequest) -> float:
    """Of the examples."""
    return float(request.param)


# -- messages ----


def read(data: bytes, place: tuple[int, int], size: int) -> tuple[int, bytes, int]:
    """What must become of a message of ``size`` bytes that ``data`` begins with, and then ends: the
    outcome, the bytes that may be used, and how many were read."""
    if len(data) < HEADER_BYTES:
        return CLOSED, b"", len(data)
    total = zlib.crc32(data[:32])
    if data[32:36] != struct.pack("=I", total):
        return CHANGED, b"", 0
    if data[:24] != struct.pack("=QQQ", *place, size):
        return OTHER, b"", 0
    end = HEADER_BYTES + size
    if len(data) < end + 4:
        return CLOSED, b"", len(data)
    if data[end : end + 4] != struct.pack("=I", zlib.crc32(data[HEADER_BYTES:end], total)):
        return CHANGED, b"", 0
    return FINE, data[HEADER_BYTES:end], end + 4


class Sent(NamedTuple):
    """What comes in place of two messages of ``sizes`` bytes, in pieces that end at ``cuts``."""

    sizes: tuple[int, int]
    data: bytes
    cuts: tuple[int, ...]


FIELDS = (0, 1, 3, 7, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1)


@st.composite
def sent(draw: st.DrawFn) -> Sent:
    """Two messages as they should be, or with changed bytes, or cut off; messages that say
    something else about themselves, with the right checksums; and anything."""
    size = st.sampled_from(SIZES) | st.integers(0, 200)
    sizes = draw(size), draw(size)
    pattern = draw(st.binary(min_size=1, max_size=9))
    bodies = [(pattern * (n // len(pattern) + 1))[:n] for n in sizes]
    data = bytearray(
        as_sent(HERE, bodies[0], draw(st.sampled_from(FIELDS))) + as_sent(THERE, bodies[1])
    )
    match draw(st.sampled_from(("right", "changed", "cut", "cut", "fields", "swapped", "any"))):
        case "changed":
            for place in draw(st.lists(st.integers(0, len(data) - 1), min_size=1, max_size=3)):
                data[place] ^= draw(st.integers(1, 255))
        case "cut":
            del data[draw(st.integers(0, len(data))) :]
        case "fields":
            fields = struct.pack("=QQQQ", *draw(st.tuples(*[st.sampled_from(FIELDS)] * 4)))
            data[:36] = fields + struct.pack("=I", zlib.crc32(fields))
        case "swapped":
            data = bytearray(as_sent(THERE, bodies[0]) + as_sent(HERE, bodies[1]))
        case "any":
            data = bytearray(draw(st.binary(max_size=300)))
    cuts = draw(st.lists(st.integers(0, len(data)), max_size=4).map(sorted))
    return Sent(sizes, bytes(data), tuple(cuts))


def check_two_messages(
    example: Sent, ours: socket.socket, theirs: socket.socket, secured: frames.Secured
) -> int:
    """``theirs`` sends, and ends; ``ours`` receives what `read` says. Returns the outcome."""
    guarded = [size + 2 * GUARD for size in example.sizes]  # bytes that must stay as they are
    rooms = [ctypes.create_string_buffer(b"\xa5" * size, size) for size in guarded]
    messages = (frames.Message * 2)()
    for i, (place, size) in enumerate(zip((HERE, THERE), example.sizes, strict=True)):
        where = ctypes.addressof(rooms[i]) + GUARD, size, ours.fileno(), True, i - 1
        frames.begin(messages, i, place, 0, *where)
    ours.setblocking(False)
    theirs.setblocking(False)
    outcome, which = FINE, 0
    for start, end in zip((0, *example.cuts), (*example.cuts, len(example.data)), strict=True):
        left = memoryview(example.data)[start:end]
        while outcome == FINE and len(left):
            with suppress(BlockingIOError, ssl.SSLWantWriteError):
                left = left[theirs.send(left) :]
            outcome, which, _ = frames.move(messages, secured, frames.WITHOUT_WAITING, 0, 0)
    theirs.shutdown(socket.SHUT_WR)
    if outcome == FINE:
        outcome, which, _ = frames.move(messages, secured, frames.ALL, len(messages), 5000)
    first, used, length = read(example.data, HERE, example.sizes[0])
    second, more, total = read(example.data[length:], THERE, example.sizes[1])
    if first != FINE:
        second, more = first, b""
    assert outcome == second and (outcome == FINE or which == int(first == FINE))
    for memory, right in zip(rooms, (used, more), strict=True):
        raw = memory.raw
        assert raw[:GUARD] == raw[-GUARD:] == b"\xa5" * GUARD, "out of bounds"
        assert raw[GUARD:].startswith(right)
    if outcome == FINE and not secured:
        ours.setblocking(True)
        rest = b"".join(iter(lambda: ours.recv(2**16), b""))
        assert rest == example.data[length + total :], "it reads no further"
    return outcome


@pytest.mark.usefixtures("moves")
def test_any_bytes_in_place_of_messages(share: float) -> None:
    """Both movers do the same: nothing is used whose checksum is wrong, nothing is written out of
    bounds, and nothing hangs."""
    outcomes = set()

    def check(example: Sent) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            outcomes.add(check_two_messages(example, ours, theirs, {}))

    s.drawn(sent(), int(1000 * share), check)
    assert outcomes == {FINE, CLOSED, CHANGED, OTHER}


def test_any_bytes_in_place_of_messages_over_tls(
    share: float, monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs
) -> None:
    """From somebody with a certificate of the job."""
    job_keys.turn_on(monkeypatch, jobs.one)
    contexts = tls.contexts()
    assert contexts is not None
    with ThreadPoolExecutor(1) as pool:

        def check(example: Sent) -> None:
            plain = socket.socketpair()
            there = pool.submit(contexts.client.wrap_socket, plain[1])
            with contexts.server.wrap_socket(plain[0], True) as ours, there.result() as theirs:
                check_two_messages(example, ours, theirs, {ours.fileno(): ours})

        s.drawn(sent(), int(200 * share), check)


@pytest.mark.usefixtures("moves")
def test_a_transfer_that_has_failed_fails_again() -> None:
    """Its checksum is wrong: nothing is left to move. Its error does not keep the connections."""
    ours, theirs = socket.socketpair()
    with theirs:
        connections = Connections(range(2), 5.0)
        connections.keep(1, ours)
        room = torch.zeros(5, dtype=torch.uint8)
        transfer = Transfer(connections, {}, {1: room}, HERE)
        theirs.sendall(as_sent(HERE, b"right")[:-1] + b"x")
        for _ in range(2):
            with pytest.raises(ChangedError, match="from rank 1 was changed in transit"):
                transfer.wait()
        del transfer, connections
        theirs.settimeout(60)
        assert theirs.recv(1) == b"", "closed"
