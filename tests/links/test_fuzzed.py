"""Whatever strangers send to a job's listeners: they are refused, and the job goes on."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import NamedTuple

import pytest
import torch

from laconic.links import connect, handshake, health, talks
from laconic.links.addresses import Address
from laconic.links.collectives import Collectives
from laconic.links.elastic import relay
from laconic.links.elastic.mesh import Guard, Mesh
from laconic.links.elastic.registry import Registry, serve
from laconic.links.elastic.tls_store import GREETING, _packed
from laconic.links.elastic.units import Units
from laconic.links.elastic.view import Member, View
from laconic.links.wire import Wire

from tests.support import gloo, job_keys
from tests.support import strangers as s
from tests.support.strangers import OURS, RAW, Attack, Stranger, Usage

SECRET = bytes(range(32))
SECONDS = 60.0
"""Within which a member is served, whoever else calls. It would take longer to wait for strangers,
one after the other."""
EVERYBODY = (RAW, RAW, RAW, OURS, OURS, "none", "other", "expired", "old")
"""Who calls a job with TLS."""


class Mode(NamedTuple):
    """Whether the job uses TLS: the settings and certificates of its callers, and some of the
    reasons that must be in the log."""

    contexts: dict[str, ssl.SSLContext]
    certificates: tuple[str, ...]
    reasons: tuple[str, ...]


@pytest.fixture(params=["plain", "tls"])
def mode(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs
) -> Mode:
    job_keys.turn_off(monkeypatch)
    monkeypatch.setattr(talks, "_reasons", set())
    if request.param == "plain":
        return Mode({}, (RAW,), ("not a hello of laconic", "does not know this job's secret"))
    job_keys.turn_on(monkeypatch, jobs.one)
    reasons = ("does not speak TLS", "no certificate", "certificate has expired", "local issuer")
    return Mode(s.contexts_of(jobs), EVERYBODY, reasons)


@pytest.fixture(params=[60, pytest.param(1000, marks=pytest.mark.slow)])
def count(request: pytest.FixtureRequest) -> int:
    """How many strangers are drawn."""
    return int(request.param)


def attack(
    port: int,
    mode: Mode,
    genuine: list[bytes],
    count: int,
    between: Callable[[], None] = lambda: None,
    most: int = handshake.NONCE_BYTES,
) -> None:
    """Strangers call, some of whom stay, while others send a byte at a time. Now and then a member
    does something ``between`` them. ``most``: the bytes that a stranger may receive."""
    calls = Attack(port, mode.contexts, most)

    def visit(stranger: Stranger) -> None:
        calls.visit(stranger)
        if calls.count % 100 == 0:
            served(between)

    try:
        with s.slow(port, genuine[0]):
            for certificate in dict.fromkeys(mode.certificates):
                for end in ("reset", "close", "wait"):
                    for data in (b"", b"GET / HTTP/1.1\r\n\r\n" * 9, s.client_hello(), *genuine):
                        visit(Stranger(data, (), end, certificate))
            s.drawn(s.strangers([*genuine, s.client_hello()], mode.certificates), count, visit)
            served(between)
    finally:
        calls.close()


def served(member: Callable[[], None]) -> None:
    begin = time.monotonic()
    member()
    assert time.monotonic() - begin < SECONDS


# -- where ranks connect ----


class Listener(NamedTuple):
    """Where rank 0 of three expects the others. ``come(rank)``: a rank's link, once it has
    connected to all."""

    port: int
    key: bytes
    come: Callable[[int], Collectives]
    close: Callable[[], None]


class Alone:
    """What collectives ask about the only call."""

    size, header = 3, (3, 7)
    blaming = Guard.blaming

    def __init__(self, rank: int) -> None:
        self.rank = rank


def by_wire() -> Listener:
    """Of a link."""
    wires = [Wire(rank, "127.0.0.1", 20, range(3)) for rank in range(3)]
    addresses = [wire.address for wire in wires]
    at = Address.parse(addresses[0])

    def come(rank: int) -> Collectives:
        wires[rank].connect(addresses, SECRET, lambda: None)
        return Collectives(Alone(rank), wires[rank])

    def close() -> None:
        for wire in wires:
            wire.close()

    return Listener(at.port, bytes.fromhex(at.key), come, close)


def by_mesh() -> Listener:
    """Of an elastic run, which connects again whenever workers change. In between nobody accepts
    connections."""
    servers = [socket.create_server(("127.0.0.1", 0), backlog=256) for _ in range(3)]
    at = [f"127.0.0.1|{server.getsockname()[1]}|{'00' * 8}" for server in servers]
    view = View(1, tuple(Member(f"{n:012x}", at[n], at[n], at[n]) for n in range(3)))
    key = blake2b(view.pack().encode(), key=SECRET, digest_size=handshake.KEY_BYTES).digest()
    meshes = [Mesh(view, member, 20) for member in view.members]

    def come(rank: int) -> Collectives:
        meshes[rank].connect(servers[rank], SECRET, lambda: None)
        return Collectives(Alone(rank), meshes[rank])

    def close() -> None:
        for mesh, server in zip(meshes, servers, strict=True):
            mesh.connections.close()
            server.close()

    return Listener(int(servers[0].getsockname()[1]), key, come, close)


@pytest.mark.parametrize("listening", [by_wire, by_mesh])
def test_ranks_connect_and_agree(
    mode: Mode, count: int, caplog: pytest.LogCaptureFixture, listening: Callable[[], Listener]
) -> None:
    """Some strangers have come before, and gone. Then two ranks wait for the third one."""
    listener = listening()
    genuine = [
        s.recorded(secret, connect.PURPOSE, listener.key, number)
        for secret, number in ((SECRET, 2), (bytes(32), 2), (SECRET, 0), (SECRET, 2**32 - 1))
    ]
    for end in ("reset", "close"):
        early = Attack(listener.port, {})
        for data in (b"", b"x" * 9, *genuine):
            early.visit(Stranger(data, (), end))
    with ThreadPoolExecutor(3) as pool:
        coming = [pool.submit(listener.come, rank) for rank in range(2)]
        time.sleep(0.1)
        before = Usage.of()
        attack(listener.port, mode, genuine, count)
        assert not any(rank.done() for rank in coming)
        s.nothing_is_left(before)

        def join() -> None:
            coming.append(pool.submit(listener.come, 2))
            coming[2].result()

        served(join)
        links = [rank.result() for rank in coming]
        for number in range(3):
            x = torch.arange(30_000.0).mul(number + 1)
            mine = [x + 3 * rank for rank in range(3)]
            list(pool.map(lambda link, mine: link.mean(mine), links, mine))
            assert all(torch.equal(each, x + 3) for each in mine)
    listener.close()
    s.check_lines(s.lines_of(caplog), *mode.reasons)


# -- listeners of a run that is under way ----


def test_a_beacon_answers_members(mode: Mode, count: int, caplog: pytest.LogCaptureFixture) -> None:
    beacon = health.Beacon("127.0.0.1")
    address = beacon.enroll(SECRET)
    key = bytes.fromhex(health.key_of(address))
    genuine = [
        s.recorded(secret, health.PURPOSE, key, 1, text)
        for secret in (SECRET, bytes(32))
        for text in (health.NOTHING.pack(), health.Request(left=7).pack())
    ]

    def ask() -> None:
        assert health.ask(address, SECRET).status.startswith("training")

    beacon.set("training")
    ask()
    before = Usage.of()
    attack(Address.parse(address).port, mode, genuine, count, ask)
    s.nothing_is_left(before)
    ask()
    assert beacon.links[key.hex()].left == {}, "nothing that was replayed is believed"
    beacon.close()
    s.check_lines(s.lines_of(caplog), *mode.reasons)


NO_KEY = "00" * 8
ME = Member("0" * 12, *(f"127.0.0.1|{port}|{NO_KEY}" for port in (1, 2, 3)))


def test_a_donor_serves_newcomers(mode: Mode, count: int, caplog: pytest.LogCaptureFixture) -> None:
    server = socket.create_server(("127.0.0.1", 0), backlog=256)
    port = int(server.getsockname()[1])
    service = relay.Service(server, SECRET, lambda member: None, Units(ME.id))
    donor = ME._replace(service=f"127.0.0.1|{port}|{NO_KEY}")
    text = View(1, (ME,)).pack().encode()
    genuine = [
        s.recorded(secret, relay.PURPOSE, relay.KEY, 0, text) for secret in (SECRET, bytes(32))
    ]

    def join() -> None:
        stream = relay.call_donor(donor, SECRET, ME)
        accepted = service.waiting.get(timeout=60)
        assert accepted.newcomer == ME and service.waiting.empty() and service.bequests.empty()
        stream.close()
        accepted._stream.close()

    join()
    before = Usage.of()
    attack(port, mode, genuine, count, join)
    s.nothing_is_left(before)
    join()
    service.close()
    s.check_lines(s.lines_of(caplog), *mode.reasons)


@pytest.fixture
def coordinator(mode: Mode) -> Iterator[int]:
    port = gloo.free_port()
    server = serve("127.0.0.1", port)
    yield port
    if mode.contexts:
        server.close()  # type: ignore[union-attr]  # torch's ends when it is freed


def test_a_coordinator_keeps_its_views(
    mode: Mode, count: int, coordinator: int, caplog: pytest.LogCaptureFixture
) -> None:
    """With a certificate, callers are members: they fuzz the handshake, and what follows it by
    requests that are none. Without TLS it is torch's store, which serves everybody who speaks its
    protocol, and leaves others connected until they close."""
    registry = Registry(f"127.0.0.1:{coordinator}", "job")
    view = registry.propose(View(1, (ME,)))

    def look() -> None:
        assert registry.latest() == view

    look()
    before = Usage.of()
    if mode.contexts:
        genuine = [_packed(["get", "none"]), _packed(["add", "k", "x"]), b"\xff" * 9, _packed([])]
        most = len(_packed(GREETING)) + 200
        attack(coordinator, mode, genuine, count, look, most)
    else:
        genuine = [s.client_hello(), s.recorded(SECRET, b"wire", bytes(8), 1), b"GET / HTTP/1.1"]
        calls = Attack(coordinator, {})
        leaving = s.strangers(genuine).map(lambda each: each._replace(end="close"))
        s.drawn(leaving, count, calls.visit)
    look()
    s.nothing_is_left(before)
    again = Registry(f"127.0.0.1:{coordinator}", "job")
    assert again.latest() == view
    for each in (registry, again):
        each.close(time.monotonic() + 5)
    s.check_lines(s.lines_of(caplog), *mode.reasons if mode.contexts else ())
