"""Which congestion control a connection uses, and what happens where it cannot be set."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
import torch

from laconic.links import congestion
from laconic.links.connections import Connections
from laconic.links.wire import Transfer


class Forbidden:
    """A connection of a process that may not choose, as root in a container."""

    def __init__(self) -> None:
        self.tried: list[str] = []

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        self.tried.append(value.decode())
        raise PermissionError(1, "Operation not permitted")

    def fileno(self) -> int:
        return -1


def test_which_is_used_and_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long round trips have their own. Where it cannot be set the system's is used."""
    microseconds = [100_000]
    monkeypatch.setattr(congestion, "tcp_info", lambda connection, layout: microseconds)
    name = next(iter(congestion.available()), "")  # none but on Linux
    with socket.socket() as connection, monkeypatch.context() as patched:
        patched.setattr(congestion, "LONG", name or "bbr")
        assert (congestion.choose(connection) is not None) == bool(name)
        if name:
            found = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            assert found.rstrip(b"\0").decode() == name
        microseconds[0] = 1_000
        assert congestion.choose(connection) is None
    microseconds[0] = 100_000
    monkeypatch.setattr(congestion, "available", lambda: ["bbr", "cubic"])
    forbidden: Any = Forbidden()
    assert congestion.choose(forbidden) is None
    assert forbidden.tried == ["bbr"]


class Reported:
    """A connection that uses BBR: what the system reports of it, and what is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.estimate, self.set = 100.0, 0, list[str]()
        monkeypatch.setattr(congestion, "tcp_info", lambda connection, layout: (0,))
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, 26)  # TCP_CC_INFO
        return self.estimate.to_bytes(8, "little")[:size]

    def setsockopt(self, level: int, option: int, value: bytes | int) -> None:
        assert level == socket.IPPROTO_TCP
        if isinstance(value, bytes):
            assert option == socket.TCP_CONGESTION
            self.set.append(value.decode())

    def anew(self, seconds: float, estimates: list[int]) -> list[int]:
        """The messages before which BBR starts anew, one for each of the ``estimates``."""
        connection: Any = self
        bbr, found = congestion.Bbr(connection), list[int]()
        for message, self.estimate in enumerate(estimates):
            self.set = []
            self.now += seconds
            bbr.before_message()
            assert self.set in ([], ["reno", "bbr"])
            found += [message] if self.set else []
        return found


def test_bbr_starts_anew_when_its_estimate_falls_by_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not when it falls by less, or is what it was after that; and after some seconds."""
    reported = Reported(monkeypatch)
    assert reported.anew(0.1, [10_000, 6_000, 4_000, 10_000, 12_000, 5_000]) == [2, 5]
    assert reported.anew(1.0, [1_000_000] * 25) == [5, 11, 17, 23]


def test_messages_start_bbr_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the connections that use it, and that a message is sent over."""
    connections, called = Connections(range(3), 1.0), []
    monkeypatch.setattr(congestion.Bbr, "before_message", lambda bbr: called.append(bbr))
    pairs = [socket.socketpair() for _ in range(3)]
    for rank, (ours, _) in enumerate(pairs):
        connections.keep(rank, ours, congestion.Bbr(ours))
    empty = torch.zeros(0)
    Transfer(connections, {0: empty, 2: empty}, {1: empty}, (1, 1))
    assert called == [connections.bbr[0], connections.bbr[2]]
    connections.close()
    for _, theirs in pairs:
        theirs.close()
