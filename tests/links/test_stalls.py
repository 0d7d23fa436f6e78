"""Connections that a firewall forgets, while both processes live and new connections pass."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

import pytest
import torch
import torch.distributed as dist

import laconic
from laconic.links import handshake, health
from laconic.links.addresses import connect, listen
from laconic.links.elastic.registry import serve
from laconic.links.sockets import borrowed
from laconic.links.talks import Talks
from laconic.links.wire import Wire

from tests.support import forgetful, gloo, job_keys
from tests.support.elastic_runs import MANY, Run

STEPS, PAUSE = 60, 20
TIMEOUT, LONG = 40.0, 100.0


def train(
    rank: int, size: int, port: int, variables: dict[str, str], recipe: str, pipe: Connection
) -> None:
    """Train, and pause after `PAUSE` steps until the test says so. Send the parameters, the longest
    step in seconds, and how many connections were made again; or the error."""
    os.environ.update(variables, MASTER_ADDR=forgetful.HERE, MASTER_PORT=str(port))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    forgetful.hasten()
    torch.set_num_threads(1)
    made: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = made.append
    logging.getLogger("laconic").addHandler(handler)
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sync = laconic.attach(
        model, optimizer, eval(recipe, {"laconic": laconic}), link="tcp", timeout=TIMEOUT
    )
    draw, slowest = torch.Generator().manual_seed(rank), 0.0
    try:
        for step in range(STEPS):
            if step == PAUSE:
                pipe.send("pausing")
                if pipe.recv() == "drop packets":
                    threading.Timer(0.02, forgetful.drop_packets, (port,)).start()
            start = time.monotonic()
            x = torch.randn(16, 64, generator=draw)
            optimizer.zero_grad()
            (model(x) - x[:, :8].sin()).square().mean().backward()
            optimizer.step()
            slowest = max(slowest, time.monotonic() - start)
        sync.finish()
    except laconic.LinkError as error:
        pipe.send(str(error))
    else:
        flat = torch.cat([p.detach().view(-1) for p in model.parameters()])
        pipe.send((flat.numpy().tobytes(), slowest, sum("made again" in r.msg for r in made)))
    pipe.recv()  # the others may still ask


Pipes, Processes = list[Connection], list[ForkServerProcess]


def go(pipes: Pipes, _: Processes, how: str = "go") -> None:
    for pipe in pipes:
        pipe.send(how)


def run(
    size: int, recipe: str, variables: dict[str, str], pausing: Callable[[Pipes, Processes], None]
) -> list[tuple[bytes, float, int] | str]:
    """What each of ``size`` processes has sent at the end."""
    context, port = gloo.forking(), gloo.free_port()
    pipes, processes = Pipes(), Processes()
    for rank in range(size):
        ours, theirs = context.Pipe()
        at = rank, size, port, variables, recipe, theirs
        processes.append(context.Process(target=train, args=at, daemon=True))
        processes[-1].start()
        pipes.append(ours)
    try:
        for pipe in pipes:
            assert pipe.poll(LONG) and pipe.recv() == "pausing"
        pausing(pipes, processes)
        found = []
        for pipe in pipes:
            assert pipe.poll(LONG)
            found.append(pipe.recv())
        go(pipes, processes)
        return found
    finally:
        for process in processes:
            process.kill()
            process.join()


@cache
def undisturbed(size: int, recipe: str) -> list[bytes]:
    return [said[0] for said in run(size, recipe, {}, go)]


linux = pytest.mark.skipif(sys.platform != "linux", reason="uses BPF")


@pytest.mark.fault("a connection that a firewall had forgotten stopped a run until its time-out")
@pytest.mark.parametrize(
    ("size", "recipe", "settings", "what"),
    [
        (2, "laconic.ddp()", "", "forgotten between rounds"),
        (3, "laconic.ddp()", "", "forgotten in a round"),
        (3, "laconic.sgp()", "not compiled", "forgotten in a round"),
        (2, "laconic.ddp()", "TLS", "forgotten in a round"),
        (2, "laconic.ddp()", "", "reset"),
        pytest.param(3, "laconic.ddp()", "", "drop packets", marks=linux),
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

        def disturb(pipes: Pipes, processes: Processes) -> None:
            if what == "forgotten between rounds":
                assert wall.forget()
            go(pipes, processes, what)
            time.sleep(0.02)
            if what == "forgotten in a round":
                assert wall.forget()
            elif what == "reset":
                wall.reset()

        found = run(size, recipe, variables, disturb)
    for said, expected in zip(found, undisturbed(size, recipe), strict=True):
        assert not isinstance(said, str), said
        params, slowest, made = said
        assert params == expected and made and slowest < TIMEOUT / 2


def test_a_process_that_is_stopped_for_a_while_keeps_its_connections() -> None:
    """Slow is not dead."""

    def stop(pipes: Pipes, processes: Processes) -> None:
        go(pipes, processes)
        os.kill(processes[1].pid, signal.SIGSTOP)
        time.sleep(6.0)
        os.kill(processes[1].pid, signal.SIGCONT)

    found = run(2, "laconic.ddp()", {}, stop)
    assert found[0][2] == found[1][2] == 0 and found[0][1] > 5
    assert [said[0] for said in found] == undisturbed(2, "laconic.ddp()")


def test_new_connections_that_pass_small_messages_only_are_an_error() -> None:
    """On both ranks, and soon."""
    ports = gloo.free_ports(6)
    with forgetful.firewall(ports) as wall:

        def disturb(pipes: Pipes, processes: Processes) -> None:
            wall.small_only = True
            assert wall.forget()
            go(pipes, processes)

        found = run(2, "laconic.ddp()", forgetful.variables(ports), disturb)
    assert found[0] == found[1], "one error for all"
    assert "lower the MTU of the path (`ip link set mtu 1400`)" in found[0]


@pytest.mark.fault("an elastic run waited a minute and more for a connection that was forgotten")
@pytest.mark.parametrize("secure", [False, True])
def test_an_elastic_run_goes_on_with_the_same_workers(
    secure: bool, jobs: job_keys.Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = gloo.free_ports(12)
    for name, value in forgetful.variables(ports).items():
        monkeypatch.setenv(name, value)
    if secure:
        job_keys.turn_on(monkeypatch, jobs.one)
    with (
        forgetful.firewall(ports) as wall,
        Run("laconic.ddp()", count=3, steps=MANY, hasten=True) as elastic,
    ):
        for worker in elastic.workers:
            worker.wait_for("ready", workers=3)
        start = time.monotonic()
        assert wall.forget()
        assert len(set(elastic.digests())) == 1
        seconds = time.monotonic() - start
        for worker in elastic.workers:
            assert worker.wait_for("done")["workers"] == 3, "nobody was given up"
    assert seconds < 30


def sockets_of_now() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd")}


@linux
@pytest.mark.fault("most sockets had no keepalive, and none a limit for what is not acknowledged")
@pytest.mark.parametrize("secure", [False, True])
def test_the_system_watches_every_socket(
    secure: bool, jobs: job_keys.Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of the coordinator's store; but a full buffer does not end a connection for messages."""
    if secure:
        job_keys.turn_on(monkeypatch, jobs.one)
    before, port = sockets_of_now(), gloo.free_port()
    beacon, store = health.Beacon(forgetful.HERE), serve(forgetful.HERE, port)
    wires = [Wire(rank, forgetful.HERE, 10, range(2)) for rank in range(2)]
    addresses, secret = [wire.address for wire in wires], bytes(32)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda wire: wire.connect(addresses, secret, lambda: None), wires))
    calls, answers = Talks(), Talks()
    server, _ = listen(forgetful.HERE)
    answer = handshake.answer(b"", lambda key: secret, lambda *_: b"")
    answers.serve(server, lambda: answer, 5, print)
    calls.call(*server.getsockname(), handshake.call(secret, b"", bytes(8), 0, b""), 5, print)
    with server, connect(forgetful.HERE, port, 5):  # as relays do, and clients of the store
        answers.turn(1)
        messages = {fd for wire in wires for fd in wire.connections.values()}
        count = 0
        for fd in sockets_of_now() - before:
            with contextlib.suppress(OSError), borrowed(fd) as end:
                if end.family == socket.AF_INET6 and end.getpeername()[1] == port:
                    continue  # torch's own client
                limit = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
                assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), end
                assert limit == (0 if fd in messages else 30_000), end
                count += 1
        assert count >= 7 and len(messages) == 2
    for end in (calls, answers, beacon, *wires):
        end.close()
    del store
