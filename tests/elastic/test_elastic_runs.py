"""Elastic runs over processes: survivors go on with the same bits, whatever happens to a worker."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

import laconic
from laconic.engine import elastic_runs
from laconic.links.elastic.signs import SHORTEST

from tests.support.elastic_runs import MANY, SECONDS, Run, train

slow = pytest.mark.slow
KILL, TERM, STOP, CONT = signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, signal.SIGCONT


def late(text: str) -> Any:
    return pytest.param(text, marks=slow)


@pytest.mark.parametrize(
    "recipe",
    [
        *("streaming_diloco(8)", late("ddp(codec='int4')"), late("post_local_sgd(60, 4)")),
        *(late("local_sgd(4, delay=2, codec='int8')"), late("diloco(8, delay=3)")),
        *(late("slowmo(laconic.local_sgd(3), period=6)"), late("auto()")),
        late("sgp(delay=1)"),
    ],
)
def test_a_killed_worker_and_its_replacement(recipe: str) -> None:
    """One recipe for each mechanism."""
    with Run(f"laconic.{recipe}", count=3) as run:
        killed = run.ready()[1]
        killed.send(KILL)
        run.workers[0].wait_for("view", workers=2)
        ready = run.add().wait_for("ready")
        assert 0 < ready["step"] < MANY, "it goes on where the others are"
        run.workers[0].wait_for("view", workers=3)
        run.check_same(3, killed)


@pytest.mark.parametrize(
    "recipe",
    [
        *("sgp(delay=1)", late("d_psgd()"), late("local_sgd(4, delay=2, codec='int8')")),
        late("ddp(codec='int4')"),
    ],
)
def test_a_trace_repeats_a_run_bit_for_bit(recipe: str, tmp_path: Path) -> None:
    """Also where a worker has left on SIGTERM."""
    options = {"samples": 5000, "clip": True}
    with Run(f"laconic.{recipe}", 3, trace=str(tmp_path), **options) as run:
        gone = run.ready()[1]
        gone.send(TERM if "ddp" in recipe else KILL)
        run.workers[0].wait_for("view", workers=2)
        run.add()
        ids = [w.wait_for("ready")["id"] for w in run.workers if w is not gone]
        events = run.done(gone)
    done = dict(zip(ids, events, strict=True))
    trace = laconic.Trace(tmp_path)

    def repeat(number: int) -> str:
        said: list[dict[str, Any]] = []
        elastic = laconic.Elastic("simulated")
        at = f"laconic.{recipe}", events[0]["step"], elastic, options, number, 0
        train(lambda event, **more: said.append(more), *at)
        return str(said[-1]["digest"])

    for id, digest in zip(trace.ids, laconic.simulate(repeat, faults=trace), strict=True):
        assert digest == (done[id]["digest"] if id in done else None)
    assert len({(event["digest"], event["step"]) for event in events}) == 1


@pytest.mark.fault("while a newcomer compiled its first step, all others waited for it")
@pytest.mark.parametrize("recipe", ["ddp()", late("local_sgd(4)")])
def test_a_newcomer_whose_first_step_is_slow(recipe: str) -> None:
    with Run(f"laconic.{recipe}", count=2, clip=True) as run:
        run.ready()
        paused = run.ask("pause", 3)
        run.add().wait_for("ready")
        run.progress(1)
        paused.unlink()
        run.workers[0].wait_for("view", workers=3)
        run.check_same(3)


def test_workers_that_drift_apart_are_named() -> None:
    """After one was killed, and another one has joined: all that are left have seen it."""
    with Run("laconic.ddp()", count=2) as run:
        run.ready()[0].send(KILL)
        run.workers[1].wait_for("view", workers=1)
        run.add()
        run.workers[1].wait_for("view", workers=2)
        run.ask("spoil", 2)
        assert all(event["drifted"] for event in run.done(run.workers[0]))
        texts = [w.errors for w in run.workers[1:] if w.end() == 0]
    assert len(texts) == 2 and sum("have drifted apart: at step " in t for t in texts) == 1


def test_a_worker_that_hangs_is_left_behind() -> None:
    """Or one that answers, and does not come to a round. Both end with an error, if they can."""
    with Run("laconic.local_sgd(2)", count=4, timeout=6) as run:
        *stay, absent, hung = run.ready()
        paused = run.ask("pause", 3)
        hung.send(STOP)
        for worker in stay:
            worker.wait_for("view", workers=2)
        run.check_same(2, hung, absent)
        paused.unlink()
        hung.send(CONT)
        for worker in (hung, absent):
            assert worker.end() == 1
            assert "the other workers go on without this one" in worker.errors


@pytest.mark.fault("a newcomer that hung, and was left behind, waited for its donor forever")
def test_a_newcomer_that_hangs_before_its_first_round() -> None:
    """In a view already, it waits for its donor, which has nothing more to send."""
    with Run("laconic.sgp(delay=1)", 2) as run:
        first, _ = run.ready()
        newcomer = run.add(stops=True)
        first.wait_for_text("has not answered for 5 s")
        newcomer.send(CONT)
        assert newcomer.end() == 1
        assert "start it again, and it joins them" in newcomer.errors
        run.check_same(2, newcomer)


@pytest.mark.fault("SIGTERM to a whole process group: no orderly end, or a forked child stayed")
@pytest.mark.parametrize("start", ["fork", late("spawn")])
def test_a_worker_leaves_on_sigterm(start: str) -> None:
    """Alone, or with the processes of a DataLoader."""
    with Run("laconic.local_sgd(2)", count=3, samples=5000) as run:
        leaves, worker, _ = run.ready()
        leaves.send(TERM)
        assert leaves.end() == 128 + TERM
        worker.wait_for("view", workers=2)
        loads = run.add(loader=start)
        run.progress(4, 1)  # before it takes part, SIGTERM ends it at once
        worker.wait_for("view", workers=3)
        assert loads.process.pid is not None
        os.killpg(loads.process.pid, TERM)
        assert loads.end() == 128 + TERM
        run.progress(2)
        run.check_same(2, leaves, loads)


@pytest.mark.fault("the last of several workers that got SIGTERM waited 10 s for the others")
def test_all_workers_leave_on_sigterm() -> None:
    with Run("laconic.local_sgd(2)", count=2) as run:
        workers, begun = run.ready(), time.monotonic()
        for worker in workers:
            worker.send(TERM)
        assert [worker.end() for worker in workers] == [128 + TERM] * 2
        assert time.monotonic() - begun < 2 * SHORTEST


@pytest.mark.fault("finish() of a worker that had just joined raised")
def test_a_newcomer_that_finishes_at_once() -> None:
    """And one that comes once a run has finished, and lives: nobody takes it in."""
    with Run("laconic.local_sgd(4)", count=2, linger=SECONDS) as run:
        run.ready()
        run.steps = 0
        run.add().wait_for("ready")
        run.check_same(3)
        newcomer = run.add(wait=2.0)
        assert newcomer.end() == 1
        assert "it takes no steps: it has finished, or waits for others" in newcomer.errors


def test_more_than_half_must_be_left() -> None:
    """Else they wait for others."""
    with Run("laconic.local_sgd(2)", count=3, min_workers=None) as run:
        first, second, third = run.ready()
        first.send(KILL)
        third.wait_for("view", workers=2)
        second.send(KILL)
        third.wait_for_text("1 of at least 2 workers are left: training waits")
        run.add()
        run.check_same(2, first, second)


def test_too_few_workers_end_with_one_line() -> None:
    with Run("laconic.local_sgd(2)", 0, workers=2, min_workers=2, wait=4.0) as run:
        workers = [run.add(hold=True) for _ in range(2)]
        for worker in workers:
            worker.wait_for("held")
        for worker in workers:  # both within the time that they wait for each other
            worker.pipe.send("go")
        run.ready()[0].send(KILL)
        assert workers[1].end() == 1
        assert "1 of at least 2 workers are left. Nothing has changed" in workers[1].errors


@pytest.mark.fault("a newcomer with another optimizer ended in its first step, with a KeyError")
def test_what_workers_have_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer, too."""
    told = list[str]()

    def start(at: object, job: str, about: dict[str, str], *_: object) -> NoReturn:
        told.append(about["optimizer"])
        raise laconic.LinkError("seen")

    monkeypatch.setattr(elastic_runs, "start", start)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    groups = [{"params": m.parameters()} for m in model]
    for optimizer in (
        torch.optim.SGD(groups, lr=0.1),
        [torch.optim.SGD(model[0].parameters()), torch.optim.AdamW(model[1].parameters())],
    ):
        with pytest.raises(laconic.LinkError, match="seen"):
            laconic.attach(model, optimizer, "ddp()", elastic=laconic.Elastic("127.0.0.1:1"))
    assert told == [f"{names} (parameters by group: 2, 2)" for names in ("SGD", "SGD, AdamW")]


def test_another_program_under_the_same_name() -> None:
    """It is refused while the run lives, and not once that has ended. So is a newcomer where the
    state of the others cannot be read."""
    with Run("laconic.local_sgd(2)", count=2, fails_after=1) as run:
        members = run.ready().copy()
        newcomer = run.add()
        run.recipe = "laconic.local_sgd(4)"
        other = run.add()
        assert newcomer.end() == other.end() == 1
        assert "the run does not take in this worker: the worker that sends its" in newcomer.errors
        assert "the job 'default' at 127.0.0.1" in other.errors
        assert "has another recipe" in other.errors
        run.check_same(2, newcomer, other)
        assert [worker.end() for worker in members] == [0, 0]
        assert "RuntimeError: no state any more" in "".join(w.errors for w in members)
        run.steps = 20
        again = [run.add(), run.add()]
        assert len({worker.wait_for("done")["digest"] for worker in again}) == 1
