"""Rounds that close with a quorum, in virtual time: references, sums, identities, and resuming."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import laconic as la
from laconic.errors import NotFiniteError

from tests.references.problem import NAMES
from tests.support import quorum_training as quorum
from tests.support import training
from tests.support.loops import descend, flat
from tests.support.quorum_training import ROWS
from tests.support.training import Job

SECONDS = {"one is slow": (1, 1, 1, 3), "all differ": (1, 1.7, 2.1, 0.9)}
STEPS = (18, 18, 19, 8)
SLOW = SECONDS["one is slow"]


@pytest.mark.parametrize(("place", "row"), [*enumerate(ROWS)])
@pytest.mark.parametrize("times", SECONDS)
def test_a_quorum_equals_its_reference(place: int, row: str, times: str) -> None:
    """Who takes part in which round, and every bit of arithmetic to rounding."""
    recipe, wanted = ROWS[row]
    turn = place + (times == "all differ")
    job = Job(recipe, 4, max(STEPS), ("nesterov", "adamw")[turn // 2 % 2])
    expected = quorum.expected(job, wanted, STEPS, SECONDS[times])
    runs = quorum.simulated(job, STEPS, SECONDS[times])
    assert [(c.kind, c.roster) for c in runs[0].closings] == expected.rosters
    assert quorum.gap(runs, expected) < 1e-10


# -- every step is delivered once ----


def changes(
    job: Job, rank: int, steps: int, at: int = 0
) -> tuple[Tensor, list[Tensor], Tensor, Tensor, Any]:
    """x0, what each step of this worker's own optimizer did to x, the consensus after step ``at``,
    x after finish(), and the rounds."""
    model, optimizer = training.build(job, rank)
    own, before, found = list[Tensor](), list[Tensor](), torch.zeros(0)
    optimizer.register_step_pre_hook(lambda *_: before.append(flat(model)))
    optimizer.register_step_post_hook(lambda *_: own.append(flat(model) - before[-1]))
    sync = la.attach(model, optimizer, job.recipe)
    start = flat(model)
    for t in range(1, steps + 1):
        training.step(job, model, optimizer, job.data()[rank][t - 1], t)
        if t == at:
            x = flat(model)
            with sync.consensus():
                found = flat(model)
            assert torch.equal(flat(model), x)
            assert sync.mean(float(rank)) == (job.workers - 1) / 2
    closings = sync.closings
    sync.finish()
    return start, own, found, flat(model), closings


DELIVERED: dict[str, tuple[la.Recipe, tuple[int, ...]]] = {
    "local_sgd": (quorum.averaged(4, quorum=3), (9, 10, 8, 3)),
    "local_sgd, first come": (quorum.averaged(4, quorum=1), (0, 0, 0, 0)),
    "local_sgd, own pace": (quorum.averaged(6, quorum=2, pace="own"), (0, 0, 0, 0)),
    "fragments": (
        la.streaming_diloco(6, 3, 0, codec=None, quorum=2, lr=1.0, momentum=0.0),
        (0, 0, 0, 0),
    ),
}


@pytest.mark.parametrize("name", DELIVERED)
def test_every_step_is_delivered_once(name: str) -> None:
    """With averages alone, the common model is x0 and one n-th of every step's change, whatever
    round it came in. So is the consensus, of the steps so far, also where workers come to it after
    different steps: it holds up nobody, and changes nothing."""
    recipe, at = DELIVERED[name]
    job = Job(recipe, 4, max(STEPS), "sgd", training.constant_lr)
    runs = la.simulate(lambda r: changes(job, r, STEPS[r], at[r]), workers=4, step_seconds=SLOW)

    def wanted(counts: tuple[int, ...]) -> Tensor:
        done = [sum(run[1][:count]) for run, count in zip(runs, counts, strict=True)]
        return runs[0][0] + sum(done) / 4

    for _, _, found, final, _ in runs:
        assert float((final - wanted(STEPS)).abs().max()) < 1e-12
        assert not any(at) or float((found - wanted(at)).abs().max()) < 1e-12
    assert len(runs[0][4]) >= 3


# -- identities ----


def with_grace(quorum: int | None = None) -> la.Recipe:
    return la.diloco(4, quorum=quorum, grace=3.0) if quorum else la.diloco(4)


PLAIN: list[Callable[..., la.Recipe]] = [
    partial(quorum.averaged, 4),
    with_grace,
    partial(la.diloco, 4, outer=quorum.adam),
    partial(la.streaming_diloco, 6, 3, 0, codec=None),
]
DTYPES = torch.float64, torch.float32, torch.bfloat16


@pytest.mark.parametrize("place", range(2 * len(PLAIN)))
def test_a_quorum_of_all_is_the_plain_recipe(place: int) -> None:
    """Bit for bit, whatever the times: x, the optimizer's state, buffers, and what finish() leaves.
    Every worker takes the outer step."""
    recipe = PLAIN[place // 2]
    plain = tuple(replace(r, exchange=r.exchange.replicated()) for r in recipe())
    dtype, workers = DTYPES[place % 3], (4, 3, 1)[place % 4 // 2 + (place == 4)]
    times = (1, 3, 2, 5)[:workers]
    one = la.simulate(partial(train, plain, dtype), workers=workers)
    other = la.simulate(partial(train, recipe(quorum=workers), dtype), workers, step_seconds=times)
    for a, b in zip(one, other, strict=True):
        assert all(map(torch.equal, a, b))


def train(recipe: la.Recipe, dtype: torch.dtype, rank: int) -> list[Tensor]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    sync = la.attach(model, optimizer, recipe)
    found = []
    for t in range(9):
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(10 * t + rank)).to(dtype)
        descend(optimizer, model(x).square().mean())
        found += [t.clone() for t in model.state_dict().values()]
        found += [optimizer.state[p].get("momentum_buffer") for p in model.parameters()]
    sync.finish()
    found += [t.clone() for t in model.state_dict().values()]
    return [torch.zeros(0) if t is None else t.clone() for t in found]


# -- buffers, errors ----


def test_a_change_that_is_not_finite_ends_the_run() -> None:
    def train(rank: int) -> None:
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        la.attach(model, optimizer, la.diloco(2, quorum=1, codec="int8"))
        with pytest.raises(NotFiniteError, match=r"ranks \[1\] of its link had NaN"):
            for t in range(9):
                bad = math.inf if (rank, t) == (1, 4) else 1.0 + rank
                model(torch.full((1, 3), bad)).sum().backward()
                optimizer.step()

    la.simulate(train, workers=2)


def test_buffers() -> None:
    """They are averaged over those that arrive, and by finish() over all, as they are: adding to a
    variance what others have changed could make it negative."""

    def train(rank: int, steps: tuple[int, ...]) -> tuple[list[Tensor], float, float, list[Any]]:
        model = nn.Sequential(nn.Linear(2, 64), nn.BatchNorm1d(64, momentum=1.0))
        norm: Any = model[1]
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        sync = la.attach(model, optimizer, quorum.averaged(2, quorum=2))
        means = []
        for t in range(steps[rank]):
            torch.manual_seed(7 * t + rank)
            model(torch.randn(4, 2) * 10.0 ** (rank - t)).sum().backward()
            means.append(norm.running_mean.clone())
            optimizer.step()
            means.append(norm.running_mean.clone())
        own = float(norm.running_var[0])
        sync.finish()
        return means, own, float(norm.running_var[0]), sync.closings

    def go(*steps: int) -> list[Any]:
        return la.simulate(partial(train, steps=steps), workers=3, step_seconds=[1, 1, 9])

    (a, _, _, closings), (b, *_), (c, *_) = go(4, 4, 4)
    assert [each.roster for each in closings] == [(0, 1), (0, 1), (2,), (2,)]
    for at in (2, 6):
        assert torch.equal(a[at + 1], b[at + 1])
        torch.testing.assert_close(a[at + 1], (a[at] + b[at]) / 2, rtol=0, atol=1e-6)
    assert torch.equal(c[2], c[3]), "a round of its own"
    late = go(8, 8, 1)
    mean = sum(own for _, own, _, _ in late) / 3
    assert all(found == pytest.approx(mean, rel=1e-5) and found > 0 for _, _, found, _ in late)


def test_recorded_rounds_are_repeated_whatever_the_times() -> None:
    job = Job(ROWS["diloco, own pace"][0], 4, max(STEPS))
    first = quorum.simulated(job, STEPS, SECONDS["all differ"])
    again = quorum.simulated(job, STEPS, None, closings=first[0].closings)
    assert quorum.same(first, again)
    assert not quorum.same(first, quorum.simulated(job, STEPS, None))
    assert [la.Closing.of(c.as_json()) for c in first[0].closings] == first[0].closings
    record = [la.Closing(0, 1, (0, 1, 2), (0, 0, 0)), la.Closing(0, 2, (0, 3), (0, 0))]
    with pytest.raises(la.LinkError, match="closings"):
        quorum.simulated(Job(quorum.averaged(4, quorum=1), 3, 8), (8,) * 3, None, closings=record)


def test_switching_and_several_synchronizers() -> None:
    """From plain rounds to a quorum, to another one, and back, while one worker is slow; and all
    of it again with another synchronizer, bit for bit."""
    job = Job(la.local_sgd(4), 3, 40)

    def train(rank: int) -> list[Tensor]:
        model, optimizer = training.build(job, rank)
        sync = la.attach(model, optimizer, job.recipe)
        found, late = [], rank == 2
        for t in range(1, 27 if late else 37):
            training.step(job, model, optimizer, job.data()[rank][t - 1], t)
            if t == 6:
                sync.switch(quorum.averaged(4, quorum=2))
            if t == (9 if late else 14):
                sync.switch(la.diloco(4, quorum=2))
                assert sync.mean(float(rank)) == 1.0
            if t == (12 if late else 22):
                sync.switch(la.local_sgd(5))
                sync.driver.session.step = 0
            if t in (6, 12 if late else 22):
                found.append(flat(model))
        sync.finish()
        sync.detach()
        return [*found, flat(model)]

    runs = la.simulate(lambda rank: train(rank) + train(rank), workers=3, step_seconds=[1, 1, 3])
    for run in runs:
        assert len(run) == 6 and all(map(torch.equal, run, runs[0]))
        assert all(map(torch.equal, run[:3], run[3:]))


ATTACHED: list[tuple[la.Recipe, dict[str, Any], str]] = [
    (la.diloco(4, quorum=5), {}, "at most the number of workers, 4, not 5"),
    ((*la.local_sgd(2), *quorum.averaged(4, quorum=2)), {}, "waits for all workers"),
    ((*la.ddp(), *quorum.averaged(4, quorum=2)), {}, "waits for all workers"),
    (la.diloco(4, quorum=2), {"nprocs_per_node": 2}, "workers of one rank"),
    ((la.Round(la.every(4), la.updates.Average(), la.exchanges.QuorumMean(2)),), {}, "an anchor"),
    ((replace(quorum.NAIVE[0], delay=1),), {}, "without delay"),
    ((replace(quorum.NAIVE[0], optimizer_state="average"),), {}, "keeps or resets"),
    ((*la.diloco(4, quorum=2), *la.diloco(4, quorum=3)), {}, "have the same rules"),
]


@pytest.mark.parametrize(("recipe", "options", "message"), ATTACHED)
def test_wrong_uses(recipe: la.Recipe, options: dict[str, Any], message: str) -> None:
    def attach(rank: int) -> None:
        model = nn.Linear(2, 2)
        with pytest.raises(ValueError, match=message):
            la.attach(model, torch.optim.SGD(model.parameters(), 0.1), recipe, **options)

    la.simulate(attach, workers=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"faults": la.Faults(2)}, "parameters of the start"),
        ({"workers": 2, "link": lambda link: la.links.Throttled(link, "1gbit")}, "without link="),
        ({"workers": 2, "step_seconds": [1.0]}, "one for each"),
        ({"workers": 2, "step_seconds": [1.0, 0.0]}, "step_seconds must be a finite number"),
        ({"workers": 2}, "parameters of the start"),
    ],
)
def test_links_without_quorum_wrong_times_and_later_parameters(
    options: dict[str, Any], message: str
) -> None:
    def train(rank: int) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model[0].parameters(), 0.1)
        la.attach(model, optimizer, quorum.averaged(2, quorum=1))
        optimizer.add_param_group({"params": [*model[1].parameters()]})
        model(torch.ones(1, 2) + rank).sum().backward()
        optimizer.step()

    with pytest.raises(ValueError, match=message):
        la.simulate(train, **options)


def test_a_signal_between_a_round_and_its_record_is_an_error() -> None:
    """Its handler raises when the round is submitted, and nothing waits for it yet."""

    def train(rank: int) -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        comm = la.attach(model, optimizer, la.diloco(1, quorum=1)).driver.session.comm
        submit = comm.submit

        def ring(*arguments: Any) -> NoReturn:
            submit(*arguments)
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(comm, "submit", ring)
            with pytest.raises(KeyboardInterrupt):
                descend(optimizer, model(torch.ones(1, 2)).sum())
        with pytest.raises(la.LinkError, match="the rounds after step 1 were interrupted"):
            descend(optimizer, model(torch.ones(1, 2)).sum())

    la.simulate(train, workers=1)


# -- resuming ----


def stopped(
    row: str, folder: Path, at: tuple[int, ...], resume: bool, save: bool, rank: int
) -> tuple[list[Any], list[Any]]:
    """Train; ``save`` after ``at[rank]`` steps, where this worker waits for nobody; or resume."""
    job = Job(ROWS[row][0], 4, max(STEPS), "adamw")
    model, optimizer = training.build(job, rank)
    sync = la.attach(model, optimizer, job.recipe)
    if resume:
        la.load(folder, model, optimizer)
        assert sync.step == at[rank]
    trace = []
    for t in range(sync.step + 1, STEPS[rank] + 1):
        training.step(job, model, optimizer, job.data()[rank][t - 1], t)
        trace.append(training.values(model))
        if t == at[rank] and save:
            la.save(folder, model, optimizer)
    closings = sync.closings
    sync.finish()
    return [*trace, training.values(model)], closings


RESUMED = [
    ("local_sgd", (14, 15, 13, 5)),
    ("local_sgd, own pace, quorum", (13, 13, 13, 4)),
    ("diloco, int8, own pace", (14, 15, 13, 5)),
    ("slowmo, reset", (1, 1, 1, 1)),
    ("streaming_diloco, int4", (13, 14, 12, 4)),
]


@pytest.mark.parametrize(("row", "at"), RESUMED)
def test_resuming_with_a_late_contribution(row: str, at: tuple[int, ...], tmp_path: Path) -> None:
    """Saved where the slow worker is in the middle of its period and the others are rounds ahead.
    The rounds after that are the same, and so is every bit."""
    options: dict[str, Any] = {"workers": 4, "step_seconds": SLOW}
    whole = la.simulate(partial(stopped, row, tmp_path, at, False, True), **options)
    later = la.simulate(partial(stopped, row, tmp_path, at, True, False), **options)
    record, rest = whole[0][1], later[0][1]
    assert rest and record[-len(rest) :] == rest
    for (trace, _), (end, _) in zip(whole, later, strict=True):
        for a, b in zip(trace[-len(end) :], end, strict=True):
            assert all(np.array_equal(a[k], b[k]) for k in NAMES)


def test_states_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    """Of another number of ranks, and of ranks that were not saved together: worker 1's is that of
    a later round than rank 0's."""
    job = Job(ROWS["local_sgd, first come"][0], 2, 30, "nesterov")

    def parts(rank: int) -> Any:
        model, optimizer = training.build(job, rank)
        return model, optimizer, la.attach(model, optimizer, job.recipe)

    def train(rank: int) -> Any:
        model, optimizer, sync = parts(rank)
        states: Any = None
        for t in range(1, 17):
            training.step(job, model, optimizer, job.data()[rank][t - 1], t)
            if t == (5, 13)[rank]:
                states = [copy.deepcopy(p.state_dict()) for p in (model, optimizer, sync)]
        sync.finish()
        return states

    saved = la.simulate(train, workers=2)

    def resume(rank: int) -> None:
        *others, sync = parts(rank)
        for part, state in zip(others, saved[rank], strict=False):
            part.load_state_dict(state)
        with pytest.raises(ValueError, match="load states that all ranks saved"):
            sync.load_state_dict(saved[rank][-1])

    def save(rank: int) -> None:
        la.save(tmp_path, *parts(rank)[:2])

    def fewer(rank: int) -> None:
        with pytest.raises(ValueError, match="resumed by the same ranks"):
            la.load(tmp_path, *parts(rank)[:2])

    la.simulate(resume, workers=2)
    la.simulate(save, workers=2)
    la.simulate(fewer, workers=1)
