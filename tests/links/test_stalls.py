"""Connections that nothing passes over, while both processes live and new ones pass."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

import laconic
from laconic.links import connections, handshake, health
from laconic.links.addresses import listen
from laconic.links.elastic.coordinator import KEY, PURPOSE, Coordinator, secret_of_callers
from laconic.links.talks import Talks, converse
from laconic.links.wire import Wire

from tests.support import forgetful, gloo, job_keys, launched
from tests.support.elastic_runs import Run
from tests.support.loops import descend

STEPS, PAUSE = 40, 20


def fit(rank: int, pausing: Callable[[], None]) -> bytes:
    """Train, and call ``pausing()`` after `PAUSE` steps. Returns the parameters."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with laconic.attach(model, optimizer, laconic.ddp(), link="tcp", timeout=200.0):
        draw = torch.Generator().manual_seed(rank)
        for step in range(STEPS):
            if step == PAUSE:
                pausing()
            x = torch.randn(16, 64, generator=draw)
            descend(optimizer, (model(x) - x[:, :8].sin()).square().mean())
    return torch.cat([p.detach().view(-1) for p in model.parameters()]).numpy().tobytes()


def train(pipe: Connection) -> bytes:
    """Pause until the test says so. Returns the parameters."""
    forgetful.hasten()
    laconic.init()

    def pausing() -> None:
        pipe.send("pausing")
        port, deed = int(os.environ["MASTER_PORT"]), pipe.recv()
        if deed == "drop":
            forgetful.drop_packets(port)
        elif deed == "close":
            forgetful.close(port)

    return fit(torch.distributed.get_rank(), pausing)


def run(variables: dict[str, str], how: Sequence[str], after: Callable[..., object]) -> list[Any]:
    """What each process returns, or its error. They go on as ``how`` says, by rank, and then
    ``after`` is called with them."""
    world = [{**given, **variables} for given in launched.of_torchrun(len(how))]
    with launched.running(world, train) as made:
        assert {rank.next() for rank in made} == {"pausing"}
        for rank, deed in zip(made, how, strict=True):
            rank.pipe.send(deed)
        after(made)
        return [rank.next() for rank in made]


@pytest.mark.fault("a connection that a firewall had forgotten stopped a run until its time-out")
@pytest.mark.parametrize("secure", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_forgotten_connection_is_one_error_on_all_ranks(
    secure: bool, jobs: job_keys.Jobs
) -> None:
    variables = job_keys.variables(jobs.one) if secure else {}
    (said,) = set(run(variables, ["drop"] * 3, len))
    assert re.search(r"gradient.* step \d+: nothing passes over the connection to rank \d", said)
    assert "a firewall or NAT" in said and "Start all ranks again" in said


def test_a_slow_reader_is_no_stalled_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host acknowledges, though there is no room for more. Where packets are dropped, nothing
    does."""
    monkeypatch.setattr(connections, "QUIET_SECONDS", 0.3)
    each = connections.Connections(range(2), 10.0)
    each.answers = lambda rank: True
    with socket.create_server((forgetful.HERE, 0)) as server:
        caller = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    each.keep(1, caller)
    with other:
        with contextlib.suppress(BlockingIOError):
            while True:
                each[1].send(bytes(2**16))
        until = time.monotonic() + 4.0
        quiet = 0.0
        while time.monotonic() < until:
            quiet = max(quiet, each.heard(1))
            assert each.forgotten() == []
            time.sleep(0.05)
        assert quiet > 0.3, "it was asked, less and less often"
        assert other.recv(2**20)
        forgetful.drop(other)
        forgetful.drop(each[1])
        while not each.forgotten():
            assert time.monotonic() < until + 60
            time.sleep(0.1)
    each.close()


def test_a_connection_that_ends_while_all_processes_live() -> None:
    (said,) = set(run({}, ["close", "go"], len))
    assert "all processes live, and a connection between two of them has ended" in said


@pytest.mark.slow
def test_a_process_that_is_stopped_for_a_while_keeps_its_connections() -> None:
    """Slow is not dead."""

    def stop(made: Sequence[launched.Rank]) -> None:
        os.kill(made[1].process.pid, signal.SIGSTOP)
        time.sleep(6.0)
        os.kill(made[1].process.pid, signal.SIGCONT)

    found = run({}, ["go", "go"], stop)
    assert found == laconic.simulate(lambda rank: fit(rank, lambda: None), workers=2)


@pytest.mark.fault("an elastic run waited a minute and more for a connection that was forgotten")
@pytest.mark.parametrize("secure", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_elastic_run_goes_on_with_the_same_workers(
    secure: bool, jobs: job_keys.Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    if secure:
        job_keys.turn_on(monkeypatch, jobs.one)
    options: Any = {"hasten": True, "timeout": 600}  # the test waits for less
    with Run("laconic.ddp()", count=3, **options) as elastic:
        for worker in elastic.ready():
            worker.send(signal.SIGUSR1)  # it drops what comes over its connections of now
        elastic.check_same(3)
        for worker in elastic.workers:
            assert worker.wait_for("done")["workers"] == 3, "nobody was given up"


@pytest.mark.fault("most sockets had no keepalive, and none a limit for what is not acknowledged")
@pytest.mark.parametrize("secure", [False, True])
def test_the_system_watches_every_socket(
    secure: bool, jobs: job_keys.Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of the coordinator; but a full buffer does not end a connection for messages."""
    if secure:
        job_keys.turn_on(monkeypatch, jobs.one)
    before, port = set(os.listdir("/proc/self/fd")), gloo.free_port()
    beacon, server = health.Beacon(forgetful.HERE), Coordinator(forgetful.HERE, port)
    wires = [Wire(rank, forgetful.HERE, 10, range(2)) for rank in range(2)]
    addresses, secret = [wire.address for wire in wires], bytes(32)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda wire: wire.connect(addresses, secret, lambda: None), wires))
    calls, answers = Talks(), Talks()
    listening, _ = listen(forgetful.HERE)
    answer = handshake.answer([b""], lambda key: secret, lambda *_: b"")
    answers.serve([listening], lambda: answer, 5, print)
    exchange = partial(handshake.call, secret, b"", bytes(8), 0, b"")
    calls.call(forgetful.HERE, listening.getsockname()[1], exchange, 5, print)
    joins = partial(handshake.call, secret_of_callers(), PURPOSE, KEY, 0, b"")
    with listening, contextlib.closing(converse(forgetful.HERE, port, joins, 5)):
        answers.turn(1)
        messages = {each.fileno() for wire in wires for each in wire.connections.values()}
        count = 0
        for fd in map(int, set(os.listdir("/proc/self/fd")) - before):
            with contextlib.suppress(OSError), forgetful.borrowed(fd) as end:
                limit = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
                assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), end
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), end
                assert limit == (0 if fd in messages else 30_000), end
                count += 1
        assert count >= 7 and len(messages) == 2
    parties: list[Talks | health.Beacon | Wire] = [calls, answers, beacon, *wires]
    for party in (*parties, server):
        party.close()
