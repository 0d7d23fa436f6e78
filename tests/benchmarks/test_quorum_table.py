"""The comparison of rounds with a quorum: short runs of each method."""

from __future__ import annotations

import pytest
from benchmarks import quorum


@pytest.mark.parametrize("name", quorum.METHODS)
def test_each_method_trains(name: str) -> None:
    pytest.importorskip("sklearn")
    short, longer = (
        quorum.run((name, 0.08, 0.7, 0.3, seconds, 1, 1.5)) for seconds in (3.0, 120.0)
    )
    assert longer < 0.7 * short < 2.5


def test_a_run_is_the_same_from_run_to_run() -> None:
    pytest.importorskip("sklearn")
    task = ("delayed Nesterov", 0.08, 0.7, 0.3, 40.0, 1, 1.5)
    assert quorum.run(task) == quorum.run(task)
