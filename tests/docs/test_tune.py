"""The programs of docs/tune.md: they stand on the page, and search on emulated hosts."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import optuna
import pytest

from tests.docs.test_code_blocks import ROOT, blocks
from tests.lab.test_lab import with_namespaces

FOLDER = ROOT / "examples" / "tune"
LAB = [sys.executable, "-m", "laconic", "lab", "--hosts", "2", "--bandwidth", "20mbit", "--"]


@pytest.fixture
def search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program, for short trials in one process."""
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("search", FOLDER / "search.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SECONDS", 0.5)
    monkeypatch.setattr(module, "LAB", [])
    return module


class Trial(optuna.trial.FixedTrial):
    """A trial that is stopped at check ``last``."""

    last = 8

    def report(self, value: float, step: int) -> None:
        self.value, self.step = value, step

    def should_prune(self) -> bool:
        return self.step == self.last


def trial(last: int = 9) -> Trial:
    made = Trial({"period": 4, "momentum": 0.2, "lr": 0.01})
    made.last = last
    return made


def test_the_page_shows_the_program_and_what_it_needs() -> None:
    program, needed = blocks(ROOT / "docs" / "tune.md", "python")
    assert program.strip() in (FOLDER / "search.py").read_text()
    lines = (FOLDER / "train.py").read_text()
    for line in needed.strip().splitlines():
        assert line.strip() in lines, line


def test_a_trial_trains_is_stopped_and_may_fail(search: ModuleType) -> None:
    whole = trial()
    assert search.train(whole) == whole.value and whole.step == 8
    with pytest.raises(optuna.TrialPruned):
        search.train(trial(last=1))
    search.TRAIN.append("local_sgd(0)")  # the recipe, which is refused
    with pytest.raises(subprocess.CalledProcessError):
        search.train(trial())


@pytest.mark.hosts
@pytest.mark.slow
@with_namespaces
def test_a_search_on_emulated_hosts_goes_on(search: ModuleType, tmp_path: Path) -> None:
    text = (FOLDER / "search.py").read_text()
    text = re.sub("TRIALS, SECONDS = .*", "TRIALS, SECONDS = 1, 1", text)
    text = re.sub("LAB = .*", f"LAB = {LAB}", text)
    Path("search.py").write_text(text)
    Path("train.py").write_text((FOLDER / "train.py").read_text())
    for _ in range(2):
        said = subprocess.run([sys.executable, "search.py"], capture_output=True, text=True)
        assert re.search(r"lowest loss \d\.\d+ with \{'period': \d+", said.stdout), said.stderr
    study = optuna.load_study(study_name="slowmo", storage="sqlite:///tuning.db")
    assert [len(each.intermediate_values) for each in study.trials] == [8, 8]
