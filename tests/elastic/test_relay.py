"""The connection between a donor and its newcomer, and strangers that call the donor."""

from __future__ import annotations

import errno
import io
import secrets
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from laconic.engine.newcomers import _steps_before, leave_out_residuals
from laconic.errors import LinkError
from laconic.links import handshake
from laconic.links.calls import GRADIENTS, Call
from laconic.links.elastic import feed as feed_module
from laconic.links.elastic import relay as module
from laconic.links.elastic.feed import Feed
from laconic.links.elastic.relay import (
    KEY,
    PURPOSE,
    READY,
    Frame,
    Record,
    Relay,
    RelayError,
    Service,
    Snapshot,
    Start,
    StepSettings,
    Stream,
    call_donor,
    numbers_of,
)
from laconic.links.elastic.units import Units
from laconic.links.elastic.view import Member, View

SECRET = bytes(range(32))
NO_KEY = "00" * 8
SOON = 60.0
ME = Member("0" * 12, *(f"127.0.0.1|{port}|{NO_KEY}" for port in (1, 2, 3)))


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Donors give strangers longer than anyone here waits: nobody waits for a stranger."""
    monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 10 * SOON)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two connected sockets."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.settimeout(SOON)
    yield ours, theirs
    ours.close()
    theirs.close()


def bits(value: Any) -> Any:
    """``value`` with tensors as their bytes, so that NaN equals itself."""
    if isinstance(value, torch.Tensor):
        return (
            str(value.dtype),
            tuple(value.shape),
            value.contiguous().view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    return value


ODD = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45, 1.0])
START = Start(
    7, Call(6, "round", True), 2**62, [{"lr": 0.5}], {"scheduler": {"last": 3}}, None, (3, 2)
)
FRAMES = [
    Snapshot(3, {"model": {"w": ODD, "h": ODD.bfloat16()}, "list": [1, None, "é"]}),
    Snapshot(0, {}),
    Record(Call(5, GRADIENTS), 3, [ODD, ODD.double(), torch.zeros(7, dtype=torch.uint8)]),
    Record(Call(5, "Average round of fragment 1/2", True, 2**64 - 1), 2, [], [2**64 - 1, 2**63]),
    StepSettings(4, [{"lr": 0.1, "weight_decay": 0.0}, {"lr": float("inf")}]),
    START,
]


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_a_frame_arrives_bit_for_bit(
    pair: tuple[socket.socket, socket.socket], frame: Frame
) -> None:
    Stream(pair[0]).send(frame)
    there = Stream(pair[1]).receive()
    assert type(there) is type(frame)
    assert bits(vars(there)) == bits(vars(frame))
    if isinstance(frame, (Record, Start)):
        assert isinstance(there, (Record, Start)) and there.call == frame.call


def test_frames_come_in_their_order(pair: tuple[socket.socket, socket.socket]) -> None:
    sender, receiver = Stream(pair[0]), Stream(pair[1])
    large = Snapshot(1, {"x": torch.arange(2**20)})  # more than a socket's buffer
    thread = threading.Thread(target=lambda: [sender.send(f) for f in (large, *FRAMES, large)])
    thread.start()
    for frame in (large, *FRAMES, large):
        assert bits(vars(receiver.receive())) == bits(vars(frame))
    thread.join(SOON)


def test_residuals_travel_as_zeros(pair: tuple[socket.socket, socket.socket]) -> None:
    """Which take no bytes. All else travels as it is."""
    large, ones = torch.ones(2**18), torch.ones(3)
    first = {"residual": large, "lag": ones.double(), "reference": ones}
    sync = {
        "rounds": [{"carried": [first, {}], "residual": ones}],
        "gradients": [{"carried": [{"residual": ones}], "scale": 1.0}],
    }
    leave_out_residuals(sync)
    Stream(pair[0]).send(Snapshot(1, sync))
    assert len(pair[1].recv(2**16, socket.MSG_PEEK)) < 2**14
    there = Stream(pair[1]).receive()
    assert isinstance(there, Snapshot)
    wanted = {"residual": 0 * large, "lag": 0 * ones.double(), "reference": ones}
    assert bits(there.state["rounds"]) == bits([{"carried": [wanted, {}], "residual": ones}])
    assert bits(there.state["gradients"]) == bits(
        [{"carried": [{"residual": 0 * ones}], "scale": 1.0}]
    )


@pytest.mark.parametrize("part", [0.0, 4.0, 8.0, 0.5, 0.99])
def test_a_connection_that_ends_within_a_frame(
    pair: tuple[socket.socket, socket.socket], part: float
) -> None:
    """``part``: of the frame, or how many bytes."""
    recorded, other = socket.socketpair()
    Stream(recorded).send(FRAMES[0])
    data = other.recv(2**20)
    recorded.close()
    other.close()
    pair[0].sendall(data[: int(part) if part >= 1 else int(part * len(data))])
    pair[0].close()
    with pytest.raises(RelayError, match="has closed the connection"):
        Stream(pair[1]).receive()


def test_a_connection_that_has_ended(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].close()
    stream = Stream(pair[0])
    with pytest.raises(RelayError):
        for _ in range(100):
            stream.send(FRAMES[0])
    with pytest.raises(RelayError):
        stream.say(READY)
    with pytest.raises(RelayError):
        stream.wait_for(READY)


def test_a_newcomer_that_says_something_else(pair: tuple[socket.socket, socket.socket]) -> None:
    Stream(pair[0]).say(READY)
    Stream(pair[1]).wait_for(READY)
    pair[0].sendall(b"steady")
    with pytest.raises(RelayError, match="violates the protocol"):
        Stream(pair[1]).wait_for(READY)


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return framed(buffer.getvalue())


def framed(data: bytes, length: int | None = None) -> bytes:
    """``data`` as it travels, with its checksums; ``length``: which it claims to have."""
    head = struct.pack(">QI", len(data) if length is None else length, zlib.crc32(data))
    return head + struct.pack(">I", zlib.crc32(head)) + data


@pytest.mark.parametrize("place", [0, 7, 9, 13, 16, 40, -1])
def test_a_flipped_bit_is_noticed(pair: tuple[socket.socket, socket.socket], place: int) -> None:
    """In the length, the checksums and the frame."""
    data = bytearray(saved({"kind": "refusal", "why": "x"}))
    data[place] ^= 8
    pair[0].sendall(data)
    with pytest.raises(RelayError, match="was changed in transit"):
        Stream(pair[1]).receive()


@pytest.mark.parametrize(
    "data",
    [
        framed(b"garbage"),
        framed(b"gar", 7),
        framed(b""),
        framed(b"", 2**64 - 1),
        framed(b"garbage", 2**62),
        saved({"kind": "other"}),
        saved({"kind": "start", "serial": 1}),
        saved({"kind": "record", "call": 5, "workers": 1, "outputs": []}),
        saved([1]),
    ],
)
def test_what_is_no_frame(pair: tuple[socket.socket, socket.socket], data: bytes) -> None:
    """For the newcomer its donor is then lost."""
    pair[0].sendall(data)
    pair[0].close()
    feed = feed_of(Stream(pair[1]))
    with pytest.raises(RelayError, match=r"is no frame of laconic's|has closed the conn") as error:
        feed.pop()
    assert "\n" not in str(error.value)


def test_numbers_of() -> None:
    """And tuples of numbers. What is no number stays what it is on the newcomer."""
    numbers = {"lr": 0.1, "betas": (0.9, 0.99), "steps": 3}
    others = {"maximize": False, "params": [1], "foreach": None, "empty": (), "mixed": (1, True)}
    assert numbers_of([{**others, **numbers}, {}]) == [numbers, {}]


# -- a donor ----


class Donor:
    """A service on 127.0.0.1."""

    def __init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = self.server.getsockname()[1]
        self.ready: list[Member] = []
        self.refuses = ""
        self.heard = threading.Event()
        self.service = Service(self.server, SECRET, self._ready, Units(ME.id))
        self.member = ME._replace(service=f"127.0.0.1|{self.port}|{NO_KEY}")

    def _ready(self, member: Member) -> None:
        self.ready.append(member)
        self.heard.set()
        if self.refuses:
            raise LinkError(self.refuses)

    def accepted(self) -> Relay:
        return self.service.waiting.get(timeout=SOON)


@pytest.fixture
def donor() -> Iterator[Donor]:
    donor = Donor()
    yield donor
    donor.service.close()


def newcomer(number: int = 9) -> Member:
    return Member(f"{number:012x}", *(f"10.0.0.{number}|{port}|{NO_KEY}" for port in (1, 2, 3)))


def test_a_newcomer_catches_up(donor: Donor) -> None:
    """Snapshot, records and settings, ready, start."""
    stream = call_donor(donor.member, SECRET, newcomer())
    relay = donor.accepted()
    assert relay.newcomer == newcomer() and not relay.ended
    relay.begin(FRAMES[0])  # type: ignore[arg-type]
    relay.put(FRAMES[2])
    relay.put(FRAMES[4])
    assert [type(stream.receive()) for _ in range(3)] == [Snapshot, Record, StepSettings]
    assert not donor.ready
    stream.say(READY)
    assert donor.heard.wait(SOON) and donor.ready == [newcomer()]
    relay.finish(START, None)
    assert relay.ended and stream.receive() == START
    stream.close()


def test_a_newcomer_asks_for_the_state_again(donor: Donor) -> None:
    """As of `Start`: where it has repeated other steps than the donor."""
    feed = feed_of(call_donor(donor.member, SECRET, newcomer()))
    relay, again = donor.accepted(), Snapshot(6, {"model": {"w": ODD}})
    relay.begin(FRAMES[0])  # type: ignore[arg-type]
    assert isinstance(feed.pop(), Snapshot) and feed.first_step == 3
    feed.say_ready()
    assert donor.heard.wait(SOON)
    relay.finish(START, lambda: again)
    assert feed.pop() == START
    assert bits(vars(feed.ask_for_state())) == bits(vars(again))
    feed.close()
    relay._stream.close()  # else nobody does


def test_a_newcomer_asks_for_a_state_that_there_is_not(donor: Donor) -> None:
    feed = feed_of(call_donor(donor.member, SECRET, newcomer()))
    relay = donor.accepted()
    relay.begin(FRAMES[0])  # type: ignore[arg-type]
    feed.say_ready()
    assert donor.heard.wait(SOON)
    relay.put(FRAMES[2])
    assert isinstance(feed.pop(), Snapshot)
    with pytest.raises(RelayError, match="the donor violates the protocol"):
        feed.ask_for_state()
    feed.close()
    relay._stream.close()  # else nobody does


def test_a_newcomer_that_is_refused(donor: Donor) -> None:
    """It is told why, behind what was sent before."""
    feed = feed_of(call_donor(donor.member, SECRET, newcomer()))
    relay = donor.accepted()
    relay.begin(FRAMES[0])  # type: ignore[arg-type]
    relay.refuse("its ports are closed")
    assert relay.ended and isinstance(feed.pop(), Snapshot)
    with pytest.raises(LinkError, match="does not take in this worker: its ports are closed"):
        feed.peek()
    feed.close()
    relay._stream.close()  # else nobody does


def test_a_newcomer_that_cannot_be_reached_is_refused(donor: Donor) -> None:
    donor.refuses = "its address lets nobody in"
    feed = feed_of(call_donor(donor.member, SECRET, newcomer()))
    relay = donor.accepted()
    relay.begin(FRAMES[0])  # type: ignore[arg-type]
    assert isinstance(feed.pop(), Snapshot)
    feed.say_ready()
    with pytest.raises(LinkError, match="its address lets nobody in"):
        feed.peek()
    feed.close()
    relay._stream.close()  # else nobody does


def test_a_newcomer_that_takes_in_too_little(monkeypatch: pytest.MonkeyPatch, donor: Donor) -> None:
    """It is given up: what waits for it would fill the memory of its donor."""
    monkeypatch.setattr(module, "MOST_WAITING", 2**22)
    large = torch.zeros(2**20, dtype=torch.uint8)
    stream = call_donor(donor.member, SECRET, newcomer())
    relay, count = donor.accepted(), 0
    relay.begin(Snapshot(1, {"x": large}))
    while not relay.ended and count < 100:
        relay.put(Record(Call(5, "a"), 2, [large]))
        count += 1
    assert 5 < count < 20, "4 MiB and two snapshots, and what is in the sockets' buffers"
    with pytest.raises(RelayError):
        for _ in range(100):
            stream.receive()
    stream.close()
    serves(donor, 8)


def test_a_newcomer_that_keeps_up_is_not_given_up(
    monkeypatch: pytest.MonkeyPatch, donor: Donor
) -> None:
    """What was sent does not wait."""
    monkeypatch.setattr(module, "MOST_WAITING", 2**16)
    stream = call_donor(donor.member, SECRET, newcomer())
    relay = donor.accepted()
    relay.begin(Snapshot(1, {}))
    stream.receive()
    for _ in range(10):
        relay.put(Record(Call(5, "a"), 2, [torch.zeros(2**13)]))
        stream.receive()
        end = time.monotonic() + SOON
        while relay._waiting and time.monotonic() < end:
            time.sleep(0.001)
    assert not relay.ended
    stream.close()


def test_a_newcomer_that_ends(donor: Donor) -> None:
    stream = call_donor(donor.member, SECRET, newcomer())
    relay = donor.accepted()
    relay.begin(FRAMES[0])  # type: ignore[arg-type]
    stream.receive()
    stream.close()
    end = time.monotonic() + SOON
    while not relay.ended and time.monotonic() < end:
        time.sleep(0.01)
    assert relay.ended and not donor.ready


def serves(donor: Donor, number: int = 9) -> None:
    """A real newcomer is served."""
    stream = call_donor(donor.member, SECRET, newcomer(number))
    relay = donor.accepted()
    assert relay.newcomer == newcomer(number) and donor.service.waiting.empty()
    relay.begin(FRAMES[0])  # type: ignore[arg-type]
    assert bits(vars(stream.receive())) == bits(vars(FRAMES[0]))
    stream.close()


def closes(connection: socket.socket) -> bool:
    """Whether the other side closes the connection before the time of a handshake is over."""
    connection.settimeout(SOON)
    try:
        while connection.recv(1000):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize(
    "data", [b"x" * 100, b"GET / HTTP/1.1\r\n\r\n" * 9, bytes(1000), secrets.token_bytes(5000)]
)
def test_a_stranger_sends_garbage(donor: Donor, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", donor.port), SOON) as stranger:
        with suppress(ConnectionError):
            stranger.sendall(data)
        assert closes(stranger)
        serves(donor)


def test_strangers_that_send_nothing_or_too_little(donor: Donor) -> None:
    hello = handshake.Hello(PURPOSE, KEY, 0, bytes(16)).pack()
    strangers = [socket.create_connection(("127.0.0.1", donor.port), SOON) for _ in range(20)]
    for length, stranger in enumerate(strangers):
        stranger.sendall(hello[:length])
    serves(donor)
    for stranger in strangers:
        stranger.close()
    serves(donor, 8)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A donor that is made later gives strangers half a second."""
    monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 0.5)


def test_a_stranger_is_given_up_after_some_time(hasty: None, donor: Donor) -> None:
    with socket.create_connection(("127.0.0.1", donor.port), SOON) as stranger:
        stranger.settimeout(SOON)
        assert stranger.recv(1) == b""


def test_a_stranger_that_sends_a_byte_now_and_then(hasty: None, donor: Donor) -> None:
    """The time is that of the whole handshake."""
    hello = handshake.Hello(PURPOSE, KEY, 0, bytes(16)).pack()
    with (
        socket.create_connection(("127.0.0.1", donor.port), SOON) as stranger,
        pytest.raises(ConnectionError),
    ):
        for byte in hello:
            stranger.sendall(bytes([byte]))
            time.sleep(0.1)


def test_too_many_files_are_open() -> None:
    """Later newcomers are served."""
    failures = [OSError(errno.EMFILE, "too many"), OSError(errno.ECONNABORTED, "aborted")]

    class Server(socket.socket):
        def accept(self) -> Any:
            if failures:
                raise failures.pop()
            return super().accept()

    with Server() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        service = Service(server, SECRET, lambda member: None, Units(ME.id))
        where = ME._replace(service=f"127.0.0.1|{server.getsockname()[1]}|{NO_KEY}")
        stream = call_donor(where, SECRET, newcomer())
        relay = service.waiting.get(timeout=SOON)
        assert relay.newcomer == newcomer() and not failures
        stream.close()
        relay._stream.close()
        service.close()


def said_with(
    donor: Donor, secret: bytes, purpose: bytes, text: bytes, change: Any = None
) -> socket.socket:
    """Call as a newcomer would, with these; ``change(out)`` changes what is sent."""
    connection = socket.create_connection(("127.0.0.1", donor.port), SOON)
    exchange = handshake.call(secret, purpose, KEY, 0, text)
    out, wanted = next(exchange)
    with suppress(ConnectionError):
        connection.sendall(out if change is None else change(out))
        if purpose == PURPOSE and change is None:
            challenge = connection.recv(wanted)
            assert len(challenge) == wanted
            connection.sendall(exchange.send(challenge)[0])
    return connection


TEXT = View(1, (newcomer(),)).pack().encode()


@pytest.mark.parametrize(
    ("secret", "purpose", "text"),
    [
        (bytes(32), PURPOSE, TEXT),
        (SECRET, b"wire", TEXT),
        (SECRET, PURPOSE, b""),
        (SECRET, PURPOSE, b"\xff\xfe"),
        (SECRET, PURPOSE, b'[1, [], "", null]'),
        (SECRET, PURPOSE, b"[" * 60_000),
    ],
)
def test_who_does_not_prove_or_say_what_is_needed(
    donor: Donor, secret: bytes, purpose: bytes, text: bytes
) -> None:
    with said_with(donor, secret, purpose, text) as stranger:
        assert closes(stranger)
        serves(donor)


def test_another_version_of_the_protocol(donor: Donor) -> None:
    with said_with(
        donor, SECRET, PURPOSE, TEXT, lambda out: out.replace(b"laconic1", b"laconic2")
    ) as other:
        assert closes(other)
        serves(donor)


def test_a_text_that_is_said_to_be_huge(donor: Donor) -> None:
    """It is refused before it is read."""
    with socket.create_connection(("127.0.0.1", donor.port), SOON) as stranger:
        stranger.sendall(handshake.Hello(PURPOSE, KEY, 0, bytes(16)).pack())
        assert len(stranger.recv(16)) == 16
        stranger.sendall(struct.pack(">I", 2**32 - 1))
        assert closes(stranger)
        serves(donor)


def test_a_donor_that_is_none(donor: Donor) -> None:
    """It has another secret, is gone, or closes at once: each a `RelayError`."""
    with pytest.raises(RelayError, match=r"closed|does not know|reset"):
        call_donor(donor.member, bytes(32), newcomer())
    serves(donor)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        where = ME._replace(service=f"127.0.0.1|{port}|{NO_KEY}")
        thread = threading.Thread(target=lambda: server.accept()[0].close(), daemon=True)
        thread.start()
        with pytest.raises(RelayError):
            call_donor(where, SECRET, newcomer())
        thread.join(SOON)
    with pytest.raises(RelayError, match="refused"):
        call_donor(where, SECRET, newcomer())


def test_a_donor_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = ME._replace(service=f"127.0.0.1|{server.getsockname()[1]}|{NO_KEY}")
        with pytest.raises(RelayError, match="timed out"):
            call_donor(where, SECRET, newcomer())


@pytest.mark.skipif(module._NOT_SENT is None, reason="the system has no such option")
def test_the_kernel_holds_little_that_was_not_sent(donor: Donor) -> None:
    stream = call_donor(donor.member, SECRET, newcomer())
    relay = donor.accepted()
    limit = relay._stream._connection.getsockopt(socket.IPPROTO_TCP, module._NOT_SENT)
    assert limit == module.PIECE
    stream.close()
    relay._stream.close()


# -- what a newcomer takes from the stream ----


def feed_of(stream: Stream) -> Feed:
    return Feed(stream, ME.id, lambda: None)


class Slow:
    """A connection over which bytes come now and then; the frame is complete after ``pieces``."""

    def __init__(self, pieces: int) -> None:
        self.moved, self._pieces = time.monotonic(), pieces
        self._closed = threading.Event()

    def receive(self) -> Frame:
        for _ in range(self._pieces):
            if self._closed.wait(0.2):
                break
            self.moved = time.monotonic()
        else:
            return FRAMES[1]
        raise RelayError("closed")

    def say(self, word: bytes) -> None:
        """Do nothing."""

    def close(self) -> None:
        self._closed.set()


def test_a_state_may_take_longer_than_the_patience_of_a_newcomer() -> None:
    """While bytes come, it waits."""
    feed = Feed(Slow(10), ME.id, lambda: None)
    assert feed.pop(1.0) == FRAMES[1]
    feed.close()


def test_a_donor_that_sends_nothing_is_given_up() -> None:
    stream = Slow(0)
    stream.moved -= 60.0

    def receive() -> Frame:
        stream._closed.wait(SOON)
        raise RelayError("closed")

    stream.receive = receive  # type: ignore[method-assign]
    feed = Feed(stream, ME.id, lambda: None)
    with pytest.raises(RelayError, match="it takes no steps: it has finished, or waits for oth"):
        feed.pop(59.0)
    feed.close()


def test_a_feed_that_has_ended_says_so_each_time(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """Several threads may ask: the one that takes steps, and the one that communicates."""
    sender, feed = Stream(pair[0]), feed_of(Stream(pair[1]))
    sender.send(FRAMES[1])
    sender.close()
    assert feed.pop() == FRAMES[1]
    for _ in range(3):
        with pytest.raises(RelayError, match="has closed the connection"):
            feed.peek()


def test_a_feed_gives_frames_in_their_order(pair: tuple[socket.socket, socket.socket]) -> None:
    """Settings are taken out; records that belong to other calls are passed over."""
    sender, feed = Stream(pair[0]), feed_of(Stream(pair[1]))
    first, second = Record(Call(5, "a"), 2, []), Record(Call(5, "b", True), 3, [])
    for frame in (FRAMES[4], first, second, START):
        sender.send(frame)
    assert feed.peek() == first and feed.peek() == first
    assert feed.settings == {4: FRAMES[4].groups}  # type: ignore[union-attr]
    assert not feed.idle()
    assert feed.record(Call(5, "b")) == second, "whether it starts a step does not matter"
    with pytest.raises(RelayError, match="has sent nothing for c after 6 steps"):
        feed.record(Call(6, "c"))
    assert feed.pop() == START and feed.idle()


def test_a_feed_ends_with_its_donor(pair: tuple[socket.socket, socket.socket]) -> None:
    sender, feed = Stream(pair[0]), feed_of(Stream(pair[1]))
    sender.send(FRAMES[2])
    pair[0].close()
    assert isinstance(feed.pop(), Record)
    with pytest.raises(RelayError, match="has closed the connection"):
        feed.pop()


def test_who_waits_for_a_frame_looks_around(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[socket.socket, socket.socket]
) -> None:
    """Where it is woken, and now and then: the donor may be lost without a word."""
    monkeypatch.setattr(feed_module, "CHECK_SECONDS", 0.02)
    looked = []

    def check() -> None:
        looked.append("check")
        if len(looked) == 1:
            feed.wake()
        if len(looked) == 3:
            raise RelayError("the run goes on without it")

    feed = Feed(Stream(pair[1]), ME.id, lambda: looked.append("awake"), check)
    with pytest.raises(RelayError, match="the run goes on without it"):
        feed.pop()
    assert looked == ["check", "awake", "check"]


def test_the_steps_before_a_call() -> None:
    """Rounds begin after their step is counted, and gradients are averaged before."""
    assert _steps_before(Call(6, GRADIENTS)) == 6
    assert _steps_before(Call(6, "Average round")) == 5
