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
STAND_INS = {
    "srun": """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
for ((i = 0; i < SLURM_JOB_NUM_NODES; i++)); do SLURM_NODEID=$i "$@" & tasks[i]=$!; done
status=0
for task in "${tasks[@]}"; do wait "$task" || status=$?; done
exit $status
""",
    "ssh": """#!/bin/bash
while [[ $1 == -* ]]; do [[ $1 == -o ]] && shift; shift; done
echo "$1" >> hosts
shift
set -m
bash -c "$*" &
task=$!
trap 'kill -HUP -- -$task; exit 255' TERM HUP
wait $task
""",
}


@contextmanager
def started(command: list[str], folder: Path, **more: str) -> Iterator[subprocess.Popen[str]]:
    """A program beside stand-ins, with nothing of a launcher's in its environment. It is ended on
    leaving."""
    for name, text in STAND_INS.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    given = ("LACONIC_", "SLURM", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(given)}
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    own = {"PATH": path, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **more}
    program = subprocess.Popen(
        command, cwd=folder, env={**kept, **own}, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield program
    finally:
        program.terminate()
        program.communicate(timeout=250)


def slurm(folder: Path) -> tuple[list[str], dict[str, str]]:
    job = str(gloo.free_ports(1)[0] - 20000)
    more = {"SLURM_JOB_ID": job, "SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "127.0.0.1"}
    return ["bash", str(LAUNCH / "slurm.sh"), EXAMPLE], more


def ssh(folder: Path) -> tuple[list[str], dict[str, str]]:
    command = ["bash", str(LAUNCH / "ssh.sh"), "127.0.0.1,127.0.0.2", EXAMPLE]
    return command, {"PORT": str(gloo.free_port())}


def kubernetes(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The file's command, with the variables that Kubeflow's runtime sets, as two pods."""
    job = yaml.safe_load((LAUNCH / "trainjob.yaml").read_text())
    assert job["kind"] == "TrainJob" and job["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    trainer = job["spec"]["trainer"]
    runtime = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(gloo.free_port()),
    }
    (folder / "examples").symlink_to(ROOT / "examples")
    pod = shlex.join(trainer["command"])
    both = f"PET_NODE_RANK=0 {pod} & PET_NODE_RANK=1 {pod} && wait $!"
    return ["bash", "-c", both], runtime


def alone(folder: Path) -> tuple[list[str], dict[str, str]]:
    return [sys.executable, EXAMPLE], {}


WAYS = [alone, *(pytest.param(way, marks=pytest.mark.slow) for way in (slurm, ssh, kubernetes))]


@pytest.mark.parametrize("way", WAYS)
def test_the_example_learns_on_two_ranks_however_it_is_launched(way, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    command, more = way(tmp_path)
    with started(command, tmp_path, **more) as job:
        said, _ = job.communicate(timeout=250)
    assert job.returncode == 0, said
    # one of two ranks has reported
    assert said.count("step 240: loss") == 1 and said.count("80 rounds; ") == 1
    losses = [float(loss) for loss in re.findall(r"step \d+: loss (\d+\.\d+)$", said, re.M)]
    assert len(losses) == 5 and losses[-1] < 0.5 * losses[0]
    if way is ssh:
        assert sorted((tmp_path / "hosts").read_text().split()) == ["127.0.0.1", "127.0.0.2"]


@pytest.mark.slow
def test_a_host_that_fails_ends_the_program_on_all_hosts(tmp_path: Path) -> None:
    program = tmp_path / "a program.py"  # whose name must be quoted on its way
    program.write_text(
        "import os, sys, time\n"
        "open(f'{os.getpid()}.pid', 'w').close()\n"
        "time.sleep(1 if os.environ['GROUP_RANK'] == '1' else 300)\n"
        "sys.exit(3)\n"
    )
    (*command, _), more = ssh(tmp_path)
    with started([*command, str(program), "it's"], tmp_path, **more) as job:
        said, _ = job.communicate(timeout=250)
    assert job.returncode not in (0, None), said
    pids = [int(file.stem) for file in tmp_path.glob("*.pid")]
    assert len(pids) == 2, said
    end = time.monotonic() + 100
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end, "the other host's program still runs"
        time.sleep(0.1)
