"""Several runs of a recipe that differ in their seed."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from statistics import stdev

import pytest
from rich.console import Console

from laconic.lab.emulation.seeds import groups
from laconic.lab.race import report
from laconic.lab.race.result import Row
from laconic.lab.race.table import caption

from tests.lab.test_page import Parsed
from tests.lab.test_report import DDP, FULL, LOCAL, SILENT, result, row


def seeds(*runs: Row) -> tuple[Row, ...]:
    return tuple(replace(run, seed=seed) for seed, run in enumerate(runs))


FIRST = row("sgp()", (0, 0, 6.0), (20, 10, 4.0), (60, 30, 2.0))
SECOND = row("sgp()", (0, 0, 5.0), (25, 15, 3.0), (50, 30, 2.5))
TWICE = result(SILENT, DDP, *seeds(FIRST, SECOND))


def test_one_run_each_is_its_own_mean() -> None:
    assert tuple(group.mean for group in groups(FULL)) == FULL.rows
    for group in groups(FULL):
        assert group.runs == (group.mean,)
        assert group.low == group.high == tuple(point.loss for point in group.mean.curve)


def test_the_mean_of_runs_is_taken_at_equal_shares_of_their_time() -> None:
    silent, ddp, sgp = groups(TWICE)
    assert (silent.mean, ddp.mean) == (SILENT, DDP)
    assert sgp.mean.steps == 55 and sgp.mean.loss == 2.25
    assert sgp.mean.seconds_per_step == pytest.approx((30 / 60 + 30 / 50) / 2)
    seen = [(p.step, p.seconds, p.loss) for p in sgp.mean.curve]
    assert seen == [
        (0, 0.0, 5.5),
        # a third on: 20 steps and loss 4 in the one; 16.67 and 5 - 2 * 10/15 in the other
        (18, pytest.approx(10.0), pytest.approx((4.0 + 5 - 2 * 10 / 15) / 2)),
        (28, pytest.approx(15.0), pytest.approx((3.5 + 3.0) / 2)),
        (55, 30.0, 2.25),
    ]
    assert sgp.low == pytest.approx((5.0, 5 - 2 * 10 / 15, 3.0, 2.0))
    assert sgp.high == pytest.approx((6.0, 4.0, 3.5, 2.5))


def test_a_run_that_failed_fails_its_recipe() -> None:
    bad = replace(SECOND, status="failed", error="rank 1: SIGKILL", curve=(), seed=1)
    (group,) = groups(result(FIRST, bad))
    assert (group.mean.status, group.mean.error) == ("failed", "rank 1: SIGKILL")
    assert "sgp() (seed 1): failed: rank 1: SIGKILL" in caption(result(FIRST, bad))
    assert "not counted: sgp() failed." in report.verdict(result(SILENT, DDP, LOCAL, FIRST, bad))


def test_the_texts_give_means_and_spread(tmp_path: Path) -> None:
    console = Console(width=100, file=io.StringIO(), force_terminal=False)
    console.print(report.table(TWICE))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    figures, spreads = text[text.index("sgp()") :].splitlines()[:2]
    place = figures.index("2.25")
    assert spreads[: place + 4].endswith(f" ±{stdev([2.0, 2.5]):.2f}")
    assert "1 to 2 runs each, seeds 0, 1" in " ".join(text.split())
    assert "sample standard deviation" in " ".join(text.split())
    # 2.45 of ddp lies within the spread, 0.35; and 3.3 of another would not
    told = report.verdict(TWICE)
    assert "sgp() and ddp() are tied at a validation loss of 2.25" in told
    assert "These are means of 2 runs" in told
    slow = row("ddp()", (0, 0, 5.5), (40, 16, 4.0), (75, 30, 3.3))
    told = report.verdict(result(SILENT, slow, *seeds(FIRST, SECOND)))
    assert "sgp() reached the lowest validation loss (2.25)" in told
    paths = {path.name: path for path in report.write(TWICE, tmp_path)}
    page = Parsed(paths["report.html"].read_text())
    assert f"±{stdev([2.0, 2.5]):.2f}" in page.texts["small"]
    data = page.embedded()
    curves = data["curves"]
    assert isinstance(curves, list)
    assert [(curve["name"], curve["runs"]) for curve in curves][1:] == [("ddp()", 1), ("sgp()", 2)]
    assert [point[3:6] for point in curves[2]["points"]][-1] == [2.25, 2.0, 2.5]
    assert len(report.read(tmp_path).rows) == 4  # the runs themselves are kept


def test_runs_of_steps_are_averaged_at_equal_steps() -> None:
    short = row("a()", (0, 0, 6.0), (10, 4, 4.0), (20, 10, 2.0))
    long = row("a()", (0, 0, 6.0), (10, 10, 5.0), (20, 18, 3.0))
    (group,) = groups(result(*seeds(short, long), seconds=None, steps=20))
    assert [(p.step, p.seconds, p.loss) for p in group.mean.curve] == [
        (0, 0, 6.0), (10, 7, 4.5), (20, 14, 2.5),
    ]  # fmt: skip
