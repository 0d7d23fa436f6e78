"""The comparison of rounds with a quorum: short runs of each method."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import quorum, quorum_lab

from laconic.lab.emulation.cluster import NamespacesUnavailable


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


def test_the_slow_link_is_that_of_one_worker() -> None:
    assert quorum.METHODS["naive asynchronous"].messages(1.5) == [0.0, 0.15, 1.5, 0.15]
    assert quorum.METHODS["equal workers, DiLoCo"].messages(1.5) == [0.0, 0.15, 0.15, 0.15]


def test_the_lab_trains_for_equal_times(tmp_path: Path) -> None:
    """Workers at their own pace take steps for all of the time; the slow one takes a third."""
    pytest.importorskip("sklearn")
    tasks = [(name, "tuned", 1) for name in ("synchronous DiLoCo", "delayed Nesterov, own pace")]
    try:
        together, own = quorum_lab.measure(tasks, 2.0, 32, slow_link=True)
    except NamespacesUnavailable:
        return
    assert len({*together["steps"]}) == 1 and 12 <= together["steps"][0] <= 36
    assert 24 < own["steps"][3] < 0.6 * own["steps"][0] and own["steps"][0] < 105
    assert own["rounds"] > 3 and own["loss"] < together["loss"] < 2.5


def test_ratios_in_the_table_are_of_the_same_seed() -> None:
    runs = [
        {"method": method, "setting": "tuned", "seed": seed, "loss": loss * (1 + seed),
         "steps": [9, 9, 9, 3], "waiting": [0.25] * 4, "rounds": 2}
        for method, loss in ((quorum_lab.REFERENCE, 0.1), ("naive asynchronous", 0.3))
        for seed in (0, 1)
    ]  # fmt: skip
    head, reference, naive = quorum_lab.table(runs)
    assert "ratio" in head
    assert reference.split("tuned")[1].split() == [
        "0.1500", "+-", "0.0500", "1.000", "+-", "0.000",
        "9,", "9,", "9,", "3", "25%,", "25%,", "25%,", "25%", "2",
    ]  # fmt: skip
    assert naive.split("tuned")[1].split()[:6] == ["0.4500", "+-", "0.1500", "3.000", "+-", "0.000"]
