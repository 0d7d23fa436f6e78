"""benchmarks.survive.join: what follows from the workers' records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.survive import join
from benchmarks.survive.join import Run

PERIOD, NORMAL, ROUND = 4, 0.1, 0.5


def step_at(number: int, begin: float, took: float) -> dict[str, object]:
    wait = 0.0 if number % PERIOD else ROUND
    computed = begin + took
    return {"event": "step", "step": number, "begin": begin, "computed": computed,
            "end": computed + wait}  # fmt: skip


def test_what_a_join_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 1 to 19 as usual; the newcomer calls at once. Steps 21 to 27, with one round, take 1.5
    times as long each, without the round. From step 28 on there are four workers, and their first
    round takes 0.2 s more."""
    monkeypatch.chdir(tmp_path)
    run = Run("local_sgd(8)", PERIOD, join.parser().parse_args([]))
    time, asked, lines = 0.0, 0.0, []
    for number in range(1, 45):
        line = step_at(number, time, 1.5 * NORMAL if 21 <= number < 28 else NORMAL)
        if number == 28:
            line["end"] = float(str(line["end"])) + 0.2
        time = float(str(line["end"]))
        asked = time if number == 19 else asked
        lines.append(line)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    for worker in range(3):
        (run.directory / f"worker{worker}.jsonl").write_text(text)
    said = [
        {"event": "attach", "time": asked + 0.01},
        {"event": "attached", "time": asked + 2.01, "step": 27, "bytes": 8},
    ]
    newcomer = run.directory / "newcomer0.jsonl"
    newcomer.write_text("".join(json.dumps(line) + "\n" for line in said))
    (run.directory / "newcomer0.trace").mkdir()
    trace = run.directory / "newcomer0.trace" / "id.jsonl"
    trace.write_text(json.dumps({"donor": "b", "step": 20}) + "\n")
    cost = run.costs(0, 1)
    assert cost.steps == 7 and cost.bytes == 8
    assert cost.ratio == pytest.approx((7 * 1.5 * NORMAL + ROUND) / (7 * NORMAL + ROUND))
    assert cost.periods == (28 - 19) / PERIOD
    assert cost.seconds == pytest.approx(2.0)
    assert cost.extra == pytest.approx(0.2)
    assert cost.period == pytest.approx(PERIOD * NORMAL + ROUND)
