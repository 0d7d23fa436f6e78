"""The same run over threads and over gloo processes: against the reference, and each other."""

from __future__ import annotations

from typing import Any

import pytest

import laconic as la
from test_exactness import ROWS

import gloo
import training
from training import Job, largest_difference, same_bits, simulated


def over_gloo(rank: int, job: Job) -> list[Any]:
    return training.train(job, rank, gloo.link_of(job.workers))


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_gloo_equals_reference_and_simulation(pool: gloo.Pool, row: str, workers: int) -> None:
    recipe, expected = ROWS[row]
    job = Job(recipe, workers, optimiser="adamw")
    trace, threads = job.expected(expected), simulated(job)
    processes = pool.run(over_gloo, job, ranks=workers)
    assert largest_difference(processes, trace) < 1e-10
    assert same_bits(processes, threads)


def test_workers_of_two_ranks_over_gloo(pool: gloo.Pool) -> None:
    job = Job(ROWS["slowmo(local_sgd(2), 6)"][0], 4, options=(("nprocs_per_node", 2),))
    assert same_bits(pool.run(over_gloo, job, ranks=4), simulated(job))


def twice(rank: int) -> str:
    link = gloo.link_of(2)
    first = training.build(Job((), 2), rank)
    sync = la.attach(*first, la.local_sgd(2), link=link)
    try:
        la.attach(*training.build(Job((), 2), rank), la.local_sgd(2), link=link)
    except ValueError as error:
        sync.detach()
        la.attach(*first, la.local_sgd(2), link=link).detach()
        return str(error)
    return "nothing"


def test_one_link_carries_one_synchroniser(pool: gloo.Pool) -> None:
    said = pool.run(twice, ranks=2)
    assert len(set(said)) == 1 and "a link for each" in said[0]
