"""Elastic runs with what ``laconic keys`` makes, with fixed ports, and with strangers that call."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from laconic.cli import main
from laconic.links import addresses, connect, health
from laconic.links.elastic import relay

from tests.support import gloo, job_keys
from tests.support import strangers as s
from tests.support.elastic_runs import Run, listening_ports
from tests.support.strangers import RAW, Attack, Stranger, Usage


@pytest.fixture
def _all_on(monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs) -> None:
    job_keys.turn_on(monkeypatch, jobs.one)
    for name, value in job_keys.variables(jobs.one, secret=True).items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("_all_on")
def test_a_worker_and_the_coordinator_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = gloo.free_ports(12)
    monkeypatch.setenv(addresses.PORTS, f"{ports[0]}-{ports[-1]}")
    with Run("laconic.local_sgd(2)", count=3) as run:
        killed = run.ready()[0]
        run.restart_coordinator()
        killed.send(signal.SIGKILL)
        run.workers[1].wait_for("view", workers=2)
        run.add()
        run.workers[1].wait_for("view", workers=3)
        used = {port for w in run.workers[1:] for port in listening_ports(w.process.pid)}
        assert len(used) == 9 and used <= set(ports)
        run.check_same(3, killed)


@pytest.mark.usefixtures("_all_on")
def test_a_worker_of_another_job(monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs) -> None:
    """It ends with one line, long before ``wait=`` is over, and the run goes on."""
    with Run("laconic.local_sgd(2)", count=2, wait=600.0) as run:
        run.ready()
        with monkeypatch.context() as patch:
            patch.setenv("LACONIC_SECRET_FILE", str(jobs.other / "secret"))
            other = [run.add()]
            job_keys.turn_on(patch, jobs.other)
            other.append(run.add())
        assert [worker.end() for worker in other] == [1, 1]
        said = [worker.errors.strip().splitlines()[-1] for worker in other]
        assert "this worker has another secret in LACONIC_SECRET_FILE than the first" in said[0]
        assert "has a certificate that this worker does not trust" in said[1]
        run.check_same(2, *other)


def test_the_command_refuses_wrong_files(
    monkeypatch: pytest.MonkeyPatch,
    jobs: job_keys.Jobs,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job_keys.turn_on(monkeypatch, jobs.one, CERT=tmp_path / "none.pem")
    assert main(["coordinator", "--port", str(gloo.free_port())]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"laconic: cannot read {tmp_path}/none.pem (GLOO_DEVICE_TRANSPORT_TCP_")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("encrypted", "count"),
    [
        (False, 60),
        pytest.param(False, 700, marks=pytest.mark.slow),
        pytest.param(True, 700, marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on(
    encrypted: bool, count: int, monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs
) -> None:
    """While strangers call all ports of its workers. No process holds more afterward, each reason
    is in its log once, a worker joins among strangers, and all hold the same model."""
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
    with Run("laconic.local_sgd(2)", count=0, workers=2) as run:
        attacks = []
        for _ in range(2):
            ports = gloo.free_ports(3)
            monkeypatch.setenv(addresses.PORTS, f"{ports[0]}-{ports[-1]}")
            run.add()
            attacks += [Attack(port, contexts) for port in ports]
        monkeypatch.delenv(addresses.PORTS)
        pids = [worker.process.pid for worker in run.ready()]
        visits = 0

        def visit(stranger: Stranger) -> None:
            nonlocal visits
            visits += 1
            if visits % 3 == 1:  # where a view connects: nobody accepts anything before the next
                stranger = stranger._replace(end="reset", certificate=RAW)
            attacks[visits % 6].visit(stranger)

        s.drawn(strategy, count // 2, visit)
        before = [Usage.of(pid) for pid in pids]
        s.drawn(strategy, count, visit)
        for each in attacks:
            each.close()
        for pid, usage in zip(pids, before, strict=True):
            s.nothing_is_left(usage, pid, mebibytes=8)
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
