"""The pages on elastic runs, security and guarantees: the tests that they name exist, and the plan
in steps runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = ("elastic", "spot", "borrowed", "security", "guarantees")
PAGES = [ROOT / "docs" / f"{name}.md" for name in NAMES]


def test_the_tests_and_files_that_are_named_exist() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    text = "".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"`(test_\w+)`", text))
    assert len(named) > 10
    assert [name for name in sorted(named) if f"def {name}(" not in tests] == []
    for file in re.findall(r"examples/[\w/.-]+\w", text):
        assert (ROOT / file).is_file(), file


def test_the_plan_in_steps_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGES[0].read_text(), re.DOTALL)
    (example,) = [block for block in blocks if "laconic.Faults(" in block]
    exec(example, {"__name__": "example"})
    calm, rough, one = capsys.readouterr().out.splitlines()
    assert calm.startswith("0 kills") and "None" not in calm
    assert int(rough.split()[0]) == rough.count("None") > 2
    losses = one.partition("[")[2].rstrip("]").split(", ")
    assert [loss == "None" for loss in losses] == [False, False, True, False, False]
    assert len({*losses}) == 2, "the workers that are left end with one model"
