"""What the lab says of an elastic run: how many of its steps counted, and who was present when; and
the plans of faults."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from laconic.cli import main
from laconic.lab.emulation import faults
from laconic.lab.emulation.faults import COORDINATOR, Fault, Plan
from laconic.lab.emulation.goodput import read, report, summary
from laconic.lab.emulation.injection import KILLED, Happened

BEGAN = 1_800_000_000.0
"""When the lab began, in seconds since 1970."""


def event(kind: str, at: float, computed: int, counted: int, **more: Any) -> dict[str, Any]:
    return {"presence": kind, "time": BEGAN + at, "steps": [computed, counted], **more}


def view(at: float, computed: int, counted: int, workers: str, **gone: Any) -> dict[str, Any]:
    return event("view", at, computed, counted, workers=[*workers], gone=gone)


def begin(at: float, host: str) -> dict[str, Any]:
    return event("begin", at, 0, 0, host=host)


def test_a_lost_run_counts_nothing() -> None:
    lost = {
        "a": [view(1, 0, 0, "ab"), begin(1, "host0"), view(3, 20, 20, "a", b=[19, 16])],
        "b": [view(1, 0, 0, "ab"), begin(1, "host1")],
        "c": [view(8, 0, 0, "c"), begin(8, "host0"), event("finished", 9, 5, 5)],
    }
    kills = [Happened(4 - 2 * k, f"host{k}", KILLED, BEGAN + 4 - 2 * k) for k in (1, 0)]
    found = summary(lost, kills, BEGAN, 10.0)
    assert found is not None and found.runs_lost == 1
    assert report(found)[0] == "goodput 11.3%: 5 of 44 steps counted"
    assert summary({}, [], BEGAN, 3.0) is None


def test_it_is_what_happened_to_each_worker_and_step(tmp_path: Path) -> None:
    """k is killed after 12 of its 14 steps counted, h hangs, l leaves; a and b, which come later,
    finish."""
    lost, hung = view(5, 14, 12, "hl", k=[14, 12]), view(12, 30, 30, "ab", h=[21, 20])
    end = event("finished", 15, 40, 40)
    events = {
        "k": [begin(1, "host0"), view(1, 0, 0, "khl")],
        "h": [begin(1, "host1"), view(1, 0, 0, "khl"), lost],
        "l": [begin(1, "host2"), view(1, 0, 0, "khl"), lost, event("left", 8, 20, 20)],
        "a": [begin(6, "host0"), view(6, 0, 0, "hla"), hung, end],
        "b": [begin(9, "host2"), view(9, 0, 0, "hab"), hung, end],
    }
    for id, own in events.items():
        lines = [json.dumps(each) + "\n" for each in [{"unit": 1}, *own]]
        (tmp_path / f"{id}.jsonl").write_text("".join(lines) + '{"presence": "vi')
    assert read(tmp_path) == events
    found = summary(events, [Happened(4, "host0", KILLED, BEGAN + 4.2)], BEGAN, 16.0)
    assert found is not None and found.runs_lost == 0
    assert (found.computed, found.counted) == (14 + 21 + 20 + 80, 12 + 20 + 20 + 80)
    assert {w.id: (w.host, w.how, w.begin, w.end) for w in found.workers} == {
        "k": ("host0", "killed by plan", 1, 4),
        "h": ("host1", "lost", 1, 12),
        "l": ("host2", "left", 1, 8),
        "a": ("host0", "finished", 6, 15),
        "b": ("host2", "finished", 9, 15),
    }


# -- plans of faults ----


def test_events_are_in_order_and_random_kills_have_the_mean_time() -> None:
    cut, hang = Fault("cut", 2.0, 0, 1, 3.0), Fault("hang", 3.0, 2, None, 4.0)
    kill = Fault("kill", 1.0, COORDINATOR)
    assert [(e.at, e.fault, e.begins) for e in Plan((hang, cut, kill)).events()] == [
        (1.0, kill, True), (2.0, cut, True), (3.0, cut, False), (3.0, hang, True),
        (4.0, hang, False),
    ]  # fmt: skip
    kills = faults.random_kills(60.0, 4, 7, 600_000.0).faults
    gaps = [late.at - soon.at for soon, late in itertools.pairwise(kills)]
    assert len(kills) == pytest.approx(10_000, rel=0.05)
    assert sum(gap < 60.0 for gap in gaps) / len(gaps) == pytest.approx(0.632, abs=0.02)
    for worker in range(4):
        assert sum(kill.worker == worker for kill in kills) == pytest.approx(2500, rel=0.1)
    shorter = faults.random_kills(60.0, 4, 7, 6_000.0).faults
    assert shorter == tuple(k for k in kills if k.at <= 6_000.0), "a longer time only adds kills"


# -- in the lab ----


@pytest.mark.slow
@pytest.mark.hosts
def test_an_elastic_run_in_the_lab(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The plan's fault is over before its program begins; it has the lab run a coordinator."""
    example = Path(__file__).parents[2] / "examples" / "elastic" / "train.py"
    options = ["--hosts", "2", "--hang", "1@1ms..2ms", "--out", str(tmp_path)]
    assert main(["lab", *options, "--", sys.executable, str(example), "--steps", "100"]) == 0
    said, rates = capfd.readouterr().err, json.loads((tmp_path / "rates.json").read_text())
    elastic = rates["elastic"]
    assert elastic["computed"] == elastic["counted"] == 200
    assert ": 200 of 200 steps counted\n" in said
    assert sorted((w["host"], w["how"]) for w in elastic["workers"]) == [
        ("host0", "finished"), ("host1", "finished")
    ]  # fmt: skip
