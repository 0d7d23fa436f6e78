"""Rounds with a quorum between processes: real time decides who takes part."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

import laconic as la
from laconic.engine.quorum_rounds import pause
from laconic.errors import NotFiniteError
from laconic.links import frames
from laconic.links.polls import BUSY, Standing

from tests.support import gloo, training
from tests.support import quorum_training as quorum
from tests.support.loops import descend
from tests.support.quorum_training import Ran
from tests.support.training import Job

slow = pytest.mark.slow
STEPS = (32, 32, 32, 11)
OWN_PACE = la.diloco(6, quorum=2, grace=0.01, pace="own")
CODED = la.diloco(4, quorum=2, codec=la.codecs.Int8(8))


def slowly(rank: int, job: Job, steps: Sequence[int], seconds: Sequence[float]) -> Ran:
    """As `quorum.work`, with this worker's seconds for each step."""
    own: Any = {"link": gloo.link_of(job.workers), "before": lambda _: time.sleep(seconds[rank])}
    return quorum.work(job, rank, steps[rank], **own)


@pytest.mark.parametrize(
    "recipe",
    [
        quorum.averaged(4, quorum=1),
        OWN_PACE,
        pytest.param(CODED, marks=slow),
        la.streaming_diloco(6, 3, 0, codec=None, quorum=2),
    ],
)
def test_processes_and_simulation_agree(pool: gloo.Pool, recipe: la.Recipe) -> None:
    """For the same arrivals, bit for bit. The fourth worker is three times slower: it misses
    rounds, and the others do not wait for it."""
    job = Job(recipe, 4, max(STEPS))
    runs = pool.run(slowly, job, STEPS, (0.004, 0.005, 0.006, 0.015), ranks=4)
    closings = runs[0].closings
    assert any(len(c.roster) < 4 for c in closings)
    assert quorum.same(runs, quorum.simulated(job, STEPS, None, closings=closings))


# -- one worker pauses for a while ----


def until_told(rank: int, job: Job, folder: Path) -> tuple[Ran, int]:
    """Train until the file "end" is in ``folder``, and note each step there; also returns how many
    there were. Worker 3 stops while the file "pause" is there."""

    def pause(step: int) -> None:
        time.sleep(0.01)
        (folder / str(rank)).write_text(str(step))
        while rank == 3 and (folder / "pause").exists():
            time.sleep(0.01)

    over = (folder / "end").exists
    ran = quorum.work(job, rank, job.steps, link=gloo.link_of(4), before=pause, until=over)
    return ran, len(ran.trace)


def stop_and_go_on(folder: Path) -> None:
    """Stop worker 3 for some 9 rounds of the others; both times wait until they have trained."""

    def wait_for(rank: int, more: int) -> None:
        def steps() -> int:
            path = folder / str(rank)
            return int(path.read_text() or 0) if path.exists() else 0

        until, end = steps() + more, time.monotonic() + 100
        while steps() < until:
            assert time.monotonic() < end, "it does not train"
            time.sleep(0.02)

    try:
        wait_for(0, 10)
        (folder / "pause").touch()
        wait_for(0, 36)
        (folder / "pause").unlink()
        wait_for(3, 12)
    finally:
        (folder / "end").touch()


def test_a_worker_that_pauses_holds_nobody_up(pool: gloo.Pool, tmp_path: Path) -> None:
    """Its training does; its communication thread goes on. It takes part again later, with what it
    has, and the simulator repeats all of it."""
    job = Job(la.diloco(4, quorum=3, momentum=0.5), 4, 4000)
    with ThreadPoolExecutor(1) as beside:
        stops = beside.submit(stop_and_go_on, tmp_path)
        runs = pool.run(until_told, job, tmp_path, ranks=4)
        stops.result()
    closings = runs[0][0].closings
    absent = [3 not in c.roster for c in closings]
    (first, *_) = [i for i in range(len(absent)) if all(absent[i : i + 6])]
    assert len(absent) >= first + 6, "six rounds without it"
    assert not all(absent[first:]), "and then with it"
    steps = [count for _, count in runs]
    again = quorum.simulated(job, steps, None, closings=closings)
    assert quorum.same([ran for ran, _ in runs], again)


def late(rank: int) -> list[Any]:
    """The last rank comes later than the link's time-out, and within the grace."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    link = gloo.link_of(3, timedelta(seconds=2))
    with la.attach(model, optimizer, quorum.averaged(2, quorum=2, grace=60.0), link=link) as sync:
        for t in range(4):
            time.sleep(3.0 * (rank == 2 and t == 3))
            descend(optimizer, model(torch.full((1, 2), rank + 1.0)).sum())
        return [closing.roster for closing in sync.closings]


def test_a_grace_may_be_longer_than_the_timeout(pool: gloo.Pool) -> None:
    assert pool.run(late, ranks=3)[0] == [(0, 1, 2)] * 2


# -- resuming ----


def resume(
    rank: int, job: Job, folder: Path, end: Sequence[int], processes: bool
) -> tuple[list[Any], list[Any]]:
    model, optimizer = training.build(job, rank)
    link = gloo.link_of(job.workers) if processes else None
    sync = la.attach(model, optimizer, job.recipe, link=link)
    la.load(folder, model, optimizer)
    trace, data = [], job.data()[rank]
    for t in range(sync.step + 1, end[rank] + 1):
        if processes:
            time.sleep((0.004, 0.004, 0.013)[rank])
        training.step(job, model, optimizer, data[t - 1], t)
        trace.append(training.values(model))
    sync.finish()
    return [*trace, training.values(model)], sync.closings


@pytest.mark.parametrize("recipe", [CODED, pytest.param(OWN_PACE, marks=slow)])
def test_processes_resume_what_threads_have_saved(
    pool: gloo.Pool, recipe: la.Recipe, tmp_path: Path
) -> None:
    """With a late contribution pending. Threads that repeat the same rounds get the same bits."""
    job = Job(recipe, 3, 40, "nesterov")
    end, at = (40, 38, 16), (18, 19, 6)

    def save(rank: int) -> None:
        model, optimizer = training.build(job, rank)
        la.attach(model, optimizer, job.recipe)
        for t, batch in enumerate(job.data()[rank][: at[rank]], 1):
            training.step(job, model, optimizer, batch, t)
        la.save(tmp_path, model, optimizer)

    la.simulate(save, workers=3, step_seconds=[1, 1, 3])
    runs = pool.run(resume, job, tmp_path, end, True, ranks=3)
    again = la.simulate(
        lambda rank: resume(rank, job, tmp_path, end, False), workers=3, closings=runs[0][1]
    )
    assert runs[0][1]
    for (one, _), (other, _) in zip(runs, again, strict=True):
        assert all(np.array_equal(a[k], b[k]) for a, b in zip(one, other, strict=True) for k in a)


# -- errors ----


class AlarmError(Exception):
    """What a signal handler of a user raises."""


def train(
    rank: int, steps: int, seconds: float, codec: Any, before: Callable[[int, Any], object]
) -> tuple[Any, la.Synchronizer]:
    """Rounds of three workers of which all must come. ``before(step, sync)``: before each step."""
    job = Job(quorum.averaged(4, quorum=3, codec=codec), 3, steps)
    model, optimizer = training.build(job, rank)
    limit, data = timedelta(seconds=seconds or 60.0), job.data()[rank]
    link = la.links.TorchLink(gloo._groups[3], torch.device("cpu"), limit)
    with la.attach(model, optimizer, job.recipe, link=link) as sync:
        for t in range(1, steps + 1):
            before(t, sync)
            try:
                training.step(job, model, optimizer, data[t - 1], t)
            except AlarmError:
                if seconds:
                    raise
                before(-t, sync)
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), sync


def alarmed(rank: int, at: int, rung: Path) -> Callable[[int], None]:
    """Before step ``at``, worker 2 is late: a signal handler of worker 1 raises while that one
    waits for it in a round."""

    def ring(*_: object) -> NoReturn:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        rung.touch()
        raise AlarmError

    def before(t: int) -> None:
        if t == at and rank == 1:
            signal.signal(signal.SIGALRM, ring)
            signal.setitimer(signal.ITIMER_REAL, 1.0)
        while t == at and rank == 2 and not rung.exists():
            time.sleep(0.01)

    return before


def ending(rank: int, how: str, codec: str | None, path: Path) -> tuple[str, tuple[int, ...]]:
    """What each rank raises where one fails, leaves while it waits, or is too late."""
    alarm = alarmed(rank, 8, path) if how == "1 leaves" else None

    def before(t: int, sync: Any) -> None:
        if f"{rank} fails" == how and t == 6:
            raise RuntimeError("on purpose")
        while how == "2 is late" and (rank, t) == (2, 3) and not path.exists():
            time.sleep(0.01)
        if alarm is not None:
            alarm(t)

    try:
        train(rank, 100, 10.0 if how == "2 is late" else 60.0, codec, before)
    except la.LinkError as error:
        path.touch()
        return str(error), error.ranks
    except (RuntimeError, AlarmError) as error:
        return type(error).__name__, ()
    return "nothing", ()


@pytest.mark.parametrize(
    "how", ["0 fails", "1 leaves", "1 fails", pytest.param("2 is late", marks=slow)]
)
def test_a_worker_that_is_lost_is_named_on_all(pool: gloo.Pool, how: str, tmp_path: Path) -> None:
    """Long before the timeout, unless it is only late: then, no quorum is reached."""
    codec = "int4" if how == "1 fails" else None
    answers = pool.run(ending, how, codec, tmp_path / "raised", ranks=3, timeout=50)
    which = int(how[0])
    for rank, (text, ranks) in enumerate(answers):
        if rank == which and how != "2 is late":
            assert text == ("AlarmError" if how == "1 leaves" else "RuntimeError")
        else:
            assert ranks == (which,) and str(which) in text, text
        if how == "2 is late":
            assert "no quorum in 10 s: ranks [2] have not arrived" in text


def not_finite(rank: int, saved: Path) -> float:
    """Worker 1 sends NaN while worker 0 computes. How long it then takes to return its state."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    link = gloo.link_of(2, timedelta(seconds=8))
    sync = la.attach(model, optimizer, la.diloco(4, quorum=1, codec="int8"), link=link)
    with pytest.raises(NotFiniteError, match=r"ranks \[1\] of its link had NaN"):
        for t in range(4):
            while (rank, t) == (0, 3) and not saved.exists():
                time.sleep(0.01)
            descend(optimizer, model(torch.full((1, 2), (1.0, math.inf)[rank])).sum())
    time.sleep(0.5)  # it polls more often than that
    start = time.monotonic()
    sync.state_dict()
    saved.touch()
    return time.monotonic() - start


def test_a_worker_that_has_failed_waits_for_no_poll(pool: gloo.Pool, tmp_path: Path) -> None:
    assert pool.run(not_finite, tmp_path / "saved", ranks=2)[1] < 5


def test_polls_are_few_where_rounds_are_far_apart() -> None:
    """Eight workers send less than 2% of 1 Mbit/s, and hold up short periods by 2% at most."""
    size = Standing(BUSY, 0, 0.0, 0, 0.0, (0.1,) * 8).row().nbytes
    assert 7 * (frames.HEADER_BYTES + size + frames.CHECK_BYTES) / pause(600.0) < 2500
    assert all(pause(seconds) <= seconds / 50 for seconds in (0.25, 1.0, 50.0))


def until_an_error(rank: int, folder: Path) -> tuple[int, ...]:
    """Train; whom the error blames."""

    def before(t: int, sync: Any) -> None:
        time.sleep(0.01)
        (folder / f"step {t} of {rank}").touch()

    try:
        train(rank, 10_000, 8.0, None, before)
    except la.LinkError as error:
        (folder / "raised").touch()
        return error.ranks
    return ()


def stop(pid: int, folder: Path) -> None:
    """Stop this process, which is worker 2, until another one has raised an error."""
    try:
        for name, signal_ in (("step 6 of 2", signal.SIGSTOP), ("raised", signal.SIGCONT)):
            end = time.monotonic() + 60
            while not (folder / name).exists() and time.monotonic() < end:
                time.sleep(0.02)
            os.kill(pid, signal_)
    finally:
        os.kill(pid, signal.SIGCONT)


@slow
def test_a_process_that_is_stopped_is_named_after_the_timeout(
    pool: gloo.Pool, tmp_path: Path
) -> None:
    """Its communication thread, too, is stopped: so the others wait for it."""
    pid = pool.processes[2].pid
    assert pid is not None
    with ThreadPoolExecutor(1) as beside:
        stopped = beside.submit(stop, pid, tmp_path)
        found = pool.run(until_an_error, tmp_path, ranks=3, timeout=100)
        stopped.result()
    assert found == [(2,)] * 3


def interrupted(rank: int, rung: Path | None, saves: bool) -> tuple[list[float], int]:
    """A wait of worker 1 is interrupted; then it ``saves`` its state. The parameters at the end,
    and how many steps were interrupted."""
    alarm, count = None if rung is None else alarmed(rank, 8, rung), 0

    def before(t: int, sync: Any) -> None:
        nonlocal count
        if t < 0:
            count += 1
            if saves:
                sync.state_dict()
        elif alarm is not None:
            alarm(t)

    params, _ = train(rank, 18, 0.0, None, before)
    return params.tolist(), count


def test_a_wait_that_is_interrupted_loses_nothing(pool: gloo.Pool, tmp_path: Path) -> None:
    """The worker takes the round's result over when its state is saved, or before its next step.
    Only in the latter case, that step's gradients are those of the parameters before the round."""
    whole = pool.run(interrupted, None, False, ranks=3)
    saved = pool.run(interrupted, tmp_path / "first", True, ranks=3)
    went_on = pool.run(interrupted, tmp_path / "second", False, ranks=3)
    assert [count for _, count in saved] == [count for _, count in went_on] == [0, 1, 0]
    assert [x for x, _ in whole] == [x for x, _ in saved]
    assert went_on[0][0] == went_on[1][0] == went_on[2][0]
    assert went_on[0][0] == pytest.approx(whole[0][0], abs=0.05)


def bytes_sent(rank: int, codec: la.codecs.Codec) -> tuple[int, int]:
    params, sync = train(rank, 12, 60.0, codec, lambda t, sync: None)
    sent = sync.stats().bytes_by_collective
    return sent["all_to_all"] + sent["all_gather"], params.numel()


def test_bytes_are_counted(pool: gloo.Pool) -> None:
    """Each worker sends the others their slices of the code, and its own slice of the result, once
    a round. Polls are not counted."""
    codec = la.codecs.Int8(8)
    answers = pool.run(bytes_sent, codec, ranks=3)
    size = codec.nbytes(-(-answers[0][1] // 24) * 24)  # multiples of 3 and of 8
    assert [sent for sent, _ in answers] == [3 * 4 * size // 3] * 3
