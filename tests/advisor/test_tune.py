"""``laconic tune``: what is tuned, what is stopped, what survives a kill, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from laconic.advisor.tune import report, tuning
from laconic.advisor.tune.journal import open_journal
from laconic.advisor.tune.runs import VALIDATIONS, Report, Run, Task
from laconic.advisor.tune.space import Setting, space_of
from laconic.cli import main
from laconic.lab.emulation.network import Network
from laconic.lab.race import runner
from laconic.policy.predict import predict

SMALL = ("--workers", "2", "--steps", "16", "--step-time", "1ms")
"""A trial of a tenth of a second."""
RECIPE = "slowmo(local_sgd(4), period=8, momentum=momentum)"


def task(steps: int, seeds: tuple[int, ...] = (0,), seconds: float | None = None) -> Task:
    settings = runner.Settings(
        (),
        network=Network(1),
        per_host=2,
        workload="digits",
        seconds=None,
        steps=steps,
        seeds=seeds,
    )
    return Task(settings, 1e-3, seconds)


# -- what is tuned ----


def test_free_names_are_tuned_and_always_lr() -> None:
    space = space_of("slowmo(local_sgd(12), outer, momentum=momentum)", {"outer": (48, 24)}, 4)
    grids = {"outer": (24, 48), "momentum": (0.0, 0.1, 0.2, 0.4, 0.6), "lr": (0.5, 1.0, 2.0, 4.0)}
    assert space.grids == grids
    assert space.size == len({tuple(s.items()) for s in space.settings()}) == 40
    setting = {"outer": 24, "momentum": 0.1, "lr": 2.0}
    assert space.text(setting) == "slowmo(local_sgd(12), 24, momentum=0.1)"
    *_, line = report.code(space, setting)
    assert line.endswith("laconic.slowmo(laconic.local_sgd(12), 24, momentum=0.1))")
    for workers, momentum in ((1, 0.0), (4, 0.2), (8, 0.4), (16, 0.6)):
        assert space_of("slowmo", {}, workers).start["momentum"] == momentum
    hierarchical = space_of("hierarchical(2, period)", {"lr": (1,)}, 4)
    (line,) = report.code(hierarchical, {"period": 4, "lr": 1}, 2)
    assert line.endswith("laconic.hierarchical(2, 4), group_size=2)")


# -- the search, on a loss that is a formula ----

SPACE = space_of("slowmo(local_sgd(period), period=period, momentum=momentum)", {}, 8)


def bowl(setting: Setting) -> float:
    """A loss with one minimum on the grid, of 1 at period 24, momentum 0.1, lr 2."""
    period, momentum, lr = (float(setting[n] or 0) for n in ("period", "momentum", "lr"))
    return 1 + (math.log2(period / 24)) ** 2 + 20 * (momentum - 0.1) ** 2 + math.log2(lr / 2) ** 2


def formula(loss: Callable[[Setting], float] = bowl) -> tuning.Evaluate:
    """Runs whose loss falls to ``loss`` along a line."""

    def run(setting: Setting, told: Report) -> Run:
        for look in range(1, VALIDATIONS + 1):
            told(10 * look, 80, loss(setting) * (2 - look / VALIDATIONS))
        return Run(loss(setting), 80, 0.1 / float(setting["period"] or 1), 1.0)

    return run


def test_finds_the_minimum_in_a_third_of_the_grids_steps(tmp_path: Path) -> None:
    with open_journal(tmp_path / "journal", {}) as study:
        trials = list(tuning.tune(study, SPACE, formula(), trials=36))
    assert dict(trials[0].setting) == dict(SPACE.start)
    assert len({tuple(t.setting.items()) for t in trials}) == 36, "no setting twice"
    assert sum(t.run.steps for t in trials) <= 80 * SPACE.size / 3
    assert tuning.best(trials).run.loss <= 1.05
    stopped = [t for t in trials if t.status == "stopped"]
    assert {t.run.steps for t in stopped} == {30, 60}, "after three and six eighths"
    assert tuning.best(trials).run.loss < min(bowl(t.setting) for t in stopped)


def test_goes_on_to_the_same_trials_after_any_interruption(tmp_path: Path) -> None:
    """And after the journal was cut at any record, without any setting run twice."""
    space = space_of(SPACE.recipe, {"period": (12, 24), "momentum": (0, 0.1), "lr": (1, 2)}, 8)

    def outcome(path: Path) -> list[tuple[Setting, str, Mapping[int, float]]]:
        with open_journal(path, {}) as study:
            list(tuning.tune(study, space, formula(), seed=3))
            return [(t.setting, t.status, t.curve) for t in tuning.ended(study, space)]

    whole = outcome(tmp_path / "whole")
    records = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    assert len({tuple(s.items()) for s, _, _ in whole}) == len(whole) == space.size
    for count in [*range(0, 18, 4), *range(18, len(records), 40)]:
        (tmp_path / "cut").write_bytes(b"".join(records[:count]))
        assert outcome(tmp_path / "cut") == whole, f"after {count} records"


def test_what_diverges_is_stopped_and_never_the_best(tmp_path: Path) -> None:
    run = formula(lambda s: math.nan if s["lr"] == 2.0 else bowl(s))
    with open_journal(tmp_path / "journal", {}) as study:
        trials = list(tuning.tune(study, SPACE, run, trials=20))
    lost = [t for t in trials if t.setting["lr"] == 2.0]
    assert lost and {(t.status, t.run.steps) for t in lost} == {("diverged", 10)}
    assert tuning.best(trials) not in lost
    with pytest.raises(ValueError, match="every trial diverged"):
        tuning.best(lost)


# -- runs ----


def test_a_length_in_seconds_is_steps_of_the_cost_model() -> None:
    here = task(21)
    recipe = here.recipe("local_sgd(8)")
    cost = predict(recipe, here.facts)
    assert here.steps(recipe, cost) == 21
    assert task(21, seconds=21 * cost.seconds).steps(recipe, cost) == 16, "after a round"
    with pytest.raises(ValueError, match=r"too little for local_sgd\(8\): it allows 4 steps"):
        task(21, seconds=cost.seconds * 4).check(["local_sgd(8)"])


def test_a_run_is_the_same_every_time_and_depends_on_lr_and_seeds() -> None:
    here = task(24)
    told: list[tuple[int, int, float]] = []
    first = here.run("local_sgd(3)", 1.0, lambda *a: told.append(a))
    assert [step for step, _, _ in told] == [3, 6, 9, 12, 15, 18, 21, 24]
    assert first.loss == told[-1][2] < told[0][2]
    assert here.run("local_sgd(3)", 1.0, lambda *_: None) == first
    assert here.run("local_sgd(3)", 2.0, lambda *_: None).loss != first.loss
    one, both = (
        task(24, seeds).run("local_sgd(3)", 1.0, lambda *_: None).loss for seeds in ((1,), (0, 1))
    )
    assert one != first.loss and both == pytest.approx((first.loss + one) / 2, rel=1e-6)


# -- the command ----


def test_command_prints_table_and_line_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["tune", RECIPE, *SMALL, "--values", "lr=1", "--out", str(tmp_path)]
    assert main([*options, "--trials", "2"]) == 0
    said = capsys.readouterr()
    assert "2 of 5 settings tried" in said.out
    assert "laconic.attach(model, optimizer, laconic.slowmo(laconic.local_sgd(4)" in said.out
    assert main([*options, "--trials", "3"]) == 0, "goes on"
    said = capsys.readouterr()
    assert "3 of 5 settings tried" in said.out and len(said.err.splitlines()) == 1
    journal = tmp_path / "journal.jsonl"
    content = journal.read_bytes()
    assert main([*options, "--seed", "1"]) == 2
    assert "was made with seed 0, not 1" in capsys.readouterr().err
    settings = json.loads(content.splitlines()[1])["user_attr"]["settings"]
    with open_journal(journal, settings):
        assert main(options) == 2
    assert "another process is tuning" in capsys.readouterr().err
    assert journal.read_bytes() == content
