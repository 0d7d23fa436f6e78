"""When a donor sends to its newcomer: in turns with its own units."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from laconic.links.calls import Call
from laconic.links.elastic import relay as module
from laconic.links.elastic.relay import Record, Relay, Snapshot, Start, Stream
from laconic.links.elastic.turns import Turns
from laconic.links.elastic.units import Units
from laconic.links.elastic.view import Member

SOON = 60.0
ME = Member("0" * 12, *(f"127.0.0.1|{port}|{'00' * 8}" for port in (1, 2, 3)))
LARGE = Snapshot(3, {"x": torch.zeros(2**18, dtype=torch.uint8)})
PIECES = 5
"""256 KiB, and what torch.save adds."""
START = Start(7, Call(6, "round", True), 0, [], {}, None, (3, 2))


class Waits:
    """In place of `Units.changed`. A wait takes no time, and ``during(n)`` happens in the n-th."""

    def __init__(self, during: Callable[[int], None] = lambda n: None) -> None:
        self.seconds: list[float] = []
        """How long each wait may take that is not over at once."""
        self._during = during

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def notify_all(self) -> None:
        """Do nothing."""

    def wait_for(self, ready: Callable[[], bool], seconds: float) -> None:
        if not ready():
            self.seconds.append(seconds)
            self._during(len(self.seconds))


class Slow:
    """A connection over which each piece takes two seconds of a false clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.sent = 100.0, list[bytes]()
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)

    def sendall(self, data: Any) -> None:
        self.sent.append(bytes(data))
        self.now += 2.0 * (len(self.sent) > 1)  # the first one is the length


def test_a_donor_sends_a_tenth_of_the_time_during_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """And all the time between them."""
    connection: Any = Slow(monkeypatch)
    units: Any = Units(ME.id)
    Stream(connection).send(LARGE, Turns(units))
    assert len(connection.sent) == 1 + PIECES
    assert max(map(len, connection.sent)) == module.PIECE
    whole = connection.sent.copy()
    units.changed = Waits(during=lambda n: units.end() if n == 3 else None)
    units.begin()
    connection.sent.clear()
    Stream(connection).send(LARGE, Turns(units))
    assert connection.sent == whole
    assert units.changed.seconds == pytest.approx([0.0, 18.0, 18.0]), "2 of 20 seconds"


def test_no_turns_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends all the time, also during units."""
    connection: Any = Slow(monkeypatch)
    units: Any = Units(ME.id)
    turns = Turns(units)
    units.changed = Waits(during=lambda n: turns.over() if n == 2 else None)
    units.begin()
    Stream(connection).send(LARGE, turns)
    assert len(units.changed.seconds) == 2 and len(connection.sent) == 1 + PIECES


@pytest.mark.parametrize("how", ["end", "over"])
def test_who_waits_for_a_turn_is_woken(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """When the unit ends, and when there are no turns any more."""
    units, waits = Units(ME.id), threading.Event()
    turns = Turns(units)
    turns._latest = 1e3
    units.begin()

    def send() -> None:
        with turns.one():
            waits.set()

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    (units.end if how == "end" else turns.over)()
    assert waits.wait(SOON)
    thread.join(SOON)


def relay_in_turns() -> tuple[Relay, Turns]:
    ours, theirs = socket.socketpair()
    theirs.close()
    turns = Turns(Units(ME.id))
    return Relay(ME, Stream(ours), lambda member: None, turns), turns


def test_a_donor_yields_until_as_much_as_its_snapshot_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a newcomer would never take part where units follow each other without a pause."""
    monkeypatch.setattr(Relay, "_send", lambda self: None)
    monkeypatch.setattr(Relay, "_listen", lambda self: None)
    relay, turns = relay_in_turns()
    relay.begin(LARGE)
    half = Record(Call(5, "a"), 2, [torch.zeros(2**17, dtype=torch.uint8)])
    for _ in range(2):
        relay.put(half)
        assert not turns._over
    relay.put(half)
    assert turns._over and not relay.ended
    relay._stream.close()


def test_nothing_yields_to_the_unit_that_waits_for_the_newcomer() -> None:
    relay, turns = relay_in_turns()
    relay.finish(START, None)
    assert turns._over
    relay._stream.close()
