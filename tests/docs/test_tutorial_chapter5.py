"""Chapter 5's program: what its chapter does not run at a hundredth of its size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tutorial import full_ddp
from tutorial.naive_ddp import free_port

from tests.support import gloo

ROOT = Path(__file__).parents[2]
OPTIONS = ["--device", "cpu", "-nb", "48", "-i", "10", "-z", "4"]


@pytest.fixture
def alone() -> object:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def parts() -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    return {"model": torch.nn.Linear(2, 1)}


@pytest.mark.usefixtures("alone")
def test_a_save_that_fails_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, saved = tmp_path / "run.pt", parts()
    full_ddp.save(path, saved, {"size": 2}, [0.5])

    def full(_: object, file: object) -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        raise OSError("no space left")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="no space left"):
        patched.setattr(torch, "save", full)
        full_ddp.save(path, parts(), {"size": 2}, [0.5, 0.4])
    found = parts()
    torch.nn.init.zeros_(found["model"].weight)
    assert full_ddp.load(path, found, {"size": 2}) == [0.5]
    assert torch.equal(found["model"].weight, saved["model"].weight)


@pytest.mark.usefixtures("alone")
def test_what_is_no_checkpoint_of_this_training_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    assert full_ddp.load(path, parts(), {}) == []
    path.write_bytes(b"something else")
    with pytest.raises(RuntimeError, match=r"run\.pt is no checkpoint of this program, or damaged"):
        full_ddp.load(path, parts(), {})
    path.unlink()
    full_ddp.save(path, parts(), {"size": 2}, [])
    with pytest.raises(ValueError, match=r"run\.pt is of a run with size 2, not 3"):
        full_ddp.load(path, parts(), {"size": 3})


@pytest.mark.parametrize(
    ("options", "environment", "said"),
    [
        ("-e 0", {}, "epochs must be at least 1, not 0"),
        ("-g 5", {}, "5 processes can't share batches of 24 equally"),
        ("-n 2 -nr 2", {}, "nodes are counted from 0: 2 is none of 2"),
        ("-n 2", {"MASTER_ADDR": "10.0.0.1"}, "set MASTER_ADDR and MASTER_PORT"),
        ("-c no/where.pt", {}, "there is no directory for the checkpoint no/where.pt"),
        ("-g 2", {"LOCAL_RANK": "0"}, "leave -n, -g and -nr to torchrun"),
        ("", {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "5", "WORLD_SIZE": "5"}, "5 processes can't"),
    ],
)
def test_the_command_line_refuses(
    options: str,
    environment: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as raised:
        full_ddp.main([*options.split(), "--device", "cpu"])
    assert raised.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_it_is_the_process_that_torchrun_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    for name, value in {**said, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    full_ddp.main([*OPTIONS, "-e", "1", "-d", "1", "-p", "mixed"])
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("epoch  1: loss ")
    assert last.startswith("1 process, gloo: ")


SRUN = """#!/bin/bash
# Slurm's, on one machine: the same command for each node, at the same time
for SLURM_NODEID in 0 1; do
    export SLURM_NODEID
    "$@" &
    started+=($!)
done
for each in "${started[@]}"; do wait "$each" || exit 1; done
"""


def test_the_slurm_script_starts_two_nodes_that_train_together(tmp_path: Path) -> None:
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/bash\necho 127.0.0.1\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    script = ROOT / "tutorial" / "full_ddp.slurm"
    ended = subprocess.run(
        ["bash", str(script), *OPTIONS, "-e", "2"],
        env={
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}",
            "SLURM_JOB_ID": str(gloo.free_ports(1)[0] - 20000),
            "SLURM_JOB_NODELIST": "host[0-1]",
            "SLURM_JOB_NUM_NODES": "2",
        },
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=250,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    *epochs, last = ended.stdout.splitlines()
    assert [line.partition(":")[0] for line in epochs] == ["epoch  1", "epoch  2"]
    assert last.startswith("2 processes, gloo: ")
    [checkpoint] = tmp_path.glob("*.pt")
    assert len(torch.load(checkpoint, weights_only=True)["losses"]) == 2
