"""Workers that are started again: the example under torchrun and under the script for Slurm."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.support import gloo

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "elastic"
TRAIN = str(EXAMPLES / "train.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--max-restarts=3"]
RUN = ["--steps", "300", "--pause", "0.02", "--min-workers", "2"]
"""With both workers only: what is left of a run waits for a worker that starts again."""
SECONDS = 200.0


def environment(**more: str) -> dict[str, str]:
    """Without this process's settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LACONIC_", "SLURM"))}
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


class Program:
    """A program whose output goes to a file."""

    def __init__(self, command: list[str], log: Path, **more: str) -> None:
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment(**more),
                cwd=ROOT,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self.log.read_text()

    def end(self) -> int:
        return self.process.wait(SECONDS)

    def kill(self) -> None:
        """End it and what it has started, which is in its session or known by its lines."""
        for pid in {*map(int, re.findall(r"^\[(\d+)\]", self.said, re.MULTILINE))}:
            if TRAIN in command_of(pid) or "examples/elastic/train.py" in command_of(pid):
                os.kill(pid, signal.SIGKILL)
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(SECONDS)


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def wait_for(what: Callable[[], object], programs: list[Program]) -> None:
    end = time.monotonic() + SECONDS
    while not what():
        assert time.monotonic() < end, "\n---\n".join(p.said for p in programs)
        time.sleep(0.05)


@contextmanager
def ended(programs: list[Program]) -> Iterator[None]:
    """End all programs on leaving."""
    try:
        yield
    finally:
        for program in programs:
            program.kill()


def pids(text: str) -> list[int]:
    """Those of the workers that have begun, in their order."""
    return [int(pid) for pid in re.findall(r"\[(\d+)\] worker \w+ begins", text)]


def digests(text: str) -> list[str]:
    return re.findall(r"digest: (\w+)", text)


@pytest.mark.slow
def test_torchrun_starts_a_killed_worker_again(tmp_path: Path) -> None:
    port, trace = gloo.free_port(), tmp_path / "trace"
    coordinator = [sys.executable, "-m", "laconic", "coordinator", "--port", str(port)]
    programs = [Program(coordinator, tmp_path / "coordinator")]
    command = [sys.executable, *TORCHRUN, TRAIN, *RUN, "--trace", str(trace)]
    address = {"LACONIC_COORDINATOR": f"127.0.0.1:{port}"}
    with ended(programs):
        programs += [Program(command, tmp_path / f"host{i}", **address) for i in range(2)]
        first, second = programs[1:]
        wait_for(lambda: "step 100:" in first.said and "step 100:" in second.said, programs)
        os.kill(pids(first.said)[0], signal.SIGKILL)
        assert [first.end(), second.end()] == [0, 0], first.said + second.said
        steps = re.findall(r"begins after step (\d+)", first.said)
        assert len(steps) == 2 and 100 <= int(steps[1]) < 300, "it goes on where the others are"
        assert "lost: 1 workers" in second.said
        (digest,) = {*digests(first.said), *digests(second.said)}
    again = Program([sys.executable, TRAIN, *RUN, "--repeat", str(trace)], tmp_path / "again")
    with ended([again]):
        assert again.end() == 0, again.said
        assert f"digests: ['{digest}', '{digest}']" in again.said


SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
for ((i = 0; i < SLURM_NTASKS; i++)); do SLURM_PROCID=$i "$@" & tasks[i]=$!; done
status=0
for task in "${tasks[@]}"; do wait "$task" || status=$?; done
exit $status
"""


@pytest.mark.slow
def test_the_script_for_slurm(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    slurm = {
        "PATH": os.pathsep.join(
            [str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]
        ),
        "SLURM_JOB_ID": str(gloo.free_ports(1)[0] - 20000),
        "SLURM_NTASKS": "2",
        "SLURMD_NODENAME": "127.0.0.1",
    }
    model = tmp_path / "model.pt"
    options = [*RUN, "--model", str(model)]
    job = Program(["bash", str(EXAMPLES / "slurm.sh"), *options], tmp_path / "job", **slurm)
    with ended([job]):
        wait_for(lambda: job.said.count("step 100:") == 2, [job])
        os.kill(pids(job.said)[0], signal.SIGKILL)
        assert job.end() == 0, job.said
        assert len(pids(job.said)) == 3 and model.exists(), job.said
        found = digests(job.said)
        assert len(found) == 2 and len(set(found)) == 1, job.said


def test_the_file_for_kubernetes_starts_the_example() -> None:
    parts = [*yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())]
    assert [part["kind"] for part in parts] == ["Service", "Deployment", "Job"]
    service, _, job = parts
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (variable,) = container["env"]
    host, _, port = variable["value"].partition(":")
    assert host == service["metadata"]["name"] and int(port) == service["spec"]["ports"][0]["port"]
    assert (ROOT / container["command"][1]).is_file()
