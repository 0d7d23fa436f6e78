"""Between a donor and its newcomer, and between the members of a view, over local connections."""

from __future__ import annotations

import secrets
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from laconic.errors import LinkError
from laconic.links.calls import GRADIENTS, Call
from laconic.links.collectives import Collectives
from laconic.links.elastic import relay as module
from laconic.links.elastic.feed import Feed
from laconic.links.elastic.mesh import Guard, Interrupted, Mesh
from laconic.links.elastic.relay import (
    Record,
    Relay,
    RelayError,
    Service,
    Snapshot,
    Start,
    StepSettings,
    Stream,
    call_donor,
)
from laconic.links.elastic.turns import Turns
from laconic.links.elastic.units import Units
from laconic.links.elastic.view import Member, View

SECRET = bytes(range(32))
SOON = 60.0
Pair = tuple[socket.socket, socket.socket]


def at(number: int, port: int) -> Member:
    return Member(f"{number:012x}", *[f"127.0.0.1|{port}|{'00' * 8}"] * 3)


ME, NEW = at(0, 1), at(9, 1)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Donors give strangers longer than anyone here waits: nobody waits for a stranger."""
    monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 10 * SOON)


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.settimeout(SOON)
    yield ours, theirs
    ours.close()
    theirs.close()


def feed_of(stream: Any) -> Feed:
    return Feed(stream, ME.id, lambda: None)


# -- frames ----


def bits(value: Any) -> Any:
    """``value`` with tensors as their bytes, so that NaN equals itself."""
    if isinstance(value, torch.Tensor):
        raw = value.contiguous().view(torch.uint8).numpy().tobytes()
        return str(value.dtype), tuple(value.shape), raw
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    return [bits(item) for item in value] if isinstance(value, (list, tuple)) else value


ODD = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45, 1.0])
STATE = Snapshot(3, {"model": {"w": ODD, "h": ODD.bfloat16()}, "list": [1, None, "é"]})
RECORD = Record(Call(5, GRADIENTS), 3, [ODD, ODD.double(), torch.zeros(7, dtype=torch.uint8)])
SETTINGS = StepSettings(4, [{"lr": 0.1, "weight_decay": 0.0}, {"lr": float("inf")}])
OTHERS = {"scheduler": {"last": 3}}
START = Start(7, Call(6, "round", True), 2**62, [{"lr": 0.5}], OTHERS, None, (3, 2))
AGAIN = Record(Call(5, "Average round of fragment 1/2", True, 2**64 - 1), 2, [], [2**64 - 1])


def test_frames_arrive_bit_for_bit_in_their_order(pair: Pair) -> None:
    large = Snapshot(1, {"x": torch.arange(2**20)})  # more than a socket's buffer
    frames: list[Any] = [large, STATE, RECORD, AGAIN, SETTINGS, START, Snapshot(0, {})]
    sender, receiver = Stream(pair[0]), Stream(pair[1])
    thread = threading.Thread(target=lambda: list(map(sender.send, frames)))
    thread.start()
    for frame in frames:
        there = receiver.receive()
        assert type(there) is type(frame) and bits(vars(there)) == bits(vars(frame))
    thread.join(SOON)


@pytest.mark.parametrize("place", [0, 7, 9, 13, 16, 40, -1])
def test_a_flipped_bit_is_noticed(pair: Pair, place: int) -> None:
    """In the length, the checksums and the frame."""
    head = struct.pack(">QI", 81, zlib.crc32(b"any frame" * 9))
    data = bytearray(head + struct.pack(">I", zlib.crc32(head)) + b"any frame" * 9)
    data[place] ^= 8
    pair[0].sendall(data)
    with pytest.raises(RelayError, match="was changed in transit"):
        Stream(pair[1]).receive()


# -- a donor ----


class Donor:
    """A service on 127.0.0.1."""

    def __init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = int(self.server.getsockname()[1])
        self.refuses, self.heard = "", threading.Event()
        self.service = Service(self.server, SECRET, self._ready, Units(ME.id))

    def _ready(self, member: Member) -> None:
        assert member == NEW
        self.heard.set()
        if self.refuses:
            raise LinkError(self.refuses)

    def joined(self) -> tuple[Stream, Relay]:
        """Both ends of a newcomer's connection, and nobody else's."""
        stream = call_donor(at(0, self.port), SECRET, NEW)
        relay = self.service.waiting.get(timeout=SOON)
        assert relay.newcomer == NEW and not relay.ended and self.service.waiting.empty()
        return stream, relay

    def serves(self) -> None:
        stream, relay = self.joined()
        relay.begin(STATE)
        assert bits(vars(stream.receive())) == bits(vars(STATE))
        stream.close()


@pytest.fixture
def donor() -> Iterator[Donor]:
    donor = Donor()
    yield donor
    donor.service.close()


def test_a_newcomer_catches_up(donor: Donor) -> None:
    """And asks for the state again, where it has repeated other steps than the donor."""
    stream, relay = donor.joined()
    feed = feed_of(stream)
    relay.begin(STATE)
    relay.put(RECORD)
    assert isinstance(feed.pop(), Snapshot) and isinstance(feed.pop(), Record)
    assert not donor.heard.is_set()
    feed.say_ready()
    assert donor.heard.wait(SOON)
    relay.finish(START, lambda: Snapshot(6, {"w": ODD}))
    assert relay.ended and feed.pop() == START
    assert bits(vars(feed.ask_for_state())) == bits(vars(Snapshot(6, {"w": ODD})))
    feed.close()
    relay._stream.close()


def test_a_newcomer_that_cannot_be_reached_is_refused(donor: Donor) -> None:
    """It is told why, behind what was sent before."""
    donor.refuses = "its address lets nobody in"
    stream, relay = donor.joined()
    feed = feed_of(stream)
    relay.begin(STATE)
    assert isinstance(feed.pop(), Snapshot)
    feed.say_ready()
    with pytest.raises(LinkError, match="not take in this worker: its address lets nobody in"):
        feed.peek()
    feed.close()
    relay._stream.close()


def test_a_newcomer_that_takes_in_too_little(monkeypatch: pytest.MonkeyPatch, donor: Donor) -> None:
    """It is given up: what waits for it would fill the memory of its donor."""
    monkeypatch.setattr(module, "MOST_WAITING", 2**22)
    large = torch.zeros(2**20, dtype=torch.uint8)
    stream, relay = donor.joined()
    relay.begin(Snapshot(1, {"x": large}))
    count = 0
    while count < 100 and not relay.ended:
        relay.put(Record(Call(5, "a"), 2, [large]))
        count += 1
    assert 5 < count < 20, "4 MiB and two snapshots, and what is in the sockets' buffers"
    with pytest.raises(RelayError):
        for _ in range(100):
            stream.receive()
    stream.close()
    donor.serves()


def test_a_donor_that_is_none(monkeypatch: pytest.MonkeyPatch, donor: Donor) -> None:
    """It has another secret, is gone, or says nothing: each a `RelayError`."""
    with pytest.raises(RelayError, match=r"closed|does not know|reset"):
        call_donor(at(0, donor.port), bytes(32), NEW)
    donor.serves()
    monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
        with pytest.raises(RelayError, match="timed out"):
            call_donor(at(0, port), SECRET, NEW)
    with pytest.raises(RelayError, match="refused"):
        call_donor(at(0, port), SECRET, NEW)


# -- when a donor sends ----


class Waits:
    """In place of `Units.changed`. A wait takes no time, and ``during(n)`` happens in the n-th."""

    def __init__(self, during: Callable[[int], None]) -> None:
        self.seconds: list[float] = []
        self._during = during

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def notify_all(self) -> None: ...

    def wait_for(self, ready: Callable[[], bool], seconds: float) -> None:
        if not ready():
            self.seconds.append(seconds)
            self._during(len(self.seconds))


@pytest.mark.parametrize("how", ["the unit ends", "too much waits"])
def test_a_donor_sends_a_tenth_of_the_time_during_units(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """And all the time between them, or where as much as its snapshot waits to be sent."""
    now, sent = [100.0], list[bytes]()

    class Slow:
        """Each piece takes two seconds of a false clock."""

        def sendall(self, data: Any) -> None:
            sent.append(bytes(data))
            now[0] += 2.0 * (len(sent) > 1)  # the first one is the length

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    connection: Any = Slow()
    units: Any = Units(ME.id)
    turns = Turns(units)
    end = units.end if how == "the unit ends" else turns.over
    large = Snapshot(3, {"x": torch.zeros(2**18, dtype=torch.uint8)})
    Stream(connection).send(large, turns)
    assert max(map(len, sent)) == module.PIECE
    whole = sent.copy()
    units.changed = Waits(during=lambda n: end() if n == 3 else None)
    units.begin()
    sent.clear()
    turns._latest = 0.0
    Stream(connection).send(large, turns)
    assert sent == whole and units.changed.seconds == pytest.approx([0.0, 18.0, 18.0])


# -- the connections of a view ----

Host = tuple[Member, socket.socket]


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Three members, and where they listen."""
    servers = [socket.create_server(("127.0.0.1", 0), backlog=64) for _ in range(3)]
    yield [(at(n, server.getsockname()[1]), server) for n, server in enumerate(servers)]
    for server in servers:
        server.close()


def view_of(hosts: Sequence[Host], epoch: int = 1) -> View:
    return View(epoch, tuple(member for member, _ in hosts))


def connected(
    hosts: list[Host], views: Sequence[View], places: Sequence[int], check: Callable[[], None]
) -> list[Mesh]:
    """The meshes of the members at ``places``, which connect at once."""

    def work(view: View, place: int) -> Mesh:
        mesh = Mesh(view, hosts[place][0], SOON)
        mesh.connect(hosts[place][1], SECRET, check)
        return mesh

    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(work, views, places))


def mean(mesh: Mesh) -> float:
    """The mean of the places, over the mesh."""
    x = torch.tensor([float(mesh.place)])
    Collectives(Guard(mesh, len(mesh.names), lambda: (1, 2)), mesh).mean(x)
    return float(x)


def works(meshes: list[Mesh]) -> None:
    """The connections carry messages. Closes them."""
    with ThreadPoolExecutor(len(meshes)) as pool:
        expected = sum(mesh.place for mesh in meshes) / len(meshes)
        assert list(pool.map(mean, meshes)) == [expected] * len(meshes)
    for mesh in meshes:
        mesh.connections.close()


def nothing() -> None:
    """A check that never raises."""


def stopping() -> None:
    raise Interrupted("another view was decided")


def test_a_view_connects_and_the_next_one(hosts: list[Host]) -> None:
    """Ranks are places in the view, not the order in which members came. Strangers do not hold them
    up, and a member that waits in vain for another one stops when the next view was decided."""
    with socket.create_connection(hosts[0][1].getsockname()) as garbage:
        garbage.sendall(secrets.token_bytes(500))
        works(connected(hosts, [view_of(hosts)] * 3, [0, 1, 2], nothing))
    for waits in ([0, 1], [1, 2]):
        with pytest.raises(Interrupted, match="another view was decided"):
            connected(hosts, [view_of(hosts, 2)] * 2, waits, stopping)
    turned = [hosts[2], hosts[0]]
    meshes = connected(turned, [view_of(turned, 3)] * 2, [0, 1], nothing)
    assert [mesh.place for mesh in meshes] == [0, 1] and sorted(meshes[0].connections) == [1]
    works(meshes)
    hosts[0][1].close()
    with pytest.raises(Interrupted, match="rank 0 can't be reached at 127"):
        connected(hosts, [view_of(hosts, 4)], [1], nothing)


def test_views_of_one_epoch_that_differ_do_not_connect(hosts: list[Host]) -> None:
    """A coordinator that was started again empty may decide an epoch twice."""
    view, end = view_of(hosts[:2]), time.monotonic() + 0.5
    changed = view.members[0]._replace(service=hosts[2][0].service)

    def check() -> None:
        if time.monotonic() >= end:
            stopping()

    with pytest.raises(Interrupted, match="another view was decided"):
        other = replace(view, members=(changed, view.members[1]))
        connected(hosts, [view, other], [0, 1], check)
    works(connected(hosts, [view] * 2, [0, 1], nothing))
