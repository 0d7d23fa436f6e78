"""A tiny run of each benchmark works, and what is not run goes on where it was."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.evidence.runs import Job, journal, train
from benchmarks.factors import ROWS, STEPS, factor
from benchmarks.race import __main__ as race

from laconic.algorithms.parse import parse_recipe
from laconic.lab.race import runner
from laconic.lab.race.result import NO_COMMUNICATION, Result

from tests.support.races import result, row


def test_a_factor_is_steps_over_those_of_ddp_at_the_same_loss() -> None:
    ddp = {STEPS // 4: 2.4, STEPS // 2: 2.2, STEPS: 1.8}
    for loss, expected in ((1.8, 1.0), (2.2, 2.0), (2.0, math.sqrt(2)), (1.5, 1.0), (9.0, 4.0)):
        assert factor(loss, ddp) == pytest.approx(expected)
    assert all(parse_recipe(text) for text in ROWS)


def test_a_race_that_was_killed_goes_on_and_tries_again_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    plan = {"killed after": 3, "failing": "torch-ddp"}

    def run(settings: runner.Settings, told: str, watch: object) -> Iterator[Result]:
        if len(ran) == plan["killed after"]:
            raise KeyboardInterrupt
        baseline = [NO_COMMUNICATION] * settings.baseline
        (text,) = (*baseline, *settings.recipes, *settings.rivals)
        ran.append(text)
        made = row(text, (0, 0, 5.0), (100, 30, 2.0), peer=text == "torch-ddp")
        if text == plan["failing"]:
            made = row(text, status="failed", error="why", peer=True)
        yield result(made, reason=None)

    monkeypatch.setattr(race, "Cluster", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(runner, "run", run)
    path = tmp_path / "journal"
    said = ["--rows", "none", "ddp()", "torch-ddp", "--networks", "10mbit", "50mbit/80ms/0.1%",
            "--seeds", "0", "--seconds", "30", "--journal", str(path)]  # fmt: skip
    assert race.main(said) == 130
    assert ran == [NO_COMMUNICATION, "ddp()", "torch-ddp"]
    ran.clear()
    plan |= {"killed after": 1000, "failing": ""}
    assert race.main(said) == 0
    assert ran == ["torch-ddp", "ddp()", "torch-ddp"]
    path.write_text(path.read_text() + '{"key": "cut')
    assert race.main(said) == 0 and len(ran) == 3, "a line that was cut off is dropped"


@pytest.mark.slow
def test_trainings_of_benchmarks(tmp_path: Path) -> None:
    job = Job("images, small", "diloco(5, momentum=0.6)", "adamw", 8e-3, 2, 12, 4, 7)
    first = train(job)
    assert journal(tmp_path / "runs.jsonl").outcomes([job], 1) == {job: first}
    assert journal(tmp_path / "runs.jsonl").load() == {job: first}
