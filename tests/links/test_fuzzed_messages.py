"""Whatever comes over a connection that stands: the two movers of messages, and quorum rounds."""

from __future__ import annotations

import ctypes
import json
import socket
import ssl
import struct
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from laconic.errors import LinkError
from laconic.links import frames, tls
from laconic.links.frames import CHANGED, CLOSED, FINE, FRAME, HEADER_BYTES, OTHER
from laconic.links.quorum.port import (
    Announcement,
    Appointment,
    Closing,
    Delivery,
    Rules,
)
from laconic.links.quorum.syncer import Syncer
from laconic.links.quorum.tcp import Host, Line
from laconic.links.wire import ChangedError, Connections, Transfer

from tests.links.test_wire import HERE, THERE, as_sent, moves
from tests.support import job_keys

GUARD = 64
SIZES = (0, 1, 5, FRAME - 1, FRAME, FRAME + 1, 17 * FRAME + 3)


__all__ = ["moves"]


@pytest.fixture(params=[0.2, pytest.param(1.0, marks=pytest.mark.slow)])
def share(request: pytest.FixtureRequest) -> float:
    """Of the examples."""
    return float(request.param)


def examples(count: float) -> settings:
    """So many, the same ones in every run."""
    same: Any = {"derandomize": True, "database": None}
    return settings(
        max_examples=int(count), deadline=None, suppress_health_check=list(HealthCheck), **same
    )


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
    used, at = b"", HEADER_BYTES
    while len(used) < size:
        frame = data[at : at + min(FRAME, size - len(used))]
        at += len(frame) + 4
        if at > len(data):
            return CLOSED, used, len(data)
        total = zlib.crc32(frame, total)
        if data[at - 4 : at] != struct.pack("=I", total):
            return CHANGED, used, 0
        used += frame
    return FINE, used, at


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


def room(size: int) -> ctypes.Array[ctypes.c_char]:
    """Memory for a payload between bytes that must stay as they are."""
    return ctypes.create_string_buffer(b"\xa5" * (size + 2 * GUARD), size + 2 * GUARD)


def check_two_messages(
    example: Sent, ours: socket.socket, theirs: socket.socket, secured: frames.Secured
) -> int:
    """``theirs`` sends, and ends; ``ours`` receives what `read` says. Returns the outcome."""
    rooms = [room(size) for size in example.sizes]
    messages = (frames.Message * 2)()
    checks = [ctypes.create_string_buffer(frames.check_bytes(size) + 1) for size in example.sizes]
    for i, (place, size) in enumerate(zip((HERE, THERE), example.sizes, strict=True)):
        where = ctypes.addressof(rooms[i]) + GUARD, size, -1, ours.fileno(), True, i - 1
        frames.begin(messages, i, place, 0, ctypes.addressof(checks[i]), *where)
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
    for memory, message, right in zip(rooms, messages, (used, more), strict=True):
        raw = memory.raw
        assert raw[:GUARD] == raw[-GUARD:] == b"\xa5" * GUARD, "out of bounds"
        assert message.done == len(right) and raw[GUARD:].startswith(right)
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

    @examples(1000 * share)
    @given(sent())
    def check(example: Sent) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            outcomes.add(check_two_messages(example, ours, theirs, {}))

    check()
    assert outcomes == {FINE, CLOSED, CHANGED, OTHER}


def test_any_bytes_in_place_of_messages_over_tls(
    share: float, monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs
) -> None:
    """From somebody with a certificate of the job."""
    job_keys.turn_on(monkeypatch, jobs.one)
    contexts = tls.contexts()
    assert contexts is not None
    with ThreadPoolExecutor(1) as pool:

        @examples(200 * share)
        @given(sent())
        def check(example: Sent) -> None:
            plain = socket.socketpair()
            there = pool.submit(contexts.client.wrap_socket, plain[1])
            with contexts.server.wrap_socket(plain[0], True) as ours, there.result() as theirs:
                check_two_messages(example, ours, theirs, {ours.fileno(): ours})

        check()


@pytest.mark.usefixtures("moves")
def test_a_transfer_that_has_failed_fails_again() -> None:
    """Its last frame is wrong: nothing is left to move. Its error does not keep the connections."""
    ours, theirs = socket.socketpair()
    with theirs:
        connections = Connections()
        connections.keep(1, ours)
        room = torch.zeros(5, dtype=torch.uint8)
        transfer = Transfer(connections, {}, {1: room}, HERE, 5.0, range(2))
        theirs.sendall(as_sent(HERE, b"right")[:-1] + b"x")
        for _ in range(2):
            with pytest.raises(ChangedError, match="from rank 1 was changed in transit"):
                transfer.wait()
        del transfer, connections
        theirs.settimeout(60)
        assert theirs.recv(1) == b"", "closed"


# -- rounds with a quorum ----


class Two:
    """A wire between two workers, over a local connection."""

    timeout, names = 5.0, (0, 2)

    def __init__(self, end: socket.socket, other: int) -> None:
        self.connections = Connections()
        self.connections.keep(other, end)
        self.shutdown, self.close = self.connections.shutdown, self.connections.close


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
ABOUT = vars(Announcement(0, 0, 4, 0.5, 4, (0.1,)))
ARRIVES: dict[str, Any] = {"what": "arrive", "about": ABOUT, "bases": False}
LENGTHS = st.sampled_from((-1, 2**24 + 1, 2**40, 2**63 - 1))


@st.composite
def differing(draw: st.DrawFn) -> bytes:
    """An arrival as JSON with a field that is missing or something else, or anything."""
    value: Any = {**ARRIVES, "about": dict(ABOUT)}
    match draw(st.sampled_from(("lacks", "other", "other", "nested", "json", "bytes"))):
        case "lacks":
            del value[draw(st.sampled_from(sorted(value)))]
        case "other":
            value[draw(st.sampled_from(sorted(value)))] = draw(ANYTHING)
        case "nested":
            value["about"][draw(st.sampled_from(sorted(ABOUT)))] = draw(ANYTHING)
        case "bytes":
            return draw(st.binary(max_size=50))
        case _:
            value = draw(ANYTHING)
    return json.dumps(value).encode()


def conclude(text: str, ranks: Sequence[int]) -> NoReturn:
    raise LinkError(text, ranks=ranks)


@pytest.mark.parametrize("huge", [False, True])
def test_rank_0_names_a_worker_that_sends_anything(huge: bool, share: float) -> None:
    """Every other worker raises an error that names it, at once, and no thread fails. ``huge``: it
    announces more bytes than there can be."""

    @examples((25 if huge else 250) * share)
    @given(differing(), LENGTHS)
    def check(data: bytes, length: int) -> None:
        def merge(closing: Closing, deliveries: Any) -> dict[int, list[Tensor]]:
            return {rank: [torch.zeros(3)] for rank in deliveries}

        core = Syncer(
            2, [Rules(2, 0.0)], merge, lambda kind, speeds, roster: [Appointment(4)] * len(roster)
        )
        ends = socket.socketpair()
        ours = Line(Two(ends[0], 1), 0, 2, 5.0)  # type: ignore[arg-type]  # rank 0's to rank 2
        theirs = Line(Two(ends[1], 0), 1, 0, 5.0)  # type: ignore[arg-type]
        host = Host(core, {1: ours}, [[torch.zeros(3)]], 5.0, conclude)
        raw = torch.tensor(list(b"" if huge else data), dtype=torch.uint8)
        with suppress(LinkError):  # it may be gone already
            theirs.send(torch.tensor([length if huge else len(data)]), raw)
            theirs.send(torch.ones(3), torch.ones(3))  # what follows an arrival
        try:
            host.deliver(0, Delivery(Announcement(**ABOUT), [torch.zeros(3)]))
        except LinkError as error:
            assert error.ranks == (2,) and "\n" not in str(error)
        else:
            assert not huge and core.rounds == [1]
            assert json.loads(data)["what"] in ("arrive", "meet", "leave")
        for end in (host, theirs, ours):
            end.close()

    check()
