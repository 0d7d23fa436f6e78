"""docs/own_algorithm.md does what it says: its code is run, and prints what stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "own_algorithm.md").read_text()
UPDATE, CHECK, RACE = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
LINE = re.compile(r"^ *loss (\d\.\d+), (\d+\.\d+) MB sent by each worker$", re.MULTILINE)


def run(*blocks: str) -> None:
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, "own_algorithm.md", "exec"), names)


@pytest.mark.timeout(60)
def test_the_page_runs_and_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    run(UPDATE, CHECK, RACE)
    printed, shown = LINE.findall(capsys.readouterr().out), LINE.findall(PAGE)
    assert len(printed) == 3
    assert [sent for _, sent in printed] == [sent for _, sent in shown]
    for (loss, _), (expected, _) in zip(printed, shown, strict=True):
        assert float(loss) == pytest.approx(float(expected), rel=0.1)  # processors differ


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ('state["a"] - x + state["e"]', 'state["a"] - x'),
        ('state["e"].copy_(d - q)', 'state["e"].copy_(q)'),
        ('state["a"].sub_(received)', 'state["a"].add_(received)'),
        ("d.bfloat16()", "d.half()"),
    ],
)
def test_the_pages_check_finds_a_wrong_line(line: str, wrong: str) -> None:
    assert UPDATE.count(line) == 1
    with pytest.raises(AssertionError):
        run(UPDATE.replace(line, wrong), CHECK)
