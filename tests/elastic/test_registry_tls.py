"""The coordinator under TLS: who gets in, and what everybody else hears."""

from __future__ import annotations

import gc
import json
import random
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from laconic.links import talks, tls
from laconic.links.elastic import registry as module
from laconic.links.elastic import tls_store
from laconic.links.elastic.registry import CoordinatorError, Registry, UntrustedError, serve
from laconic.links.elastic.view import Member, View

from tests.support import gloo, job_keys

KEY = "00" * 8
A, B = (Member(f"{n:012x}", *(f"10.0.0.{n}|{port}|{KEY}" for port in (1, 2, 3))) for n in (1, 2))
Made = Callable[[], Registry]


@pytest.fixture(autouse=True)
def _on(monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs) -> None:
    job_keys.turn_on(monkeypatch, jobs.one)


@pytest.fixture
def port() -> Iterator[int]:
    """Of a coordinator."""
    port = gloo.free_port()
    server = serve("127.0.0.1", port)
    assert isinstance(server, tls_store.Server)
    yield port
    server.close()


@pytest.fixture
def make(port: int) -> Iterator[Made]:
    """Makes another worker's registry."""
    with ExitStack() as ending:

        def make() -> Registry:
            registry = Registry(f"127.0.0.1:{port}", "job")
            ending.callback(lambda: registry.close(time.monotonic() + 5))
            registry.connect(time.monotonic() + 60)
            return registry

        yield make


def refusal(port: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a worker hears at its start. One that is not refused would wait for ten minutes."""
    monkeypatch.setattr(module, "CALL_SECONDS", 2.0)
    registry = Registry(f"127.0.0.1:{port}", "job")
    with pytest.raises(UntrustedError) as error:
        registry.connect(time.monotonic() + 600)
    text = str(error.value)
    assert text.startswith(f"the coordinator at 127.0.0.1:{port} ") and "\n" not in text
    assert isinstance(error.value, CoordinatorError), "a run that is under way goes on"
    return text.removeprefix(f"the coordinator at 127.0.0.1:{port} ")


def written(port: int, capfd: pytest.CaptureFixture[str]) -> str:
    """What torch's client has written about ``port``; a client of an earlier test, whose connection
    is never made, may write about another."""
    text = capfd.readouterr().err
    return text if f":{port}" in text or f", {port})" in text else ""


# -- the store ----


def test_it_answers_as_torchs_does(port: int) -> None:
    """The same random operations on both."""
    contexts = tls.contexts()
    assert contexts is not None
    client = tls_store.Client("127.0.0.1", port, "", contexts, 5.0)
    twin = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), False)
    draws = random.Random(0)
    for _ in range(2000):
        key = f"k{draws.randrange(200)}"
        values = draws.choices(["", "x", "y", "é"], k=2)
        match draws.choice(["check", "get", "set", "compare_set", "add", "new"]):
            case "check":
                assert client.check([key]) == twin.check([key])
            case "get" if twin.check([key]):
                assert client.get(key) == twin.get(key)
            case "set":
                client.set(key, values[0])
                twin.set(key, values[0])
            case "compare_set":
                assert client.compare_set(key, *values) == twin.compare_set(key, *values)
            case "add":
                amount = draws.randrange(-3, 4)
                assert client.add("n" + key, amount) == twin.add("n" + key, amount)
    client.set("a", "")
    client.set("b", "x")
    assert client.check(["a", "b"]) and not client.check(["a", "none"])
    client.close()


def test_what_it_refuses(port: int) -> None:
    contexts = tls.contexts()
    assert contexts is not None
    client = tls_store.Client("127.0.0.1", port, "", contexts, 5.0)
    client.set("text", "garbage")
    for request in (["get", "none"], ["add", "text", 1], ["nothing"], [], None, ["set", "k"]):
        with pytest.raises(RuntimeError):
            client._connection.sendall(tls_store._packed(request))
            answer: Any = client._receive()
            assert answer[0] == "error"
            raise RuntimeError(answer[1])
    assert client.get("text") == b"garbage", "the connection still serves"
    client._connection.sendall(struct.pack(">I", 3) + b"\xff{[")
    assert client._receive()[0] == "error"  # type: ignore[index]
    client._connection.sendall(struct.pack(">I", tls_store.MOST_BYTES + 1))
    with pytest.raises(ConnectionError):
        client._receive()
    with pytest.raises(OSError):
        client.get("text")
    client.close()


def test_the_views_of_a_run(make: Made) -> None:
    first, second = make(), make()
    assert first.secret() == second.secret()
    assert first.about("one") == second.about("two") == "one"
    assert (first.enter(A), second.enter(B)) == (1, 2) and first.entered() == {1: A, 2: B}
    one = View(1, (A, B))
    assert first.propose(one) == second.propose(View(1, (B,))) == one == second.latest()
    with ThreadPoolExecutor(8) as pool:
        several = list(pool.map(lambda _: make().propose(View(2, (A,))), range(8)))
    assert several == [View(2, (A,))] * 8


def test_it_is_started_again_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.05)
    port = gloo.free_port()
    server = serve("127.0.0.1", port)
    registry = Registry(f"127.0.0.1:{port}", "job")
    registry.connect(time.monotonic() + 60)
    secret, about, view = registry.secret(), registry.about("mine"), View(4, (A, B), "why")
    registry.propose(view)
    del server
    gc.collect()
    for _ in range(2):
        with pytest.raises(CoordinatorError) as error:
            registry.view(4)
        assert not isinstance(error.value, UntrustedError)
    server = serve("127.0.0.1", port)
    registry.connect(time.monotonic() + 60)
    assert registry.latest() is None
    assert registry.restore(secret, about, view) == view == registry.latest()
    assert registry.secret() == secret
    registry.close(time.monotonic() + 5)
    server.close()  # type: ignore[union-attr]


def test_its_port_is_taken(port: int) -> None:
    with pytest.raises(OSError):
        serve("127.0.0.1", port)


def test_nobody_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(f"127.0.0.1:{gloo.free_port()}", "job")
    with pytest.raises(CoordinatorError, match=r"no coordinator answers at 127\.0\.0\.1:\d+: sta"):
        registry.connect(time.monotonic())


# -- who is refused ----


def test_a_worker_of_another_ca(
    port: int, monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs
) -> None:
    job_keys.turn_on(monkeypatch, jobs.other)
    said = refusal(port, monkeypatch)
    assert said.startswith("has a certificate that this worker does not trust: the coordinator and")


def test_a_worker_that_is_not_trusted(
    port: int, monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs
) -> None:
    """It trusts the coordinator, which does not trust it."""
    found = tls.contexts()
    assert found is not None
    job_keys.turn_on(monkeypatch, jobs.other)
    other = tls.contexts()
    assert other is not None
    other.client.load_verify_locations(jobs.one / "ca.pem")
    said = refusal(port, monkeypatch)
    assert said.startswith("refuses this worker's certificate: the coordinator and all workers")
    tls._contexts.cache_clear()


def test_a_worker_whose_certificate_has_expired(
    port: int, monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs
) -> None:
    job_keys.turn_on(monkeypatch, jobs.expired)
    with pytest.raises(ValueError, match="has expired"):
        Registry(f"127.0.0.1:{port}", "job")
    expired = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    expired.check_hostname, expired.verify_mode = False, ssl.CERT_NONE
    expired.load_cert_chain(jobs.expired / "cert.pem", jobs.expired / "key.pem")
    with pytest.raises(tls_store.UntrustedError, match=r"refuses .*certificate expired"):
        tls_store.Client("127.0.0.1", port, "", tls.Contexts(expired, expired), 5.0)


def test_a_worker_without_tls(
    port: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At once, and without the stack that torch's client writes. The coordinator says it, too."""
    monkeypatch.setattr(talks, "_reasons", set())
    job_keys.turn_off(monkeypatch)
    said = refusal(port, monkeypatch)
    assert said.startswith("uses TLS, and this worker does not: set the variables that `laconic k")
    assert not written(port, capfd)
    lines = [record.getMessage() for record in caplog.records]
    assert any("127.0.0.1: it does not speak TLS" in line for line in lines), lines


def test_a_coordinator_without_tls(
    monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs, capfd: pytest.CaptureFixture[str]
) -> None:
    job_keys.turn_off(monkeypatch)
    port = gloo.free_port()
    server = serve("127.0.0.1", port)
    job_keys.turn_on(monkeypatch, jobs.one)
    said = refusal(port, monkeypatch)
    assert said.startswith("has no TLS, and this worker uses it: set the va")
    assert not written(port, capfd)
    del server


def test_what_answers_otherwise_is_left_to_torchs_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of another version of torch may not know the question."""
    monkeypatch.setattr(tls_store, "_TORCH_PING", b"\0" * 9)
    monkeypatch.setattr(tls_store, "PROBE_SECONDS", 0.2)
    job_keys.turn_off(monkeypatch)
    port = gloo.free_port()
    server = serve("127.0.0.1", port)
    assert tls_store.probe("127.0.0.1", port, 5.0) == tls_store.Probed.UNKNOWN
    registry = Registry(f"127.0.0.1:{port}", "job")
    registry.connect(time.monotonic() + 60)
    registry.close(time.monotonic() + 5)
    del server


def test_another_program_with_a_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = tls.contexts()
    assert contexts is not None

    def work() -> None:
        with suppress(OSError), contexts.server.wrap_socket(server.accept()[0], True) as connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)
            connection.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=work)
        thread.start()
        said = refusal(server.getsockname()[1], monkeypatch)
        assert said == "is another program with a certificate of this job's CA"
        thread.join(10)


def test_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        with suppress(OSError), server.accept()[0] as connection:
            connection.sendall(b"220 mail.example ESMTP\r\n")
            connection.recv(1000)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=work)
        thread.start()
        said = refusal(server.getsockname()[1], monkeypatch)
        assert said.startswith("does not speak TLS 1.3")
        thread.join(10)


def test_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may continue, so the worker goes on trying, for as long as it may."""
    monkeypatch.setattr(module, "CALL_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(CoordinatorError, match=f"127.0.0.1:{port}") as error:
            Registry(f"127.0.0.1:{port}", "job").connect(time.monotonic() + 1)
        assert "\n" not in str(error.value)


# -- strangers ----


def test_strangers_delay_nobody(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some say nothing, some garbage, some a byte at a time. Each is gone after a while."""
    monkeypatch.setattr(tls_store, "HELLO_SECONDS", 1.0)
    with ExitStack() as ending:
        strangers = [
            ending.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(30)
        ]
        for number, stranger in enumerate(strangers):
            with suppress(OSError):
                stranger.sendall([b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01"][number % 3])
        registry = Registry(f"127.0.0.1:{port}", "job")
        registry.connect(time.monotonic() + 15)  # one after the other they would take 30 s
        assert registry.latest() is None
        for stranger in strangers:
            stranger.settimeout(60)
            with suppress(ConnectionError):
                while stranger.recv(1000):
                    continue
        time.sleep(1.2)
        assert registry.latest() is None, "the worker's connection stays, idle as it was"
        registry.close(time.monotonic() + 5)


def test_no_more_than_so_many_strangers(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest makes room, long before its time is over."""
    monkeypatch.setattr(tls_store, "MOST_STRANGERS", 4)
    monkeypatch.setattr(tls_store, "HELLO_SECONDS", 1000.0)
    with ExitStack() as ending:
        first, *_ = (
            ending.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(5)
        )
        first.settimeout(60)
        with suppress(ConnectionError):
            assert first.recv(1) == b""
        registry = Registry(f"127.0.0.1:{port}", "job")
        registry.connect(time.monotonic() + 60)
        registry.close(time.monotonic() + 5)


def test_a_stranger_reads_nothing(port: int) -> None:
    """Not even the greeting, without a certificate."""
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nobody.check_hostname, nobody.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", port), 5) as raw,
        nobody.wrap_socket(raw) as connection,
        pytest.raises(OSError),  # the alert, or the end, whichever comes first
    ):
        connection.sendall(tls_store._packed(["check", "laconic/job/secret"]))
        connection.recv(1)


def test_what_travels_is_encrypted(port: int, jobs: job_keys.Jobs) -> None:
    """A man in the middle sees neither the secret nor the views."""
    seen, there = [], socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, to: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                seen.append(data)
                to.sendall(data)
        with suppress(OSError):
            to.shutdown(socket.SHUT_WR)

    def work() -> None:
        with there.accept()[0] as near, socket.create_connection(("127.0.0.1", port)) as far:
            back = threading.Thread(target=pump, args=(far, near))
            back.start()
            pump(near, far)
            back.join(5)

    with there:
        thread = threading.Thread(target=work)
        thread.start()
        registry = Registry(f"127.0.0.1:{there.getsockname()[1]}", "job")
        secret = registry.secret()
        registry.propose(View(1, (A,), "a reason to read"))
        registry.close(time.monotonic() + 5)
        thread.join(5)
    packets = b"".join(seen)
    assert len(packets) > 1000
    for text in (secret.hex(), "secret", "10.0.0.1", "a reason", json.dumps("view/1")):
        assert text.encode() not in packets
