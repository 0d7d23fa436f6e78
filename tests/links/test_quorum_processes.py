"""Rounds with a quorum between processes: real time decides who takes part."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

import laconic as la

from tests.references.problem import NAMES
from tests.support import gloo, training
from tests.support import quorum_training as quorum
from tests.support.quorum_training import Ran
from tests.support.training import Job

STEPS = (32, 32, 32, 11)
RECIPES: dict[str, la.Recipe] = {
    "local_sgd": la.local_sgd(4, quorum=1),
    "diloco": la.diloco(4, quorum=3, grace=0.005),
    "diloco, steps": la.diloco(4, quorum=2, weigh="steps"),
    "diloco, own pace": la.diloco(6, quorum=2, grace=0.01, pace="own"),
    "diloco, int8": la.diloco(4, quorum=2, codec=la.codecs.Int8(8, stochastic=True)),
    "slowmo": la.slowmo(None, 4, 0.5, quorum=2),
    "streaming_diloco": la.streaming_diloco(6, 3, 0, codec=None, quorum=2),
}


def slowly(rank: int, job: Job, steps: Sequence[int], seconds: Sequence[float]) -> Ran:
    """As `quorum.work`, with this worker's seconds for each step."""

    def pause(_: int) -> None:
        time.sleep(seconds[rank])

    return quorum.work(job, rank, steps[rank], link=gloo.link_of(job.workers), before=pause)


@pytest.mark.parametrize("name", RECIPES)
def test_processes_and_simulation_agree(pool: gloo.Pool, name: str) -> None:
    """For the same arrivals, bit for bit. The fourth worker is three times slower: it misses
    rounds, and the others do not wait for it."""
    job = Job(RECIPES[name], 4, max(STEPS))
    runs = pool.run(slowly, job, STEPS, (0.004, 0.005, 0.006, 0.015), ranks=4)
    closings = runs[0].closings
    assert any(len(c.roster) < 4 for c in closings)
    assert quorum.same(runs, quorum.simulated(job, STEPS, None, closings=closings))


# -- one worker stops for a while ----


@pytest.fixture
def own_pool() -> Iterator[gloo.Pool]:
    """Processes of this test alone."""
    pool = gloo.Pool(4)
    yield pool
    pool.close()


def until_told(rank: int, job: Job, folder: Path) -> tuple[Ran, int]:
    """Train until the file "end" is in ``folder``, and note each step there; also returns how many
    there were."""

    def pause(step: int) -> None:
        time.sleep(0.01)
        (folder / f"{rank}-{step}").touch()

    over = (folder / "end").exists
    ran = quorum.work(job, rank, job.steps, link=gloo.link_of(4), before=pause, until=over)
    return ran, len(ran.trace)


def stop_and_go_on(pid: int, folder: Path) -> None:
    """Stop worker 3 for some 15 rounds of the others; both times wait until they have trained."""

    def steps(rank: int) -> int:
        return len([*folder.glob(f"{rank}-*")])

    def wait_for(rank: int, more: int) -> None:
        until, end = steps(rank) + more, time.monotonic() + 100
        while steps(rank) < until:
            assert time.monotonic() < end, "it does not train"
            time.sleep(0.02)

    try:
        wait_for(0, 40)
        os.kill(pid, signal.SIGSTOP)
        wait_for(0, 60)
        os.kill(pid, signal.SIGCONT)
        wait_for(3, 40)
    finally:
        os.kill(pid, signal.SIGCONT)
        (folder / "end").touch()


def test_a_worker_that_is_stopped_holds_nobody_up(own_pool: gloo.Pool, tmp_path: Path) -> None:
    """A whole process is stopped, its communication thread, too. It takes part again later, with
    what it has, and the simulator repeats all of it."""
    job = Job(la.diloco(4, quorum=3, momentum=0.5), 4, 4000)
    pid = own_pool.processes[3].pid
    assert pid is not None
    with ThreadPoolExecutor(1) as beside:
        stops = beside.submit(stop_and_go_on, pid, tmp_path)
        runs = own_pool.run(until_told, job, tmp_path, ranks=4)
        stops.result()
    closings = runs[0][0].closings
    absent = [3 not in c.roster for c in closings]
    (first, *_) = [i for i in range(len(absent)) if all(absent[i : i + 10])]
    assert len(absent) >= first + 10, "ten rounds without it"
    assert not all(absent[first:]), "and then with it"
    steps = [count for _, count in runs]
    again = quorum.simulated(job, steps, None, closings=closings)
    assert quorum.same([ran for ran, _ in runs], again)


# -- resuming ----


def resume(
    rank: int, job: Job, folder: Path, end: Sequence[int], processes: bool
) -> tuple[list[Any], list[Any]]:
    model, optimizer = training.build(job, rank)
    link = gloo.link_of(job.workers) if processes else None
    sync = la.attach(model, optimizer, job.recipe, link=link)
    saved = torch.load(folder / f"{rank}.pt", weights_only=True)
    for name, part in (("model", model), ("optimizer", optimizer), ("sync", sync)):
        part.load_state_dict(saved[name])
    trace = []
    for t in range(sync.step + 1, end[rank] + 1):
        if processes:
            time.sleep((0.004, 0.004, 0.013)[rank])
        training.step(job, model, optimizer, job.data()[rank][t - 1], t)
        trace.append(training.values(model))
    sync.finish()
    return [*trace, training.values(model)], sync.closings


def save(rank: int, job: Job, folder: Path, at: Sequence[int]) -> int:
    """Train, save where worker 2 is late, and return the number of the last round of worker 0."""
    model, optimizer = training.build(job, rank)
    sync = la.attach(model, optimizer, job.recipe)
    for t in range(1, at[rank] + 1):
        training.step(job, model, optimizer, job.data()[rank][t - 1], t)
    sync.mean(0.0)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "sync": sync}
    torch.save({k: v.state_dict() for k, v in parts.items()}, folder / f"{rank}.pt")
    return len(sync.closings)


@pytest.mark.parametrize("name", ["local_sgd", "diloco", "diloco, own pace", "diloco, int8"])
def test_processes_resume_what_threads_have_saved(
    pool: gloo.Pool, name: str, tmp_path: Path
) -> None:
    """With a late contribution pending. Threads that repeat the same rounds get the same bits."""
    recipe = la.diloco(4, quorum=2) if name == "diloco" else RECIPES[name]
    job = Job(recipe, 3, 40, "nesterov", training.plain_lr)
    end = (40, 38, 16)
    at = (18, 19, 6)
    la.simulate(partial(_save, job, tmp_path, at), workers=3, step_seconds=[1, 1, 3])
    runs = pool.run(resume, job, tmp_path, end, True, ranks=3)
    again = la.simulate(
        lambda rank: resume(rank, job, tmp_path, end, False), workers=3, closings=runs[0][1]
    )
    assert runs[0][1]
    for (one, _), (other, _) in zip(runs, again, strict=True):
        for a, b in zip(one, other, strict=True):
            assert all(np.array_equal(a[k], b[k]) for k in NAMES)


def _save(job: Job, folder: Path, at: Sequence[int], rank: int) -> int:
    return save(rank, job, folder, at)


# -- errors ----


def failing(rank: int, when: int, codec: str | None = None) -> tuple[str, tuple[int, ...]]:
    """Worker ``when`` fails in the middle; what each of the others raises. They can still save
    their state."""
    job = Job(la.local_sgd(4, quorum=3, codec=codec), 3, 100)
    model, optimizer = training.build(job, rank)
    sync = la.attach(model, optimizer, job.recipe, link=gloo.link_of(3))
    start = time.monotonic()
    try:
        with sync:
            for t in range(1, 101):
                if (rank, t) == (when, 6):
                    raise RuntimeError("on purpose")
                training.step(job, model, optimizer, job.data()[rank][t - 1], t)
    except la.LinkError as error:
        assert time.monotonic() - start < gloo.TIMEOUT.total_seconds() / 2, "not its timeout"
        return str(error), error.ranks
    except RuntimeError as error:
        return str(error), ()
    return "nothing", ()


@pytest.mark.parametrize("codec", [None, "int4"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_worker_that_fails_is_named_on_all(
    own_pool: gloo.Pool, which: int, codec: str | None
) -> None:
    answers = own_pool.run(failing, which, codec, ranks=3)
    assert answers[which][0] == "on purpose"
    for rank, (text, ranks) in enumerate(answers):
        assert rank == which or (ranks == (which,) and f"rank {which}" in text), text


class AlarmError(Exception):
    pass


@contextmanager
def alarms(rung: Path) -> Iterator[None]:
    """A signal handler that makes the file ``rung`` and raises."""

    def ring(*_: object) -> NoReturn:
        rung.touch()
        raise AlarmError

    before = signal.signal(signal.SIGALRM, ring)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


def wait_or_set(rank: int, rung: Path) -> None:
    """Set the alarm of worker 1, which then waits in a round for worker 2 as long as it takes."""
    if rank == 1:
        signal.setitimer(signal.ITIMER_REAL, 1.0)
    while rank == 2 and not rung.exists():
        time.sleep(0.01)


def interrupted(rank: int, rung: Path | None, saves: bool) -> tuple[list[float], int]:
    """Worker 2 comes late to a round, and a signal handler of worker 1 raises meanwhile; then it
    ``saves`` its state. The parameters at the end, and how many steps were interrupted."""
    job, count = Job(la.local_sgd(4, quorum=3), 3, 18), 0
    model, optimizer = training.build(job, rank)
    sync = la.attach(model, optimizer, job.recipe, link=gloo.link_of(3))
    with nullcontext() if rung is None else alarms(rung):
        for t in range(1, 19):
            if rung is not None and t == 8:
                wait_or_set(rank, rung)
            try:
                training.step(job, model, optimizer, job.data()[rank][t - 1], t)
            except AlarmError:
                count += 1
                if saves:
                    sync.state_dict()
    sync.finish()
    sync.detach()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist(), count


def test_a_wait_that_is_interrupted_loses_nothing(own_pool: gloo.Pool, tmp_path: Path) -> None:
    """The worker takes the round's result over when its state is saved, or before its next step.
    Only in the latter case, that step's gradients are those of the parameters before the round."""
    whole = own_pool.run(interrupted, None, False, ranks=3)
    saved = own_pool.run(interrupted, tmp_path / "first", True, ranks=3)
    went_on = own_pool.run(interrupted, tmp_path / "second", False, ranks=3)
    assert [count for _, count in whole] == [0, 0, 0]
    assert [count for _, count in saved] == [count for _, count in went_on] == [0, 1, 0]
    assert [x for x, _ in whole] == [x for x, _ in saved]
    assert went_on[0][0] == went_on[1][0] == went_on[2][0]
    assert went_on[0][0] == pytest.approx(whole[0][0], abs=0.05)


def leaving(rank: int, rung: Path) -> tuple[str, tuple[int, ...]]:
    """Worker 2 comes late to a round, and a signal handler of worker 1 ends its training meanwhile;
    what the ranks raise."""
    job = Job(la.local_sgd(4, quorum=3), 3, 100)
    model, optimizer = training.build(job, rank)
    sync = la.attach(model, optimizer, job.recipe, link=gloo.link_of(3))
    try:
        with alarms(rung), sync:
            for t in range(1, 101):
                if t == 8:
                    wait_or_set(rank, rung)
                training.step(job, model, optimizer, job.data()[rank][t - 1], t)
    except la.LinkError as error:
        return str(error), error.ranks
    except AlarmError:
        return "alarm", ()
    return "nothing", ()


def test_a_worker_that_leaves_while_it_waits_is_named(own_pool: gloo.Pool, tmp_path: Path) -> None:
    answers = own_pool.run(leaving, tmp_path / "rung", ranks=3)
    assert answers[1] == ("alarm", ())
    for text, ranks in (answers[0], answers[2]):
        assert ranks == (1,) and "rank 1" in text, text


def too_late(rank: int, raised: Path) -> tuple[str, tuple[int, ...]]:
    """Worker 2 takes longer for a step than the timeout: until another one has ``raised``."""
    job = Job(la.local_sgd(4, quorum=3), 3, 100)
    model, optimizer = training.build(job, rank)
    link = la.links.TorchLink(gloo._groups[3], torch.device("cpu"), timedelta(seconds=3.0))
    sync = la.attach(model, optimizer, job.recipe, link=link)
    try:
        with sync:
            for t in range(1, 9):
                while (rank, t) == (2, 3) and not raised.exists():
                    time.sleep(0.01)
                training.step(job, model, optimizer, job.data()[rank][t - 1], t)
    except la.LinkError as error:
        raised.touch()
        return str(error), error.ranks
    return "nothing", ()


def test_a_quorum_that_is_not_reached_names_who_is_missing(
    own_pool: gloo.Pool, tmp_path: Path
) -> None:
    for text, ranks in own_pool.run(too_late, tmp_path / "raised", ranks=3):
        assert ranks == (2,) and "no quorum in 3 s: ranks [2] have not arrived" in text, text


def bytes_sent(rank: int, codec: la.codecs.Codec | None) -> tuple[int, int, int]:
    job = Job(la.local_sgd(4, quorum=3, codec=codec), 3, 12)
    model, optimizer = training.build(job, rank)
    sync = la.attach(model, optimizer, job.recipe, link=gloo.link_of(3))
    for t in range(1, 13):
        training.step(job, model, optimizer, job.data()[rank][t - 1], t)
    sent = sync.stats().bytes_by_collective["quorum"]
    received = sync.stats().bytes_received
    with sync:
        pass
    return sent, received, sum(p.numel() for p in model.parameters()) * 8


@pytest.mark.parametrize("codec", [None, la.codecs.Int8(8)], ids=["whole", "coded"])
def test_bytes_are_counted(pool: gloo.Pool, codec: la.codecs.Codec | None) -> None:
    """Each worker sends the model and receives it, once a round; rank 0's process, for each other
    worker."""
    answers = pool.run(bytes_sent, codec, ranks=3)
    size = -(-answers[0][2] // 24) * 24
    if codec is not None:
        size = codec.nbytes(-(-answers[0][2] // 8 // 24) * 24)  # multiples of 3 and of 8
    assert [sent for sent, _, _ in answers] == [2 * 3 * size, 3 * size, 3 * size]
