"""``laconic report``: a report made anew, reports joined, and what is refused."""

from __future__ import annotations

import csv
import json
import math
import re
import webbrowser
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from laconic.cli import main
from laconic.lab.race import report
from laconic.lab.race.result import NO_COMMUNICATION, Result

from tests.lab.test_page import RECORDED, Parsed
from tests.lab.test_report import DDP, FAILED, FULL, LOCAL, SILENT, result, row

WRITTEN = {"report.html", "results.json", "results.csv", "rows.csv", "loss.png", "loss.svg"}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")


def kept(shown: Result, name: str) -> Path:
    return report.save(shown, Path(name)).parent


def said(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the command prints, as if on one long line."""
    assert main(["report", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return " ".join(captured.out.split())


def test_a_report_is_made_anew_where_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    directory = kept(RECORDED, "run")
    text = said(["run"], capsys)
    assert report.verdict(RECORDED) in text
    assert {path.name for path in directory.iterdir()} == WRITTEN
    assert all(f"run/{name}" in text for name in WRITTEN)
    assert report.read(directory) == RECORDED


def test_results_from_before_the_recording_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    fields = json.loads(FULL.to_json())
    for run in fields["rows"]:
        for name in ("timeline", "rounds", "source", "seed"):
            del run[name]
        for point in run["curve"]:
            del point["distance"]
    Path("old").mkdir()
    Path("old/results.json").write_text(json.dumps(fields))
    assert report.read(Path("old")) == FULL
    assert report.verdict(FULL) in said(["old", "--out", "new"], capsys)


def test_reports_are_joined_and_say_where_they_differ(capsys: pytest.CaptureFixture[str]) -> None:
    kept(result(SILENT, DDP), "fast")
    slow = row("ddp()", (0, 0, 5.5), (10, 15, 4.0), (20, 30, 3.5))
    kept(result(SILENT, slow, LOCAL, bandwidth=1e7), "slow")
    text = said(["fast", "slow"], capsys)
    joined = report.read(Path("laconic-report"))
    assert [run.name for run in joined.rows] == [
        f"{NO_COMMUNICATION} [fast]", "ddp() [fast]",
        f"{NO_COMMUNICATION} [slow]", "ddp() [slow]", "local_sgd(12) [slow]",
    ]  # fmt: skip
    assert [run.curve for run in joined.rows] == [
        run.curve for run in (SILENT, DDP, SILENT, slow, LOCAL)
    ]
    assert "bandwidth" not in joined.settings and joined.settings["hosts"] == 4
    assert joined.settings["runs"] == {"fast": {"bandwidth": 1e8}, "slow": {"bandwidth": 1e7}}
    assert "[fast]: bandwidth 100 Mbit/s [slow]: bandwidth 10 Mbit/s" in text
    assert "ddp() [slow] 1.50 15.0 20 3.50" in text  # against its own row without communication
    assert "In 30 s per recipe, local_sgd(12) [slow] reached the lowest" in text
    assert "as many steps as ddp() [fast] (2.45)" in text
    page = Parsed(Path("laconic-report/report.html").read_text())
    assert "[fast]: bandwidth 100 Mbit/s" in page.texts["p"]
    assert page.texts["pre"] == ["laconic race\nlaconic race"]


def test_runs_of_one_name_are_told_apart_by_their_paths(capsys: pytest.CaptureFixture[str]) -> None:
    kept(result(DDP), "monday/run")
    kept(result(LOCAL, DDP), "tuesday/run")
    said(["monday/run", "tuesday/run", "--out", "both"], capsys)
    names = [run.name for run in report.read(Path("both")).rows]
    assert names == ["ddp() [monday/run]", "local_sgd(12) [tuesday/run]", "ddp() [tuesday/run]"]


def test_runs_of_different_length_are_compared_where_the_first_ended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept(result(SILENT, DDP), "long")
    kept(result(SILENT, row("sgp()", (0, 0, 5.5), (30, 10, 2.0)), seconds=10.0), "short")
    text = said(["long", "short"], capsys)
    assert "[long]: seconds 30 [short]: seconds 10" in text
    assert "In 10 s per recipe on this 100 Mbit/s network, sgp() [short] reached" in text
    # 3.94 is what ddp had after 10 s, and sgp after 4.46
    assert "ahead of ddp() [long] (3.94), a loss that it reached after 4.46 s, 2.2 times" in text


def test_machines_that_differ_are_all_named() -> None:
    here, there = result(DDP), replace(result(LOCAL), machine={"cpu": "eight cores"})
    joined = report.join([("a", here), ("b", there)])
    assert joined.machine == {"cpu": "[a] two cores; [b] eight cores"}
    assert joined.versions == {"torch": "2"}
    assert report.join([("a", here)]) is here


def test_the_page_is_opened(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) is None)
    kept(FULL, "run")
    said(["run", "--open"], capsys)
    assert opened == [Path("run/report.html").resolve().as_uri()]
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    assert main(["report", "run", "--open"]) == 2
    assert re.fullmatch(r"laconic: no browser .*\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("nowhere", "cannot read a result from nowhere"),
        ("empty", "cannot read a result from empty/results.json"),
        ("broken", "not the result of a race"),
        ("run other nowhere", "cannot read a result from nowhere"),
        ("run run", "run is given twice"),
        ("run ./other/../run", "is given twice"),
        ("run other --out run", "run contains one of the results to combine"),
        ("run --out file", "file"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    line: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept(FULL, "run")
    kept(result(DDP), "other")
    for name in ("empty", "broken"):
        Path(name).mkdir()
    Path("broken/results.json").write_text('{"rows": 3}')
    Path("file").write_text("abc")
    before = sorted(tmp_path.rglob("*"))
    assert main(["report", *line.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    match = re.fullmatch(r"laconic: (\S.*)\n", captured.err)
    assert match and told in match[1], captured.err
    assert sorted(tmp_path.rglob("*")) == before


def lines_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_csv_has_the_numbers_of_the_json(tmp_path: Path) -> None:
    odd = replace(DDP, recipe="odd(1, 2)", seconds_per_step=math.nan, seed=3)
    report.write(result(SILENT, odd, LOCAL, FAILED), tmp_path)
    points = lines_of(tmp_path / "results.csv")
    assert len(points) == len(SILENT.curve) + len(odd.curve) + len(LOCAL.curve)
    for line, point in zip(points[3:6], odd.curve, strict=True):
        assert (line["recipe"], line["source"], line["seed"]) == ("odd(1, 2)", "", "3")
        figures = [float(line[name]) for name in ("step", "seconds", "megabytes", "loss")]
        assert figures == [point.step, point.seconds, point.megabytes, point.loss]
        assert line["distance"] == ""
    silent, second, local, failed = lines_of(tmp_path / "rows.csv")
    assert second["seconds_per_step"] == "" and second["status"] == "ok"
    assert float(local["loss"]) == LOCAL.loss and int(local["steps"]) == LOCAL.steps
    assert float(local["loss_at_equal_time"]) == 2.01
    assert float(local["loss_at_equal_steps"]) == pytest.approx(2.6)
    assert failed["error"] == FAILED.error and failed["loss_at_equal_time"] == ""
    assert not {"curve", "timeline", "rounds", "notes"} & silent.keys()


ROW = [
    "recipe", "source", "peer", "status", "runs", "seconds_per_step", "times_no_communication",
    "steps", "loss_at_equal_time", "loss_at_equal_steps", "megabytes_per_step", "waiting", "spread",
]  # fmt: skip


def told(directory: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["report", str(directory), "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    found = json.loads(captured.out, parse_constant=pytest.fail)
    assert isinstance(found, dict)
    return found


def test_the_report_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown: Result = result(SILENT, DDP, LOCAL, FAILED)
    report.save(shown, tmp_path)
    found = told(tmp_path, capsys)
    assert list(found) == [
        "question", "answer", "equal_time", "equal_steps", "rows", "notes", "runs_left", "files",
    ]  # fmt: skip
    assert " ".join(found["answer"]) == report.verdict(shown)
    assert (found["equal_time"], found["equal_steps"], found["runs_left"]) == (30.0, 75, 0)
    assert [list(row) for row in found["rows"]] == [ROW] * 4
    assert [row["recipe"] for row in found["rows"]] == [row.recipe for row in shown.rows]
    ddp, local, failed = found["rows"][1:]
    assert ddp["steps"] == DDP.steps and ddp["seconds_per_step"] == DDP.seconds_per_step
    assert local["loss_at_equal_time"] == report.equal_time(shown)["local_sgd(12)"]
    assert failed["status"] == "failed" and failed["loss_at_equal_time"] is None
    assert all(Path(path).exists() for path in found["files"])


def test_several_seeds_have_a_spread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = replace(DDP, seed=1, seconds_per_step=DDP.seconds_per_step + 0.2)
    report.save(result(SILENT, DDP, other), tmp_path)
    ddp = told(tmp_path, capsys)["rows"][1]
    assert ddp["runs"] == 2
    assert ddp["seconds_per_step"] == pytest.approx(DDP.seconds_per_step + 0.1)
    assert ddp["spread"]["seconds_per_step"] == pytest.approx(0.2 / 2**0.5)
