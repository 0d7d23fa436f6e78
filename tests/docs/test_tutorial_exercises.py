"""The course's exercises: solutions are right, what a chapter begins with and other answers not."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tutorial import __main__ as command
from tutorial import checks
from tutorial.averaging import Team
from tutorial.cells import HERE
from tutorial.checks import CHECKS, ring_all_reduce, verdict

CHAPTERS = [str(number) for number in range(1, 8)]


@pytest.mark.parametrize("number", CHAPTERS)
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
    imports = "import math\nfrom tutorial.checks import check\n"
    Path(f"my_chapter{number}.py").write_text(imports + solution_cells(number))
    tutorial(monkeypatch, "check", number)
    found = re.findall(r"^Exercise (\d\.\d): (.*?)\.", capsys.readouterr().out, re.M)
    assert found == [(exercise, "right") for exercise in there]


def tutorial(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Run the command line in this process."""
    monkeypatch.setattr(sys, "argv", ["tutorial", *arguments])
    monkeypatch.setattr(checks, "CHOSEN", None)
    monkeypatch.setattr(checks, "WRONG", [])
    command.main()


def test_one_exercise_is_checked_by_its_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checks, "loss_after_ten_epochs", None)  # exercise 1.3 would train
    tutorial(monkeypatch, "start", "1")
    assert "# 1.2 How many steps" in Path("my_chapter1.py").read_text()
    assert "math.ceil" not in Path("my_chapter1.py").read_text()  # the solution
    capsys.readouterr()
    with pytest.raises(SystemExit):
        tutorial(monkeypatch, "check", "1.2")
    assert re.findall(r"Exercise (\d\.\d)", capsys.readouterr().out) == ["1.2"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("check", "1"), "python -m tutorial start 1 writes it"),
        (("check", "9.1"), "no chapter '9'"),
        (("check",), "check needs the number of a chapter"),
    ],
)
def test_what_cannot_be_checked_is_refused(
    arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=re.escape(said)):
        tutorial(monkeypatch, *arguments)


def test_your_answers_are_not_overwritten_and_an_unknown_exercise_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_chapter1.py").write_text("mine")
    with pytest.raises(SystemExit, match="exists"):
        tutorial(monkeypatch, "start", "1")
    assert Path("my_chapter1.py").read_text() == "mine"
    with pytest.raises(SystemExit, match=r"no exercise '1\.9': choose from 1\.1, 1\.2, 1\.3"):
        tutorial(monkeypatch, "check", "1.9")


def solution_cells(number: str) -> str:
    cells = (HERE / f"chapter{number}.py").read_text().split("\n# %%")
    return "\n".join(c.partition("\n")[2] for c in cells if c.startswith(' tags=["solution"]'))


def centers_too_early(x: torch.Tensor, a: torch.Tensor, beta: float) -> Any:
    return x - beta * (x - a), (1 - beta) * a + beta * x.mean(0)


def always_averages(team: Team, steps: int, start: int, period: int) -> None:
    for _ in range(steps):
        team.backward()
        team.g = team.g.mean(0)
        team.step()


WRONG: list[tuple[str, Any, str]] = [
    ("1.1", lambda i, d, z: i * z + z + d * (z * z + z), "should be 1021"),  # no output layer
    ("1.2", lambda samples, batch: samples // batch + 1, "no samples are left after it"),
    ("1.3", 1.0, "go lower"),
    ("2.1", lambda sizes: [1.0 for _ in sizes], "off by 300%"),
    ("2.2", 200, "not a third"),
    ("2.3", lambda parameters, bits, rate: 8 * parameters * bits / rate, "count the bits"),
    ("3.1", lambda samples, ranks: [-(-samples // ranks)] * ranks, "1004 samples in all"),
    ("3.1", lambda samples, ranks: [samples, *[0] * (ranks - 1)], "or one more"),
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
    ("5.4", {"model", "epoch"}, "differ"),
    ("5.4", {"weights"}, "Choose from"),
    ("6.1", 30, "a shorter period is enough"),
    ("6.2", centers_too_early, "is now"),
    ("6.3", always_averages, "differs"),
    ("6.4", {"beta": 0.0, "alpha": 1.0}, "differ"),
    ("7.1", lambda p, hosts, compute: 8 * p * 2 * (hosts - 1) / hosts / compute, "8 bits each"),
    ("7.2", lambda seconds, needed: "ddp", "the answer is 'ddp int4'"),
    ("7.3", lambda compute, round_time: 10_000, "longer than needed"),
]


@pytest.mark.parametrize(("number", "answer", "why"), WRONG)
def test_other_wrong_answers_are_not_right_and_told_why(number: str, answer: Any, why: str) -> None:
    right, told = verdict(number, answer)
    assert not right
    assert re.search(why, told), told


def test_every_exercise_has_another_wrong_answer() -> None:
    assert {number for number, _, _ in WRONG} == set(CHECKS)


def test_an_answer_that_fails_is_wrong_and_says_how() -> None:
    assert verdict("1.1", lambda: 1) == (
        False,
        "Your answer raised TypeError: test_an_answer_that_fails_is_wrong_and_says_how.<locals>."
        "<lambda>() takes 0 positional arguments but 3 were given",
    )


def test_an_unknown_exercise_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no exercise '9\.9': choose from 1\.1, 1\.2"):
        verdict("9.9", 1)


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_the_ring_sums_on_every_rank(n: int) -> None:
    rows = torch.randn(n, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    summed, sent = ring_all_reduce(rows)
    torch.testing.assert_close(summed, rows.sum(0).expand_as(rows))
    assert sent == 2 * (n - 1)
