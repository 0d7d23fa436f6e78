"""Elastic runs over processes: survivors go on with the same bits, whatever happens to a worker."""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest
import torch

import laconic
from laconic.links.elastic.registry import serve

from tests.support import gloo
from tests.support.elastic_runs import MANY, Run, Worker

RECIPES = [
    "laconic.ddp()",
    "laconic.ddp(codec='int4')",
    "laconic.local_sgd(4, delay=2, codec='int8')",
    "laconic.post_local_sgd(60, 4)",
    "laconic.slowmo(laconic.local_sgd(3), period=6)",
    "laconic.diloco(8, merge='eager', delay=3)",
    "laconic.streaming_diloco(8)",
    "laconic.sparse_loco(6)",
    "laconic.sgp(delay=1)",
    "laconic.noloco(4)",
    "laconic.auto()",
]
"""One for each mechanism. The others run in the simulator (test_traces), and all of them over
processes in ``python -m benchmarks.chaos``."""


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_killed_worker_and_its_replacement(recipe: str) -> None:
    with Run(recipe, count=3, steps=MANY) as run:
        replacement = run.add(hold=True)
        for worker in run.workers[:3]:
            worker.wait_for("ready")
        killed = run.workers[1]
        killed.send(signal.SIGKILL)
        run.workers[0].wait_for("view", workers=2)
        replacement.go()
        ready = replacement.wait_for("ready")
        assert 0 < ready["step"] < MANY, "it goes on where the others are"
        run.workers[0].wait_for("view", workers=3)
        digests = run.digests(killed)
    assert len(digests) == 3 and len(set(digests)) == 1


@pytest.mark.fault("while a newcomer compiled its first step, all others waited for it")
@pytest.mark.parametrize("recipe", ["laconic.ddp()", "laconic.local_sgd(4)"])
def test_a_newcomer_whose_first_step_is_slow(recipe: str) -> None:
    with Run(recipe, count=2, steps=MANY, slow=3, clip=True) as run:
        run.workers[0].wait_for("ready")
        run.add()
        run.workers[0].wait_for("view", workers=3)
        digests = run.digests()
    assert len(digests) == 3 and len(set(digests)) == 1


@pytest.mark.parametrize(
    "recipe",
    [
        "laconic.ddp()",
        "laconic.local_sgd(4, codec='int8')",
        "laconic.local_sgd(4, delay=2, codec='int8')",
    ],
)
def test_workers_that_drift_apart_are_named(recipe: str) -> None:
    """After one was killed and another one has joined: all that are left have seen it."""
    with Run(recipe, count=3, steps=MANY) as run:
        for worker in run.workers:
            worker.wait_for("ready")
        run.add()
        run.workers[1].wait_for("view", workers=4)
        run.workers[0].send(signal.SIGKILL)
        run.workers[1].wait_for("view", workers=3)
        run.spoil(run.workers[1])
        run.end_soon(run.workers[0])
        done = [w.wait_for("done") for w in run.workers[1:]]
        assert len({event["digest"] for event in done}) == 1
        assert all(event["drifted"] for event in done)
        texts = [w.errors for w in run.workers[1:] if w.end() == 0]
    assert len(texts) == 3 and sum("have drifted apart: at step " in t for t in texts) == 1


def test_a_worker_that_hangs_is_left_behind() -> None:
    with Run("laconic.local_sgd(2)", count=3, steps=MANY, fresh=True) as run:
        for worker in run.workers:
            worker.wait_for("ready")
        hung = run.workers[2]
        hung.send(signal.SIGSTOP)
        run.workers[0].wait_for("view", workers=2)
        digests = run.digests(hung)
        assert len(set(digests)) == 1
        hung.send(signal.SIGCONT)
        assert hung.end() == 1
        assert "the other workers go on without this one" in hung.errors


def test_a_worker_leaves_on_sigterm() -> None:
    with Run("laconic.local_sgd(2)", count=3, steps=MANY) as run:
        for worker in run.workers:
            worker.wait_for("ready")
        run.workers[0].send(signal.SIGTERM)
        assert run.workers[0].end() == 128 + signal.SIGTERM
        run.workers[1].wait_for("view", workers=2)
        digests = run.digests(run.workers[0])
    assert len(set(digests)) == 1


@pytest.mark.fault("SIGTERM to a whole process group: no orderly end, or a forked child stayed")
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_sigterm_reaches_the_processes_of_a_data_loader(start: str) -> None:
    with Run("laconic.local_sgd(2)", 2, MANY, fresh=True, samples=5000) as run:
        worker = run.workers[1]
        for founder in run.workers:  # one that came with them would be no change of the view
            founder.wait_for("ready")
        loads = run.add(loader=start)
        loads.wait_for("loads")
        worker.wait_for("view", workers=3)
        os.killpg(loads.process.pid, signal.SIGTERM)
        assert loads.end() == 128 + signal.SIGTERM
        worker.wait_for("view", workers=2)


@pytest.mark.fault("a process that was interrupted while it waited ended with a thread in torch")
def test_a_worker_that_is_interrupted_ends_its_threads() -> None:
    with Run("laconic.ddp()", 2, MANY, fresh=True, min_workers=2, wait=200.0) as run:
        for worker in run.workers:
            worker.wait_for("ready")
        run.workers[0].send(signal.SIGKILL)
        run.workers[1].wait_for_nothing(2.0)
        run.workers[1].send(signal.SIGINT)
        run.workers[1].wait_for("end", threads=[])


@pytest.mark.fault("finish() of a worker that had just joined raised")
def test_a_newcomer_that_finishes_at_once() -> None:
    with Run("laconic.local_sgd(4)", count=2, steps=MANY) as run:
        run.workers[0].wait_for("ready")
        run.steps = 0
        run.add().wait_for("ready")
        digests = run.digests()
    assert len(digests) == 3 and len(set(digests)) == 1


@pytest.mark.fault("attach after detach found none of three LACONIC_PORTS free")
def test_attached_again_under_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    with Run("laconic.ddp()", 0, MANY) as run:
        first = gloo.free_port()
        monkeypatch.setenv("LACONIC_PORTS", f"{first}-{first + 2}")
        for job in ("one", "two"):
            model = torch.nn.Linear(2, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            elastic = laconic.Elastic(run.address, workers=1, min_workers=1, job=job, wait=20.0)
            before = signal.getsignal(signal.SIGTERM)
            sync = laconic.attach(model, optimizer, laconic.ddp(), elastic=elastic)
            signal.signal(signal.SIGTERM, before)
            sync.detach()


def test_the_coordinator_is_killed_and_started_again_empty() -> None:
    with Run("laconic.local_sgd(2)", count=3, steps=MANY) as run:
        for worker in run.workers:
            worker.wait_for("ready")
        run.store = None
        time.sleep(1.0)  # training goes on
        run.store = serve("127.0.0.1", run.port)
        killed = run.workers[0]
        killed.send(signal.SIGKILL)
        run.workers[1].wait_for("view", workers=2)
        run.add().wait_for("ready")
        digests = run.digests(killed)
    assert len(digests) == 3 and len(set(digests)) == 1


def test_too_few_workers_wait_for_others() -> None:
    with Run("laconic.local_sgd(2)", count=3, steps=MANY, min_workers=3) as run:
        for worker in run.workers:
            worker.wait_for("ready")
        killed = run.workers[0]
        killed.send(signal.SIGKILL)
        run.workers[1].wait_for_nothing(2.0)
        run.add()
        digests = run.digests(killed)
    assert len(digests) == 3 and len(set(digests)) == 1


def test_too_few_workers_end_with_one_line() -> None:
    with Run("laconic.local_sgd(2)", 0, MANY, workers=2, min_workers=2, wait=3.0) as run:
        for worker in [run.add(hold=True) for _ in range(2)]:
            worker.wait_for("held")
        for worker in run.workers:  # both within the time that they wait for each other
            worker.go()
        for worker in run.workers:
            worker.wait_for("ready")
        run.workers[0].send(signal.SIGKILL)
        assert run.workers[1].end() == 1
        assert "1 of at least 2 workers are left" in run.workers[1].errors


def test_no_coordinator() -> None:
    worker = Worker(1, "laconic.local_sgd(2)", 10, "127.0.0.1:9", wait=1.0)
    assert worker.end() == 1
    assert "no coordinator answers at 127.0.0.1:9: start one by" in worker.errors


def test_another_program_under_the_same_name() -> None:
    with Run("laconic.local_sgd(2)", count=2, steps=MANY) as run:
        run.workers[0].wait_for("ready")
        other = Worker(9, "laconic.local_sgd(3)", 10, run.address)
        assert other.end() == 1
        assert "the job 'default' at 127.0.0.1" in other.errors
        assert "has another recipe" in other.errors


def test_fewer_workers_than_needed_at_the_start() -> None:
    with Run("laconic.local_sgd(2)", 0, 10, workers=2, wait=2.0) as run:
        run.add()
        assert run.workers[0].end() == 1
        assert "of 2 workers have come" in run.workers[0].errors


def test_state_that_cannot_be_read_keeps_newcomers_out_only() -> None:
    with Run("laconic.local_sgd(2)", count=2, steps=MANY, fails_after=1) as run:
        for worker in run.workers:
            worker.wait_for("ready")
        newcomer = run.add()
        assert newcomer.end() == 1
        assert "the run does not take in this worker: the worker that sends its" in newcomer.errors
        digests = run.digests(newcomer)
        assert len(digests) == 2 and len(set(digests)) == 1
        for worker in run.workers[:2]:
            assert worker.end() == 0
        assert "RuntimeError: no state any more" in "".join(w.errors for w in run.workers[:2])


def test_a_run_that_has_finished_and_lives_takes_nobody_in() -> None:
    with Run("laconic.local_sgd(2)", count=2, steps=20, linger=30.0) as run:
        assert len(set(run.digests())) == 1
        newcomer = run.add(wait=2.0)
        assert newcomer.end() == 1
        assert "it takes no steps: it has finished, or waits for others" in newcomer.errors


def test_another_recipe_once_the_run_has_ended() -> None:
    with Run("laconic.local_sgd(2)", count=2, steps=20) as run:
        for worker in run.workers:
            assert worker.end() == 0
        run.recipe = "laconic.local_sgd(4)"
        again = [run.add() for _ in range(2)]
        assert len({worker.wait_for("done")["digest"] for worker in again}) == 1


def test_a_coordinator_that_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        worker = Worker(1, "laconic.local_sgd(2)", 10, address, wait=1.0, fresh=True)
        assert worker.end() == 1, "and is not aborted"
    assert f"the coordinator at {address} does not answer" in worker.errors
