"""Special cases: what one recipe becomes at the edge of its settings is another, known, algorithm.

The right-hand sides are few-line loops that share nothing with the library, or other recipes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import laconic as la

from tests.references import reference as ref
from tests.support import gloo, training
from tests.support.exact_rows import ROWS
from tests.support.training import (
    OPTIMIZERS,
    Job,
    build,
    changing_lr,
    constant_lr,
    flat,
    largest_difference,
    simulated,
)

STEPS = 20
CLOSE = 1e-10


def settings(job: Job) -> tuple[Any, ...]:
    """The last arguments of the reference's special cases."""
    init = ref.initial(job.workers, job.seed)
    return OPTIMIZERS[job.optimizer][1], job.lr, job.data(), init


def workers_differ(job: Job, other: ref.Trace) -> float:
    """As `largest_difference`, for the workers alone: an anchor lags behind the mean of x."""
    runs = [[(own, own) for own, _ in run] for run in simulated(job)]
    worst = 0.0
    for rank, run in enumerate(runs):
        steps = len(other.workers)
        lone = ref.Trace([[step[rank]] for step in other.workers], [s[rank] for s in other.workers])
        assert len(run) == steps
        worst = max(worst, largest_difference([run], lone))
    return worst


# -- against independent implementations ----


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.3])
@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("optimizer", ["nesterov", "adamw"])
def test_one_worker_without_momentum_is_lookahead(
    alpha: float, sharded: bool, optimizer: str
) -> None:
    job = Job(la.slowmo(None, 4, 0.0, alpha, sharded=sharded), 1, STEPS, optimizer)
    trace = ref.lookahead(4, alpha, STEPS, *settings(job))
    assert largest_difference(simulated(job), trace) < CLOSE


@pytest.mark.parametrize("base", [None, la.ddp(), la.local_sgd(1)])
@pytest.mark.parametrize("workers", [1, 3, 4])
def test_slowmo_at_every_step_of_sgd_is_large_batch_momentum(
    base: la.Recipe | None, workers: int
) -> None:
    job = Job(la.slowmo(base, 1, 0.6, 0.8), workers, STEPS, "sgd")
    _, lr, data, init = settings(job)
    trace = ref.large_batch_momentum(workers, STEPS, 0.6, 0.8, lr, data, init)
    assert largest_difference(simulated(job), trace) < CLOSE


@pytest.mark.parametrize("reference", [ref.heavy_ball_outer, ref.bmuf])
@pytest.mark.parametrize("beta", [0.3, 0.8])
@pytest.mark.parametrize("workers", [2, 3])
def test_slowmo_at_constant_rate_is_heavy_ball_and_block_momentum(
    reference: Any, beta: float, workers: int
) -> None:
    job = Job(la.slowmo(None, 4, beta, 0.9), workers, STEPS, lr=constant_lr)
    trace = reference(workers, STEPS, 4, beta, 0.9, *settings(job))
    assert largest_difference(simulated(job), trace) < CLOSE


def test_slowmo_at_changing_rate_is_neither() -> None:
    """What tells SlowMo from heavy ball is that u is in units of the gradient."""
    job = Job(la.slowmo(None, 4, 0.8, 0.9), 2, STEPS, lr=changing_lr)
    trace = ref.heavy_ball_outer(2, STEPS, 4, 0.8, 0.9, *settings(job))
    assert largest_difference(simulated(job), trace) > 1e-4


# -- recipes that become other recipes ----

IDENTITIES: dict[str, tuple[la.Recipe, ref.Recipe, str]] = {
    "slowmo(None) beta 0, alpha 1": (la.slowmo(None, 4, 0.0, 1.0), ref.local_sgd(4), "adamw"),
    "slowmo(local_sgd) beta 0, alpha 1": (
        la.slowmo(la.local_sgd(2), 6, 0.0, 1.0),
        ref.local_sgd(2),
        "adamw",
    ),
    "slowmo unsharded, beta 0, alpha 1": (
        la.slowmo(None, 4, 0.0, 1.0, sharded=False),
        ref.local_sgd(4),
        "nesterov",
    ),
    "slowmo(None), reset, beta 0, alpha 1": (
        la.slowmo(None, 4, 0.0, 1.0, optimizer_state="reset"),
        ref.local_sgd(4, optimizer_state="reset"),
        "nesterov",
    ),
    "slowmo(None), average, beta 0, alpha 1": (
        la.slowmo(None, 4, 0.0, 1.0, optimizer_state="average"),
        ref.local_sgd(4, optimizer_state="average"),
        "adamw",
    ),
    "local_sgd(1) of plain SGD": (la.local_sgd(1), ref.ddp(), "sgd"),
    "local_sgd(1) of Nesterov": (la.local_sgd(1), ref.ddp(), "nesterov"),
    "local_sgd(1, average) of Nesterov": (
        la.local_sgd(1, optimizer_state="average"),
        ref.ddp(),
        "nesterov",
    ),
    "post_local_sgd that starts at once": (la.post_local_sgd(0, 3), ref.local_sgd(3), "adamw"),
    "post_local_sgd that starts at the end": (la.post_local_sgd(STEPS, 3), ref.ddp(), "adamw"),
    "post_local_sgd that never starts": (la.post_local_sgd(10**6, 1), ref.ddp(), "nesterov"),
    "post_local_sgd, delayed, at once": (
        la.post_local_sgd(0, 3, delay=2),
        ref.local_sgd(3, delay=2),
        "adamw",
    ),
    "diloco lr 1, momentum 0": (la.diloco(4, 1.0, 0.0), ref.local_sgd(4), "adamw"),
    "diloco lr 1, momentum 0, unsharded": (
        la.diloco(4, 1.0, 0.0, sharded=False),
        ref.local_sgd(4),
        "adamw",
    ),
    "diloco of torch's plain SGD at lr 1": (
        la.diloco(4, outer=partial(torch.optim.SGD, lr=1.0)),
        ref.local_sgd(4),
        "adamw",
    ),
    "diloco without momentum": (la.diloco(4, 0.6, 0.0), ref.slowmo(None, 4, 0.0, 0.6), "adamw"),
    "slowmo without momentum": (la.slowmo(None, 4, 0.0, 0.6), ref.diloco(4, 0.6, 0.0), "nesterov"),
    "diloco of torch's Nesterov SGD": (
        la.diloco(4, outer=partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)),
        ref.diloco(4, 0.7, 0.9),
        "adamw",
    ),
    "a message settled at every slow step": (
        la.slowmo(la.local_sgd(2, delay=9), 3, momentum=0.5),
        ref.slowmo(None, 3),
        "adamw",
    ),
    "a period longer than the run": (la.local_sgd(STEPS + 1), ref.Recipe(), "adamw"),
    "a message that does not arrive within the run": (
        la.local_sgd(3, delay=STEPS),
        ref.Recipe(),
        "nesterov",
    ),
}


@pytest.mark.parametrize(
    ("name", "workers"), [(name, 2 + place % 2) for place, name in enumerate(IDENTITIES)]
)
def test_identity(name: str, workers: int) -> None:
    recipe, other, optimizer = IDENTITIES[name]
    job = Job(recipe, workers, STEPS, optimizer)
    assert workers_differ(job, job.expected(other)) < CLOSE


@pytest.mark.parametrize("recipe", [la.local_sgd(1), la.local_sgd(4), la.local_sgd(2, delay=5)])
def test_one_worker_that_averages_with_itself_trains_alone(recipe: la.Recipe) -> None:
    job = Job(recipe, 1, STEPS)
    assert largest_difference(simulated(job), job.expected(ref.Recipe())) < CLOSE


def test_local_sgd_at_every_step_of_adam_is_not_ddp() -> None:
    """The identity needs an optimizer that is linear in the gradient: the bounds here can tell
    recipes apart."""
    job = Job(la.local_sgd(1), 3, STEPS, "adamw")
    assert workers_differ(job, job.expected(ref.ddp())) > 1e-4


SHARDED: dict[str, tuple[la.Recipe, la.Recipe]] = {
    "slowmo": (
        la.slowmo(la.local_sgd(2), 6, momentum=0.5),
        la.slowmo(la.local_sgd(2), 6, sharded=False, momentum=0.5),
    ),
    "diloco": (la.diloco(4), la.diloco(4, sharded=False)),
    "diloco, delayed": (la.diloco(4, delay=3), la.diloco(4, delay=3, sharded=False)),
    "diloco, Adam": (
        la.diloco(4, outer=partial(torch.optim.Adam, lr=0.03)),
        la.diloco(4, outer=partial(torch.optim.Adam, lr=0.03), sharded=False),
    ),
}


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("name", SHARDED)
def test_sharded_equals_unsharded(name: str, workers: int) -> None:
    one, other = (simulated(Job(recipe, workers, STEPS)) for recipe in SHARDED[name])
    worst = max(
        float(np.abs(a[which][key] - b[which][key]).max())
        for run, run2 in zip(one, other, strict=True)
        for a, b in zip(run, run2, strict=True)
        for which in (0, 1)
        for key in ref.NAMES
    )
    assert worst < 1e-12


# -- what every round keeps ----


def around_rounds(job: Job, rank: int) -> list[tuple[Tensor, Tensor]]:
    """x before and after the rounds of every step: hooks run in the order of registration, so
    one registered before `laconic.attach` sees what the optimizer left."""
    model, optimizer = build(job, rank)
    before: list[Tensor] = []
    optimizer.register_step_post_hook(lambda *_: before.append(flat(model)))
    sync = la.attach(model, optimizer, job.recipe)
    batches, trace = job.data()[rank], []
    for t, batch in enumerate(batches, 1):
        training.step(job, model, optimizer, batch, t)
        trace.append((before[-1], flat(model)))
    sync.detach()
    return trace


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize(("period", "delay"), [(1, 0), (4, 0), (4, 2), (3, 7), (1, 1), (2, 2)])
def test_local_sgd_keeps_the_mean(period: int, delay: int, workers: int) -> None:
    job = Job(la.local_sgd(period, delay=delay), workers, STEPS)
    runs = la.simulate(partial(around_rounds, job), workers=workers)
    folds = {t + delay for t in range(period, STEPS + 1, period)}
    for t, ranks in enumerate(zip(*runs, strict=True), 1):
        before, after = (torch.stack(list(x)) for x in zip(*ranks, strict=True))
        assert (after.mean(0) - before.mean(0)).abs().max() < 1e-13
        moved = bool((after != before).any(1).all())
        assert moved == (t in folds), f"step {t}"


def equal_replicas(job: Job, rank: int, link: la.links.Link | None = None) -> list[bytes]:
    """This worker's parameters after every step, as bytes."""
    own = training.train(job, rank, link)
    return [b"".join(x[name].tobytes() for name in ref.NAMES) for x, _ in own]


EQUAL: dict[str, tuple[la.Recipe, set[int]]] = {
    "ddp": (la.ddp(), set(range(1, STEPS + 1))),
    "local_sgd(4)": (la.local_sgd(4), set(range(4, STEPS + 1, 4))),
    "local_sgd(5, average)": (la.local_sgd(5, optimizer_state="average"), {5, 10, 15, 20}),
    "post_local_sgd(6, 4)": (la.post_local_sgd(6, 4), {1, 2, 3, 4, 5, 6, 8, 12, 16, 20}),
    "slowmo(None, 4)": (la.slowmo(None, 4, momentum=0.5), {4, 8, 12, 16, 20}),
    "slowmo(None, 4, unsharded)": (
        la.slowmo(None, 4, sharded=False, momentum=0.5),
        {4, 8, 12, 16, 20},
    ),
    "slowmo(local_sgd(2), 5)": (
        la.slowmo(la.local_sgd(2), 5, momentum=0.5),
        {2, 4, 5, 6, 8, 10, 12, 14, 15, 16, 18, 20},
    ),
    "slowmo(local_sgd(3, delay=4), 5)": (
        la.slowmo(la.local_sgd(3, delay=4), 5, momentum=0.5),
        {5, 10, 15, 20},
    ),
    "slowmo(ddp, 3)": (la.slowmo(la.ddp(), 3, momentum=0.5), set(range(1, STEPS + 1))),
    "slowmo(None, 4, no average)": (la.slowmo(None, 4, average=False, momentum=0.5), set()),
    "diloco(4)": (la.diloco(4), {4, 8, 12, 16, 20}),
    "diloco(4, unsharded)": (la.diloco(4, sharded=False), {4, 8, 12, 16, 20}),
    "diloco(4, delay=3)": (la.diloco(4, delay=3), set()),
}
"""Recipes, and the steps after which all replicas are equal to the last bit, and no others."""


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", EQUAL)
def test_replicas_are_equal_bit_for_bit_exactly_where_they_must_be(name: str, workers: int) -> None:
    recipe, steps = EQUAL[name]
    runs = la.simulate(partial(equal_replicas, Job(recipe, workers, STEPS)), workers=workers)
    assert {t for t, xs in enumerate(zip(*runs, strict=True), 1) if len(set(xs)) == 1} == steps


def equal_over_gloo(rank: int, job: Job) -> list[bytes]:
    return equal_replicas(job, rank, gloo.link_of(job.workers))


@pytest.mark.parametrize("name", ["ddp", "local_sgd(4)", "slowmo(local_sgd(2), 5)", "diloco(4)"])
def test_replicas_are_equal_over_processes(pool: gloo.Pool, name: str) -> None:
    recipe, steps = EQUAL[name]
    runs = pool.run(equal_over_gloo, Job(recipe, 3, STEPS), ranks=3)
    assert {t for t, xs in enumerate(zip(*runs, strict=True), 1) if len(set(xs)) == 1} == steps


# -- alone ----


@pytest.mark.parametrize("row", ROWS)
def test_a_single_worker_sends_nothing(row: str) -> None:
    def run(rank: int) -> la.Stats:
        job = Job(ROWS[row][0], 1, STEPS)
        model, optimizer = build(job, rank)
        with la.attach(model, optimizer, job.recipe) as sync:
            for t, batch in enumerate(job.data()[rank], 1):
                training.step(job, model, optimizer, batch, t)
            with sync.consensus():
                pass
            sync.mean(1.0)
        return sync.stats()

    (stats,) = la.simulate(run, workers=1)
    assert (stats.bytes_sent, stats.bytes_received) == (0, 0)
    assert set(stats.bytes_by_collective.values()) <= {0}
    assert stats.steps == STEPS
    assert (stats.rounds > 0) == (row not in ("nothing", "ddp"))


@pytest.mark.parametrize(
    "make",
    [
        lambda delay: la.local_sgd(3, delay=delay),
        lambda delay: la.d_psgd(delay=delay - 2),
        lambda delay: la.diloco(3, delay=delay),
        lambda delay: la.post_local_sgd(2, 3, delay=delay),
    ],
)
def test_delays_beyond_the_period_are_warned_of(make: Callable[[int], la.Recipe]) -> None:
    told = []
    for delay in (3, 4):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert make(delay)[-1].delay > 0
        told.append(["is longer than the period" in str(w.message) for w in caught])
    assert told == [[], [True]]
