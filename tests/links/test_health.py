"""What every rank says of one that is late or lost, and who is not taken for lost."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import laconic as la
from laconic.errors import LinkError
from laconic.links import health, long_wait, rendezvous
from laconic.links.addresses import Address
from laconic.links.connections import Connections
from laconic.links.wire import Wire

from tests.support import gloo


def test_a_forked_child_holds_no_connection_open() -> None:
    """As the processes of a DataLoader, that may outlive the rank: the others would wait for it."""
    ours, theirs = socket.socketpair()
    beacon, wire = health.Beacon("127.0.0.1"), Wire(0, "127.0.0.1", 5, range(2))
    places = [Address.parse(address) for address in (wire.address, beacon.enroll(bytes(32)))]
    connections = Connections(range(2), 5.0)
    connections.keep(1, ours)
    (heard, says), (waits, ends) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ends)
        os.write(says, b"x")
        os.read(waits, 1)
        os._exit(0)
    try:
        os.read(heard, 1)
        for party in (connections, wire, beacon):
            party.close()
        theirs.settimeout(60)
        assert theirs.recv(1) == b""
        for place in places:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((place.host, place.port))
    finally:
        os.close(ends)
        os.waitpid(pid, 0)
        theirs.close()


def waits_for_rank_1(rank: int, recipe: la.Recipe, logged: Path) -> list[str]:
    """What each of three ranks logs while rank 1 comes late to a round: once rank 0 has logged
    twice."""
    lines, handler = list[str](), logging.Handler()

    def emit(record: logging.LogRecord) -> None:
        lines.append(record.getMessage())
        if len(lines) == 2:
            logged.touch()

    handler.emit = emit  # type: ignore[method-assign]
    log = logging.getLogger("laconic")
    log.addHandler(handler)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(long_wait, "FIRST_SECONDS", 0.5)
        with la.attach(model, optimizer, recipe, link=gloo.link_of(3)):
            for step in range(2):
                while (rank, step) == (1, 1) and not logged.exists():
                    time.sleep(0.05)
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
    log.removeHandler(handler)
    return lines


@pytest.mark.parametrize("recipe", [la.local_sgd(2), la.diloco(2, quorum=3)])
def test_who_is_waited_for_is_logged_by_one_rank(
    pool: gloo.Pool, recipe: la.Recipe, tmp_path: Path
) -> None:
    """Each time after twice as long."""
    (first, second, *_), *others = pool.run(waits_for_rank_1, recipe, tmp_path / "logged", ranks=3)
    assert others == [[], []]
    for line in (first, second):
        assert line.startswith("rank 0 has waited ") and "It gives up after 60 s" in line
        assert re.search(r"s for rank 1 in \w+ round after .*2.*: rank 1 is ", line)


class FakeTime:
    """A clock that only sleeping moves on."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    monkeypatch.setattr(rendezvous, "time", clock := FakeTime())
    return clock


@pytest.mark.usefixtures("clock")
def test_a_rank_that_never_comes_to_attach_is_logged_before_the_timeout(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(LinkError, match="rank 1 has not come within 100 s"):
        rendezvous.Rendezvous(HashStore(), 0, 2).exchange("", 100.0)
    for record, seconds in zip(caplog.records, (30, 60), strict=True):
        assert f"{seconds} s for rank 1" in record.getMessage()


def test_a_rank_that_ends_before_attach_is_named_within_seconds(clock: FakeTime) -> None:
    store = HashStore()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = str(Address("127.0.0.1", server.getsockname()[1], "00" * 8))
    entry = json.dumps(rendezvous.Entry(beacon=address))
    dist.PrefixStore("laconic", store).set("beacon/1", entry)  # type: ignore[attr-defined]
    with pytest.raises(LinkError, match="rank 1 ") as caught:
        rendezvous.Rendezvous(store, 0, 2).exchange("", 600.0)
    assert caught.value.ranks == (1,) and clock.now < 10
