"""What workers share through the coordinator's store, with a store on 127.0.0.1."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from laconic.errors import LinkError
from laconic.links.elastic import registry as module
from laconic.links.elastic.founding import found
from laconic.links.elastic.registry import CoordinatorError, Registry, parse_address, serve
from laconic.links.elastic.view import Member, View
from laconic.links.handshake import SECRET_BYTES
from laconic.links.health import Beacon

from tests.support import gloo

KEY = "00" * 8
JOBS = itertools.count()


def member(number: int) -> Member:
    return Member(f"{number:012x}", *(f"10.0.0.{number}|{port}|{KEY}" for port in (1, 2, 3)))


A, B, C = (member(n) for n in range(1, 4))
Made = Callable[[], Registry]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    port = gloo.free_port()
    store = serve("127.0.0.1", port)
    yield port
    del store


@pytest.fixture
def job() -> str:
    return f"job{next(JOBS)}"


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, port: int, job: str) -> Iterator[Made]:
    """Makes another worker's registry of the test's job."""
    registries: list[Registry] = []

    def make() -> Registry:
        registry = Registry(f"127.0.0.1:{port}", job)
        registries.append(registry)
        with monkeypatch.context() as patched:
            # of 50 connections of torch's client one is never made
            patched.setattr(module, "CALL_SECONDS", 1.0)
            patched.setattr(module, "RETRY_SECONDS", 0.0)
            registry.connect(time.monotonic() + 60)
        return registry

    yield make
    for registry in registries:
        registry.close(time.monotonic() + 5)


@pytest.fixture(scope="module")
def store(port: int) -> Any:
    """A connection of the tests' own."""
    for _ in range(10):
        with suppress(dist.DistNetworkError):
            return dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=1))
    raise AssertionError("no connection to the store")


@pytest.fixture
def raw(store: Any, job: str) -> Any:
    """The job's keys and values."""
    return dist.PrefixStore(f"laconic/{job}", store)


# -- addresses ----


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.1:80", "10.0.0.1", 80),
        ("host.name:65535", "host.name", 65535),
        ("host", "host", module.PORT),
        ("10.0.0.1", "10.0.0.1", module.PORT),
        ("[::1]:80", "::1", 80),
        ("[::1]", "::1", module.PORT),
        ("[fe80::1]:65535", "fe80::1", 65535),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)
    registry = Registry(text, "job")
    assert (registry.host, registry.port) == (host, port)


@pytest.mark.parametrize(
    "text",
    [
        *["", ":", ":80", "host:", "host:0", "host:65536", "host:-1", "host:x", "[]:80", "[]"],
        *["http://10.0.0.1:29400", "10.0.0.1:80:90", " host:80", "a b:80", "host:80\n", "host:²"],
        *["fe80::1", "fe80::1:80", "[fe80::1%eth0]:80", "[host]:80", "[::1", "::1]", "host:000080"],
    ],
)
def test_what_is_no_address(text: str) -> None:
    """Also a bare IPv6 address: its last part may be a port."""
    with pytest.raises(ValueError, match="a coordinator is given as host:port, such as 10"):
        parse_address(text)


# -- the coordinator ----


def test_nobody_answers() -> None:
    port = gloo.free_port()
    registry = Registry(f"127.0.0.1:{port}", "job")
    with pytest.raises(CoordinatorError) as error:
        registry.connect(time.monotonic())
    said = f"no coordinator answers at 127.0.0.1:{port}: start one by `laconic coordinator --port "
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


def silent(server: socket.socket, kept: list[socket.socket]) -> None:
    kept.append(server.accept()[0])
    kept.append(server.accept()[0])


def closes(server: socket.socket, kept: list[socket.socket]) -> None:
    while True:
        server.accept()[0].close()


def another_protocol(server: socket.socket, kept: list[socket.socket]) -> None:
    while True:
        with server.accept()[0] as connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.mark.parametrize("behave", [silent, closes, another_protocol])
def test_another_program_is_there(monkeypatch: pytest.MonkeyPatch, behave: Any) -> None:
    """One line, and no hang: a store that was stopped never answers either."""
    monkeypatch.setattr(module, "CALL_SECONDS", 0.2)
    kept: list[socket.socket] = []

    def work() -> None:
        with suppress(OSError):  # the server is closed at the end
            behave(server, kept)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        registry = Registry(f"127.0.0.1:{server.getsockname()[1]}", "job")
        with pytest.raises(CoordinatorError, match=r"coordinator (answers )?at 127\.0\.0\.1:"):
            registry.latest()
        server.shutdown(socket.SHUT_RDWR)
        for connection in kept:
            connection.close()
        thread.join(5)
        assert not thread.is_alive()


def test_it_starts_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.05)
    port, stores = gloo.free_port(), []
    registry = Registry(f"127.0.0.1:{port}", "job")
    timer = threading.Timer(0.3, lambda: stores.append(serve("127.0.0.1", port)))
    timer.start()
    registry.connect(time.monotonic() + 60)
    timer.join()
    assert registry.latest() is None
    registry.close(time.monotonic() + 5)
    stores.clear()


def test_it_ends_and_is_started_again_empty() -> None:
    port = gloo.free_port()
    store = serve("127.0.0.1", port)
    registry = Registry(f"127.0.0.1:{port}", "job")
    registry.connect(time.monotonic() + 60)
    secret, about, view = registry.secret(), registry.about("mine"), View(4, (A, B), "why")
    registry.propose(view)
    del store
    with pytest.raises(CoordinatorError):
        registry.view(4)
    with pytest.raises(CoordinatorError):
        registry.view(4)
    store = serve("127.0.0.1", port)
    registry.connect(time.monotonic() + 60)
    assert registry.view(4) is None and registry.latest() is None
    assert registry.restore(secret, about, view) == view
    assert registry.secret() == secret and registry.about("others'") == about
    assert registry.latest() == registry.view(4) == view
    assert registry.view(3) is None
    registry.close(time.monotonic() + 5)
    del store


def test_its_port_is_taken(port: int) -> None:
    with pytest.raises(OSError):
        serve("127.0.0.1", port)


# -- secret, about ----


def test_the_first_worker_draws_the_secret(make: Made) -> None:
    first, second = make(), make()
    secret = first.secret()
    assert len(secret) == SECRET_BYTES
    assert first.secret() == second.secret() == secret
    assert first.about("one") == second.about("another") == first.about("third") == "one"


def test_jobs_are_apart(port: int, make: Made) -> None:
    other = Registry(f"127.0.0.1:{port}", "another job")
    other.connect(time.monotonic() + 60)
    one = make()
    assert one.secret() != other.secret()
    one.propose(View(1, (A,)))
    assert other.latest() is None and other.entered() == {}
    other.close(time.monotonic() + 5)


@pytest.mark.parametrize("value", ["not hex", "00", "00" * 33, b"\xff\xfe", "é"])
def test_a_secret_that_is_none(make: Made, raw: Any, value: Any) -> None:
    raw.set("secret", value)
    with pytest.raises(LinkError, match=r"what is at 127\.0\.0\.1:\d+ is no coordinator of lac"):
        make().secret()


# -- views ----


def test_the_first_proposal_counts(make: Made) -> None:
    first, second = make(), make()
    one, other = View(1, (A, B), "one"), View(1, (B, A, C), "other")
    assert first.propose(one) == one and second.propose(other) == one
    assert second.propose(other).why == "one"
    assert first.view(1) == second.view(1) == one
    assert first.view(2) is None
    assert second.propose(View(2, (C,))) == first.latest() == View(2, (C,))


def test_many_propose_at_once(make: Made) -> None:
    """All get the same view, of every epoch."""
    registries = [make() for _ in range(6)]
    barrier = threading.Barrier(len(registries))

    def work(number: int) -> list[View]:
        found = []
        for epoch in range(1, 11):
            barrier.wait(10)
            found.append(registries[number].propose(View(epoch, (member(number + 1),))))
        return found

    with ThreadPoolExecutor(len(registries)) as pool:
        found = list(pool.map(work, range(len(registries))))
    assert all(views == found[0] for views in found)
    assert [view.epoch for view in found[0]] == list(range(1, 11))
    assert make().latest() == found[0][-1]


@pytest.mark.parametrize("number", ["1", "2", "3"])
def test_the_number_of_the_latest_view_may_be_late(make: Made, raw: Any, number: str) -> None:
    registry = make()
    for epoch in (1, 2, 3):
        registry.propose(View(epoch, (A,)))
    raw.set("latest", number)
    assert registry.latest() == View(3, (A,))
    registry.propose(View(2, (B,)))
    assert make().latest() == View(3, (A,))
    assert int(raw.get("latest")) >= 2


def test_an_older_proposal_does_not_set_the_number_back(make: Made, raw: Any) -> None:
    registry = make()
    registry.propose(View(7, (A,)))
    registry.propose(View(3, (A,)))
    assert raw.get("latest") == b"7"


DAMAGED = r"what the coordinator at 127\.0\.0\.1:\d+ has as "
NO_MEMBERS = '[1, [], "", null]'
GARBAGE = [
    "garbage",
    NO_MEMBERS,
    "[1]",
    '[1, [], ""]',
    b"\xff\x00\xff",
    "9" * 5000,
    "[" * 5000,
    "null",
    "{}",
]


@pytest.mark.parametrize("value", GARBAGE)
def test_a_view_that_is_none(make: Made, raw: Any, value: Any) -> None:
    registry = make()
    raw.set("view/2", value)
    for read in (lambda: registry.view(2), lambda: registry.propose(View(2, (A,)))):
        with pytest.raises(LinkError, match=DAMAGED + "view/2: (not )?a view") as error:
            read()
        assert not isinstance(error.value, CoordinatorError), "it answers"
        assert "\n" not in str(error.value) and len(str(error.value)) < 1000
    assert registry.view(1) is None, "the connection still serves"


@pytest.mark.parametrize("value", ["garbage", "", "-1", "1.5", b"\xff\x00", "²"])
def test_the_number_of_the_latest_view_is_none(make: Made, raw: Any, value: Any) -> None:
    make().propose(View(1, (A,)))
    raw.set("latest", value)
    assert make().latest() is None


@pytest.mark.parametrize("value", ["garbage", "1.5", b"\xff\x00", "²", "9" * 5000])
def test_a_view_can_be_decided_all_the_same(make: Made, raw: Any, value: Any) -> None:
    raw.set("latest", value)
    assert make().propose(View(1, (A,))) == make().latest() == View(1, (A,))


def test_a_view_of_another_epoch(make: Made, raw: Any) -> None:
    raw.set("view/5", View(3, (A,)).pack())
    for read in (lambda: make().view(5), lambda: make().propose(View(5, (A,)))):
        with pytest.raises(LinkError, match=DAMAGED + "view/5: it is of epoch 3"):
            read()


def test_a_view_of_too_many_is_not_written(make: Made) -> None:
    many = View(1, tuple(Member(f"{n:012x}", *A[1:]) for n in range(4097)))
    with pytest.raises(AssertionError):
        make().propose(many)
    assert make().view(1) is None


# -- workers that come ----


def test_workers_enter(make: Made) -> None:
    first, second = make(), make()
    assert (first.enter(A), second.enter(B), first.enter(C)) == (1, 2, 3)
    assert second.entered() == {1: A, 2: B, 3: C}
    assert first.entered({1: A}) == {2: B, 3: C} and first.entered([1, 3]) == {2: B}
    assert first.entered(range(1, 9)) == {}


def test_workers_that_have_ended_are_forgotten(make: Made) -> None:
    registry = make()
    for each in (A, B, C):
        registry.enter(each)
    registry.propose(View(1, (A,)), {B.id: "has ended"})
    assert make().entered() == {1: A, 3: C} and make().enter(B) == 4


def test_workers_of_another_program_are_no_part_of_a_run(make: Made) -> None:
    first, second = make(), make()
    first.program, second.program = "one", "two"
    first.enter(A)
    second.enter(B)
    assert first.entered() == {1: A} and second.entered() == {2: B}
    assert first.strangers == {B.id} and second.strangers == {A.id}


def test_what_a_job_is_about_can_be_replaced_and_put_back(make: Made) -> None:
    first, second = make(), make()
    assert first.about("one") == second.about("two") == "one"
    second.put_back()
    assert second.about("two", instead_of="another") == "one"
    assert second.about("two", instead_of="one") == "two" and first.about("one") == "two"
    second.put_back()
    assert second.about("two") == "one"


def test_many_enter_at_once(make: Made) -> None:
    registries = [make() for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda n: registries[n].enter(member(n + 1)), range(8)))
    assert sorted(numbers) == list(range(1, 9))
    assert make().entered() == {number: member(n + 1) for n, number in enumerate(numbers)}


@pytest.mark.parametrize("value", [*GARBAGE[:-1], "[[1, [], 2]]"])
def test_a_list_of_workers_that_is_none(make: Made, raw: Any, value: Any) -> None:
    raw.set("entered", value)
    for use in (Registry.entered, lambda registry: registry.enter(A)):
        with pytest.raises(LinkError, match=DAMAGED + "entered: ") as error:
            use(make())
        assert "\n" not in str(error.value) and len(str(error.value)) < 1000


def test_the_count_of_workers_is_none(make: Made, raw: Any) -> None:
    """The store closes that connection; the next call makes another one."""
    raw.set("numbers", "garbage")
    registry = make()
    with pytest.raises(CoordinatorError):
        registry.enter(A)
    registry.connect(time.monotonic() + 60)
    assert registry.latest() is None


@pytest.mark.fault("joining took longer with every worker that had ever come")
def test_joining_after_many_takes_as_many_calls_as_after_few(
    monkeypatch: pytest.MonkeyPatch, make: Made
) -> None:
    calls, call = list[None](), module._Client.call
    beacon = Beacon("127.0.0.1")
    registry, newcomer = make(), make()
    secret = registry.secret()
    alive = A._replace(beacon=beacon.enroll(secret))
    registry.enter(alive)
    view = registry.propose(View(1, (alive,)))
    monkeypatch.setattr(module._Client, "call", lambda *at: (calls.append(None), call(*at))[1])
    taken = []
    for number in range(2, 42):
        registry.enter(member(number))
        view = registry.propose(view.after({}, [member(number)]))
        view = registry.propose(view.after({member(number).id: "has ended"}, []))
        calls.clear()
        assert found(newcomer, member(99), secret, need=1, expected=1, wait=9.0)[1]
        taken.append(len(calls))
    beacon.close()
    assert taken[-1] <= taken[4]


# -- a store that has lost what it knew ----


def test_into_another_jobs_store(make: Made) -> None:
    """It is left as it is."""
    there, lost = make(), make()
    secret, about = there.secret(), there.about("theirs")
    there.propose(View(1, (C,)))
    assert lost.restore(bytes(SECRET_BYTES), about, View(2, (A,))) is None
    assert lost.restore(secret, "ours", View(2, (A,))) is None
    assert there.latest() == View(1, (C,)) and there.view(2) is None
    assert there.secret() == secret and there.about("") == about


def test_workers_restore_one_after_the_other(make: Made) -> None:
    secret, about, view = bytes(range(SECRET_BYTES)), "ours", View(5, (A, B), "why")
    first, second, behind, ahead = make(), make(), make(), make()
    assert first.restore(secret, about, view) == second.restore(secret, about, view) == view
    assert second.restore(secret, about, View(5, (A, B), "said otherwise")) == view
    before = View(4, (A, B, C))
    assert behind.restore(secret, about, before) == before
    assert ahead.restore(secret, about, View(6, (A,))) == View(6, (A,))
    assert second.restore(secret, about, View(6, (B,))) == View(6, (A,)), "it goes on without B"
    assert second.restore(secret, about, View(5, (B, A))) == view
    assert make().latest() == View(6, (A,))


def test_workers_that_would_begin_a_run_come_first(make: Made) -> None:
    """The older run counts, and the other workers see another secret."""
    new, old = make(), make()
    drawn, ours, view = new.secret(), bytes(range(SECRET_BYTES)), View(5, (A, B), "why")
    assert new.about("theirs") == "theirs"
    new.enter(C)
    assert old.restore(ours, "ours", view) == view
    assert new.secret() == ours != drawn and new.about("theirs") == "ours"
    assert new.latest() == view and new.entered() == {1: C}
    assert make().restore(drawn, "theirs", View(1, (C,))) is None, "now it has begun"


def test_about_is_any_text(make: Made) -> None:
    text = json.dumps({"recipe": "é\n\x00" * 100, "model": "x" * 20_000})
    assert make().about(text) == make().about("") == text
