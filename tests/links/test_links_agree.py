"""The same run over threads and over gloo processes: against the reference, and each other.

Three workers: `test_resume` compares threads and processes for every row.
"""

from __future__ import annotations

import socket
from typing import Any

import pytest

import laconic as la
from laconic.links import health
from laconic.links.addresses import Address

from tests.support import gloo, training
from tests.support.exact_rows import BOUND, IN_PROCESSES, ROWS
from tests.support.training import Job, largest_difference, same_bits, simulated


def over_gloo(rank: int, job: Job) -> list[Any]:
    return training.train(job, rank, gloo.link_of(job.workers))


@pytest.mark.parametrize(("row", "workers"), IN_PROCESSES.items())
def test_gloo_equals_reference_and_simulation(pool: gloo.Pool, row: str, workers: int) -> None:
    recipe, expected = ROWS[row]
    job = Job(recipe, workers, optimizer="adamw")
    trace, threads = job.expected(expected), simulated(job)
    processes = pool.run(over_gloo, job, ranks=workers)
    assert largest_difference(processes, trace) < BOUND[row]
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


def test_one_link_carries_one_synchronizer(pool: gloo.Pool) -> None:
    said = pool.run(twice, ranks=2)
    assert len(set(said)) == 1 and "a link for each" in said[0]


def after_leaving(rank: int) -> tuple[float, list[Any]]:
    model, optimizer = training.build(Job((), 2), rank)
    with la.attach(model, optimizer, la.local_sgd(2), link=gloo.link_of(2)) as sync:
        pass
    mean = sync.mean(float(rank))
    with sync.consensus():
        return mean, [(training.values(model), training.values(model))]


def test_calls_after_leaving_still_run(pool: gloo.Pool) -> None:
    (mean, one), (same, other) = pool.run(after_leaving, ranks=2)
    assert mean == same == 0.5 and same_bits([one], [other])


def nonsense(rank: int) -> bool:
    """Whether this process's beacon falls silent after words that it does not know."""
    beacon = health.beacon()
    secret = bytes(32)
    address = beacon.enroll(secret)
    host, port, key = Address.parse(address)
    for said in (b"5", b"{", b"[1]", b"[[], 1]", b"\xff" * 100, b""):
        with socket.create_connection((host, port), timeout=60) as connection:
            connection.sendall(said)
    verdict = health.Request(health.Verdict("on calls that are not ours", (), 0))
    health.ask(str(Address(host, port, "00" * 8)), secret, 1, verdict)
    health.ask(address, bytes(31) + b"1", 1, verdict)
    return health.ask(address, secret).lost or beacon.links[key].verdict is not None


def test_a_beacon_outlives_nonsense(pool: gloo.Pool) -> None:
    assert pool.run(nonsense, ranks=1) == [False]
