"""Which congestion control a connection uses, and what happens where it cannot be set."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from laconic.links import congestion


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
