"""A tiny run of each benchmark works, and what is not run goes on where it was."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from benchmarks import codecs, larger, quorum
from benchmarks.cuda import PARTS, checks
from benchmarks.cuda.__main__ import main as cuda
from benchmarks.evidence.runs import Job, journal, train
from benchmarks.factors import ROWS, STEPS, factor
from benchmarks.plan import emulated, published
from benchmarks.race import __main__ as race
from benchmarks.race import journal as race_journal
from benchmarks.science.experiment import Job as Trial
from benchmarks.science.experiment import train as try_out
from benchmarks.validate.__main__ import main as validate

from laconic.advisor.plan.simulate import check_plannable, recipe_of
from laconic.algorithms.parse import parse_recipe
from laconic.lab.race import runner
from laconic.lab.race.result import NO_COMMUNICATION, Result

from tests.support.races import result, row


def test_a_factor_is_steps_over_those_of_ddp_at_the_same_loss() -> None:
    ddp = {STEPS // 4: 2.4, STEPS // 2: 2.2, STEPS: 1.8}
    for loss, expected in ((1.8, 1.0), (2.2, 2.0), (2.0, math.sqrt(2)), (1.5, 1.0), (9.0, 4.0)):
        assert factor(loss, ddp) == pytest.approx(expected)
    assert all(parse_recipe(text) for text in ROWS)


@contextmanager
def no_cluster(hosts: int, **network: object) -> Iterator[None]:
    yield


def test_a_race_that_was_killed_goes_on_and_tries_again_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    plan = {"killed after": 3, "failing": "torch-ddp"}

    def run(settings: runner.Settings, told: str, watch: object) -> Iterator[Result]:
        if len(ran) == plan["killed after"]:
            raise KeyboardInterrupt
        (text,) = (
            *([NO_COMMUNICATION] * settings.baseline), *settings.recipes, *settings.rivals
        )  # fmt: skip
        ran.append(text)
        made = row(text, (0, 0, 5.0), (100, 30, 2.0), peer=text == "torch-ddp")
        if text == plan["failing"]:
            made = row(text, status="failed", error="why", peer=True)
        yield result(made, reason=None)

    monkeypatch.setattr(race, "Cluster", no_cluster)
    monkeypatch.setattr(runner, "run", run)
    said = ["--rows", "none", "ddp()", "torch-ddp", "--networks", "10mbit", "50mbit/80ms/0.1%",
            "--seeds", "0", "--seconds", "30", "--journal", str(tmp_path / "j")]  # fmt: skip
    assert race.main(said) == 130
    assert ran == [NO_COMMUNICATION, "ddp()", "torch-ddp"]
    ran.clear()
    plan |= {"killed after": 1000, "failing": ""}
    assert race.main(said) == 0
    assert ran == ["torch-ddp", "ddp()", "torch-ddp"]
    assert len(race_journal.load(tmp_path / "j")) == 5
    (tmp_path / "j").write_text((tmp_path / "j").read_text() + '{"key": "cut')
    assert race.main(said) == 0 and len(ran) == 3, "a line that was cut off is dropped"
    for words, message in (("--rows nonsense", "no row 'nonsense'"), ("table", "no runs in")):
        journal = ["--journal", str(tmp_path / "none")]
        assert race.main([*words.split(), *journal]) == 2
        assert message in capsys.readouterr().err
    assert validate(["--hosts", "1", *journal]) == 2


def test_plans_of_published_and_emulated_runs() -> None:
    model = published.Model("tiny", 2 * 10**9, 2, 3.0, {}, {})
    assert published.layer_by_layer(model, 0, 8.0) == pytest.approx(3.0 / 6.0)
    assert published.layer_by_layer(model, 2, 8.0) == pytest.approx(6.0 / 9.0)
    for setting in emulated.settings():
        known = emulated.cluster(setting, [(host, 5.0) for host in setting.kill])
        check_plannable(recipe_of(setting.recipe, known), setting.recipe, known)


def test_without_a_gpu_it_lists_what_was_not_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cuda([]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert "Not run:" in first
    assert [line.split(":")[0].strip() for line in rest] == [each.name for each in PARTS]


@pytest.mark.slow
def test_trainings_of_benchmarks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job("images, small", "diloco(5, momentum=0.6)", "adamw", 8e-3, 2, 12, 4, 7)
    first = train(job)
    assert journal(tmp_path / "runs.jsonl").outcomes([job], 1) == {job: first}
    assert journal(tmp_path / "runs.jsonl").load() == {job: first}
    trial = Trial("local_sgd(2)", 0.1, 0, workers=2, steps=8)
    assert try_out(trial) == try_out(trial)
    assert 0 < larger.train("ddp()", 32, 2, 3, 5) < 10
    for name in quorum.METHODS:
        assert 0 < quorum.run((name, 0.08, 0.7, 0.3, 3.0, 1, 1.5)) < 5
    codecs.main(2**12, 1)
    assert "Int4" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["codecs", "recipes", "offload", "collectives"])
def test_checks_of_gpus_pass_between_cpus(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "SHAPES", 4)
    next(each.run for each in PARTS if each.name == name)(torch.device("cpu"))
