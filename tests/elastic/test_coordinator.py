"""A coordinator and its workers: what a worker hears where there is none, or where one of both has
no TLS, and what strangers hear. The workers are in this process."""

from __future__ import annotations

import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest
import torch

import laconic
from laconic.links import health, talks
from laconic.links.calls import CallPosition
from laconic.links.elastic import client, coordinator, leases
from laconic.links.elastic.signs import Signs
from laconic.links.elastic.view import NONCE_BITS, View

from tests.elastic.test_leases import member
from tests.links.test_secured import Between
from tests.support import gloo, job_keys
from tests.support.elastic_runs import SECONDS, Coordinator
from tests.support.strangers import anybody

Start = Callable[[], Coordinator]


@pytest.fixture(autouse=True)
def sigterm() -> Iterator[None]:
    """As in a program that handles no signals."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a coordinator with the settings of now."""
    job_keys.turn_off(monkeypatch)
    monkeypatch.setattr(talks, "_reasons", set())
    with ExitStack() as ending:

        def start() -> Coordinator:
            made = Coordinator(gloo.free_port())
            ending.callback(made.kill)
            return made

        yield start


def attached(port: int, wait: float = 60.0, **options: Any) -> laconic.Synchronizer:
    """A run of one worker."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given: Any = {"workers": 1, "min_workers": 1, "wait": wait, **options}
    elastic = laconic.Elastic(f"127.0.0.1:{port}", **given)
    return laconic.attach(model, optimizer, laconic.ddp(), elastic=elastic)


def members_of(sync: laconic.Synchronizer) -> Any:
    """Whom a worker looks after."""
    link: Any = sync.driver.session.elastic
    return link.members


def refused(port: int, **options: Any) -> str:
    """What a worker hears, in one line."""
    with pytest.raises(laconic.LinkError) as error:
        attached(port, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.fault(
    "attach after detach found none of its LACONIC_PORTS free, and SIGTERM ended the second run "
    "at once"
)
def test_attached_again_under_another_job(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    ports, port = gloo.free_ports(2), start().port
    monkeypatch.setenv("LACONIC_PORTS", f"{ports[0]}-{ports[-1]}")
    for job in ("one", "two"):
        sync = attached(port, job=job)
        assert len(sync.view.workers) == 1 and sync.attached
        handler: Any = signal.getsignal(signal.SIGTERM)
        assert handler.__self__.needed
        sync.detach()


@pytest.mark.fault("a worker called again later than the coordinator waits for it to come back")
def test_a_worker_whose_connection_ends_calls_again_at_once(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause = 3.0
    monkeypatch.setattr("laconic.links.elastic.members.RETRY_SECONDS", pause)
    sync = attached(start().port)
    client = members_of(sync).client
    time.sleep(pause)
    before = client._stream
    before._connection.shutdown(socket.SHUT_RDWR)
    end = time.monotonic() + pause - 0.5
    while client._stream in (None, before) and time.monotonic() < end:
        time.sleep(0.05)
    assert client._stream not in (None, before)
    sync.detach()


@pytest.mark.fault("a worker that was cut off right after long rounds kept its long lease")
def test_the_coordinator_hears_of_another_lease_at_once(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = attached(start().port)
    members = members_of(sync)
    time.sleep(1.0)  # the first beats
    monkeypatch.setattr("laconic.links.elastic.members.BEAT", 60.0)
    time.sleep(1.0)
    said = list[float]()
    monkeypatch.setattr(members.client, "beat", lambda beat: said.append(beat.lease))
    begins, moments = members.signs.begins, iter([100.0, 104.0, *range(105, 113)])
    monkeypatch.setattr(members.signs, "begins", lambda _: begins(next(moments)))
    for _ in range(10):
        members.round_begins()
        time.sleep(0.05)
    assert said == [8.0, 5.0]
    sync.detach()


@pytest.mark.fault("one that was silent for a moment was reported when nobody asked it any more")
def test_one_that_was_silent_is_asked_until_it_answers(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = attached(start().port)
    members = members_of(sync)
    other, answers = member("b"), iter([health.SILENT] * 3)

    def ask_all(
        beacons: object, secret: object, heard: Callable[[int, health.Answer], None]
    ) -> None:
        heard(0, next(answers, health.Answer("computing")))

    monkeypatch.setattr(health, "ask_all", ask_all)
    monkeypatch.setattr(members, "_others", lambda: [other])
    monkeypatch.setattr(members, "moved", lambda id: 0)
    members.waiting_since = end = time.monotonic() + 10.0
    while members.signs.silent_since(other.id) is None and time.monotonic() < end:
        time.sleep(0.05)
    assert members.signs.silent_since(other.id) is not None
    members.waiting_since = None
    time.sleep(3.0)
    assert members.signs.silent_since(other.id) is None
    monkeypatch.undo()
    sync.detach()


def test_no_coordinator_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, which says what to start."""
    monkeypatch.setattr("laconic.links.elastic.client.CALL_SECONDS", 0.5)
    with socket.socket() as silent:  # nobody listens, and no worker can serve the address
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        said = refused(port, job="other", wait=0.5)
    assert f"answers at 127.0.0.1:{port}: start one by `laconic coordinator" in said
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert "does not answer" in refused(server.getsockname()[1], wait=0.5)


def test_too_few_workers_come(start: Start) -> None:
    said = refused(start().port, workers=3, wait=2.0)
    assert "1 of 3 workers have come to the coordinator" in said and "start more workers" in said


def test_a_worker_ends_before_it_has_read_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its system resets the connection then, which counts as closed."""
    job_keys.turn_off(monkeypatch)
    port, need = gloo.free_port(), leases.Need(1, None, None)
    with closing(coordinator.Coordinator("127.0.0.1", port)) as served:
        worker = client.Client("127.0.0.1", port, "job", member("a"), "a model", need)
        worker.connect(None)
        worker.beat(leases.Beat(lease=60.0))
        stream = worker._stream
        assert stream is not None and select.select([stream._connection], [], [], SECONDS)[0]
        (lease,) = served._jobs["job"].leases.values()
        stream.close()
        until = time.monotonic() + SECONDS
        while lease.closed is None and time.monotonic() < until:
            time.sleep(0.01)
        assert lease.closed is not None


# -- with TLS ----


def test_a_worker_without_tls(
    start: Start, monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs
) -> None:
    """Both sides say it at once; and a worker the same where only the coordinator has none."""
    port = start().port
    job_keys.turn_on(monkeypatch, jobs.one)
    said = refused(port, wait=600.0)
    assert f"127.0.0.1:{port} does not use TLS as this worker does: set the" in said
    coordinator = start()
    job_keys.turn_off(monkeypatch)
    said = refused(coordinator.port, wait=600.0)
    assert f"127.0.0.1:{coordinator.port} uses TLS, and this worker does not: set the" in said
    coordinator.wait_for_text("refused a caller at 127.0.0.1: it does not speak TLS")


def test_strangers_read_nothing_and_delay_nobody(
    start: Start, monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs
) -> None:
    """Not even the greeting, without a certificate; and however many they are."""
    job_keys.turn_on(monkeypatch, jobs.one)
    port = start().port
    with ExitStack() as ending:
        raw = ending.enter_context(socket.create_connection(("127.0.0.1", port), 60))
        with suppress(OSError), anybody().wrap_socket(raw) as connection:  # an alert, or the end
            connection.sendall(b"hello")
            assert not connection.recv(1)
        for _ in range(300):
            ending.enter_context(socket.create_connection(("127.0.0.1", port)))
        attached(port).detach()


def test_what_travels_is_encrypted(
    start: Start, monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs
) -> None:
    """A man in the middle reads neither the salt nor who takes part."""
    for secure in (False, True):
        if secure:
            job_keys.turn_on(monkeypatch, jobs.one)
        between = Between(start().port)
        attached(between.port, job="a name to read").detach()
        between.close()
        assert len(between.passed) > 1000
        assert [w in between.passed for w in (b"a name", b"salt", b"127.0.0.1")] == [not secure] * 3


@pytest.mark.fault("a coordinator with TLS ended when it wrote to a worker that it had sent away")
def test_those_that_wait_begin_again_where_a_run_comes_back(
    monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs
) -> None:
    """And the coordinator goes on."""
    job_keys.turn_on(monkeypatch, jobs.one)
    place = "127.0.0.1", gloo.free_port()
    server = coordinator.Coordinator(*place)
    at, need = (*place, "job"), leases.Need(2, None, 1)
    waits, returns, last = [client.Client(*at, member(name), "it", need) for name in "abc"]
    waits.connect(None)
    returns._salt = "00" * 32
    returns.connect(View(1 << NONCE_BITS, (member("b"),)))
    while "again" not in waits.receive(5.0):
        continue
    time.sleep(0.5)
    last.connect(None)
    assert "view" in last.receive(5.0)
    for each in (waits, returns, last, server):
        each.close()


def test_whom_a_worker_reports() -> None:
    """One to which no connection can be made, for long enough; and nothing twice."""
    signs = Signs(limit=0.1)
    id, asked = member("a").id, ([member("a")], None, CallPosition())
    news = [health.GONE, health.GONE, health.Answer("here"), health.Answer("here")]
    heard = [signs.hear(id, time.monotonic(), answer) for answer in news]
    assert heard == [True, False, True, False]
    signs.connected([id])
    assert not signs.reports(*asked)
    time.sleep(0.3)
    assert signs.reports(*asked)[id][0] == leases.SILENT
    signs.connected([])
    assert not signs.reports(*asked)


def test_a_flood_from_one_address_drops_nobody_elses_calls() -> None:
    callers = {"one": [1], "flood": [2, 3, 4]}
    assert {talks.superfluous(callers) for _ in range(200)} == {2, 3, 4}


# -- processes that end ----

ENDS = """
import atexit, sys, threading
atexit.register(lambda: print([t.name for t in threading.enumerate()]))  # after laconic's own
import torch, laconic
model = torch.nn.Linear(20, 5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
elastic = laconic.Elastic(sys.argv[1], workers=2, min_workers=2)
sync = laconic.attach(model, optimizer, laconic.ddp(), elastic=elastic)
print("ready", flush=True)
while True:
    model(torch.randn(16, 20)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.fault("a process that was interrupted while it waited ended with a thread in torch")
def test_a_worker_that_is_interrupted_ends_its_threads(start: Start) -> None:
    """Else it is aborted, and the exit code is that of SIGABRT."""
    command = [sys.executable, "-c", ENDS, f"127.0.0.1:{start().port}"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    workers = [subprocess.Popen(command, **pipes) for _ in range(2)]
    try:
        for worker in workers:
            assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
        workers[0].kill()
        assert workers[1].stderr is not None
        while "training waits" not in (line := workers[1].stderr.readline()):
            assert line, "it has ended"
        workers[1].send_signal(signal.SIGINT)
        threads, said = workers[1].communicate(timeout=SECONDS)
        assert said.endswith("KeyboardInterrupt\n") and workers[1].returncode == -signal.SIGINT
        assert threads and "laconic-comm" not in threads
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
