"""A part of the cases of `golden` against what is recorded; ``python -m tests.golden compare`` runs
them all."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import golden
from tests.support import all_recipes, gloo, programs

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="recorded with fused multiply-add",
)
ROWS = [f"{name}, 4 workers" for name in all_recipes.ROWS]
OTHERS = [
    name
    for name, case in golden.CASES.items()
    if "workers" not in name and "large" not in name and not case.sharded
]
SIMULATED = [
    name
    for name in (*ROWS[::2], *OTHERS[::20])
    if golden.comparable(name) and not re.search("rda|outer", name)
]
"""A sample, since the script takes minutes for all, of those that this machine can compare. Norms
and products of matrices were recorded on one processor only."""
PARTS = 2
PROCESSES = [
    "ddp, codec int8",
    "local_sgd, late, int4",
    "slowmo over late sgp, 4 workers",
    "diloco, late, int4, 2 ranks a worker",
    "local_sgd, late, groups",
    "lsgd, overflow",
    "comm EASGD, groups",
    "SlowMo, masters, overlap",
]
RECORDED = golden.read(golden.FILE)


def test_every_case_is_recorded() -> None:
    assert list(RECORDED) == list(golden.CASES)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("part", range(PARTS))
def test_simulated(part: int) -> None:
    """By the script, which pins the instructions of torch and MKL before they are loaded."""
    names = SIMULATED[part::PARTS]
    script = [*programs.NEW, "-m", "tests.golden", "compare", "--simulated", "--only", *names]
    run = subprocess.run(
        script, capture_output=True, text=True, cwd=Path(golden.__file__).parents[1]
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.startswith(f"{len(names)} cases, ")
    assert run.stdout.endswith(" digests, all equal\n")


@pytest.mark.parametrize("name", PROCESSES)
def test_processes(pool: gloo.Pool, name: str) -> None:
    trace, wrong = golden.in_processes(name, {golden.CASES[name].ranks: pool})
    assert golden.differences(name, trace, wrong, RECORDED[name]) == []


def test_a_changed_formula_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the last bit of an outer step, which falls due at step 5."""
    name = "slowmo, 2 workers"
    kind = type(golden.CASES[name].recipe[-1].update)
    combine = kind.combine

    def changed(*arguments: Any) -> Tensor:
        found = combine(*arguments)
        return torch.nextafter(found, torch.full_like(found, torch.inf))

    monkeypatch.setattr(kind, "combine", changed)
    only = ["compare", "--simulated", "--only", "local_sgd, 2 workers", name]
    assert golden.main(only) == 1
    said = capsys.readouterr().out.splitlines()
    assert f"{name}: params: first at step 5" in said
    assert f"{name}: optimizer: first at step 6" in said  # by the next gradient
    assert f"{name}: consensus: first at step 8" in said
    assert not any("ledger" in line or "local_sgd" in line for line in said)
    assert said[-1].startswith("2 cases, ")
    assert said[-1].endswith(f", {len(said) - 1} differences")


def test_a_run_that_resumes_otherwise_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forget(training: golden.Training, path: Path) -> None:
        load(training, path)
        training.inner.state.clear()

    load = golden.Training.load
    monkeypatch.setattr(golden.Training, "load", forget)
    assert golden.main(["compare", "--simulated", "--only", "local_sgd, 2 workers"]) == 1
    said = capsys.readouterr().out
    assert "local_sgd, 2 workers: resumed params: first at step 9 (from folder)\n" in said


def test_what_was_recorded_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = ["--simulated", "--file", str(tmp_path / "file.json"), "--only", "nothing"]
    assert golden.main(["record", *case]) == 0
    assert golden.main(["compare", *case]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == said[1]
    assert said[1].startswith("1 cases, ") and said[1].endswith(" digests, all equal")
    case[-1] = "no such case"
    assert golden.main(["compare", *case]) == 2
    error = capsys.readouterr().err
    assert "unknown case 'no such case'" in error and "SlowMo, masters, overlap" in error


def test_a_digest_of_every_step_is_written_once() -> None:
    trace: golden.Trace = {"params": {2: "b", 0: "a", 1: "a"}}
    written = golden.written(trace)
    assert written == {"params": "a = b"}
    assert golden.as_written(written["params"]) == ["a", "a", "b"]
    assert golden.differences("x", trace, [], {"params": "a = c"}) == ["x: params: first at step 2"]
    assert golden.differences("x", trace, [], {}) == ["x: params: not recorded"]
    assert golden.differences("x", trace, [], {"params": "a ="}) == [
        "x: params: 3 digests, 2 recorded"
    ]
