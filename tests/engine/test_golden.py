"""A part of the cases of `golden` against what is recorded, and in the slow tier all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import golden
from tests.support import gloo

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="recorded with fused multiply-add",
)
RECORDED = golden.read(golden.FILE)
NAMES = [name for name in golden.CASES if golden.comparable(name, RECORDED)]
SAMPLE = [
    *("sgp, trace", "ddp, int4, trace", "local_sgd, late, int8, elastic", "auto, 30kbit"),
    *("diloco, late, offload", "SlowMo, SGP, overlap"),
    "ddp, int4, broken",
    *("muon over ddp, int4, elastic", "streaming_diloco, muon"),
]
SAMPLE = [name for name in SAMPLE if name in NAMES]
"""Of those that this machine can compare, since all take minutes."""
PROCESSES = ["local_sgd, late, int4", "comm EASGD, groups"]


def test_every_case_is_recorded() -> None:
    assert list(RECORDED) == list(golden.CASES)


def compare(*options: str, only: list[str]) -> str:
    """By the script, which pins the instructions of torch and MKL before they are loaded."""
    script = [sys.executable, "-m", "tests.golden", "compare", *options, "--only", *only]
    place = Path(golden.__file__).parents[1]
    run = subprocess.run(script, capture_output=True, text=True, cwd=place)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.timeout(600)
def test_simulated() -> None:
    said = compare("--simulated", only=SAMPLE)
    assert said.startswith(f"{len(SAMPLE)} cases, ") and said.endswith(" digests, all equal\n")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(4))
def test_all(part: int) -> None:
    """Simulated and over processes."""
    compare(only=NAMES[part::4])


@pytest.mark.parametrize("name", PROCESSES)
def test_processes(pool: gloo.Pool, name: str) -> None:
    trace, wrong = golden.in_processes(name, {golden.CASES[name].ranks: pool})
    assert golden.differences(name, trace, wrong, RECORDED[name]) == []


@pytest.mark.fault("an exception from a signal handler in a round: the rank lacks the round")
def test_an_interrupted_step() -> None:
    name, pools = "diloco, late, interrupted at 5", golden.Pools()  # connections are lost
    try:
        trace, _ = golden.in_processes(name, pools)
    finally:
        pools.close()
    assert golden.differences(name, trace, [], RECORDED[name]) == []


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
    only = ["compare", "--simulated", "--only", "nothing", name, "no such case"]
    assert golden.main(only) == 2
    assert "unknown case 'no such case'" in capsys.readouterr().err
    assert golden.main(only[:-1]) == 1
    said = capsys.readouterr().out.splitlines()
    assert f"{name}: params: first at step 5" in said
    assert f"{name}: consensus: first at step 8" in said
    assert not any("nothing" in line for line in said) and said[-1].startswith("2 cases, ")
