"""``laconic demo`` as a command: its settings, its progress in words, its end, and mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from laconic.cli import demo, main, parsers
from laconic.lab.demo import kill
from laconic.lab.demo.outcome import EXPLAINED, RECIPES
from laconic.lab.race import runner, workloads
from laconic.lab.race.report import Point, Result, Row, read


def row(name: str, number: int) -> Row:
    """A row that ends at a loss of 2 and a tenth for its number."""
    final = 2 + number / 10
    curve = Point(0, 0.0, 0.0, 5.5), Point(50, 10.0, 1.0, 3.0), Point(100, 20.0, 2.0, final)
    return Row(name, "ok", None, 100, 20.0, 0.2, final, 1e6, None, 0.25, curve)


def race(*rows: Row) -> Result:
    settings = {"hosts": 4, "per_host": 1, "bandwidth": 1e8, "seconds": 20.0, "network": "emulated"}
    return Result(rows, settings, {}, {}, "laconic demo")


@pytest.fixture
def raced(monkeypatch: pytest.MonkeyPatch) -> list[runner.Settings]:
    """Races end at once with made-up rows. Returns their settings, when there are any."""
    seen: list[runner.Settings] = []

    def run(settings: runner.Settings, command: str, watch: Any) -> Iterator[Result]:
        seen.append(settings)
        rows: list[Row] = []
        for number, name in enumerate(EXPLAINED):
            for event in ({"event": "launched"}, {"event": "planning"}):
                watch(name, event)
            watch(name, {"event": "step", "step": 1, "steps": 9, "loss": 5.0})
            rows.append(row(name, number))
            if name == "local_sgd(24)" and settings.seconds == 1:
                rows[-1] = replace(rows[-1], status="failed", error="worker 2 did not answer")
            watch(name, {"event": "done", "row": rows[-1]})
            yield race(*rows)

    monkeypatch.setattr(runner, "run", run)
    return seen


def test_all_recipes_get_the_same_and_little_time() -> None:
    arguments = parsers(["demo"])[0].parse_args(["demo"])
    assert (arguments.seconds, arguments.kill) == (demo.SECONDS, False)
    settings = demo.settings_of(arguments.seconds)
    settings.check()
    assert settings == runner.Settings(
        recipes=tuple(RECIPES), hosts=4, bandwidth=100e6, workload=workloads.SMALL, seconds=15.0
    )
    assert len(EXPLAINED) * (settings.seconds or 0) <= 180


def test_it_says_what_it_measures_and_ends_with_a_picture_and_three_sentences(
    raced: list[runner.Settings], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    progress, end = " ".join(said.err.split()), " ".join(said.out.split())
    assert "send 100 Mbit/s each" in progress and "6 ways, for 15 s each" in progress
    for number, (name, text) in enumerate(EXPLAINED.items(), start=1):
        assert f"{number}/6 {name}: {text}" in progress
    assert "100 steps in 20 s, of which 25% waiting for the network: loss 2.10" in progress
    for number in (1, 2, 3):
        assert f" {number}. " in end
    assert "no recipe is ahead of them" in end  # as in the made-up result
    assert max(map(len, [*said.err.splitlines(), *said.out.splitlines()[:-2]])) <= 80
    names = {"demo.png", "report.html", "results.json"}
    assert names <= {path.name for path in tmp_path.iterdir()}
    assert len(read(tmp_path).rows) == 6


def test_a_failed_row_is_told_by_the_exit_code_too(
    raced: list[runner.Settings], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--seconds", "1", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "failed: worker 2 did not answer" in said.err
    assert "not counted: local_sgd(24) failed." in " ".join(said.out.split())


def test_kill_runs_the_other_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kill, "run", lambda: 7)
    assert main(["demo", "--kill"]) == 7


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--seconds", "0"]) == 2
    assert capsys.readouterr().err.startswith(
        "laconic: seconds must be a finite number of at least"
    )
