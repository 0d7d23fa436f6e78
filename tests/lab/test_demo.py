"""``laconic demo``: what it races, and what it says, from results made by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from laconic.algorithms.parse import parse_recipe
from laconic.cli import main
from laconic.lab.demo import outcome
from laconic.lab.demo.outcome import AUTO, DDP, EXPLAINED, LOCAL
from laconic.lab.race import runner
from laconic.lab.race.result import NO_COMMUNICATION, Result, Row, read

from tests.support.races import result, row


def raced(*failed: str, chooses: str = "streaming_diloco(8)", **finals: float) -> Result:
    """A race in which each row falls from 5.5 to 3 in 10 s, and to its final loss in 30 s."""
    names = {"alone": NO_COMMUNICATION, "ddp": DDP, "auto": AUTO, "local": LOCAL}
    steps = {"alone": 400, "ddp": 40, "auto": 380, "local": 300}
    chose = tuple(
        f"after step {step}: a step computes for 40 ms: {recipe} takes 90 ms per step, 40%"
        for step, recipe in ((4, "ddp(codec='int4')"), (68, chooses))
    )
    rows = []
    for key, final in finals.items():
        n = steps[key]
        curve = ((0, 0.0, 5.5), (n // 3, 10.0, 3.0), (n, 30.0, final))
        made = row(names[key], *curve, notes=chose if key == "auto" else (), waiting=1 - n / 400)
        rows.append(replace(made, status="failed", error="it broke") if key in failed else made)
    return result(*rows)


ALL: dict[str, Any] = {"alone": 2.5, "ddp": 2.9, "local": 2.4, "auto": 2.2}
SAYS: list[tuple[Result, list[str]]] = [
    (raced(**ALL),
     ["ddp() waits for the network (100 Mbit/s per host) during 90% of its 30 s",
      "auto() chose streaming_diloco(8), had that loss after 12.5 s (2.4 times as fast, with an "
      "outer step, a second optimizer; local_sgd(24), which has none, took 13.3 s), and ended",
      "Hosts that never communicate end at 2.50", "all recipes but ddp() are ahead of them."]),
    (raced(**ALL, chooses="local_sgd(8)"), ["(2.4 times as fast), and ended"]),
    (raced(alone=2.1, ddp=2.3, local=2.2, auto=2.4),
     ["did not reach the loss of ddp(), and ended at 2.40, behind ddp() (2.30) and local_sgd(24)",
      "no recipe is ahead of them: communication has not paid"]),
    (raced("auto", "alone", **ALL),
     ["auto() did not finish.", "Hosts that never communicate did not finish"]),
    (raced("local", **ALL), ["(2.4 times as fast, with an outer step, a second optimizer), and"]),
    (raced("auto", "ddp", alone=2.5, ddp=2.9, auto=2.2), ["no recipe is ahead of them"]),
]  # fmt: skip


def test_what_a_race_shows_and_whether_it_was_disturbed() -> None:
    """By more steps than without communication, or steps that compute far longer."""
    for race, phrases in SAYS:
        said = " ".join(outcome.sentences(race))
        assert all(phrase in said for phrase in phrases), said
        assert outcome.disturbed(race) is None
    alone, *others = raced(alone=2.5, ddp=2.9, auto=2.2).rows
    told = outcome.disturbed(result(replace(alone, steps=200), *others))
    assert "took more steps than hosts that never" in str(told)
    told = outcome.disturbed(result(alone, *(replace(r, waiting=0.0) for r in others)))
    assert "computed more than 1.5 times as long" in str(told)


def test_the_command_ends_with_a_picture_and_three_sentences(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[runner.Settings] = []

    def run(settings: runner.Settings, command: str, watch: Any) -> Iterator[Result]:
        seen.append(settings)
        rows: list[Row] = []
        for number, name in enumerate(EXPLAINED):
            watch(name, {"event": "launched"})
            watch(name, {"event": "step", "step": 1, "steps": 9, "loss": 5.0})
            made = row(name, (0, 0, 5.0), (100, 20, 2 + number / 10))
            if name == LOCAL and settings.seconds == 1:
                made = replace(made, status="failed", error="worker 2 did not answer")
            rows.append(made)
            watch(name, {"event": "done", "row": made})
            yield result(*rows, seconds=20.0)

    monkeypatch.setattr(runner, "run", run)
    assert main(["demo", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    for name, text in EXPLAINED.items():
        assert f"{name}: {text}" in " ".join(said.err.split())
        assert name == NO_COMMUNICATION or parse_recipe(name)
    assert all(f" {number}. " in " ".join(said.out.split()) for number in (1, 2, 3))
    assert {"loss.svg", "report.html", "results.json"} <= {p.name for p in tmp_path.iterdir()}
    assert len(read(tmp_path).rows) == 5
    assert main(["demo", "--seconds", "1", "--out", str(tmp_path)]) == 1
    assert "failed: worker 2 did not answer" in capsys.readouterr().err
    assert seen[0].network.bandwidth == 100e6 and len(EXPLAINED) * (seen[0].seconds or 0) <= 60
