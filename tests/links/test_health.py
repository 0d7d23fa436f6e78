"""Who may talk to a rank, and what every rank says of one that is lost."""

from __future__ import annotations

import hmac
import json
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.errors import LinkError
from laconic.links import call_guard, forks, handshake, health, long_wait, rendezvous
from laconic.links.addresses import Address
from laconic.links.calls import Call, CallPosition
from laconic.links.comm_thread import _labeled
from laconic.links.handshake import RefusedError
from laconic.links.health import Request, Verdict
from laconic.links.tcp import TcpLink
from laconic.links.texts import clean
from laconic.links.torch_link import TorchLink
from laconic.links.wire import Connections, Wire

from tests.support import gloo

SECRET = bytes(range(32))
VERDICT = Verdict("rank 1 is gone", (1,), 0)
SMALL = st.integers(0, 2**64 - 1)


# -- what is read from the network ----

TEXTS = st.text(max_size=40)
CALLS = st.none() | st.builds(Call, SMALL, TEXTS)
POSITIONS = st.builds(CallPosition, SMALL, CALLS, st.booleans(), st.booleans())
VERDICTS = st.builds(Verdict, TEXTS, st.lists(SMALL, max_size=5).map(tuple), SMALL)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)
BYTES = st.binary(max_size=300) | JSON.map(lambda value: json.dumps(value).encode())


def printable(verdict: Verdict | None) -> bool:
    return verdict is None or verdict.text.isprintable()


@given(data=BYTES)
@settings(deadline=None)
def test_a_request_of_any_bytes_is_read_or_refused(data: bytes) -> None:
    try:
        request = Request.unpack(data)
    except ValueError:
        return
    assert printable(request.verdict) and (request.left is None or 0 <= request.left < 2**64)


@given(data=BYTES)
@settings(deadline=None)
def test_an_answer_of_any_bytes_is_read_or_refused(data: bytes) -> None:
    try:
        answer = health.unpack_answer(data)
    except ValueError:
        return
    assert answer.status.isprintable() and printable(answer.verdict) and answer.position is not None


@given(data=BYTES)
@settings(deadline=None)
def test_a_verdict_of_any_bytes_is_read_or_refused(data: bytes) -> None:
    try:
        assert health.unpack_verdict(data).text.isprintable()
    except ValueError:
        return


@pytest.mark.parametrize("depth", [10, 30_000])
def test_deeply_nested_text_is_refused(depth: int) -> None:
    for read in (Request.unpack, health.unpack_answer, health.unpack_verdict):
        with pytest.raises(ValueError):
            read(b"[" * depth + b"]" * depth)


@given(verdict=st.none() | VERDICTS, left=st.none() | SMALL)
@settings(deadline=None)
def test_a_request_survives_the_way(verdict: Verdict | None, left: int | None) -> None:
    there = Request.unpack(Request(verdict, left).pack())
    assert there.left == left and (verdict is None) == (there.verdict is None)
    if verdict is not None and there.verdict is not None:
        assert there.verdict == verdict._replace(text=clean(verdict.text))


@given(status=TEXTS, position=POSITIONS)
@settings(deadline=None)
def test_an_answer_survives_the_way(status: str, position: CallPosition) -> None:
    there = health.unpack_answer(health.pack_answer(status, position, VERDICT))
    shown = position.call and health.shown(position.call)
    assert (there.status, there.position) == (clean(status), position._replace(call=shown))
    assert there.verdict == VERDICT


def test_the_longest_texts_fit_a_frame() -> None:
    text = "\U0001f40c" * 10**5
    verdict = Verdict(text, tuple(range(2**63, 2**63 + 5000)), 2**64 - 1)
    assert len(Request(verdict).pack()) <= handshake.MOST_BYTES
    answer = health.pack_answer(text, CallPosition(2**64 - 1, Call(2**64 - 1, text)), verdict)
    assert len(answer) <= handshake.MOST_BYTES
    assert health.unpack_answer(answer).verdict is not None


def test_terminal_escapes_do_not_arrive() -> None:
    sent = Request(Verdict("\x1b[2J\x07all\u202e is\nlost", (1,), 0)).pack()
    assert b"\x1b" not in sent
    raw = json.dumps([["\x1b[2J\x07lost\u202e", [1], 0], None]).encode()
    received = Request.unpack(raw).verdict
    assert received is not None and received.text == " [2J lost "


@given(text=st.text(max_size=60) | st.from_regex(r"[0-9.:]*\|[0-9]*\|[0-9a-f]*"))
@settings(deadline=None)
def test_an_address_is_read_or_refused(text: str) -> None:
    try:
        address = Address.parse(text)
    except ValueError as error:
        assert str(error).isprintable()
        return
    assert str(Address.parse(str(address))) == str(address)


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


def test_a_callee_that_does_not_know_the_secret_is_not_believed() -> None:
    caller = handshake.call(SECRET, b"beacon", b"k" * 8, 3, b"asks")
    next(caller)
    caller.send(b"n" * 16)
    text = b"all is well"
    caller.send(len(text).to_bytes(4, "big"))
    with pytest.raises(RefusedError, match="secret"):
        caller.send(text + hmac.digest(bytes(32), text, "sha256"))


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


@given(data=st.binary(max_size=400), cut=st.integers(0, 200))
@settings(deadline=None)
def test_a_callee_survives_any_bytes(data: bytes, cut: int) -> None:
    valid = handshake.Hello(b"beacon", b"k" * 8, 3, b"n" * 16).pack()
    for stream in (data, valid + data, valid[:cut] + data):
        exchange, left = callee(), stream
        _, wanted = next(exchange)
        try:
            while len(left) >= wanted:
                piece, left = left[:wanted], left[wanted:]
                out, wanted = exchange.send(piece)
                assert b"reply" not in out and wanted <= handshake.MOST_BYTES + 32
        except RefusedError:
            continue


@given(data=st.binary(min_size=16, max_size=300))
@settings(deadline=None)
def test_a_caller_survives_any_bytes(data: bytes) -> None:
    exchange, left = handshake.call(SECRET, b"wire", b"k" * 8, 3, b"", most=0), data
    _, wanted = next(exchange)
    with pytest.raises(RefusedError):
        left += bytes(36)
        while len(left) >= wanted:
            piece, left = left[:wanted], left[wanted:]
            _, wanted = exchange.send(piece)


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


@contextmanager
def strangers(address: str, count: int) -> Iterator[list[socket.socket]]:
    host, port, _ = Address.parse(address)
    idle = [socket.create_connection((host, port), timeout=60) for _ in range(count)]
    try:
        yield idle
    finally:
        for one in idle:
            one.close()


def test_hundreds_of_idle_strangers_delay_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(health, "ANSWER_SECONDS", 1000.0)  # the time that a stranger has
        beacon = health.Beacon()
        address = beacon.enroll(SECRET)
        with strangers(address, 400) as idle:
            patched.setattr(health, "ANSWER_SECONDS", 60.0)
            assert not health.ask(address, SECRET).lost
            idle[0].settimeout(60)  # sooner than its own time is up
            assert idle[0].recv(1) == b"", "the oldest makes room"
    beacon.close()


def test_a_stranger_that_drips_is_cut_off_in_all(beacon: health.Beacon) -> None:
    """The time is for all that it says, and not for each byte."""
    address = beacon.enroll(SECRET)
    with strangers(address, 1) as (slow,):
        slow.settimeout(0.2)
        for _ in range(handshake.HELLO_BYTES - 1):  # with the last byte there is an answer
            try:
                slow.send(b"l")
                if slow.recv(1) == b"":
                    return
            except TimeoutError:
                continue
            except OSError:
                return
    raise AssertionError("it was not cut off")


def test_silence_is_told_from_death() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = str(Address("127.0.0.1", server.getsockname()[1], "00" * 8))
        assert health.ask(address, SECRET).missing == "silent"
    assert health.ask(address, SECRET).missing == "gone"


def test_a_program_at_a_dead_rank_s_address_is_not_taken_for_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = str(Address("127.0.0.1", server.getsockname()[1], "00" * 8))

        def speak() -> None:
            caller, _ = server.accept()
            with caller, suppress(ConnectionError):  # it is closed in the middle of it
                caller.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 9)
                while caller.recv(4096):
                    continue

        thread = threading.Thread(target=speak, daemon=True)
        thread.start()
        answer = health.ask(address, SECRET)
    assert answer.lost and "HTTP" not in answer.status


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


def test_threads_that_ask_for_the_first_beacon_at_once_get_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Barrier(4)
    made = []

    def slow() -> object:
        made.append(object())
        time.sleep(0.05)
        return made[-1]

    def ask(_: int) -> object:
        start.wait(60)
        return health.beacon()

    monkeypatch.setattr(health, "_beacons", [])
    monkeypatch.setattr(health, "Beacon", slow)
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(ask, range(4))) == set(made) and len(made) == 1


def test_nothing_is_forked_while_a_socket_is_opened() -> None:
    order = []
    with forks.guard:
        thread = threading.Thread(target=lambda: order.append(in_child(lambda: True)))
        thread.start()
        thread.join(0.3)
        order.append("opened")
    thread.join(100)
    assert order == ["opened", True]


# -- LinkError ----


def test_a_link_error_keeps_who_is_to_blame() -> None:
    def fail() -> None:
        raise LinkError("rank 3 is gone", ranks=[3, 1])

    with pytest.raises(LinkError, match="a round: rank 3 is gone") as raised:
        _labeled(fail, "a round")
    assert raised.value.ranks == (1, 3) and LinkError("who knows").ranks == ()
    copy = pickle.loads(pickle.dumps(raised.value))
    assert (str(copy), copy.ranks) == (str(raised.value), (1, 3))


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


def test_a_late_look_reports_a_wait_once() -> None:
    wait = long_wait.LongWait()
    times = [0, 9, 18, 27, 36, 45, 54, 63, 72]
    assert [wait.due("a round", t) for t in times] == [0, 0, 0, 0, 36, 0, 0, 63, 0]


def test_another_call_progress_or_a_pause_begins_another_wait() -> None:
    for what, pause in ((1, 1.0), (0, 2 * long_wait.PAUSE_SECONDS)):
        wait = long_wait.LongWait()
        assert not any(wait.due(0, float(second)) for second in range(30))
        start = 29 + pause
        assert [s for s in range(50) if wait.due(what, start + s)] == [30]


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


@pytest.mark.parametrize(("answers", "due"), [({}, 30.0), ({1: health.SILENT}, 0.0)])
def test_nothing_is_logged_of_ranks_that_have_come_or_too_early(
    pool: gloo.Pool, answers: dict[int, health.Answer | int], due: float
) -> None:
    assert pool.run(reports, answers, due, ranks=3)[::2] == [[], []]


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


def hears(rank: int) -> tuple[list[float], dict[int, bool], dict[int, bool]]:
    """What a connection tells of the other rank, before and after that one has closed it."""
    link = gloo.link_of(2)
    assert isinstance(link, TcpLink)
    link.gather(torch.ones(1))
    open_, times = link._wire.closed(), [link._wire.heard(r) for r in range(2)]
    link.gather(torch.ones(1))
    if rank == 1:
        link.close()
        return times, open_, {}
    end = time.monotonic() + 60
    while not link._wire.closed() and time.monotonic() < end:
        time.sleep(0.01)
    return times, open_, link._wire.closed()


def test_what_a_connection_tells_without_a_message(pool: gloo.Pool) -> None:
    (times, before, after), _ = pool.run(hears, ranks=2)
    assert before == {} and after == {1: False}
    assert times[0] == 0.0 and 0.0 <= times[1] < 10.0


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
