"""Connections that a firewall forgets, while both processes live and new connections pass."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

import laconic
from laconic.links import handshake, health
from laconic.links.addresses import listen
from laconic.links.elastic.coordinator import KEY, PURPOSE, Coordinator, secret_of_callers
from laconic.links.sockets import borrowed
from laconic.links.talks import Talks, converse
from laconic.links.wire import Wire

from tests.support import forgetful, gloo, job_keys, launched
from tests.support.elastic_runs import Run
from tests.support.loops import descend

STEPS, PAUSE = 40, 20
slow = pytest.mark.slow


def fit(rank: int, recipe: str, pausing: Callable[[], None], **options: Any) -> bytes:
    """Train, and call ``pausing()`` after `PAUSE` steps. Returns the parameters."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with laconic.attach(model, optimizer, eval(recipe, {"laconic": laconic}), **options):
        draw = torch.Generator().manual_seed(rank)
        for step in range(STEPS):
            if step == PAUSE:
                pausing()
            x = torch.randn(16, 64, generator=draw)
            descend(optimizer, (model(x) - x[:, :8].sin()).square().mean())
    return torch.cat([p.detach().view(-1) for p in model.parameters()]).numpy().tobytes()


def train(pipe: Connection, recipe: str) -> tuple[bytes, int]:
    """Pause until the test says so. Returns the parameters, and how many connections were made
    again."""
    forgetful.hasten()
    made: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = made.append  # type: ignore[method-assign, assignment]
    logging.getLogger("laconic").addHandler(handler)
    laconic.init()

    def pausing() -> None:
        pipe.send("pausing")
        if pipe.recv() == "drop packets":
            port = int(os.environ["MASTER_PORT"])
            threading.Timer(0.02, forgetful.drop_packets, (port,)).start()

    params = fit(torch.distributed.get_rank(), recipe, pausing, link="tcp", timeout=200.0)
    return params, sum("made again" in record.msg for record in made)


Ranks = list[launched.Rank]


def run(
    size: int,
    recipe: str,
    variables: dict[str, str],
    before: Callable[[Ranks], object],
    how: str = "go",
    after: Callable[[Ranks], object] = len,
) -> list[Any]:
    """What each of ``size`` processes returns, or its error. They go on ``how``, between what
    happens ``before`` and ``after``."""
    world = [{**given, **variables} for given in launched.of_torchrun(size)]
    with launched.running(world, train, recipe) as made:
        assert [rank.next() for rank in made] == ["pausing"] * size
        before(made)
        for rank in made:
            rank.pipe.send(how)
        after(made)
        return [rank.next() for rank in made]


def undisturbed(size: int, recipe: str) -> list[bytes]:
    return laconic.simulate(lambda rank: fit(rank, recipe, lambda: None), workers=size)


@pytest.mark.fault("a connection that a firewall had forgotten stopped a run until its time-out")
@pytest.mark.parametrize(
    ("size", "recipe", "settings", "what"),
    [
        (2, "laconic.ddp()", "", "forgotten between rounds"),
        pytest.param(3, "laconic.sgp()", "not compiled", "forgotten in a round", marks=slow),
        pytest.param(2, "laconic.ddp()", "TLS", "forgotten in a round", marks=slow),
        pytest.param(2, "laconic.ddp()", "", "reset", marks=slow),
        pytest.param(3, "laconic.ddp()", "", "drop packets", marks=slow),
    ],
)
def test_a_static_run_goes_on_over_new_connections(
    size: int, recipe: str, settings: str, what: str, jobs: job_keys.Jobs
) -> None:
    """With the same bits as without the firewall."""
    ports = gloo.free_ports(2 * size + 2)
    variables = forgetful.variables(ports)
    if settings == "TLS":
        variables |= job_keys.variables(jobs.one)
    elif settings:
        variables["LACONIC_WITHOUT_KERNELS"] = "1"
    with forgetful.firewall(ports) as wall:

        def before(made: Ranks) -> None:
            assert what != "forgotten between rounds" or wall.forget()

        def after(made: Ranks) -> None:
            time.sleep(0.02)
            if what == "forgotten in a round":
                assert wall.forget()
            elif what == "reset":
                wall.reset()

        found = run(size, recipe, variables, before, what, after)
    for said, expected in zip(found, undisturbed(size, recipe), strict=True):
        assert not isinstance(said, str), said
        assert said[0] == expected and said[1]


@slow
def test_a_process_that_is_stopped_for_a_while_keeps_its_connections() -> None:
    """Slow is not dead."""

    def stop(made: Ranks) -> None:
        os.kill(made[1].process.pid, signal.SIGSTOP)
        time.sleep(6.0)
        os.kill(made[1].process.pid, signal.SIGCONT)

    found = run(2, "laconic.ddp()", {}, len, "go", stop)
    assert found == [(params, 0) for params in undisturbed(2, "laconic.ddp()")]


@slow
def test_new_connections_that_pass_small_messages_only_are_an_error() -> None:
    """On both ranks, and soon."""
    ports = gloo.free_ports(6)
    with forgetful.firewall(ports) as wall:

        def forget(made: Ranks) -> None:
            wall.small_only = True
            assert wall.forget()

        (said,) = set(run(2, "laconic.ddp()", forgetful.variables(ports), forget))
    assert "lower the MTU of the path (`ip link set mtu 1400`)" in said


@pytest.mark.fault("an elastic run waited a minute and more for a connection that was forgotten")
@pytest.mark.parametrize("secure", [False, pytest.param(True, marks=slow)])
def test_an_elastic_run_goes_on_with_the_same_workers(
    secure: bool, jobs: job_keys.Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = gloo.free_ports(12)
    for name, value in forgetful.variables(ports).items():
        monkeypatch.setenv(name, value)
    if secure:
        job_keys.turn_on(monkeypatch, jobs.one)
    options: Any = {"hasten": True, "timeout": 600}  # the test waits for less
    with forgetful.firewall(ports) as wall, Run("laconic.ddp()", count=3, **options) as elastic:
        elastic.ready()
        assert wall.forget()
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
    answer = handshake.answer(b"", lambda key: secret, lambda *_: b"")
    answers.serve([listening], lambda: answer, 5, print)
    exchange = handshake.call(secret, b"", bytes(8), 0, b"")
    calls.call(forgetful.HERE, listening.getsockname()[1], exchange, 5, print)
    joins = partial(handshake.call, secret_of_callers(), PURPOSE, KEY, 0, b"")
    with listening, contextlib.closing(converse(forgetful.HERE, port, joins, 5)):
        answers.turn(1)
        messages = {fd for wire in wires for fd in wire.connections.values()}
        count = 0
        for fd in map(int, set(os.listdir("/proc/self/fd")) - before):
            with contextlib.suppress(OSError), borrowed(fd) as end:
                limit = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
                assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), end
                assert limit == (0 if fd in messages else 30_000), end
                count += 1
        assert count >= 7 and len(messages) == 2
    parties: list[Talks | health.Beacon | Wire] = [calls, answers, beacon, *wires]
    for party in (*parties, server):
        party.close()
