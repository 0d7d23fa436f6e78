"""The tables and pictures of the docs are those of the committed journals."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from benchmarks.cuda import page as cuda
from benchmarks.cuda.__main__ import RESULTS
from benchmarks.evidence import page as evidence
from benchmarks.evidence import signals
from benchmarks.evidence.runs import journal as evidence_journal
from benchmarks.race import __main__ as race
from benchmarks.race import headline
from benchmarks.race import journal as race_journal
from benchmarks.validate.__main__ import main as validate

DOCS = Path(__file__).parents[2] / "docs"


def test_the_race(tmp_path: Path) -> None:
    target = tmp_path / "race.md"
    shutil.copy(DOCS / "race.md", target)
    table = ["table", "--journal", str(DOCS / "race.jsonl"), "--page", str(target)]
    assert race.main([*table, "--key", "f1fc677f"]) == 0, "the key with the most runs"
    assert target.read_text() == (DOCS / "race.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("theme", headline.THEMES)
def test_the_picture_of_readme(theme: str) -> None:
    entries = race_journal.load(DOCS / "race.jsonl")
    drawn = io.BytesIO()
    settings: Any = headline.SETTINGS
    with matplotlib.rc_context(settings):
        headline.picture(entries, theme).savefig(drawn, format="svg", metadata={"Date": None})
    committed = (DOCS / f"headline_{theme}.svg").read_bytes()
    assert drawn.getvalue() == committed, "python -m benchmarks.race.headline"


@pytest.mark.slow
def test_the_accuracy_of_the_cost_model(tmp_path: Path) -> None:
    """On any machine: a round that prints differently would lose the time that was measured for
    it."""
    path = tmp_path / "validation.md"
    shutil.copy(DOCS / "validation.md", path)
    table = ["--table", "--journal", str(DOCS / "validation.jsonl"), "--page", str(path)]
    assert validate(table) == 1, "one prediction misses its bound"
    assert path.read_text() == (DOCS / "validation.md").read_text()


@pytest.mark.slow
def test_the_evidence(tmp_path: Path) -> None:
    shutil.copy(DOCS / "evidence.md", tmp_path / "evidence.md")
    evidence.write(tmp_path, evidence_journal().load())
    evidence.write_signals(tmp_path, signals.lines(signals.journal().load()))
    assert (tmp_path / "evidence.md").read_text() == (DOCS / "evidence.md").read_text()


def test_the_gpu() -> None:
    assert cuda.PAGE.read_text() == cuda.rendered(cuda.PAGE.read_text(), cuda.read(RESULTS))
