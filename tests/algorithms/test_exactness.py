"""Every recipe against its plain-loop float64 reference: one row each, over threads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.references import reference as ref
from tests.references import reference_decade as decade
from tests.references import reference_leader as leader
from tests.support.exact_rows import BOUND, GOSSIP, GROUPED, IN_PROCESSES, KINDS, NEWER, ROWS
from tests.support.training import (
    OPTIMIZERS,
    Job,
    largest_difference,
    partly_zero_lr,
    same_bits,
    simulated,
)


@pytest.mark.parametrize(
    ("row", "workers", "optimizer"),
    [
        (row, workers, optimizer)
        for row in ROWS
        for workers, optimizer in ((1, "adamw"), (2, "nesterov"), (3, "nesterov"), (4, "adamw"))
        if workers != IN_PROCESSES[row]  # which `test_links_agree` compares
    ],
)
def test_recipe_equals_its_reference(row: str, workers: int, optimizer: str) -> None:
    recipe, expected = ROWS[row]
    job = Job(recipe, workers, optimizer=optimizer)
    assert largest_difference(simulated(job), job.expected(expected)) < BOUND[row]


@pytest.mark.parametrize(
    ("row", "workers"),
    [
        (row, workers)
        for place, row in enumerate(GOSSIP)
        for k, workers in enumerate((5, 6, 8))
        # a graph is in a row without slowmo and delay, too
        if k == place % 3 or not ("slowmo" in row or "delay" in row)
    ],
)
def test_gossip_among_more_workers(row: str, workers: int) -> None:
    recipe, expected = ROWS[row]
    job = Job(recipe, workers)
    assert largest_difference(simulated(job), job.expected(expected)) < BOUND[row]


@pytest.mark.parametrize("row", [row for row in NEWER if row not in GOSSIP])
def test_eight_workers(row: str) -> None:
    recipe, expected = ROWS[row]
    job = Job(recipe, 8, steps=14)  # DOWNPOUR's sums grow, and with them its rounding errors
    assert largest_difference(simulated(job), job.expected(expected)) < BOUND[row]


@pytest.mark.parametrize(("workers", "size"), [(2, 1), (3, 3), (4, 2), (8, 4)])
@pytest.mark.parametrize("row", GROUPED)
def test_groups_of_workers(row: str, workers: int, size: int) -> None:
    recipe, expected = GROUPED[row]
    job = Job(recipe, workers, options=(("group_size", size),))
    assert largest_difference(simulated(job), job.expected(expected(size))) < 1e-10


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_leaders_by_gradient_score(optimizer: str) -> None:
    job = Job(GROUPED["lsgd(4, local_period=2)"][0], 4, options=(("group_size", 2),))
    job = replace(job, reports=False, optimizer=optimizer)
    options = dict(local_drift=0.4, local_pull=0.3, group_size=2)
    expected = leader.LSGD(4, 2, **options, score="gradient", score_includes_pulls=False)
    assert largest_difference(simulated(job), job.expected(expected)) < 1e-10


@pytest.mark.parametrize("row", ["slowmo(None, 4)", "slowmo(local_sgd(2), 6)"])
def test_slowmo_at_learning_rate_zero(row: str) -> None:
    recipe, expected = ROWS[row]
    job = Job(recipe, 3, lr=partly_zero_lr)
    assert largest_difference(simulated(job), job.expected(expected)) < BOUND[row]


@pytest.mark.parametrize("row", KINDS)
def test_workers_of_two_ranks(row: str) -> None:
    """Two workers of two ranks each are two workers on batches twice as large."""
    recipe, expected = ROWS[row]
    job = Job(recipe, 4, options=(("nprocs_per_node", 2),))
    one, two, three, four = job.data()

    def join(a: ref.Batch, b: ref.Batch) -> ref.Batch:
        return np.concatenate([a[0], b[0]]), np.concatenate([a[1], b[1]])

    data = [list(map(join, one, two)), list(map(join, three, four))]
    rules = OPTIMIZERS[job.optimizer][1]
    trace = decade.run(expected, 2, job.steps, rules, job.lr, data, ref.initial(2, job.seed))
    runs = simulated(job)
    assert largest_difference([runs[0], runs[2]], trace) < BOUND[row]
    assert same_bits([runs[0], runs[2]], [runs[1], runs[3]])
