"""The tutorial: its chapters run, its pages are of these chapters, its loops are laconic's recipes,
and its exercises tell right answers from wrong ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jupytext  # type: ignore[import-untyped]
import nbformat
import pytest
import torch
from torch import Tensor

import laconic
from tutorial import __main__ as command
from tutorial import averaging, checks, notebooks, pages
from tutorial.averaging import ADAM, MOMENTUM, Task, Team, by_laconic
from tutorial.checks import CHECKS, verdict

ROOT = Path(__file__).parents[2]
CHAPTERS = sorted(ROOT.glob("tutorial/chapter*.py"))
NUMBERS = [path.stem.removeprefix("chapter") for path in CHAPTERS]


def python(*arguments: str) -> str:
    """What a program prints that ends well."""
    ended = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "TUTORIAL_SCALE": "0.01", "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=290,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


# -- chapters and their pages ----


@pytest.mark.hosts
@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
def test_a_chapter_runs_and_says_that_it_is_scaled(number: str) -> None:
    assert "scaled to 0.01 of the work" in python("-m", "tutorial", number)


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_a_page_has_the_chapters_prose_code_and_source(chapter: Path) -> None:
    """Else make tutorial has to be run again. A page has a goal and folded solutions, and no
    assertion is about a measured time: claims about those are for `expect`."""
    text = chapter.read_text()
    page = (ROOT / "docs" / "tutorial" / f"{chapter.stem}.md").read_text()
    for cell in text.split("\n# %%")[1:]:
        kind, _, body = cell.partition("\n")
        prose = kind.startswith(" [markdown]")
        body = re.sub(r"^# ?", "", body, flags=re.MULTILINE) if prose else body
        assert body.strip() in page
    for line in re.findall(r"^ *(assert .*)", text, re.MULTILINE):
        assert not re.search(r"seconds|taken|rates|waiting|computing|days|speed", line), line
    goal, before = page.index("**After this chapter you can**"), page.index("**Before you start.**")
    assert goal < before < page.index("```python") and "../glossary.md#" in page
    folded = re.findall(r"<details.*?>\n<summary>Solution</summary>.*?</details>", page, re.S)
    assert len(folded) >= 3
    assert all(re.search(r"\nExercise \d\.\d: right\.", each) for each in folded)
    assert ": right." not in re.sub(r"<details.*?</details>", "", page, flags=re.S)
    notebook = jupytext.read(chapter)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    names: dict[str, Any] = {"__name__": "__main__"}
    pages.run(code[0], names)
    for cell in (cell for cell in code if "source" in pages.tags(cell)):
        assert pages.run(cell, names).rstrip() in page
    if "folder" in names:  # a chapter's temporary directory, which its last cell removes
        names["folder"].cleanup()
    if chapter.stem == "chapter5":
        assert (ROOT / "tutorial" / "full_ddp.slurm").read_text() in page


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
def test_a_notebook_is_valid_and_one_with_changes_is_kept(
    number: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = nbformat.read(notebooks.write(number, tmp_path), as_version=4)
    nbformat.validate(written)
    for cell in written.cells:
        for link in re.findall(r"\]\(([^)\s]+)\)", cell.source) * (cell.cell_type == "markdown"):
            path = link.partition("#")[0]
            other = re.fullmatch(r"chapter\d\.ipynb", path) or link.startswith("https:")
            assert other or (tmp_path / path).is_file(), link
        if "solution" in cell.metadata.get("tags", []):
            assert cell.metadata["jupyter"] == notebooks.FOLDED
    assert sum("solution" in cell.metadata.get("tags", []) for cell in written.cells) >= 3
    path = tmp_path / f"chapter{number}.ipynb"
    path.write_text("mine")
    notebooks.main([number, "--to", str(tmp_path)])
    assert path.read_text() == "mine" and "(kept as it is)" in capsys.readouterr().out


# -- what the chapters compute ----


STEPS = 21  # five rounds of 4, and one step
Loop = Callable[[Team], Tensor]
TASK = Task(MOMENTUM, seed=5)
LOOPS: dict[str, tuple[Task, Loop, laconic.Recipe, dict[str, Any]]] = {
    "ddp": (
        TASK,
        lambda team: averaging.gradient_averaging(team, STEPS),
        laconic.ddp(),
        {},
    ),
    "local SGD": (
        TASK,
        lambda team: averaging.local_sgd(team, STEPS, 4),
        laconic.local_sgd(4),
        {},
    ),
    "SlowMo": (
        TASK,
        lambda team: averaging.slowmo(team, STEPS, base=2, period=4, beta=0.6, lr=0.02, alpha=0.9),
        laconic.slowmo(laconic.local_sgd(2), 4, 0.6, 0.9),
        {},
    ),
    "EASGD": (
        TASK,
        lambda team: averaging.easgd(team, STEPS, 4, 0.6),
        laconic.easgd(4, 0.6),
        {},
    ),
    "LSGD": (
        TASK,
        lambda team: averaging.lsgd(team, STEPS, period=6, local_period=2, group=2, c=0.2),
        laconic.lsgd(
            6, local_period=2, pull=0.2, local_pull=0.2, drift=0.2, local_drift=0.2, window=10
        ),
        {"group_size": 2},
    ),
    "SGP": (
        replace(Task(MOMENTUM), workers=3),
        lambda team: averaging.sgp(team, STEPS, averaging.row_of_three),
        laconic.sgp("bipartite_linear"),
        {},
    ),
    "DiLoCo": (
        Task(ADAM, seed=6),
        lambda team: averaging.diloco(team, STEPS, 4, eta=0.6, mu=0.8),
        laconic.diloco(4, 0.6, 0.8),
        {},
    ),
}


@pytest.mark.parametrize(
    "name", [n if n == "SlowMo" else pytest.param(n, marks=pytest.mark.slow) for n in LOOPS]
)
def test_loops_from_the_papers_equal_recipes(name: str) -> None:
    task, loop, recipe, options = LOOPS[name]
    team = Team(task)
    start, model = team.x, loop(team)
    trained = by_laconic(task, recipe, STEPS, **options)
    torch.testing.assert_close(team.x, trained.x, rtol=0, atol=1e-13)
    torch.testing.assert_close(model, trained.model, rtol=0, atol=1e-13)
    assert float((trained.x - start).abs().max()) > 1e-2  # something was learned


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
    number: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nine",), "no chapter 'nine': choose from 1, 2"),
        (("check", "1"), "python -m tutorial start 1 writes it"),
        (("check", "9.1"), "no chapter '9'"),
        (("check",), "check needs the number of a chapter"),
    ],
)
def test_what_cannot_be_run_or_checked_is_refused(
    arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=re.escape(said)):
        tutorial(monkeypatch, *arguments)


def centers_too_early(x: Tensor, a: Tensor, beta: float) -> Any:
    return x - beta * (x - a), (1 - beta) * a + beta * x.mean(0)


WRONG: list[tuple[str, Any, str]] = [
    ("1.1", lambda i, d, z: i * z + z + d * (z * z + z), "should be 1021"),  # no output layer
    ("1.2", lambda samples, batch: samples // batch + 1, "no samples are left after it"),
    ("1.3", 1.0, "go lower"),
    ("2.1", lambda sizes: [1.0 for _ in sizes], "off by 300%"),
    ("2.2", 200, "not a third"),
    ("2.3", lambda parameters, bits, rate: 8 * parameters * bits / rate, "count the bits"),
    ("3.1", lambda samples, ranks: [-(-samples // ranks)] * ranks, "1004 samples in all"),
    ("3.2", lambda samples, batch, ranks: True, r"\[10, 9\] samples"),
    ("3.3", lambda computing, message, messages, ranks: computing / ranks, "every message"),
    ("4.1", lambda ranks, size: 2 * size, "each sent 2 chunks"),
    ("4.2", lambda sizes, first, most: [[size] for size in sizes], "has room"),
    ("4.2", lambda sizes, first, most: [sizes[::-1], [0]], "in the order given"),
    ("4.3", lambda complete, sent: 0, "should be 1"),
    ("4.4", lambda ready, travel: ready[-1] + travel[-1], "should be 7"),
    ("5.1", lambda node, local, per_node: local * per_node + node, "each once"),
    ("5.2", lambda samples, ranks: ranks - samples % ranks, "is 2, but should be 0"),
    ("5.3", lambda errors, batch, ranks: errors.mean() / ranks, "0.50 of the right one"),
    ("5.4", {"model", "optimizer"}, "differ"),
    ("6.1", 30, "a shorter period is enough"),
    ("6.2", centers_too_early, "is now"),
    ("6.3", lambda team, steps, start, period: None, "differs"),
    ("6.4", {"beta": 0.0, "alpha": 1.0}, "differ"),
    ("7.1", lambda p, hosts, compute: 8 * p * 2 * (hosts - 1) / hosts / compute, "8 bits each"),
    ("7.2", lambda seconds, needed: "ddp", "the answer is 'ddp int4'"),
    ("7.3", lambda compute, round_time: 10_000, "longer than needed"),
    ("1.1", lambda: 1, "Your answer raised TypeError"),
]


@pytest.mark.slow
def test_wrong_answers_are_not_right_and_told_why() -> None:
    assert {number for number, _, _ in WRONG} == set(CHECKS)
    for number, answer, why in WRONG:
        right, told = verdict(number, answer)
        assert not right and re.search(why, told), f"{number}: {told}"
    with pytest.raises(ValueError, match=r"no exercise '9\.9': choose from 1\.1, 1\.2"):
        verdict("9.9", 1)
