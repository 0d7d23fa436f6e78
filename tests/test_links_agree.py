"""The same run over threads and over gloo processes: against the reference, and each other."""

from __future__ import annotations

from typing import Any

import pytest

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
    if workers == 2:  # a sum of two is exact in either order
        assert same_bits(processes, threads)
    else:
        differences = [
            abs(a[which][name] - b[which][name]).max()
            for run, run2 in zip(processes, threads, strict=True)
            for a, b in zip(run, run2, strict=True)
            for which in (0, 1)
            for name in a[which]
        ]
        assert max(differences) < 1e-12


@pytest.mark.parametrize("row", ["slowmo(None, 4)", "diloco(4)", "diloco(4, delay=3)"])
@pytest.mark.parametrize("workers", [3, 4])
def test_sharded_rounds_are_the_simulations_bit_for_bit(
    pool: gloo.Pool, row: str, workers: int
) -> None:
    """Slices are summed in rank order on either link. The workers alone: the consensus of these
    recipes is their anchor."""
    job = Job(ROWS[row][0], workers)
    assert same_bits(pool.run(over_gloo, job, ranks=workers), simulated(job))


def test_workers_of_two_ranks_over_gloo(pool: gloo.Pool) -> None:
    job = Job(ROWS["slowmo(local_sgd(2), 6)"][0], 4, options=(("nprocs_per_node", 2),))
    assert same_bits(pool.run(over_gloo, job, ranks=4), simulated(job))
