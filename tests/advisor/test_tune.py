"""``laconic tune``: what is tuned, what is stopped, what survives a kill, and what is refused."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from optuna.trial import TrialState

from laconic.advisor.tune import report, tuning
from laconic.advisor.tune.journal import open_journal
from laconic.advisor.tune.runs import VALIDATIONS, Length, Report, Run, Task, measure_compute
from laconic.advisor.tune.space import Setting, parse_values, space_of
from laconic.advisor.tune.tuning import Trial
from laconic.cli import main
from laconic.lab.race import runner
from laconic.predict import predict

from tests.support import programs

SMALL = ("--workers", "2", "--steps", "16", "--compute", "1ms")
"""A trial of a tenth of a second."""
RECIPE = "slowmo(local_sgd(4), period=8, momentum=momentum)"


def task(length: Length, workers: int = 2, **options: object) -> Task:
    settings = runner.Settings(
        (), hosts=1, per_host=workers, workload="digits", seconds=None, steps=8, **options
    )  # type: ignore[arg-type]
    return Task(settings, length, compute=1e-3)


# --- what is tuned --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "momentum"), [(1, 0.0), (3, 0.0), (4, 0.2), (8, 0.4), (15, 0.4), (16, 0.6)]
)
def test_slow_momentum_starts_at_the_grids_value_next_to_the_usual(
    workers: int, momentum: float
) -> None:
    assert space_of("slowmo", {}, workers).start["momentum"] == momentum


def test_free_names_are_tuned_and_always_lr() -> None:
    space = space_of("slowmo(local_sgd(12), outer, momentum=momentum)", {"outer": (48, 24)}, 4)
    assert space.grids == {
        "outer": (24, 48),
        "momentum": (0.0, 0.1, 0.2, 0.4, 0.6),
        "lr": (0.5, 1.0, 2.0, 4.0),
    }
    assert space.size == len({tuple(s.items()) for s in space.settings()}) == 40
    setting = {"outer": 24, "momentum": 0.1, "lr": 2.0}
    assert space.text(setting) == "slowmo(local_sgd(12), 24, momentum=0.1)"
    assert report.code(space, setting) == [
        "    for group in optimizer.param_groups:",
        '        group["lr"] *= 2.0  # of the workload\'s own',
        "    sync = laconic.attach(model, optimizer, "
        "laconic.slowmo(laconic.local_sgd(12), 24, momentum=0.1))",
    ]
    hierarchical = space_of("hierarchical(2, period)", {"lr": (1,)}, 4)
    (line,) = report.code(hierarchical, {"period": 4, "lr": 1}, 2)
    assert line.endswith("laconic.hierarchical(2, 4), group_size=2)")


def test_words_and_none_can_be_values() -> None:
    name, values = parse_values("codec=int4, None,'int8'")
    assert (name, values) == ("codec", ("int4", None, "int8"))
    space = space_of("ddp(codec=codec)", {name: values, "lr": (1,)}, 4)
    assert not space.ordered("codec")
    assert [space.text(s) for s in space.settings()] == [
        "ddp(codec='int4')", "ddp(codec=None)", "ddp(codec='int8')"
    ]  # fmt: skip


# --- the search, on a loss that is a formula ------------------------------------------------------

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


def search(path: Path, trials: int | None = None, **options: object) -> list[Trial]:
    with open_journal(path, {}) as study:
        for _ in tuning.tune(study, SPACE, formula(), trials=trials, **options):  # type: ignore[arg-type]
            pass
        return tuning.ended(study, SPACE)


def settings_of(trials: list[Trial]) -> list[Mapping[str, object]]:
    return [dict(trial.setting) for trial in trials]


def test_finds_the_minimum_in_a_third_of_the_grids_steps(tmp_path: Path) -> None:
    trials = search(tmp_path / "journal", 36)
    assert settings_of(trials[:1]) == [dict(SPACE.start)]
    assert len({tuple(t.setting.items()) for t in trials}) == 36, "no setting twice"
    assert sum(t.run.steps for t in trials) <= 80 * SPACE.size / 3
    assert tuning.best(trials).run.loss <= 1.05
    stopped = [t for t in trials if t.status == "stopped"]
    assert {t.run.steps for t in stopped} == {30, 60}, "after three and six eighths"
    assert tuning.best(trials).run.loss < min(bowl(t.setting) for t in stopped)


def test_without_stopping_the_whole_grid_is_run_once(tmp_path: Path) -> None:
    space = space_of(SPACE.recipe, {"momentum": (0, 0.1), "lr": (1, 2)}, 8)
    with open_journal(tmp_path / "journal", {}) as study:
        trials = list(tuning.tune(study, space, formula(), prune=False))
    assert len({tuple(t.setting.items()) for t in trials}) == len(trials) == space.size == 16
    assert {t.status for t in trials} == {"ok"}


def test_goes_on_to_the_same_trials_after_any_interruption(tmp_path: Path) -> None:
    whole = search(tmp_path / "whole", 12, seed=3)
    calls = 0

    def failing(setting: Setting, told: Report) -> Run:
        nonlocal calls
        calls += 1
        at = {0: 0, 1: 4}.get(calls % 4)  # before the first look, or when others were compared
        heard = 0

        def hear(step: int, steps: int, loss: float) -> None:
            nonlocal heard
            heard += 1
            told(step, steps, loss)
            if heard == at:
                raise KeyboardInterrupt

        if at == 0:
            raise KeyboardInterrupt
        return formula()(setting, hear)

    for _ in range(24):
        with open_journal(tmp_path / "parts", {}) as study:
            try:
                list(tuning.tune(study, SPACE, failing, trials=12, seed=3))
            except KeyboardInterrupt:
                continue
    with open_journal(tmp_path / "parts", {}) as study:
        parts = tuning.ended(study, SPACE)
    assert settings_of(parts) == settings_of(whole)
    assert [t.curve for t in parts] == [t.curve for t in whole]


def test_a_journal_cut_after_any_record_goes_on_to_the_same_trials(tmp_path: Path) -> None:
    space = space_of(SPACE.recipe, {"period": (12, 24), "momentum": (0, 0.1), "lr": (1, 2)}, 8)

    def outcome(path: Path) -> list[tuple[Setting, str, Mapping[int, float]]]:
        with open_journal(path, {}) as study:
            list(tuning.tune(study, space, formula()))
            return [(t.setting, t.status, t.curve) for t in tuning.ended(study, space)]

    whole = outcome(tmp_path / "whole")
    records = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    failed = f'"state":{TrialState.FAIL.value}'.encode()
    assert any(failed in record for record in records), "a setting came again"
    # all of the first trial, whose records are alike in later ones
    for count in [*range(18), *range(18, len(records), 7)]:
        cut = tmp_path / "cut"
        cut.write_bytes(b"".join(records[:count]))
        assert outcome(cut) == whole, f"after {count} records"


def test_the_budget_counts_what_earlier_processes_took(tmp_path: Path) -> None:
    def slow(setting: Setting, told: Report) -> Run:
        time.sleep(0.02)
        return formula()(setting, told)

    for _ in range(2):
        with open_journal(tmp_path / "journal", {}) as study:
            list(tuning.tune(study, SPACE, slow, seconds=0.05))
            trials = tuning.ended(study, SPACE)
            assert sum(t.seconds for t in trials[:-1]) < 0.05 <= sum(t.seconds for t in trials)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_what_diverges_is_stopped_and_never_the_best(tmp_path: Path, number: float) -> None:
    run = formula(lambda s: number if s["lr"] == 2.0 else bowl(s))
    with open_journal(tmp_path / "journal", {}) as study:
        trials = list(tuning.tune(study, SPACE, run, trials=20))
    lost = [t for t in trials if t.setting["lr"] == 2.0]
    assert lost and {(t.status, t.run.steps) for t in lost} == {("diverged", 10)}
    assert tuning.best(trials) not in lost
    with pytest.raises(ValueError, match="every trial diverged"):
        tuning.best(lost)


def test_a_coded_recipe_that_diverges_is_one_trial_and_not_the_end(tmp_path: Path) -> None:
    """Coded rounds refuse what is not finite, on all ranks; uncoded ones let it through."""
    space = space_of("local_sgd(2, codec=codec)", {"codec": (None, "int4"), "lr": (1, 1e30)}, 2)
    here = task(Length("steps", 16))
    with open_journal(tmp_path / "journal", {}) as study:
        trials = list(
            tuning.tune(study, space, lambda s, t: here.run(space.text(s), float(s["lr"] or 1), t))
        )
    lost = [t for t in trials if t.setting["lr"] == 1e30]
    assert len(trials) == 4 and [t.status for t in lost] == ["diverged"] * 2
    assert tuning.best(trials).setting["lr"] == 1


def test_the_front_stays_in_the_table_whatever_its_losses() -> None:
    space = space_of("local_sgd(period)", {"period": range(1, 41), "lr": (1,)}, 2)

    def trial(period: int) -> Trial:
        run = Run(1 + period / 100, 8, 1.0 if period < 40 else 0.5, 0.0)
        return Trial({"period": period, "lr": 1}, "ok", run, {}, 0.0)

    shown = report.table(space, [trial(period) for period in range(1, 41)])
    periods, marks = (list(column.cells) for column in (shown.columns[0], shown.columns[-1]))
    assert periods == [str(period) for period in (*range(1, 21), 40)]
    assert [p for p, mark in zip(periods, marks, strict=True) if mark] == ["1", "40"]
    assert shown.caption == "19 more in trials.csv"


def test_the_front_is_what_none_beats_in_both() -> None:
    def trial(seconds: float, loss: float, status: str = "ok") -> Trial:
        return Trial({}, status, Run(loss, 1, seconds, 0.0), {}, 0.0)  # type: ignore[arg-type]

    fast, slow, dear, worse, same = (
        trial(1, 5), trial(3, 2), trial(4, 2), trial(2, 6), trial(1, 6)
    )  # fmt: skip
    stopped = trial(0.5, 1, "stopped")
    assert tuning.pareto([worse, dear, slow, same, fast, stopped]) == [fast, slow]


# --- runs -----------------------------------------------------------------------------------------


def test_lengths_in_time_and_bytes_are_steps_of_the_cost_model() -> None:
    here = task(Length("steps", 40))
    recipe = here.recipe("local_sgd(8)")
    cost = predict(recipe, here.facts)
    assert Length("steps", 21).steps(recipe, cost) == 21
    assert Length("seconds", 21 * cost.seconds).steps(recipe, cost) == 16, "after a round"
    assert Length("megabytes", 33.5 * cost.bytes / 1e6).steps(recipe, cost) == 32
    with pytest.raises(ValueError, match=r"too little for local_sgd\(8\): it allows 4 steps"):
        task(Length("seconds", cost.seconds * 4)).check(["local_sgd(8)"])


def test_what_the_optimizer_leaves_alone_is_not_sent() -> None:
    here = task(Length("steps", 8))
    workload = here.workload

    def last_alone(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(model.parameters())[-1:], lr=0.1)

    vars(here)["workload"] = replace(workload, optimizer=last_alone)
    assert here.facts.shapes == (tuple(list(workload.model().parameters())[-1].shape),)


def test_a_run_is_the_same_every_time_and_depends_on_lr() -> None:
    here = task(Length("steps", 24))
    told: list[tuple[int, int, float]] = []
    first = here.run("local_sgd(3)", 1.0, lambda *a: told.append(a))
    assert [step for step, _, _ in told] == [3, 6, 9, 12, 15, 18, 21, 24]
    assert first.loss == told[-1][2] < told[0][2]
    assert here.run("local_sgd(3)", 1.0, lambda *_: None) == first
    assert here.run("local_sgd(3)", 2.0, lambda *_: None).loss != first.loss


def test_several_seeds_count_by_their_mean() -> None:
    here = task(Length("steps", 24))

    def loss(*seeds: int) -> float:
        several = replace(here, race=replace(here.race, seeds=seeds))
        return several.run("slowmo(local_sgd(3, delay=1), 12)", 1.0, lambda *_: None).loss

    assert loss(0) != loss(1)
    assert loss(0, 1) == pytest.approx((loss(0) + loss(1)) / 2, rel=1e-6)


def test_a_run_ends_where_it_is_told_to() -> None:
    class EndError(Exception):
        pass

    def told(step: int, steps: int, loss: float) -> None:
        raise EndError

    with pytest.raises(EndError):
        task(Length("steps", 24)).run("ddp()", 1.0, told)


def test_computing_is_measured() -> None:
    assert 0 < measure_compute(task(Length("steps", 8))) < 1


# --- the command ----------------------------------------------------------------------------------


def test_command_writes_table_picture_and_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [RECIPE, *SMALL, "--param", "lr=1", "--out", str(tmp_path)]
    assert main(["tune", *options, "--trials", "3"]) == 0
    said = capsys.readouterr()
    assert "3 of 5 settings tried" in said.out
    assert "laconic.attach(model, optimizer, laconic.slowmo(laconic.local_sgd(4)" in said.out
    assert len(said.err.splitlines()) == 3
    assert (tmp_path / "tune.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "trials.csv").read_text().splitlines()) == 4

    assert main(["tune", *options, "--trials", "4"]) == 0, "goes on"
    said = capsys.readouterr()
    assert "4 of 5 settings tried" in said.out
    assert len(said.err.splitlines()) == 1


def test_killed_it_goes_on_where_it_was(tmp_path: Path) -> None:
    """SIGKILL in the middle of a trial; the same command then ends like one that was not killed."""

    options = [RECIPE, "--workers", "2", "--steps", "64", "--compute", "1ms", "--trials", "6"]
    command = [*programs.NEW, "-m", "laconic", "tune", *options, "--out", str(tmp_path)]
    threads = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}  # sums depend on them
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, env=threads, **quiet)  # type: ignore[call-overload]
    journal, deadline = tmp_path / "journal.jsonl", time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        lines = journal.read_bytes().splitlines() if journal.exists() else []
        if sum(b'"state":' in line for line in lines) > 4:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "killed, and not ended by itself"
    with journal.open("ab") as file:
        file.write(b'{"op_code":7,"worker')  # as if killed in the middle of a record
    before = journal.read_bytes()
    assert main(["tune", *options, "--out", str(tmp_path)]) == 0
    assert journal.read_bytes().startswith(before[: before.rfind(b"\n") + 1]), "nothing is lost"
    assert main(["tune", *options, "--out", str(tmp_path / "whole")]) == 0
    killed, whole = ((tmp_path / d / "trials.csv").read_text() for d in ("", "whole"))
    assert killed == whole


REFUSED: dict[str, tuple[str, str]] = {
    "recipe": ("slomo", "no recipe 'slomo'"),
    "syntax": ("slowmo(", "cannot read the recipe"),
    "a free name without values": ("local_sgd(tau)", "no values for 'tau'"),
    "a name that is not free": ("ddp --param period=4,8", "'period' is not free in 'ddp()'"),
    "lr as a free name": ("diloco(12,lr=lr)", "rename it in"),
    "no list": ("ddp --param lr", "--param must be NAME=VALUE"),
    "an empty value": ("ddp --param lr=1,,2", "--param must be NAME=VALUE"),
    "a value twice": ("ddp --param lr=1,1", "given twice"),
    "a param twice": ("ddp --param lr=1 --param lr=2", "given twice"),
    "a bad lr": ("ddp --param lr=0,1", "lr must be a finite number greater than 0"),
    "a value that the recipe refuses": ("slowmo --param momentum=2", "momentum must be"),
    "a word for a number": ("slowmo --param period=often", "period must be an integer"),
    "too many": (
        "slowmo --param lr=" + ",".join(map(str, range(1, 3000))),
        "settings; the maximum is 10000",
    ),
    "auto": ("auto", "nothing to tune"),
    "workload": ("ddp --workload imagenet", "no workload 'imagenet'"),
    "own workload": ("ddp --workload mine.py:make", "no file mine.py"),
    "bandwidth": ("ddp --bandwidth fast", "not a rate: 'fast'"),
    "bandwidth without a unit": ("ddp --bandwidth 100", "not a rate: '100'"),
    "latency without a unit": ("ddp --latency 5", "not a latency: '5'"),
    "compute": ("ddp --compute soon", "not a duration: 'soon'"),
    "budget": ("ddp --budget 10days", "not a duration: '10days'"),
    "no budget": ("ddp --budget 0", "budget must be"),
    "trials": ("ddp --trials 0", "trials must be"),
    "steps": ("ddp --steps 3", "steps must be an integer of at least 8"),
    "seconds": ("ddp --seconds 0.0001 --compute 1ms", "is too little for ddp()"),
    "megabytes of one worker": ("ddp --megabytes 1 --workers 1", "the recipe sends nothing"),
    "workers": ("ddp --workers 0", "workers must be"),
    "compute that is measured": ("ddp --emulated --compute 1ms", "--compute is for predicted"),
    "seeds that are measured": ("ddp --emulated --repeat 2", "--repeat works with simulated"),
    "groups": ("hierarchical(2,period)", "--group-size 2"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "said"), REFUSED.values(), ids=list(REFUSED))
def test_mistakes_are_one_line(
    options: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tune", *options.split()]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.count("\n") == 1 and not printed.out


@pytest.mark.parametrize("pair", ["--steps 9 --seconds 9", "--trials 9 --budget 9min"])
def test_options_that_contradict_each_other(pair: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["tune", *pair.split()])
    assert ended.value.code == 2
    assert "not allowed with argument" in capsys.readouterr().err


FOREIGN = {
    "text": b"dear diary\n",
    "text without a line's end": b"dear diary",
    "json": b'{"loss": 3}\n',
    "another study": b'{"op_code":0,"worker_id":"w","study_name":"mine","directions":[1]}\n',
    "bytes": bytes(range(256)),
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=list(FOREIGN))
def test_a_file_that_is_not_ours_is_left_as_it_is(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = tmp_path / "journal.jsonl"
    journal.write_bytes(content)
    assert main(["tune", RECIPE, *SMALL, "--out", str(tmp_path)]) == 2
    assert "is not a journal of laconic tune: choose another --out" in capsys.readouterr().err
    assert journal.read_bytes() == content
    assert list(tmp_path.iterdir()) == [journal]


def test_a_journal_of_other_settings_or_in_use_is_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["tune", RECIPE, *SMALL, "--param", "lr=1", "--out", str(tmp_path)]
    assert main([*options, "--trials", "1"]) == 0
    journal = tmp_path / "journal.jsonl"
    content = journal.read_bytes()
    capsys.readouterr()
    assert main([*options, "--seed", "1"]) == 2
    assert "was made with seed 0, not 1" in capsys.readouterr().err
    settings = json.loads(content.splitlines()[1])["user_attr"]["settings"]
    with open_journal(journal, settings):
        assert main(options) == 2
    assert "another process is tuning" in capsys.readouterr().err
    assert journal.read_bytes() == content


def test_what_was_refused_can_be_put_right(tmp_path: Path) -> None:
    options = ["tune", "ddp", "--workers", "2", "--trials", "1", "--compute", "1ms"]
    options += ["--out", str(tmp_path)]
    assert main([*options, "--seconds", "0.0001"]) == 2
    assert main([*options, "--steps", "8"]) == 0


def test_interrupted_it_shows_what_it_has(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "laconic", "tune", *SMALL, "--budget", "1h"]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("1/? ")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=250)
    assert process.returncode == 130
    assert err.endswith("laconic: interrupted\n")
    assert "settings tried" in out and (tmp_path / "trials.csv").exists()
