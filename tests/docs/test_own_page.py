"""docs/own_algorithm.md does what it says: its code is run, and prints what stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import laconic
from laconic.algorithms.exchanges import Mean

PAGE = (Path(__file__).parents[2] / "docs" / "own_algorithm.md").read_text()
UPDATE, CHECK, RACE, OUTER, LATE, SCHEDULE, MATRICES = re.findall(
    r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL
)
LINE = re.compile(r"^ *loss (\d\.\d+), (\d+\.\d+) MB sent by each worker$", re.MULTILINE)


def run(*blocks: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, "own_algorithm.md", "exec", dont_inherit=True), names)
    return names


def test_the_page_runs_and_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    run(UPDATE, CHECK, RACE, OUTER, LATE, SCHEDULE, MATRICES)
    printed, shown = LINE.findall(capsys.readouterr().out), LINE.findall(PAGE)
    assert len(printed) == 6
    assert [sent for _, sent in printed] == [sent for _, sent in shown]
    for (loss, _), (expected, _) in zip(printed, shown, strict=True):
        assert float(loss) == pytest.approx(float(expected), rel=0.1)  # processors differ


def test_the_matrix_step_is_orthogonal() -> None:
    names = run(UPDATE, MATRICES)

    def worker(rank: int) -> Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        start = model.weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recipe = (laconic.Round(laconic.every(1), names["MatrixStep"](0.5), Mean()),)
        laconic.attach(model, optimizer, recipe)
        model(torch.randn(4, 3) + rank).square().sum().backward()
        optimizer.step()
        return (start - model.weight.detach()) / 0.5

    for step in laconic.simulate(worker, workers=2):
        assert torch.allclose(step @ step.T, torch.eye(2), atol=1e-5)


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
