"""The other rows of the table: options, bases, graphs and codecs of the recipes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import laconic as la

from tests.algorithms.test_contract import setting_of
from tests.support.contract import check_bytes, check_reference, go
from tests.support.recipes import ROWS, tagged
from tests.support.training import Job, largest_difference, partly_zero_lr, simulated

REST = [name for name in ROWS if not ROWS[name].tags & {"golden", "variant"}]


@pytest.mark.parametrize("name", REST)
def test_equals_the_reference(name: str, tmp_path: Path) -> None:
    setting = replace(setting_of(name), save=0)
    runs = la.simulate(lambda rank: go(rank, setting, tmp_path, False), workers=setting.workers)
    check_reference(setting, runs)
    check_bytes(setting, runs, 0)


def check(job: Job, name: str, size: int = 1) -> None:
    recipe = ROWS[name].reference
    assert recipe is not None
    assert largest_difference(simulated(job), job.expected(recipe(size))) < ROWS[name].bound


@pytest.mark.parametrize(
    ("name", "workers"),
    [(name, (5, 6, 8)[i % 3]) for i, name in enumerate(tagged("gossip", "irregular", "variant"))],
)
def test_gossip_among_more_workers(name: str, workers: int) -> None:
    check(ROWS[name].job_of(workers, steps=7, optimizer="sgd"), name)


@pytest.mark.parametrize("name", ["hierarchical", "lsgd, groups"])
@pytest.mark.parametrize(("workers", "size"), [(3, 3), (6, 2), (6, 3)])
def test_sizes_of_groups(name: str, workers: int, size: int) -> None:
    check(ROWS[name].job_of(workers, steps=12, options=(("group_size", size),)), name, size)


@pytest.mark.parametrize("name", ["slowmo(None, 4)", "slowmo(local_sgd(2), 6)"])
def test_slowmo_at_learning_rate_zero(name: str) -> None:
    check(ROWS[name].job_of(3, lr=partly_zero_lr), name)
