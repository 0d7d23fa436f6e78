"""The tutorial: its chapters run, its pages are of these chapters, and its exercises tell right
answers from what stands there first. That its loops are laconic's recipes, chapter 6 asserts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jupytext  # type: ignore[import-untyped]
import pytest

from tutorial import __main__ as command
from tutorial import checks, pages
from tutorial.checks import CHECKS

ROOT = Path(__file__).parents[2]
CHAPTERS = sorted(ROOT.glob("tutorial/chapter*.py"))
NUMBERS = [path.stem.removeprefix("chapter") for path in CHAPTERS]


# -- chapters and their pages ----


@pytest.mark.hosts
@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
def test_a_chapter_runs_and_says_that_it_is_scaled(number: str) -> None:
    env = {**os.environ, "TUTORIAL_SCALE": "0.01", "MPLBACKEND": "agg"}
    command = [sys.executable, "-m", "tutorial", number]
    ended = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=290)
    assert ended.returncode == 0, ended.stderr
    assert "scaled to 0.01 of the work" in ended.stdout


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_a_page_has_the_chapters_prose_code_and_source(chapter: Path) -> None:
    """Else make tutorial has to be run again. Solutions are folded, and hidden cells left out."""
    text = chapter.read_text()
    page = (ROOT / "docs" / "tutorial" / f"{chapter.stem}.md").read_text()
    for cell in text.split("\n# %%")[1:]:
        kind, _, body = cell.partition("\n")
        prose = kind.startswith(" [markdown]")
        body = re.sub(r"^# ?", "", body, flags=re.MULTILINE) if prose else body
        shown = '"hidden"' not in kind and '"source"' not in kind
        assert (body.strip() in page) == shown
    folded = re.findall(r"<details.*?>\n<summary>Solution</summary>.*?</details>", page, re.S)
    assert len(folded) >= 3 and all("check(" in each for each in folded)
    assert ": right." not in page
    notebook = jupytext.read(chapter)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    names: dict[str, Any] = {"__name__": "__main__"}
    pages.run(code[0], names)
    for cell in (cell for cell in code if "source" in pages.tags(cell)):
        assert pages.run(cell, names).rstrip() in page
    if "folder" in names:  # a chapter's temporary directory, which its last cell removes
        names["folder"].cleanup()


# -- exercises ----


def tutorial(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Run the command line in this process."""
    monkeypatch.setattr(sys, "argv", ["tutorial", *arguments])
    monkeypatch.setattr(checks, "CHOSEN", None)
    monkeypatch.setattr(checks, "WRONG", [])
    command.main()


@pytest.mark.parametrize(
    "number", [n if n == "3" else pytest.param(n, marks=pytest.mark.slow) for n in NUMBERS]
)
def test_solutions_are_right_and_what_stands_there_first_is_not(
    number: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=f"python -m tutorial start {number} writes it"):
        tutorial(monkeypatch, "check", number)
    tutorial(monkeypatch, "start", number)
    with pytest.raises(SystemExit) as ended:
        tutorial(monkeypatch, "check", number)
    assert ended.value.code == 1
    begun = re.findall(r"^Exercise (\d\.\d): (.*?)\.", capsys.readouterr().out, re.M)
    there = [exercise for exercise in CHECKS if exercise.startswith(f"{number}.")]
    assert begun == [(exercise, "not yet") for exercise in there]
    with pytest.raises(SystemExit, match="exists"):
        tutorial(monkeypatch, "start", number)
    parts = (ROOT / "tutorial" / f"chapter{number}.py").read_text().split("\n# %%")
    solved = [c.partition("\n")[2] for c in parts if c.startswith(' tags=["solution"]')]
    imports = "import math\nfrom tutorial.checks import check\n"
    Path(f"my_chapter{number}.py").write_text(imports + "\n".join(solved))
    tutorial(monkeypatch, "check", number)
    found = re.findall(r"^Exercise (\d\.\d): (.*?)\.", capsys.readouterr().out, re.M)
    assert found == [(exercise, "right") for exercise in there]
