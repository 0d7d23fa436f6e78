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


def test_the_gpu() -> None:
    assert cuda.PAGE.read_text() == cuda.rendered(cuda.PAGE.read_text(), cuda.read(RESULTS))


@pytest.mark.slow
def test_the_race_the_cost_model_and_the_evidence(tmp_path: Path) -> None:
    for name in ("race", "validation", "evidence"):
        shutil.copy(DOCS / f"{name}.md", tmp_path)
    words = ["--journal", str(DOCS / "race.jsonl"), "--page", str(tmp_path / "race.md")]
    assert race.main(["table", *words, "--key", "f1fc677f"]) == 0
    words = [word.replace("race", "validation") for word in words]
    assert validate(["--table", *words]) == 1, "one prediction misses its bound"
    evidence.write(tmp_path, evidence_journal().load())
    evidence.write_signals(tmp_path, signals.lines(signals.journal().load()))
    for page in tmp_path.glob("*.md"):
        assert page.read_text() == (DOCS / page.name).read_text(), page.name


@pytest.mark.slow
@pytest.mark.parametrize("theme", headline.THEMES)
def test_the_picture_of_readme(theme: str) -> None:
    """Else run ``python -m benchmarks.race.headline``."""
    entries = race_journal.load(DOCS / "race.jsonl")
    drawn, settings = io.BytesIO(), dict[Any, Any](headline.SETTINGS)
    with matplotlib.rc_context(settings):
        headline.picture(entries, theme).savefig(drawn, format="svg", metadata={"Date": None})
    assert drawn.getvalue() == (DOCS / f"headline_{theme}.svg").read_bytes()
