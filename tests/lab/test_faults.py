"""Plans of faults, and an elastic run in the lab with one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from laconic.cli import main
from laconic.lab.emulation.faults import COORDINATOR, Fault, Plan


def test_events_are_in_order() -> None:
    cut, hang = Fault("cut", 2.0, 0, 1, 3.0), Fault("hang", 3.0, 2, None, 4.0)
    kill = Fault("kill", 1.0, COORDINATOR)
    assert [(e.at, e.fault, e.begins) for e in Plan((hang, cut, kill)).events()] == [
        (1.0, kill, True), (2.0, cut, True), (3.0, cut, False), (3.0, hang, True),
        (4.0, hang, False),
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.hosts
def test_an_elastic_run_in_the_lab(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The plan's fault is over before its program begins; it has the lab run a coordinator."""
    example = Path(__file__).parents[2] / "examples" / "elastic" / "train.py"
    options = ["--hosts", "2", "--hang", "1@1ms..2ms", "--out", str(tmp_path)]
    assert main(["lab", *options, "--", sys.executable, str(example), "--steps", "100"]) == 0
    said, rates = capfd.readouterr().out, json.loads((tmp_path / "rates.json").read_text())
    assert [fault["what"] for fault in rates["faults"]] == ["stopped", "continued"]
    assert "lost: 0 workers and 0 of their steps" in said
