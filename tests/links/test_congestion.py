"""Which congestion control a connection uses, and what happens where it cannot be set."""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext

import pytest
import torch

from laconic.links import congestion, frames, wire


@pytest.fixture
def connection() -> Iterator[socket.socket]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as made,
    ):
        yield made


class Forbidden:
    """A connection of a process that may not choose, as root in a container."""

    def setsockopt(self, *arguments: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    def getsockopt(self, *arguments: object) -> bytes:
        return bytes(68) + (100_000).to_bytes(4, "little")


def test_long_round_trips_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(congestion.VARIABLE, raising=False)
    monkeypatch.setattr(congestion, "available", lambda: ["bbr", "cubic"])
    assert congestion.name_for(0.1) == "bbr" and congestion.name_for(0.001) == ""
    monkeypatch.setenv(congestion.VARIABLE, "system")
    assert congestion.name_for(0.1) == ""


def test_it_is_set(connection: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    name = next(iter(congestion.available()), "")
    monkeypatch.setenv(congestion.VARIABLE, name)
    assert congestion.choose(connection) == name
    if name:
        found = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        assert found.rstrip(b"\0").decode() == name


def test_where_it_cannot_be_set_the_systems_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless somebody has asked for it."""
    monkeypatch.delenv(congestion.VARIABLE, raising=False)
    monkeypatch.setattr(congestion, "available", lambda: ["bbr"])
    assert congestion.choose(Forbidden()) == ""  # type: ignore[arg-type]
    monkeypatch.setenv(congestion.VARIABLE, "bbr")
    with pytest.raises(ValueError, match="may not set it"):
        congestion.choose(Forbidden())  # type: ignore[arg-type]


class Connection:
    """A connection that uses BBR: what the system reports of it, and what is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state, self.estimate = 0, 1_000_000
        self.set: list[str] = []
        monkeypatch.setattr(congestion, "borrowed", lambda fd: nullcontext(self))
        monkeypatch.setattr(congestion, "tcp_info", lambda fd, layout: (self.state,))

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, 26)  # TCP_CC_INFO
        return self.estimate.to_bytes(8, "little")[:size]

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION)
        self.set.append(value.decode())


@pytest.fixture
def bbr_connection(monkeypatch: pytest.MonkeyPatch) -> Connection:
    return Connection(monkeypatch)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(congestion.time, "monotonic", lambda: now[0])
    return now


ANEW = ["reno", "bbr"]


def test_bbr_starts_anew_when_its_estimate_falls_by_half(
    bbr_connection: Connection, clock: list[float]
) -> None:
    """And not when it falls by less, or is what it was after that."""
    bbr = congestion.Bbr()
    for estimate, anew in [(10, False), (6, False), (4, True), (10, False), (12, False), (5, True)]:
        bbr_connection.set, bbr_connection.estimate = [], estimate * 1000
        clock[0] += 0.1
        bbr.before_message(7)
        assert bbr_connection.set == (ANEW if anew else []), estimate


def test_bbr_starts_anew_after_some_seconds(bbr_connection: Connection, clock: list[float]) -> None:
    bbr, times = congestion.Bbr(), []
    for message in range(25):
        bbr_connection.set = []
        bbr.before_message(7)
        times += [message] if bbr_connection.set == ANEW else []
        clock[0] += 1
    assert times == [6, 12, 18, 24]


def test_bbr_keeps_its_window_while_packets_are_sent_again(
    bbr_connection: Connection, clock: list[float]
) -> None:
    bbr = congestion.Bbr()
    clock[0] += 60
    for state in (1, 2, 3, 4):
        bbr_connection.state = state
        bbr.before_message(7)
        assert not congestion.renew(7)
    assert not bbr_connection.set
    bbr_connection.state = 0
    bbr.before_message(7)
    assert bbr_connection.set == ANEW


def test_a_network_that_has_become_slower_is_accepted(
    bbr_connection: Connection, clock: list[float]
) -> None:
    bbr, anew = congestion.Bbr(), 0
    bbr.before_message(7)
    bbr_connection.estimate //= 4
    for _ in range(100):
        bbr.before_message(7)
        anew += bool(bbr_connection.set)
        bbr_connection.set = []
    assert anew == 34  # 0.98 to the power of 35 is 0.49


def test_closed_connections_and_other_systems_are_left_alone(connection: socket.socket) -> None:
    assert congestion.Bbr.of(connection) is None or congestion.name_of(connection) == "bbr"
    for made in (socket.socket(), connection):  # one was never connected, one may not use BBR
        fd = made.fileno()
        congestion.Bbr().before_message(fd)
        made.close()
        congestion.Bbr().before_message(fd)
        assert not congestion.renew(fd)


def test_messages_start_bbr_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the connections that use it, and that a message is sent over."""
    monkeypatch.setattr(congestion, "name_of", lambda connection: "bbr")
    monkeypatch.setattr(congestion, "name_for", lambda round_trip: "bbr")
    connections, called = wire.Connections(), []
    monkeypatch.setattr(congestion.Bbr, "before_message", lambda self, fd: called.append(fd))
    pairs = [socket.socketpair() for _ in range(3)]
    for rank, (ours, _) in enumerate(pairs):
        connections.keep(rank, ours)
    empty = torch.zeros(0)
    wire.Transfer(connections, {0: empty, 2: empty}, {1: empty}, (1, 1), 1.0, range(3))
    assert called == [connections[0], connections[2]]
    connections.close()
    for _, theirs in pairs:
        theirs.close()


def test_a_connection_that_started_anew_still_uses_bbr(
    connection: socket.socket, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the system's BBR, if there is one, and data before and after."""
    if congestion.LONG not in congestion.available():
        assert congestion.name_of(connection) != congestion.LONG
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
    assert congestion.Bbr.of(connection) is None, "a short round trip, and the system's choice"
    monkeypatch.setenv(congestion.VARIABLE, "bbr")
    bbr = congestion.Bbr.of(connection)
    assert bbr is not None
    assert connection.getsockopt(socket.IPPROTO_TCP, 25) == congestion.UNSENT  # TCP_NOTSENT_LOWAT
    for _ in range(3):
        clock[0] += 60
        bbr.before_message(connection.fileno())
        assert congestion.name_of(connection) == "bbr"
        assert connection.send(bytes(1000)) == 1000


@pytest.fixture(params=[False, True], ids=["compiled", "interpreted"])
def socket_pairs(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int], list[int]]]:
    """Descriptors of so many connections of little buffer that nobody reads, for either loop."""
    monkeypatch.setattr(congestion, "renew", lambda fd: False)  # these are no TCP connections
    if request.param:
        monkeypatch.setattr(frames, "library", lambda: None)
    with ExitStack() as stack:

        def connect(count: int) -> list[int]:
            pairs = [socket.socketpair() for _ in range(count)]
            for ours, theirs in pairs:
                stack.enter_context(ours)
                stack.enter_context(theirs)
                ours.setblocking(False)
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
            return [ours.fileno() for ours, _ in pairs]

        yield connect


def move(messages: ctypes.Array[frames.Message]) -> list[int]:
    """What each message knows of BBR after as much as goes without waiting."""
    frames.move(messages, {}, frames.WITHOUT_WAITING, 0, 1)
    return [m.bbr for m in messages]


SIZES = {
    "others have much left": ([1000, 4 << 20, 4 << 20], [1, 2, 2]),
    "others have little left": ([1000, 300_000, 4 << 20], [1, 1, 2]),
    "none is complete": ([4 << 20, 4 << 20, 4 << 20], [1, 1, 1]),
}


def test_what_is_sent_next_needs_the_rate_itself(socket_pairs: Callable[[int], list[int]]) -> None:
    """The others do not start anew before its last message is sent; nor does one that waits."""
    connections = socket_pairs(3)
    x = torch.zeros(4 << 20, dtype=torch.uint8)
    messages = (frames.Message * 4)()
    room = torch.zeros(4 * frames.check_bytes(4 << 20), dtype=torch.uint8)  # for checksums
    # two messages on the first connection, a long one on the second, one on the third that waits
    each = [(0, 1000, 1000, -1), (0, 1000, -1, 0), (1, 4 << 20, 4 << 20, -1), (2, 4 << 20, -1, -1)]
    for index, (connection, size, ready, after) in enumerate(each):
        checks = room.data_ptr() + index * frames.check_bytes(4 << 20)
        at = (1, 1), 0, checks, x.data_ptr(), size, ready, connections[connection], False, after
        frames.begin(messages, index, *at, bbr=True)
    assert move(messages) == [1, 1, 1, 1]
    messages[1].ready = 1000
    assert move(messages) == [1, 1, 2, 1]


@pytest.mark.parametrize(("sizes", "expected"), SIZES.values(), ids=SIZES)
def test_when_a_message_is_sent_others_start_anew(
    sizes: list[int], expected: list[int], socket_pairs: Callable[[int], list[int]]
) -> None:
    """Over connections that are never read, so that only the first one can be complete. Those over
    which nothing was sent yet do not count, nor those without BBR."""
    connections = socket_pairs(len(sizes))
    tensors = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    messages = (frames.Message * len(sizes))()
    rooms = [torch.zeros(frames.check_bytes(size), dtype=torch.uint8) for size in sizes]
    for index in (2, 1, 0):  # the first one last: the others have begun when it is complete
        where = tensors[index].data_ptr(), sizes[index], -1 if index == 0 else sizes[index]
        at = (1, 1), 0, rooms[index].data_ptr(), *where, connections[index], False, -1
        frames.begin(messages, index, *at, bbr=True)
    assert move(messages) == [1, 1, 1]
    messages[0].ready = sizes[0]
    assert move(messages) == expected


@pytest.mark.parametrize(("later", "expected"), [(4 << 20, 2), (1000, 1)])
def test_what_a_connection_sends_next_counts_as_left(
    later: int, expected: int, socket_pairs: Callable[[int], list[int]]
) -> None:
    """Little is left of the message under way, and the one after it has not begun."""
    connections = socket_pairs(2)
    x = torch.zeros(4 << 20, dtype=torch.uint8)
    messages = (frames.Message * 3)()
    room = torch.zeros(3 * frames.check_bytes(4 << 20), dtype=torch.uint8)
    each = [(0, 1000, -1, -1), (1, 400_000, 400_000, -1), (1, later, -1, 1)]
    for index, (connection, size, ready, after) in enumerate(each):
        checks = room.data_ptr() + index * frames.check_bytes(4 << 20)
        at = (1, 1), 0, checks, x.data_ptr(), size, ready, connections[connection], False, after
        frames.begin(messages, index, *at, bbr=True)
    move(messages)
    assert 0 < messages[1].moved < 400_000
    messages[0].ready = 1000
    assert move(messages) == [1, expected, 1]
