"""Workers that are started again: the example under torchrun and under the script for Slurm."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

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


class Program:
    """A program whose output goes to a file, without this process's settings."""

    def __init__(self, command: list[str], log: Path, **more: str) -> None:
        self.log = log
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("LACONIC_", "SLURM"))}
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        environ = {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}
        more_options: Any = {"stderr": subprocess.STDOUT, "cwd": ROOT, "start_new_session": True}
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, env=environ, **more_options)

    @property
    def said(self) -> str:
        return self.log.read_text()

    def end(self) -> int:
        return self.process.wait(SECONDS)

    def workers(self) -> list[int]:
        """Those that have begun, in their order."""
        return [int(pid) for pid in re.findall(r"\[(\d+)\] worker \w+ begins", self.said)]

    def kill_worker(self, *others: Program) -> None:
        """Kill the first one once all have come to step 100."""
        programs, end = (self, *others), time.monotonic() + SECONDS
        while sum(each.said.count("step 100:") for each in programs) < 2:
            assert time.monotonic() < end, "\n---\n".join(each.said for each in programs)
            time.sleep(0.05)
        os.kill(self.workers()[0], signal.SIGKILL)

    def close(self) -> None:
        """End it and what it has started, which is in its session or known by its lines."""
        for pid in self.workers():
            with suppress(OSError):
                if "examples/elastic/train.py" in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(SECONDS)


def digests(text: str) -> list[str]:
    return re.findall(r"digest: (\w+)", text)


@pytest.mark.slow
def test_torchrun_starts_a_killed_worker_again(tmp_path: Path) -> None:
    port, trace = gloo.free_port(), tmp_path / "trace"
    coordinator = [sys.executable, "-m", "laconic", "coordinator", "--address", f"127.0.0.1:{port}"]
    command = [sys.executable, *TORCHRUN, TRAIN, *RUN, "--trace", str(trace)]
    address = {"LACONIC_COORDINATOR": f"127.0.0.1:{port}"}
    with ExitStack() as ending:
        ending.enter_context(closing(Program(coordinator, tmp_path / "coordinator")))
        first, second = (
            ending.enter_context(closing(Program(command, tmp_path / f"host{i}", **address)))
            for i in range(2)
        )
        first.kill_worker(second)
        assert [first.end(), second.end()] == [0, 0], first.said + second.said
        steps = re.findall(r"begins after step (\d+)", first.said)
        assert len(steps) == 2 and 100 <= int(steps[1]) < 300, "it goes on where the others are"
        assert "lost: 1 workers" in second.said
        (digest,) = {*digests(first.said), *digests(second.said)}
    command = [sys.executable, TRAIN, *RUN, "--repeat", str(trace)]
    with closing(Program(command, tmp_path / "again")) as again:
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
    programs = str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]
    slurm = {
        "PATH": os.pathsep.join(programs),
        "SLURM_JOB_ID": str(gloo.free_ports(1)[0] - 20000),
        "SLURM_NTASKS": "2",
        "SLURMD_NODENAME": "127.0.0.1",
    }
    model = tmp_path / "model.pt"
    command = ["bash", str(EXAMPLES / "slurm.sh"), *RUN, "--model", str(model)]
    with closing(Program(command, tmp_path / "job", **slurm)) as job:
        job.kill_worker()
        assert job.end() == 0, job.said
        assert len(job.workers()) == 3 and model.exists(), job.said
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
