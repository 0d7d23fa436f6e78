"""Who may talk to a rank, and what every rank says of one that is lost."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.errors import LinkError
from laconic.links import call_guard, handshake, health, long_wait, rendezvous
from laconic.links.addresses import Address
from laconic.links.calls import Call, CallPosition
from laconic.links.handshake import RefusedError
from laconic.links.health import Request, Verdict
from laconic.links.tcp import TcpLink
from laconic.links.torch_link import TorchLink
from laconic.links.wire import Connections, Wire

from tests.support import gloo

SECRET = bytes(range(32))
VERDICT = Verdict("rank 1 is gone", (1,), 0)
# -- what is read from the network ----

TEXTS = st.text(max_size=40)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)
BYTES = st.binary(max_size=300) | JSON.map(lambda value: json.dumps(value).encode())


def printable(verdict: Verdict | None) -> bool:
    return verdict is None or verdict.text.isprintable()


@given(data=BYTES | st.sampled_from([b"[" * n + b"]" * n for n in (10, 30_000)]))
@settings(deadline=None)
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with suppress(ValueError):
        request = Request.unpack(data)
        assert printable(request.verdict) and (request.left is None or 0 <= request.left < 2**64)
    with suppress(ValueError):
        answer = health.unpack_answer(data)
        assert answer.status.isprintable() and printable(answer.verdict)
    with suppress(ValueError):
        assert health.unpack_verdict(data).text.isprintable()
    escaped = json.dumps([["\x1b[2J\x07lost\u202e", [1], 0], None]).encode()
    verdict = Request.unpack(escaped).verdict
    assert verdict is not None and verdict.text == " [2J lost "


# -- the handshake ----


def converse(
    caller: handshake.Exchange, callee: handshake.Exchange
) -> tuple[bytes | None, bytes | None, list[bytes]]:
    """What both get (None: refused), and all that traveled."""
    ends, got, traveled = [caller, callee], [None, None], []
    says: list[tuple[bytes, int] | None] = [next(end) for end in ends]
    mail = [b"", b""]
    while any(says):
        moved = False
        for i in (0, 1):
            now = says[i]
            if now is None:
                continue
            out, wanted = now
            if out:
                traveled.append(out)
                mail[1 - i] += out
                says[i], moved = (b"", wanted), True
            if len(mail[i]) >= wanted:
                data, mail[i] = mail[i][:wanted], mail[i][wanted:]
                moved = True
                try:
                    says[i] = ends[i].send(data)
                except StopIteration as stop:
                    got[i], says[i] = stop.value, None
                except RefusedError:
                    says[i] = None
        if not moved:
            break
    return got[0], got[1], traveled


def callee(secret: bytes = SECRET, purpose: bytes = b"beacon") -> handshake.Exchange:
    return handshake.answer(
        purpose, lambda key: secret if key == b"k" * 8 else None, lambda hello, text: b"reply"
    )


def test_who_knows_the_secret_gets_an_answer() -> None:
    own, theirs, traveled = converse(
        handshake.call(SECRET, b"beacon", b"k" * 8, 3, b"asks"), callee()
    )
    assert own == b"reply" and theirs is not None and theirs.endswith(b"asks")
    assert not any(SECRET in piece or SECRET.hex().encode() in piece for piece in traveled)


@pytest.mark.parametrize(
    ("secret", "purpose", "key"),
    [
        (bytes(32), b"beacon", b"k" * 8),
        (SECRET, b"wire", b"k" * 8),
        (SECRET, b"beacon", b"x" * 8),
    ],
)
def test_who_does_not_prove_it_gets_nothing(secret: bytes, purpose: bytes, key: bytes) -> None:
    own, theirs, traveled = converse(handshake.call(secret, purpose, key, 3, b"asks"), callee())
    assert own is None and theirs is None
    assert not any(b"reply" in piece for piece in traveled)


def test_a_proof_is_good_for_one_connection_and_one_side() -> None:
    """What one connection carried does not open another one, nor does it come back as an answer."""
    caller = handshake.call(SECRET, b"beacon", b"k" * 8, 3, b"asks")
    _, _, (hello, _, frame, _) = converse(caller, callee())
    again = callee()
    next(again)
    again.send(hello)
    again.send(frame[:4])
    with pytest.raises(RefusedError, match="secret"):
        again.send(frame[4:])
    mirrored = handshake.call(SECRET, b"beacon", b"k" * 8, 3, b"asks")
    next(mirrored)
    own, _ = mirrored.send(b"n" * 16)
    mirrored.send(own[:4])
    with pytest.raises(RefusedError, match="secret"):
        mirrored.send(own[4:])


# -- a beacon ----


@pytest.fixture
def beacon() -> health.Beacon:
    return health.Beacon()


def test_a_beacon_answers_who_knows_the_secret_and_nobody_else(beacon: health.Beacon) -> None:
    address = beacon.enroll(SECRET)
    link = beacon.links[health.key_of(address)]
    link.position = CallPosition(7, Call(3, "finish()"))
    answer = health.ask(address, SECRET, 5, Request(left=9))
    assert answer.position == link.position and link.left == {5: 9}
    refused = health.ask(address, bytes(32), 5, Request(VERDICT))
    assert refused.lost and link.verdict is None
    told = health.ask(address, SECRET, 5, Request(VERDICT))
    assert told.verdict == link.verdict == VERDICT


def test_of_several_verdicts_the_one_of_the_lowest_finder_holds(beacon: health.Beacon) -> None:
    address = beacon.enroll(SECRET)
    for finder, expected in ((2, 2), (3, 2), (1, 1)):
        verdict = VERDICT._replace(finder=finder)
        answer = health.ask(address, SECRET, finder, Request(verdict))
        assert answer.verdict == VERDICT._replace(finder=expected)


def test_silence_is_told_from_death() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = str(Address("127.0.0.1", server.getsockname()[1], "00" * 8))
        assert health.ask(address, SECRET).missing == "silent"
    assert health.ask(address, SECRET).missing == "gone"


# -- forked children ----


def in_child(function: Callable[[], bool]) -> bool:
    """Whether ``function()`` is true in a forked child."""
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            code = 0 if function() else 1
        finally:
            os._exit(code)
    end = time.monotonic() + 100
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("the child hangs")


def test_a_forked_child_closes_its_copies_and_forgets_them(beacon: health.Beacon) -> None:
    ours, theirs = socket.socketpair()
    connections = Connections()
    connections.keep(1, ours)
    wire = Wire(0, "127.0.0.1", 5, range(2))
    numbers = [connections[1], beacon._server.fileno(), wire._server.fileno()]

    def closed() -> bool:
        for number in numbers:
            try:
                os.fstat(number)
                return False
            except OSError:
                continue
        other = [os.open(os.devnull, os.O_RDONLY) for _ in numbers]  # the same numbers again
        connections.__del__()
        beacon._server.close()
        wire._server.close()
        return all(os.fstat(number) for number in other) and connections.forked

    assert in_child(closed)
    theirs.setblocking(False)
    with pytest.raises(BlockingIOError):
        theirs.recv(1)  # the parent's own stands
    theirs.close()
    wire._server.close()


def test_a_forked_child_can_have_a_beacon_of_its_own() -> None:
    own = health.beacon()
    address = own.enroll(SECRET)

    def fresh() -> bool:
        other = health.beacon()
        mine = other.enroll(SECRET)
        return other is not own and not health.ask(mine, SECRET).lost and mine != address

    assert in_child(fresh)
    assert not health.ask(address, SECRET).lost


# -- LinkError ----


# -- a host that cannot be reached ----


def looks(rank: int, missing: str, heard: float) -> str:
    """What a rank that waits raises in 0.6 s, where the other one's beacon is as said, and
    something came from its host so many seconds ago; 0.3 s is what it allows."""
    answers = {"silent": health.SILENT, "unreachable": health.UNREACHABLE}
    link = gloo.link_of(2)
    assert isinstance(link, TcpLink)
    said = ""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            health, "ask_all", lambda addresses, *_: [answers[missing]] * len(addresses)
        )
        patched.setattr(call_guard, "UNREACHABLE_SECONDS", 0.3)
        patched.setattr(call_guard, "FIRST_ASK_SECONDS", 0.0)
        patched.setattr(link._wire, "heard", lambda rank: heard)
        end = time.monotonic() + 0.6
        while time.monotonic() < end and not said:
            try:
                link.check()
            except LinkError as error:
                said = f"{error.ranks} {error}"
            time.sleep(0.01)
    return said


@pytest.mark.parametrize(("missing", "heard"), [("silent", 99.0), ("unreachable", 0.1)])
def test_a_slow_process_or_network_is_not_dead(pool: gloo.Pool, missing: str, heard: float) -> None:
    assert pool.run(looks, missing, heard, ranks=2) == ["", ""]


def test_a_host_from_which_nothing_comes_is_lost(pool: gloo.Pool) -> None:
    first, second = pool.run(looks, "unreachable", 99.0, ranks=2)
    assert first.startswith("(1,) rank 1 does not answer (its host is unreachable)"), first
    assert second.startswith("(0,) rank 0 does not answer (its host is unreachable)"), second


# -- long waits ----


def test_a_long_wait_is_reported_at_each_doubling() -> None:
    wait = long_wait.LongWait()
    reported = {second: wait.due("a round", 100.0 + second) for second in range(300)}
    assert {s: r for s, r in reported.items() if r} == {s: float(s) for s in (30, 60, 120, 240)}


def reports(rank: int, answers: dict[int, health.Answer | int], due: float) -> list[str]:
    """What a rank logs after ``due`` seconds of a wait in its third call, where other ranks give
    these ``answers``: a number is that of their call, by default the same one."""
    link = gloo.link_of(3)
    assert isinstance(link, TcpLink)
    call = Call(120, "Average round")
    found: list[str] = []

    def ask(addresses: list[str], *_: object) -> list[health.Answer]:
        given = []
        for r in (r for r in range(3) if r != rank):
            answer = answers.get(r, 3)
            if isinstance(answer, int):
                at = CallPosition(answer, call if answer == 3 else Call(119, "gradients"))
                answer = health.Answer("computing (119 steps done), for 31 s", at)
            given.append(answer)
        return given

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(health, "ask_all", ask)
        patched.setattr(link.calls, "_sequence", call_guard.CallSequence())
        for _ in range(3):
            link.calls._sequence.begin(call)
        link.calls._sequence.record.secret = SECRET
        patched.setattr(link.calls._wait, "due", lambda what, now: due)
        patched.setattr(long_wait.log, "warning", lambda text, *values: found.append(text % values))
        link.check()
    return found


def test_who_is_waited_for_is_logged_by_one_rank(pool: gloo.Pool) -> None:
    one = (
        "rank 0 has waited 30 s for rank 1 in Average round after 120 steps: rank 1 does not "
        "answer (hung, stopped or very slow). It gives up after 60 s (timeout=)"
    )
    assert pool.run(reports, {1: health.SILENT}, 30.0, ranks=3)[::2] == [[one], []]
    both = (
        "rank 1 has waited 61 s for ranks 0, 2 in Average round after 120 steps: rank 0 is "
        "computing (119 steps done), for 31 s; rank 2 does not answer (its host is unreachable). "
        "It gives up after 60 s (timeout=)"
    )
    assert pool.run(reports, {0: 2, 2: health.UNREACHABLE}, 61.0, ranks=3)[1] == [both]


class FakeTime:
    """A clock that only sleeping moves on."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_rank_that_never_comes_to_attach_is_logged_before_the_timeout(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(rendezvous, "time", FakeTime())
    store = dist.HashStore()  # type: ignore[attr-defined]
    with pytest.raises(LinkError, match="rank 1 has not come within 100 s"):
        rendezvous.Rendezvous(store).wait_for_all(100.0)
    assert [record.getMessage()[:45] for record in caplog.records] == [
        "rank 0 has waited 30 s for rank 1 in laconic.",
        "rank 0 has waited 60 s for rank 1 in laconic.",
    ]


def test_a_rank_that_ends_before_attach_is_named_within_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    clock = FakeTime()
    monkeypatch.setattr(rendezvous, "time", clock)
    store = dist.HashStore()  # type: ignore[attr-defined]
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = str(Address("127.0.0.1", server.getsockname()[1], "00" * 8))
    dist.PrefixStore("laconic", store).set("beacon/1", address)  # type: ignore[attr-defined]
    with pytest.raises(LinkError, match="rank 1 ") as caught:
        rendezvous.Rendezvous(store).wait_for_all(600.0)
    assert caught.value.ranks == (1,) and clock.now < 10


def comes_and_sends_nothing(rank: int) -> str:
    """What a rank raises whose message does not come, although the other one is in the same
    call."""
    link = TorchLink(gloo._groups[2], torch.device("cpu"), timedelta(seconds=2))
    link.begin_call(Call(1, "a round"), wait=False)
    try:
        link.broadcast(torch.zeros(1000), 1 - rank) if rank == 0 else time.sleep(5)
    except LinkError as error:
        return str(error)
    return ""


@pytest.mark.fault("a path that drops full packets was found by a time-out that did not say so")
def test_large_messages_do_not_arrive_and_small_ones_do(pool: gloo.Pool) -> None:
    first, _ = pool.run(comes_and_sends_nothing, ranks=2)
    assert "nothing was sent or received for 2 s" in first
    assert "MTU is smaller than this host's. `laconic doctor` tests that" in first
