"""Elastic runs with what ``laconic keys`` makes, with fixed ports, and with strangers that call."""

from __future__ import annotations

import signal

import pytest

from laconic.links import addresses, connect, health
from laconic.links.elastic import relay

from tests.support import gloo, job_keys
from tests.support import strangers as s
from tests.support.elastic_runs import Run
from tests.support.strangers import RAW, Attack, Stranger, Usage

LOCAL_SGD = "laconic.local_sgd(2)"


@pytest.mark.parametrize("secure", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_coordinator_is_killed_and_started_again_empty(
    secure: bool, monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs
) -> None:
    """And a worker is lost meanwhile. The workers listen at the given ports only."""
    job_keys.turn_off(monkeypatch)
    if secure:
        job_keys.turn_on(monkeypatch, jobs.one)
        monkeypatch.setenv("LACONIC_SECRET_FILE", str(jobs.one / "secret"))
    ports = gloo.free_ports(12)
    monkeypatch.setenv(addresses.PORTS, f"{ports[0]}-{ports[-1]}")
    with Run(LOCAL_SGD, count=3) as run:
        killed = run.ready()[0]
        run.restart_coordinator()
        killed.send(signal.SIGKILL)
        run.workers[1].wait_for("view", workers=2)
        run.add()
        run.workers[1].wait_for("view", workers=3)
        used = [s.listening(worker.process.pid) for worker in run.workers[1:]]
        assert all({host for host, _ in places} == {"127.0.0.1"} for places in used)
        assert {port for places in used for _, port in places} <= set(ports)
        run.check_same(3, killed)


def test_a_worker_serves_the_coordinators_address_and_another_one_after_it() -> None:
    """Where nobody else does."""
    with Run(LOCAL_SGD, count=2, apart=False) as run:
        here = "this worker serves the coordinator's address"
        (first,) = (worker for worker in run.ready() if here in worker.errors)
        (second,) = (worker for worker in run.workers if worker is not first)
        run.progress(1)
        first.kill()
        second.wait_for_text(here)
        second.wait_for("view", workers=1)
        run.add()
        second.wait_for("view", workers=2)
        run.check_same(2, first)


def test_a_worker_of_another_job(monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs) -> None:
    """It ends with one line, long before ``wait=`` is over, and the run goes on. So does one that
    the others cannot reach."""
    job_keys.turn_on(monkeypatch, jobs.one)
    monkeypatch.setenv("LACONIC_SECRET_FILE", str(jobs.one / "secret"))
    with Run(LOCAL_SGD, count=2, wait=600.0) as run:
        run.ready()
        with monkeypatch.context() as patch:
            patch.setenv(addresses.BIND, "127.0.0.1")
            patch.setenv(addresses.ADDRESS, "127.0.0.77")
            other = [run.add()]
        with monkeypatch.context() as patch:
            patch.setenv("LACONIC_SECRET_FILE", str(jobs.other / "secret"))
            other.append(run.add())
            job_keys.turn_on(patch, jobs.other)
            other.append(run.add())
        said = [worker.errors.splitlines()[-1] for worker in other if worker.end() == 1]
        assert "the run does not take in this worker" in said[0]
        assert "at 127.0.0.77 does not answer" in said[0]
        assert "has another secret in LACONIC_SECRET_FILE than this worker" in said[1]
        assert "do not accept each other's certificates" in said[2]
        run.check_same(2, *other)


@pytest.mark.parametrize(
    ("encrypted", "count"),
    [
        (False, 40),
        pytest.param(False, 700, marks=pytest.mark.slow),
        pytest.param(True, 700, marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on(
    encrypted: bool, count: int, monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs
) -> None:
    """While strangers call all ports of its workers and of its coordinator. No process holds more
    afterward, each reason is in its log once, a worker joins among strangers, and all hold the same
    model. Without TLS, a coordinator leaves strangers connected until they close."""
    job_keys.turn_off(monkeypatch)
    if encrypted:
        job_keys.turn_on(monkeypatch, jobs.one)
    contexts = s.contexts_of(jobs) if encrypted else {}
    who = (RAW, RAW, "one", "none", "expired") if encrypted else (RAW,)
    genuine = [
        s.recorded(bytes(32), purpose, bytes(8), 1)
        for purpose in (health.PURPOSE, relay.PURPOSE, connect.PURPOSE)
    ]
    strategy = s.strangers([*genuine, s.client_hello()], who)
    with Run(LOCAL_SGD, count=0, workers=2) as run:
        attacks = [Attack(run.port, contexts, 400)]
        four = gloo.free_ports(4)  # at once: two ranges by chance may be one
        for ports in (four[:2], four[2:]):
            monkeypatch.setenv(addresses.PORTS, f"{ports[0]}-{ports[-1]}")
            run.add()
            attacks += [Attack(port, contexts) for port in ports]
        monkeypatch.delenv(addresses.PORTS)
        assert run.coordinator is not None
        processes, visits = [*run.ready(), run.coordinator], 0

        def visit(stranger: Stranger) -> None:
            nonlocal visits
            visits += 1
            place = visits % 5
            if place in (2, 4):  # where a view connects: nobody accepts anything before the next
                stranger = stranger._replace(end="reset", certificate=RAW)
            elif place == 0 and not encrypted:
                stranger = stranger._replace(end="close")
            attacks[place].visit(stranger)

        s.drawn(strategy, count, visit)  # what is allocated once is there by then
        before = [Usage.of(each.process.pid) for each in processes]
        s.drawn(strategy, count, visit)
        for each in attacks:
            each.close()
        for process, usage in zip(processes, before, strict=True):
            s.nothing_is_left(usage, process.process.pid, mebibytes=8)
        s.drawn(strategy, count // 2, visit)
        run.add().wait_for("ready")
        run.check_same(3)
        assert [worker.end() for worker in run.workers] == [0] * 3
        for each in attacks:
            each.close()
    for worker in run.workers[:2]:
        lines = worker.errors.replace("WARNING:laconic:", "").splitlines()
        assert "Traceback" not in worker.errors and "Error" not in worker.errors
        refused = [line for line in lines if line.startswith("refused")]
        s.check_lines(refused, "does not speak TLS" if encrypted else "not a hello of laconic")
