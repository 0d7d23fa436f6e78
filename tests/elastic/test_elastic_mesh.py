"""The connections of a view, with strangers that call, and members that never come."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b

import pytest
import torch

from laconic.links import connect, handshake
from laconic.links.collectives import Collectives
from laconic.links.elastic.mesh import Guard, Interrupted, Mesh
from laconic.links.elastic.view import Member, View

SECRET = bytes(range(32))
NO_KEY = "00" * 8
SOON = 60.0
Host = tuple[Member, socket.socket]


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Three members, and where they listen."""
    made = []
    for number in range(3):
        server = socket.create_server(("127.0.0.1", 0), backlog=64)
        mesh = f"127.0.0.1|{server.getsockname()[1]}|{NO_KEY}"
        made.append((Member(f"{number:012x}", mesh, mesh, mesh), server))
    yield made
    for _, server in made:
        server.close()


def nothing() -> None:
    """A check that never raises."""


def view_of(hosts: list[Host], epoch: int = 1) -> View:
    return View(epoch, tuple(member for member, _ in hosts))


def connected(
    hosts: list[Host], view: View, places: list[int], check: Callable[[], None] = nothing
) -> list[Mesh]:
    """The meshes of the members at ``places``, which connect at once."""

    def work(place: int) -> Mesh:
        member, server = hosts[place]
        mesh = Mesh(view, member, SOON)
        mesh.connect(server, SECRET, check)
        return mesh

    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(work, places))


def mean(mesh: Mesh, header: tuple[int, int] = (1, 2)) -> float:
    """The mean of the places, over the mesh."""
    x = torch.tensor([float(mesh.place)])
    Collectives(Guard(mesh, len(mesh.names), lambda: header), mesh).mean(x)
    return float(x)


def works(meshes: list[Mesh]) -> None:
    """The connections carry messages. Closes them."""
    with ThreadPoolExecutor(len(meshes)) as pool:
        expected = sum(mesh.place for mesh in meshes) / len(meshes)
        assert list(pool.map(mean, meshes)) == [expected] * len(meshes)
    for mesh in meshes:
        mesh.connections.close()


def test_a_view_connects_and_the_next_one(hosts: list[Host]) -> None:
    """Ranks are places in the view, not the order in which members came."""
    works(connected(hosts, view_of(hosts), [0, 1, 2]))
    turned = [hosts[2], hosts[0]]
    meshes = connected(turned, view_of(turned, 2), [0, 1])
    assert [mesh.place for mesh in meshes] == [0, 1] and sorted(meshes[0].connections) == [1]
    works(meshes)
    works(connected(hosts[:1], view_of(hosts[:1], 3), [0]))


def key_of(view: View) -> bytes:
    return blake2b(view.pack().encode(), key=SECRET, digest_size=8).digest()


def garbage(connection: socket.socket, view: View) -> None:
    connection.sendall(secrets.token_bytes(500))


def silent(connection: socket.socket, view: View) -> None:
    connection.sendall(b"")


def half_a_hello(connection: socket.socket, view: View) -> None:
    connection.sendall(handshake.Hello(connect.PURPOSE, key_of(view), 1, bytes(16)).pack()[:20])


def without_secret(connection: socket.socket, view: View) -> None:
    said(connection, bytes(32), connect.PURPOSE, key_of(view), 1)


def of_another_view(connection: socket.socket, view: View) -> None:
    said(connection, SECRET, connect.PURPOSE, key_of(replace(view, epoch=1)), 1)


def of_a_view_with_other_members(connection: socket.socket, view: View) -> None:
    """Of the same epoch: a coordinator that was started again empty may decide it twice."""
    others = replace(view, members=view.members[:2])
    said(connection, SECRET, connect.PURPOSE, key_of(others), 1)


def for_something_else(connection: socket.socket, view: View) -> None:
    said(connection, SECRET, b"join", key_of(view), 1)


def of_no_rank(connection: socket.socket, view: View) -> None:
    said(connection, SECRET, connect.PURPOSE, key_of(view), 77)


def as_the_callee(connection: socket.socket, view: View) -> None:
    said(connection, SECRET, connect.PURPOSE, key_of(view), 0)


def said(connection: socket.socket, secret: bytes, purpose: bytes, key: bytes, number: int) -> None:
    """The caller's side of a handshake. It must not succeed."""
    exchange = handshake.call(secret, purpose, key, number, b"", most=0)
    out, wanted = next(exchange)
    with pytest.raises((ConnectionError, handshake.RefusedError)):
        while True:
            connection.sendall(out)
            data = b""
            while len(data) < wanted:
                piece = connection.recv(wanted - len(data))
                if not piece:
                    raise ConnectionError
                data += piece
            try:
                out, wanted = exchange.send(data)
            except StopIteration:
                return


@pytest.mark.parametrize(
    "behave",
    [
        *[garbage, silent, half_a_hello, without_secret, of_another_view, for_something_else],
        *[of_no_rank, as_the_callee, of_a_view_with_other_members],
    ],
)
def test_strangers_disturb_nothing(
    hosts: list[Host],
    behave: Callable[[socket.socket, View], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They call before, and while one member is still to come. Nobody waits for them."""
    monkeypatch.setattr(connect, "HELLO_SECONDS", 10 * SOON)
    view = view_of(hosts, 2)
    port = hosts[0][1].getsockname()[1]
    strangers = [socket.create_connection(("127.0.0.1", port), SOON) for _ in range(4)]
    for stranger in strangers:
        stranger.settimeout(SOON)
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(connected, hosts, view, [0, 1])
        calls = [pool.submit(behave, stranger, view) for stranger in strangers]
        for call in calls:
            call.result(SOON)
        assert not first.done(), "one member has not come"
        last = pool.submit(connected, hosts, view, [2])
        meshes = first.result(SOON) + last.result(SOON)
    works(meshes)
    for stranger in strangers:
        stranger.close()


def stopping(seconds: float) -> Callable[[], None]:
    """A check that says so after a while that waiting is in vain."""
    end = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() >= end:
            raise Interrupted("another view was decided")

    return check


@pytest.mark.parametrize("place", [0, 2])
def test_a_member_that_never_comes(hosts: list[Host], place: int) -> None:
    """Whether it would call, or be called."""
    begin = time.monotonic()
    places = [p for p in range(3) if p != place]
    with pytest.raises(Interrupted, match="another view was decided"):
        connected(hosts, view_of(hosts), places, stopping(0.3))
    assert time.monotonic() - begin > 0.25
    works(connected(hosts, view_of(hosts, 2), [0, 1, 2]))


def test_views_of_one_epoch_that_differ_do_not_connect(hosts: list[Host]) -> None:
    """A coordinator that was started again empty may decide an epoch twice."""
    view = view_of(hosts[:2])
    changed = view.members[0]._replace(service=hosts[2][0].service)
    other = replace(view, members=(changed, view.members[1]))
    with ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(connected, hosts, v, [place], stopping(0.5))
            for place, v in enumerate((view, other))
        ]
        for call in calls:
            with pytest.raises(Interrupted):
                call.result(SOON)
    works(connected(hosts, view, [0, 1]))


def test_a_member_that_is_gone(hosts: list[Host]) -> None:
    """Its port is closed: that ends the attempt at once."""
    hosts[0][1].close()
    with pytest.raises(Interrupted, match="rank 0 can't be reached at 127"):
        connected(hosts, view_of(hosts), [1])


def test_nobody_comes_for_too_long(hosts: list[Host]) -> None:
    mesh = Mesh(view_of(hosts), hosts[0][0], 0.2)
    with pytest.raises(Interrupted, match=r"ranks \[1, 2\] have not connected within 0.2 s"):
        mesh.connect(hosts[0][1], SECRET, nothing)


def test_a_connection_that_ends_interrupts(hosts: list[Host]) -> None:
    meshes = connected(hosts, view_of(hosts), [0, 1, 2])
    waits = threading.Event()
    with ThreadPoolExecutor(2) as pool:

        def call(mesh: Mesh) -> float:
            waits.set()
            return mean(mesh)

        calls = [pool.submit(call, mesh) for mesh in meshes[:2]]
        assert waits.wait(SOON)
        meshes[2].connections.close()
        errors = []
        for mesh, call_ in zip(meshes, calls, strict=False):
            with suppress(Interrupted):
                call_.result(SOON)
                errors.append(mesh.place)
            mesh.connections.shutdown()
    assert not errors, "they need the third one's message"
    for mesh in meshes:
        mesh.connections.close()
