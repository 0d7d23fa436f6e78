"""What workers share through a coordinator on 127.0.0.1, with TLS and without; and who is refused.

`Registry` is what a worker knows of it."""

from __future__ import annotations

import gc
import itertools
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.errors import LinkError
from laconic.links import talks
from laconic.links.elastic import registry as module
from laconic.links.elastic import tls_store
from laconic.links.elastic.founding import found
from laconic.links.elastic.registry import CoordinatorError, Registry, UntrustedError, serve
from laconic.links.elastic.view import Member, View
from laconic.links.health import Beacon

from tests.support import gloo, job_keys

JOBS = itertools.count()
OURS = bytes(range(32))


def member(number: int) -> Member:
    return Member(f"{number:012x}", *(f"10.0.0.1|{port}|{'00' * 8}" for port in (1, 2, 3)))


A, B, C = (member(n) for n in range(1, 4))


class Coordinator:
    """One in this process. ``worker()`` makes another worker's registry of the test's job."""

    def __init__(self) -> None:
        self.port = gloo.free_port()
        self.server: Any = None
        self.job = f"job{next(JOBS)}"
        self._registries: list[Registry] = []
        self.start()

    def start(self) -> None:
        self.server = serve("127.0.0.1", self.port)

    def kill(self) -> None:
        self.server = None
        gc.collect()

    def worker(self, job: str = "") -> Registry:
        registry = Registry(f"127.0.0.1:{self.port}", job or self.job)
        self._registries.append(registry)
        registry.connect(time.monotonic() + 60)
        return registry

    def close(self) -> None:
        for registry in self._registries:
            registry.close(time.monotonic() + 5)
        if isinstance(self.server, tls_store.Server):
            self.server.close()
        self.server = None


@pytest.fixture(params=["plain", "tls"])
def coordinator(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs
) -> Iterator[Coordinator]:
    job_keys.turn_off(monkeypatch)
    if request.param == "tls":
        job_keys.turn_on(monkeypatch, jobs.one)
    # of 50 connections of torch's client one is never made
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.05)
    made = Coordinator()
    assert isinstance(made.server, tls_store.Server) == (request.param == "tls")
    yield made
    made.close()


@pytest.fixture
def secured(
    monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs
) -> Iterator[Callable[[], Coordinator]]:
    """Makes one with TLS."""
    job_keys.turn_on(monkeypatch, jobs.one)
    monkeypatch.setattr(talks, "_reasons", set())
    with ExitStack() as ending:

        def make() -> Coordinator:
            made = Coordinator()
            ending.callback(made.close)
            return made

        yield make


def test_what_workers_share(coordinator: Coordinator) -> None:
    """The first one's secret and program count, and the first proposal of a view."""
    first, second = coordinator.worker(), coordinator.worker()
    assert first.secret() == second.secret() and len(first.secret()) == 32
    text = json.dumps({"recipe": "é\n\x00" * 100, "model": "x" * 20_000})
    assert first.about(text) == second.about("two") == text
    assert (first.enter(A), second.enter(B), first.enter(C)) == (1, 2, 3)
    assert second.entered() == {1: A, 2: B, 3: C} and first.entered([1, 3]) == {2: B}
    one, other = View(1, (A, B), "one"), View(1, (B, A, C), "other")
    assert first.propose(one) == second.propose(other) == one == second.latest()
    assert second.propose(other).why == "one" and first.view(2) is None
    assert second.propose(View(2, (C,)), {B.id: "has ended"}) == first.latest() == View(2, (C,))
    assert first.entered() == {1: A, 3: C} and second.enter(B) == 4
    assert first.propose(View(1, (B,))) == one and second.latest() == View(2, (C,))
    first._call(lambda store: store.set("latest", "1"))  # its writer was late
    assert second.latest() == View(2, (C,))
    another = coordinator.worker("another job")
    assert another.secret() != first.secret()
    assert another.latest() is None and another.entered() == {}


def test_many_propose_and_enter_at_once(coordinator: Coordinator) -> None:
    """All get the same view, of every epoch, and numbers of their own."""
    registries = [coordinator.worker() for _ in range(5)]
    barrier = threading.Barrier(len(registries))

    def work(number: int) -> tuple[int, list[View]]:
        me, views = member(number + 1), []
        for epoch in range(1, 6):
            barrier.wait(60)
            views.append(registries[number].propose(View(epoch, (me,))))
        barrier.wait(60)
        return registries[number].enter(me), views

    with ThreadPoolExecutor(len(registries)) as pool:
        results = list(pool.map(work, range(len(registries))))
    assert all(views == results[0][1] for _, views in results)
    assert coordinator.worker().latest() == results[0][1][-1]
    expected = {number: member(n + 1) for n, (number, _) in enumerate(results)}
    assert coordinator.worker().entered() == expected and len(expected) == 5


def test_it_is_started_again_empty(coordinator: Coordinator) -> None:
    registry = coordinator.worker()
    secret, about, view = registry.secret(), registry.about("mine"), View(4, (A, B), "why")
    registry.propose(view)
    coordinator.kill()
    for _ in range(2):
        with pytest.raises(CoordinatorError, match="no coordinator answers") as error:
            registry.view(4)
        assert not isinstance(error.value, UntrustedError) and "\n" not in str(error.value)
    coordinator.start()
    registry.connect(time.monotonic() + 60)
    assert registry.latest() is None
    assert registry.restore(secret, about, view) == view == registry.latest()
    assert registry.secret() == secret and registry.about("others'") == about
    with pytest.raises(OSError):  # its port is taken
        serve("127.0.0.1", coordinator.port)


def test_workers_restore_one_after_the_other(coordinator: Coordinator) -> None:
    """Whichever comes first, all follow one chain of views, and another job's stays as it is."""
    view = View(5, (A, B), "why")
    first, second = coordinator.worker(), coordinator.worker()
    assert first.restore(OURS, "ours", view) == second.restore(OURS, "ours", view) == view
    assert second.restore(OURS, "ours", View(5, (B, A))) == view
    assert second.restore(OURS, "ours", View(4, (A, B, C))) == View(4, (A, B, C))
    assert first.restore(OURS, "ours", View(6, (A,))) == View(6, (A,))
    assert second.restore(OURS, "ours", View(6, (B,))) == View(6, (A,)), "it goes on without B"
    assert first.restore(bytes(32), "ours", View(7, (C,))) is None
    assert first.restore(OURS, "others'", View(7, (C,))) is None
    assert first.latest() == View(6, (A,)) and first.secret() == OURS


@pytest.mark.parametrize(
    "value", ["garbage", '[1, [], "", null]', "[1]", "9" * 5000, "[" * 5000, "null", "é"]
)
def test_what_is_damaged_is_one_line(coordinator: Coordinator, value: str) -> None:
    """And no reason to think that the coordinator is lost."""
    registry = coordinator.worker()
    registry.propose(View(1, (A,)))
    for key in ("secret", "view/2", "entered"):
        registry._call(lambda store, key=key: store.set(key, value))  # type: ignore[misc]
    reads: list[Callable[[], object]] = [registry.secret, registry.entered]
    reads += [lambda: registry.enter(A), lambda: registry.view(2)]
    reads += [lambda: registry.propose(View(2, (A,)))]
    for read in reads:
        with pytest.raises(LinkError, match="what ") as error:
            read()
        assert "\n" not in str(error.value) and len(str(error.value)) < 1000
        assert not isinstance(error.value, CoordinatorError)
    registry._call(lambda store: store.set("latest", value))
    registry._call(lambda store: store.set("view/2", View(2, (A,)).pack()))
    assert registry.propose(View(3, (A,))) == coordinator.worker().latest()


@pytest.mark.fault("joining took longer with every worker that had ever come")
def test_joining_after_many_takes_as_many_calls_as_after_few(
    monkeypatch: pytest.MonkeyPatch, coordinator: Coordinator
) -> None:
    calls, call = list[None](), module._Client.call
    registry, newcomer, beacon = coordinator.worker(), coordinator.worker(), Beacon("127.0.0.1")
    secret = registry.secret()
    alive = A._replace(beacon=beacon.enroll(secret))
    registry.enter(alive)
    view = registry.propose(View(1, (alive,)))

    def counted(*at: Any) -> Any:
        calls.append(None)
        return call(*at)

    monkeypatch.setattr(module._Client, "call", counted)
    taken = []
    for number in range(2, 24):
        registry.enter(member(number))
        view = registry.propose(view.after({}, [member(number)]))
        view = registry.propose(view.after({member(number).id: "has ended"}, []))
        calls.clear()
        assert found(newcomer, member(99), secret, need=1, expected=1, wait=60.0)[1]
        taken.append(len(calls))
    beacon.close()
    assert taken[-1] <= taken[4]


# -- views as texts that come over the network ----

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(at=st.lists(st.integers(0, 4), max_size=4), junk=JSON | st.sampled_from([A[:3], A.id]))
@settings(deadline=None, max_examples=100)
def test_a_view_with_one_part_replaced_is_read_or_refused(at: list[int], junk: Any) -> None:
    value: Any = json.loads(View(7, (A, B), "why", (C.id, "bye")).pack())
    part = value
    for index in at[:-1]:
        if isinstance(part, list) and index < len(part) and isinstance(part[index], list):
            part = part[index]
    part[at[-1] % len(part) if at else 0] = junk
    try:
        there = View.unpack(json.dumps(value))
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
        return
    assert 0 <= there.epoch <= 2**62 and 1 <= len(there.members) == len(set(there.ids))
    assert there.why.isprintable() and all(m.name.isprintable() for m in there.members)
    assert View.unpack(there.pack()) == there


# -- who is refused ----


def refusal(port: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a worker hears at its start. One that is not refused would wait for ten minutes."""
    monkeypatch.setattr(module, "CALL_SECONDS", 2.0)
    with pytest.raises(UntrustedError) as error:
        Registry(f"127.0.0.1:{port}", "job").connect(time.monotonic() + 600)
    assert "\n" not in str(error.value) and f"the coordinator at 127.0.0.1:{port} " in str(error)
    return str(error.value)


def test_a_worker_without_tls(
    secured: Callable[[], Coordinator],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Both sides say it at once."""
    coordinator = secured()
    job_keys.turn_off(monkeypatch)
    assert "uses TLS, and this worker does not: set the" in refusal(coordinator.port, monkeypatch)
    lines = [record.getMessage() for record in caplog.records]
    assert any("127.0.0.1: it does not speak TLS" in line for line in lines), lines


def test_a_coordinator_without_tls(monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs) -> None:
    job_keys.turn_off(monkeypatch)
    coordinator = Coordinator()
    job_keys.turn_on(monkeypatch, jobs.one)
    assert "has no TLS, and this worker uses it: set the" in refusal(coordinator.port, monkeypatch)
    coordinator.close()


def test_no_more_than_so_many_strangers(
    secured: Callable[[], Coordinator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest makes room, long before its time is over."""
    monkeypatch.setattr(tls_store, "MOST_STRANGERS", 4)
    monkeypatch.setattr(tls_store, "HELLO_SECONDS", 1000.0)
    coordinator, at = secured(), "127.0.0.1"
    with ExitStack() as ending:
        strangers = [socket.create_connection((at, coordinator.port)) for _ in range(5)]
        for stranger in strangers:
            ending.enter_context(stranger)
        strangers[0].settimeout(60)
        with suppress(ConnectionError):
            assert strangers[0].recv(1) == b""
        coordinator.worker()


def test_a_stranger_reads_nothing(secured: Callable[[], Coordinator]) -> None:
    """Not even the greeting, without a certificate."""
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nobody.check_hostname, nobody.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", secured().port), 60) as raw,
        nobody.wrap_socket(raw) as connection,
        pytest.raises(OSError),  # the alert, or the end, whichever comes first
    ):
        connection.sendall(tls_store._packed(["check", "laconic/job/secret"]))
        connection.recv(1)


def test_what_travels_is_encrypted(secured: Callable[[], Coordinator]) -> None:
    """A man in the middle sees neither the secret nor the views."""
    coordinator, seen = secured(), list[bytes]()

    def pump(source: socket.socket, to: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                seen.append(data)
                to.sendall(data)
        with suppress(OSError):
            to.shutdown(socket.SHUT_WR)

    def work() -> None:
        with (
            there.accept()[0] as near,
            socket.create_connection(("127.0.0.1", coordinator.port)) as far,
        ):
            back = threading.Thread(target=pump, args=(far, near))
            back.start()
            pump(near, far)
            back.join(60)

    with socket.create_server(("127.0.0.1", 0)) as there:
        thread = threading.Thread(target=work)
        thread.start()
        registry = Registry(f"127.0.0.1:{there.getsockname()[1]}", "job")
        secret = registry.secret()
        registry.propose(View(1, (A,), "a reason to read"))
        registry.close(time.monotonic() + 60)
        thread.join(60)
    packets = b"".join(seen)
    assert len(packets) > 1000
    for text in (secret.hex(), "secret", "10.0.0.1", "a reason", json.dumps("view/1")):
        assert text.encode() not in packets
