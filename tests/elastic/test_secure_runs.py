"""Elastic runs with everything that ``laconic keys`` makes, and ports that are fixed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from laconic.cli import main
from laconic.links import addresses
from laconic.links.addresses import Address
from laconic.links.elastic.registry import Registry, serve

from tests.support import gloo, job_keys
from tests.support.elastic_runs import MANY, Run


@pytest.fixture(autouse=True)
def _all_on(monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs) -> None:
    """Workers inherit this process's variables."""
    job_keys.turn_on(monkeypatch, jobs.one)
    for name, value in job_keys.variables(jobs.one, secret=True).items():
        monkeypatch.setenv(name, value)


def test_a_worker_and_the_coordinator_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = gloo.free_ports(12)
    monkeypatch.setenv(addresses.PORTS, f"{ports[0]}-{ports[-1]}")
    with Run("laconic.local_sgd(2)", count=3, steps=MANY) as run:
        for worker in run.workers:
            worker.wait_for("ready")
        run.store = None
        time.sleep(1.0)  # training goes on
        run.store = serve("127.0.0.1", run.port)
        killed = run.workers[0]
        killed.send(signal.SIGKILL)
        run.workers[1].wait_for("view", workers=2)
        run.add()
        run.workers[1].wait_for("view", workers=3)
        registry = Registry(run.address, "default")
        view = registry.latest()
        registry.close(time.monotonic() + 5)
        digests = run.digests(killed)
    assert len(digests) == 3 and len(set(digests)) == 1
    assert view is not None and len(view.members) == 3
    used = {
        Address.parse(text).port for m in view.members for text in (m.mesh, m.service, m.beacon)
    }
    assert len(used) == 9 and used <= set(ports)


@pytest.mark.parametrize("wrong", ["certificate", "secret"])
def test_a_worker_of_another_job(
    monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs, wrong: str
) -> None:
    """It ends with one line, long before ``wait=`` is over, and the run goes on."""
    with Run("laconic.local_sgd(2)", count=2, steps=MANY, wait=600.0) as run:
        for worker in run.workers:
            worker.wait_for("ready")
        if wrong == "certificate":
            job_keys.turn_on(monkeypatch, jobs.other)
        else:
            monkeypatch.setenv("LACONIC_SECRET_FILE", str(jobs.other / "secret"))
        stranger = run.add()
        assert stranger.end() == 1
        said = {
            "certificate": "has a certificate that this worker does not trust",
            "secret": "this worker has another secret in LACONIC_SECRET_FILE than the first",
        }[wrong]
        assert said in stranger.errors.strip().splitlines()[-1]
        digests = run.digests(stranger)
    assert len(digests) == 2 and len(set(digests)) == 1


def test_the_command_says_that_it_uses_tls() -> None:
    port = gloo.free_port()
    run = "import sys; from laconic.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", run, "coordinator", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said == f"coordinator at 127.0.0.1:{port}, with TLS; end it with Ctrl-C\n"
        process.terminate()
        assert process.wait(10) == 0


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
