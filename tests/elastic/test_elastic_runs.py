"""Elastic runs over processes: survivors go on with the same bits, whatever happens to a worker."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import laconic

from tests.support import gloo
from tests.support.elastic_runs import MANY, SECONDS, Coordinator, Run
from tests.support.elastic_worker import train

slow = pytest.mark.slow
KILL, TERM = signal.SIGKILL, signal.SIGTERM


def recipe(text: str, *marks: pytest.MarkDecorator) -> Any:
    return pytest.param(f"laconic.{text}", marks=marks)


@pytest.mark.parametrize(
    "recipe",
    [
        recipe("ddp(codec='int4')"),
        recipe("streaming_diloco(8)"),
        recipe("ddp()", slow),
        recipe("local_sgd(4, delay=2, codec='int8')", slow),
        recipe("post_local_sgd(60, 4)", slow),
        recipe("slowmo(laconic.local_sgd(3), period=6)", slow),
        recipe("diloco(8, merge='eager', delay=3)", slow),
        recipe("sparse_loco(6)", slow),
        recipe("sgp(delay=1)", slow),
        recipe("noloco(4)", slow),
        recipe("auto()", slow),
    ],
)
def test_a_killed_worker_and_its_replacement(recipe: str) -> None:
    """One recipe for each mechanism."""
    with Run(recipe, count=3) as run:
        killed = run.ready()[1]
        killed.send(KILL)
        run.workers[0].wait_for("view", workers=2)
        ready = run.add().wait_for("ready")
        assert 0 < ready["step"] < MANY, "it goes on where the others are"
        run.workers[0].wait_for("view", workers=3)
        run.check_same(3, killed)


@pytest.mark.parametrize(
    ("recipe", "number"),
    [
        ("laconic.local_sgd(4, delay=2, codec='int8')", KILL),
        ("laconic.sgp(delay=1)", TERM),
        pytest.param("laconic.ddp()", KILL, marks=slow),
        pytest.param("laconic.sgp()", KILL, marks=slow),
        pytest.param("laconic.ddp(codec='int4')", TERM, marks=slow),
    ],
)
def test_a_trace_repeats_a_run_bit_for_bit(
    recipe: str, number: signal.Signals, tmp_path: Path
) -> None:
    """After SIGTERM, another worker has taken over what only the one that left held."""
    options = {"samples": 5000, "clip": True}
    with Run(recipe, 3, trace=str(tmp_path), **options) as run:
        gone = run.ready()[1]
        gone.send(number)
        run.workers[0].wait_for("view", workers=2)
        run.add()
        ids = {w.wait_for("ready")["id"]: w for w in run.workers if w is not gone}
        run.end_soon(gone)
        done = {id: worker.wait_for("done") for id, worker in ids.items()}
    (steps,) = {event["step"] for event in done.values()}
    trace = laconic.Trace(tmp_path)
    assert trace.workers == 4

    def repeat(number: int) -> dict[str, Any]:
        events: list[dict[str, Any]] = []
        elastic = laconic.Elastic("simulated")
        train(lambda event, **more: events.append(more), recipe, steps, elastic, options, number, 0)
        return events[-1]

    repeated = laconic.simulate(repeat, faults=trace)
    for id, result in zip(trace.ids, repeated, strict=True):
        assert (result and result["digest"]) == (done[id]["digest"] if id in done else None)
    assert len({event["digest"] for event in done.values()}) == 1


@pytest.mark.fault("while a newcomer compiled its first step, all others waited for it")
@pytest.mark.parametrize("recipe", [recipe("ddp()"), recipe("local_sgd(4)", slow)])
def test_a_newcomer_whose_first_step_is_slow(recipe: str) -> None:
    with Run(recipe, count=2, slow=3, clip=True) as run:
        run.workers[0].wait_for("ready")
        run.add()
        run.workers[0].wait_for("view", workers=3)
        run.check_same(3)


def test_workers_that_drift_apart_are_named() -> None:
    """After one has joined, and another one was killed: all that are left have seen it."""
    with Run("laconic.ddp()", count=3) as run:
        run.ready()
        run.add()
        run.workers[1].wait_for("view", workers=4)
        run.workers[0].send(KILL)
        run.workers[1].wait_for("view", workers=3)
        run.spoil(run.workers[1])
        run.end_soon(run.workers[0])
        done = [w.wait_for("done") for w in run.workers[1:]]
        assert all(event["drifted"] for event in done)
        texts = [w.errors for w in run.workers[1:] if w.end() == 0]
    assert len(texts) == 3 and sum("have drifted apart: at step " in t for t in texts) == 1


def test_a_worker_that_hangs_is_left_behind() -> None:
    with Run("laconic.local_sgd(2)", count=3) as run:
        hung = run.ready()[2]
        hung.send(signal.SIGSTOP)
        run.workers[0].wait_for("view", workers=2)
        run.check_same(2, hung)
        hung.send(signal.SIGCONT)
        assert hung.end() == 1
        assert "the other workers go on without this one" in hung.errors


def test_a_worker_leaves_on_sigterm() -> None:
    with Run("laconic.local_sgd(2)", count=3) as run:
        leaves = run.ready()[0]
        leaves.send(TERM)
        assert leaves.end() == 128 + TERM
        run.workers[1].wait_for("view", workers=2)
        run.check_same(2, leaves)


@pytest.mark.fault("SIGTERM to a whole process group: no orderly end, or a forked child stayed")
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=slow)])
def test_sigterm_reaches_the_processes_of_a_data_loader(start: str) -> None:
    with Run("laconic.local_sgd(2)", count=2, samples=5000) as run:
        worker = run.ready()[1]
        loads = run.add(loader=start)
        loads.wait_for("stepped")  # before it takes part, SIGTERM ends it at once
        worker.wait_for("view", workers=3)
        assert loads.process.pid is not None
        os.killpg(loads.process.pid, TERM)
        assert loads.end() == 128 + TERM
        worker.wait_for("view", workers=2)


@pytest.mark.fault("finish() of a worker that had just joined raised")
def test_a_newcomer_that_finishes_at_once() -> None:
    with Run("laconic.local_sgd(4)", count=2) as run:
        run.workers[0].wait_for("ready")
        run.steps = 0
        run.add().wait_for("ready")
        run.check_same(3)


def test_the_coordinator_is_killed_and_started_again_empty() -> None:
    with Run("laconic.local_sgd(2)", count=3) as run:
        killed = run.ready()[0]
        run.restart_coordinator()
        killed.send(KILL)
        run.workers[1].wait_for("view", workers=2)
        run.add().wait_for("ready")
        run.check_same(3, killed)


def test_too_few_workers_wait_for_others() -> None:
    with Run("laconic.local_sgd(2)", count=3, min_workers=3) as run:
        killed = run.ready()[0]
        killed.send(KILL)
        run.workers[1].wait_for_text("2 of at least 3 workers are left: training waits")
        run.add()
        run.check_same(3, killed)


def test_too_few_workers_end_with_one_line() -> None:
    """A run under way, and one that does not begin."""
    with Run("laconic.local_sgd(2)", 0, workers=2, min_workers=2, wait=4.0) as run:
        for _ in range(3):
            run.add(hold=True).wait_for("held")
        for worker in run.workers[:2]:  # both within the time that they wait for each other
            worker.go()
        for worker in run.workers[:2]:
            worker.wait_for("ready")
        run.workers[0].send(KILL)
        assert run.workers[1].end() == 1
        assert "1 of at least 2 workers are left. Nothing has changed" in run.workers[1].errors
        run.workers[2].go()
        assert run.workers[2].end() == 1
        assert "1 of 2 workers have come to the coordinator" in run.workers[2].errors


def test_another_program_under_the_same_name() -> None:
    """It is refused while the run lives, and not once that has ended."""
    with Run("laconic.local_sgd(2)", count=2) as run:
        run.workers[0].wait_for("ready")
        run.recipe = "laconic.local_sgd(4)"
        other = run.add()
        assert other.end() == 1
        assert "the job 'default' at 127.0.0.1" in other.errors
        assert "has another recipe" in other.errors
        run.check_same(2, other)
        assert [worker.end() for worker in run.workers[:2]] == [0, 0]
        run.steps = 20
        again = [run.add(), run.add()]
        assert len({worker.wait_for("done")["digest"] for worker in again}) == 1


def test_state_that_cannot_be_read_keeps_newcomers_out_only() -> None:
    with Run("laconic.local_sgd(2)", count=2, fails_after=1) as run:
        run.ready()
        newcomer = run.add()
        assert newcomer.end() == 1
        assert "the run does not take in this worker: the worker that sends its" in newcomer.errors
        run.check_same(2, newcomer)
        assert [worker.end() for worker in run.workers[:2]] == [0, 0]
        assert "RuntimeError: no state any more" in "".join(w.errors for w in run.workers[:2])


def test_a_run_that_has_finished_and_lives_takes_nobody_in() -> None:
    with Run("laconic.local_sgd(2)", count=2, steps=20, linger=SECONDS) as run:
        run.check_same(2)
        newcomer = run.add(wait=2.0)
        assert newcomer.end() == 1
        assert "it takes no steps: it has finished, or waits for others" in newcomer.errors


# -- in this process ----


def attached(address: str, **options: Any) -> laconic.Synchronizer:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elastic = laconic.Elastic(address, workers=1, min_workers=1, **options)
    before = signal.getsignal(TERM)
    try:
        return laconic.attach(model, optimizer, laconic.ddp(), elastic=elastic)
    finally:
        signal.signal(TERM, before)


@pytest.mark.fault("attach after detach found none of three LACONIC_PORTS free")
def test_attached_again_under_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = Coordinator(port := gloo.free_port())
    ports = gloo.free_ports(3)
    monkeypatch.setenv("LACONIC_PORTS", f"{ports[0]}-{ports[-1]}")
    for job in ("one", "two"):
        attached(f"127.0.0.1:{port}", job=job, wait=60.0).detach()
    coordinator.kill()


def test_no_coordinator_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, which says what to start."""
    monkeypatch.setattr("laconic.links.elastic.registry.CALL_SECONDS", 0.5)
    address = f"127.0.0.1:{gloo.free_port()}"
    for job in ("default", "other"):
        with pytest.raises(laconic.LinkError, match=f"answers at {address}: start one by") as error:
            attached(address, job=job, wait=0.5)
        assert "\n" not in str(error.value)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(laconic.LinkError, match=address):
            attached(address, wait=0.5)


ENDS = """
import atexit, sys, threading
atexit.register(lambda: print([t.name for t in threading.enumerate()]))  # after laconic's own
import torch, laconic
model = torch.nn.Linear(20, 5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
elastic = laconic.Elastic(sys.argv[1], workers=2, min_workers=2, wait=float(sys.argv[2]))
sync = laconic.attach(model, optimizer, laconic.ddp(), elastic=elastic)
print("ready", flush=True)
while True:
    model(torch.randn(16, 20)).square().mean().backward()
    optimizer.step()
"""


def program(address: str, wait: float) -> subprocess.Popen[str]:
    """A process that was not forked: Python stops its threads when it ends."""
    command = [sys.executable, "-c", ENDS, address, str(wait)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@slow
@pytest.mark.fault("a process that was interrupted while it waited ended with a thread in torch")
def test_a_worker_that_is_interrupted_ends_its_threads() -> None:
    """Else it is aborted, and the exit code is that of SIGABRT."""
    coordinator = Coordinator(port := gloo.free_port())
    workers = [program(f"127.0.0.1:{port}", SECONDS) for _ in range(2)]
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
        coordinator.kill()


@slow
def test_a_worker_whose_coordinator_never_answers_is_not_aborted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        worker = program(address, 1.0)
        said = worker.communicate(timeout=SECONDS)[1]
    assert worker.returncode == 1 and f"the coordinator at {address} does not answer" in said
