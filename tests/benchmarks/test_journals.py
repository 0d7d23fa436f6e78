"""The tables of the docs are those of the committed journals, and a race goes on where it was."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.cuda import page as cuda
from benchmarks.cuda.__main__ import RESULTS
from benchmarks.race import __main__ as race
from benchmarks.study import inserted
from benchmarks.validate.__main__ import main as validate

from laconic.lab.race import runner
from laconic.lab.race.result import NO_COMMUNICATION, Result

from tests.support.races import result, row

DOCS = Path(__file__).parents[2] / "docs"


def test_the_gpu() -> None:
    text = cuda.PAGE.read_text()
    assert text == inserted(text, cuda.NAME, cuda.table(cuda.read(RESULTS)))


def test_tables_are_those_of_the_journals(tmp_path: Path) -> None:
    from benchmarks.evidence import page, runs, signals  # they import matplotlib

    for name in ("race", "validation", "evidence"):
        shutil.copy(DOCS / f"{name}.md", tmp_path)
    words = ["--journal", str(DOCS / "race.jsonl"), "--page", str(tmp_path / "race.md")]
    assert race.main(["table", *words]) == 0
    words = [word.replace("race", "validation") for word in words]
    assert validate(["--table", *words]) == 0, "of one process on each host"
    page.write(tmp_path / "evidence.md", runs.study().load())
    page.write_signals(tmp_path / "evidence.md", signals.lines(signals.study().load()))
    for path in tmp_path.glob("*.md"):
        assert path.read_text() == (DOCS / path.name).read_text(), path.name


def test_a_race_that_was_killed_goes_on_and_tries_again_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    plan = {"killed after": 3, "failing": "torch-ddp"}

    def run(settings: runner.Settings, told: str, watch: object) -> Iterator[Result]:
        if len(ran) == plan["killed after"]:
            raise KeyboardInterrupt
        baseline = [NO_COMMUNICATION] * settings.baseline
        (text,) = (*baseline, *settings.recipes, *settings.rivals)
        ran.append(text)
        made = row(text, (0, 0, 5.0), (100, 30, 2.0), peer=text == "torch-ddp")
        if text == plan["failing"]:
            made = row(text, status="failed", error="why", peer=True)
        yield result(made, reason=None)

    monkeypatch.setattr(race, "Cluster", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(runner, "run", run)
    path = tmp_path / "journal"
    said = ["--rows", "none", "ddp()", "torch-ddp", "--networks", "10mbit", "50mbit/80ms/0.1%",
            "--seeds", "0", "--seconds", "30", "--journal", str(path)]  # fmt: skip
    assert race.main(said) == 130
    assert ran == [NO_COMMUNICATION, "ddp()", "torch-ddp"]
    ran.clear()
    plan |= {"killed after": 1000, "failing": ""}
    assert race.main(said) == 0
    assert ran == ["torch-ddp", "ddp()", "torch-ddp"]
    path.write_text(path.read_text() + '{"key": "cut')
    assert race.main(said) == 0 and len(ran) == 3, "a line that was cut off is dropped"
