"""Every recipe against its plain-loop float64 reference: one row each, over threads."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

import laconic as la

import reference as ref
from training import OPTIMISERS, Job, largest_difference, partly_zero_lr, same_bits, simulated

ADAM = partial(torch.optim.Adam, lr=0.03)

ROWS: dict[str, tuple[la.Recipe, ref.Recipe]] = {
    "nothing": ((), ref.Recipe()),
    "ddp": (la.ddp(), ref.ddp()),
    "local_sgd(1)": (la.local_sgd(1), ref.local_sgd(1)),
    "local_sgd(4)": (la.local_sgd(4), ref.local_sgd(4)),
    "local_sgd(4, delay=2)": (la.local_sgd(4, delay=2), ref.local_sgd(4, delay=2)),
    "local_sgd(3, delay=7)": (la.local_sgd(3, delay=7), ref.local_sgd(3, delay=7)),
    "local_sgd(1, delay=1)": (la.local_sgd(1, delay=1), ref.local_sgd(1, delay=1)),
    "local_sgd(4, average)": (
        la.local_sgd(4, optimizer_state="average"),
        ref.local_sgd(4, optimizer_state="average"),
    ),
    "local_sgd(4, reset)": (
        la.local_sgd(4, optimizer_state="reset"),
        ref.local_sgd(4, optimizer_state="reset"),
    ),
    "post_local_sgd(6, 4)": (la.post_local_sgd(6, 4), ref.post_local_sgd(6, 4)),
    "slowmo(None, 4)": (la.slowmo(None, 4), ref.slowmo(None, 4)),
    "slowmo(local_sgd(2), 6)": (
        la.slowmo(la.local_sgd(2), 6, 0.6, 0.9),
        ref.slowmo(ref.local_sgd(2), 6, 0.6, 0.9),
    ),
    "slowmo(local_sgd(2), 6, unsharded)": (
        la.slowmo(la.local_sgd(2), 6, sharded=False),
        ref.slowmo(ref.local_sgd(2), 6),
    ),
    "slowmo(local_sgd(2), 6, no average)": (
        la.slowmo(la.local_sgd(2), 6, average=False),
        ref.slowmo(ref.local_sgd(2), 6, average=False),
    ),
    "slowmo(local_sgd(2), 6, reset)": (
        la.slowmo(la.local_sgd(2), 6, optimizer_state="reset"),
        ref.slowmo(ref.local_sgd(2), 6, optimizer_state="reset"),
    ),
    "slowmo(local_sgd(2), 6, average)": (
        la.slowmo(la.local_sgd(2, optimizer_state="average"), 6, optimizer_state="average"),
        ref.slowmo(ref.local_sgd(2, optimizer_state="average"), 6, optimizer_state="average"),
    ),
    "slowmo(local_sgd(3, delay=4), 5)": (
        la.slowmo(la.local_sgd(3, delay=4), 5),
        ref.slowmo(ref.local_sgd(3, delay=4), 5),
    ),
    "slowmo(post_local_sgd(5, 2), 4)": (
        la.slowmo(la.post_local_sgd(5, 2), 4),
        ref.slowmo(ref.post_local_sgd(5, 2), 4),
    ),
    "slowmo(ddp, 3)": (la.slowmo(la.ddp(), 3), ref.slowmo(ref.ddp(), 3)),
    "diloco(4)": (la.diloco(4, 0.7, 0.9), ref.diloco(4, 0.7, 0.9)),
    "diloco(4, unsharded)": (la.diloco(4, sharded=False), ref.diloco(4)),
    "diloco(4, no momentum)": (la.diloco(4, 0.5, 0.0), ref.diloco(4, 0.5, 0.0)),
    "diloco(4, delay=3)": (la.diloco(4, delay=3), ref.diloco(4, delay=3)),
    "diloco(3, delay=5)": (la.diloco(3, delay=5), ref.diloco(3, delay=5)),
    "diloco(4, Adam)": (
        la.diloco(4, outer=ADAM),
        ref.diloco(4, outer=ref.adam_outer(lr=0.03)),
    ),
    "diloco(4, Adam, unsharded)": (
        la.diloco(4, outer=ADAM, sharded=False),
        ref.diloco(4, outer=ref.adam_outer(lr=0.03)),
    ),
}


@pytest.mark.parametrize("optimiser", ["nesterov", "adamw"])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("row", ROWS)
def test_recipe_equals_its_reference(row: str, workers: int, optimiser: str) -> None:
    recipe, expected = ROWS[row]
    job = Job(recipe, workers, optimiser=optimiser)
    assert largest_difference(simulated(job), job.expected(expected)) < 1e-10


@pytest.mark.parametrize("row", ["slowmo(None, 4)", "slowmo(local_sgd(2), 6)"])
def test_slowmo_at_learning_rate_zero(row: str) -> None:
    recipe, expected = ROWS[row]
    job = Job(recipe, 3, lr=partly_zero_lr)
    assert largest_difference(simulated(job), job.expected(expected)) < 1e-10


@pytest.mark.parametrize("row", ROWS)
def test_workers_of_two_ranks(row: str) -> None:
    """Two workers of two ranks each are two workers on batches twice as large."""
    recipe, expected = ROWS[row]
    job = Job(recipe, 4, options=(("nprocs_per_node", 2),))
    one, two, three, four = job.data()

    def join(a: ref.Batch, b: ref.Batch) -> ref.Batch:
        return np.concatenate([a[0], b[0]]), np.concatenate([a[1], b[1]])

    data = [list(map(join, one, two)), list(map(join, three, four))]
    rules = OPTIMISERS[job.optimiser][1]
    trace = ref.run(expected, 2, job.steps, rules, job.lr, data, ref.initial(2, job.seed))
    runs = simulated(job)
    assert largest_difference([runs[0], runs[2]], trace) < 1e-10
    assert same_bits([runs[0], runs[2]], [runs[1], runs[3]])
