"""Ranks started by Slurm: their variables, and a training under a stand-in for srun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from laconic.links.slurm import first_host, torchrun_variables

from tests.support import gloo

ROOT = Path(__file__).parents[2]
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_TASKS_PER_NODE": "4(x2),3",
    "SLURM_STEP_NODELIST": "gpu[03-04,17]",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
}

TASKS = ("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE")


def test_the_variables_are_torchruns() -> None:
    rank_9 = torchrun_variables(STEP)
    assert rank_9.pop("MASTER_ADDR") == "gpu03" and rank_9.pop("MASTER_PORT") == "26711"
    local = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}
    assert rank_9 == {"RANK": "9", "WORLD_SIZE": "11", **local}
    assert torchrun_variables({**STEP, "SLURM_NODEID": "1"})["LOCAL_WORLD_SIZE"] == "4"
    for hosts, first in (
        ("node1", "node1"),
        ("10.0.0.1,10.0.0.2", "10.0.0.1"),
        ("node[7,09-12],gpu3", "node7"),
        ("rack[1-2]node[03-04]-ib,gpu3", "rack1node03-ib"),
    ):
        assert first_host(hosts) == first


def test_without_ranks_of_slurms_there_are_none() -> None:
    for environ in (
        {},
        {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # the batch script
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},  # a shell by srun
        {**STEP, "RANK": "0", "WORLD_SIZE": "2"},  # torchrun's
        {**STEP, "SLURM_TASKS_PER_NODE": "1"},  # a batch script that a step has submitted
    ):
        assert torchrun_variables(environ) == {}


def test_mistakes_name_the_variable() -> None:
    for change, said in (
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST has no host in it: ''"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID is no number: 'x'"),
        (dict.fromkeys(TASKS, "4(y2)"), "SLURM_STEP_TASKS_PER_NODE cannot be read"),
        ({"SLURM_DISTRIBUTION": "arbitrary"}, "set MASTER_ADDR to the host of task 0"),
        ({"SLURM_NODEID": "3"}, r"has no host number 3 \(SLURM_NODEID\)"),
    ):
        with pytest.raises(ValueError, match=said):
            torchrun_variables({**STEP, **change})
    lacking = {name: value for name, value in STEP.items() if name != "SLURM_STEP_NODELIST"}
    with pytest.raises(ValueError, match="srun has not set SLURM_STEP_NODELIST: set RANK and"):
        torchrun_variables(lacking)


@pytest.mark.slow
def test_a_training_by_srun_without_torchrun(tmp_path: Path) -> None:
    port = gloo.free_port()
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    step = {**STEP, "SLURM_STEP_NUM_TASKS": "3", **dict.fromkeys(TASKS, "2,1")}
    step |= {"SLURM_STEP_NODELIST": "127.0.0.1,127.0.0.[2-3]", "MASTER_PORT": str(port)}
    given = {**kept, **step, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/src"}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    tasks = []
    for rank, (node, local) in enumerate([("0", "0"), ("0", "1"), ("1", "0")]):
        own = {"SLURM_PROCID": str(rank), "SLURM_NODEID": node, "SLURM_LOCALID": local}
        command = [sys.executable, str(ROOT / "examples" / "minimal.py")]
        tasks.append(subprocess.Popen(command, env=given | own, cwd=tmp_path, **pipes))
    try:
        said = [task.communicate(timeout=250) for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    assert [task.returncode for task in tasks] == [0] * 3, said
    assert "80 rounds" in said[0][0] and not said[1][0] and not said[2][0]
