"""What a newcomer runs: the example, and `examples/launch` with stand-ins for its launchers."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.support import gloo

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "examples" / "launch"
EXAMPLE = str(ROOT / "examples" / "minimal.py")
SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
for ((i = 0; i < SLURM_JOB_NUM_NODES; i++)); do SLURM_NODEID=$i "$@" & tasks[i]=$!; done
status=0
for task in "${tasks[@]}"; do wait "$task" || status=$?; done
exit $status
"""
SSH = """#!/bin/bash
while [[ $1 == -* ]]; do [[ $1 == -o ]] && shift; shift; done
echo "$1" >> hosts
shift
set -m
bash -c "$*" &
task=$!
trap 'kill -HUP -- -$task; exit 255' TERM HUP
wait $task
"""


def stand_in(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def environment(folder: Path, **more: str) -> dict[str, str]:
    """With stand-ins in ``folder``, and nothing of a launcher's."""
    given = ("LACONIC_", "SLURM", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(given)}
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**kept, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **more}


@contextmanager
def started(command: list[str], folder: Path, **more: str) -> Iterator[subprocess.Popen[str]]:
    """A program in a session of its own, which is ended on leaving."""
    program = subprocess.Popen(
        command,
        cwd=folder,
        env=environment(folder, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield program
    finally:
        program.terminate()
        program.communicate(timeout=250)


def test_the_example_learns_and_is_short(tmp_path: Path) -> None:
    with started([sys.executable, EXAMPLE], tmp_path) as example:
        said, _ = example.communicate(timeout=250)
    assert example.returncode == 0 and trained(said), said
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\d+\.\d+)$", said, re.M)]
    assert len(losses) == 5 and losses[-1] < 0.5 * losses[0]
    assert not [*tmp_path.iterdir()]
    lines = Path(EXAMPLE).read_text().splitlines()
    added = [line for line in lines if "# added" in line]
    assert len(lines) < 60 and len(added) == 2 and "laconic.attach(" in "".join(added)


def trained(said: str) -> bool:
    """Whether two ranks have run the example together: one of them has reported."""
    return said.count("step 240: loss") == 1 and said.count("80 rounds; ") == 1


@pytest.mark.slow
def test_the_script_for_slurm(tmp_path: Path) -> None:
    stand_in(tmp_path, "srun", SRUN)
    slurm = {
        "SLURM_JOB_ID": str(gloo.free_ports(1)[0] - 20000),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURMD_NODENAME": "127.0.0.1",
    }
    command = ["bash", str(LAUNCH / "slurm.sh"), EXAMPLE]
    with started(command, tmp_path, **slurm) as job:
        said, _ = job.communicate(timeout=250)
    assert job.returncode == 0 and trained(said), said


@pytest.mark.slow
def test_the_script_for_ssh(tmp_path: Path) -> None:
    stand_in(tmp_path, "ssh", SSH)
    command = ["bash", str(LAUNCH / "ssh.sh"), "127.0.0.1,127.0.0.2", EXAMPLE]
    with started(command, tmp_path, PORT=str(gloo.free_port())) as job:
        said, _ = job.communicate(timeout=250)
    assert job.returncode == 0 and trained(said), said
    assert sorted((tmp_path / "hosts").read_text().split()) == ["127.0.0.1", "127.0.0.2"]


@pytest.mark.slow
def test_a_host_that_fails_ends_the_program_on_all_hosts(tmp_path: Path) -> None:
    stand_in(tmp_path, "ssh", SSH)
    program = tmp_path / "a program.py"  # whose name must be quoted on its way
    program.write_text(
        "import os, sys, time\n"
        "open(f'{os.getpid()}.pid', 'w').close()\n"
        "time.sleep(1 if os.environ['GROUP_RANK'] == '1' else 300)\n"
        "sys.exit(3)\n"
    )
    command = ["bash", str(LAUNCH / "ssh.sh"), "127.0.0.1,127.0.0.2", str(program), "it's"]
    with started(command, tmp_path, PORT=str(gloo.free_port())) as job:
        said, _ = job.communicate(timeout=250)
    assert job.returncode not in (0, None), said
    pids = [int(file.stem) for file in tmp_path.glob("*.pid")]
    assert len(pids) == 2, said
    end = time.monotonic() + 100
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end, "the other host's program still runs"
        time.sleep(0.1)


@pytest.mark.slow
def test_the_file_for_kubernetes(tmp_path: Path) -> None:
    """Its command, with the variables that Kubeflow's runtime sets, as two pods."""
    job = yaml.safe_load((LAUNCH / "trainjob.yaml").read_text())
    assert job["kind"] == "TrainJob" and job["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    trainer = job["spec"]["trainer"]
    port, nodes = gloo.free_port(), 2
    runtime = {
        "PET_NNODES": str(nodes),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
    }
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    pod = shlex.join(trainer["command"])
    command = f"PET_NODE_RANK=0 {pod} & PET_NODE_RANK=1 {pod} && wait $!"
    with started(["bash", "-c", command], tmp_path, **runtime) as pods:
        said, _ = pods.communicate(timeout=250)
    assert pods.returncode == 0 and trained(said), said
