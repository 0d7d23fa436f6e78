"""What a newcomer runs first: the example, and the command line's help."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import laconic
from laconic.algorithms.recipes import RECIPES
from laconic.cli import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "minimal.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def run(command: Sequence[str], directory: Path) -> str:
    """Its stdout; it must end well, and say nothing on stderr that is not torchrun's own."""
    unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in unset}
    ended = subprocess.run(
        command,
        env={**env, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        cwd=directory,
        timeout=250,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stdout


@pytest.mark.parametrize("workers", [1, 2])
def test_the_example_learns(workers: int, tmp_path: Path) -> None:
    launcher = [sys.executable] if workers == 1 else [*TORCHRUN, str(workers)]
    out = run([*launcher, str(EXAMPLE)], tmp_path)
    told = re.findall(r"^step (\d+): loss (\d+\.\d+)$", out, re.MULTILINE)
    assert [int(step) for step, _ in told] == [48, 96, 144, 192, 240]
    losses = [float(loss) for _, loss in told]
    assert losses[-1] < 0.5 * losses[0]
    rounds, sent, size = map(
        int, re.findall(r"^(\d+) rounds; (\d+) kB sent for a model of (\d+) kB$", out, re.M)[0]
    )
    assert rounds == 240 // 3
    assert size == round((16 * 64 + 64 + 64 + 1) * 4 / 1e3)
    if workers == 1:
        assert sent == 0
    else:
        assert sent == pytest.approx(rounds * size, rel=0.15)
    assert out.count("step 48:") == 1
    assert not [*tmp_path.iterdir()]


def test_the_example_is_short_and_marks_what_it_adds() -> None:
    lines = EXAMPLE.read_text().splitlines()
    assert len(lines) < 60
    assert all(len(line) <= 100 for line in lines)
    added = [line for line in lines if "# added" in line]
    assert len(added) == 2
    assert any("laconic.attach(" in line for line in added)


def told(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the command prints before it ends well."""
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def test_the_version(tmp_path: Path) -> None:
    out = run([sys.executable, "-m", "laconic", "--version"], tmp_path)
    assert out == f"laconic {laconic.__version__}\n"


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Train PyTorch models ") and len(out.splitlines()) <= 16
    assert re.search(r"^ +compare +race recipes on an emulated slow network$", out, re.MULTILINE)
    assert "--version" in out


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_help_names_recipes_and_options(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    out = told(["compare", "--help"], capsys)
    for name in RECIPES:
        assert re.search(rf"\b{name}\b", out.partition("Recipes:")[2])
    for option in ("hosts", "per-host", "bandwidth", "latency", "workload", "data", "seconds",
                   "steps", "seed", "out"):  # fmt: skip
        assert re.search(rf"^ +--{option} [A-Z]", out, re.MULTILINE)
    assert all(len(line) <= max(int(columns), 80) for line in out.splitlines())


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == listed
