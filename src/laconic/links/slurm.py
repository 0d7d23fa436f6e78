"""Ranks that Slurm has started: ``srun python train.py``, without torchrun."""

from __future__ import annotations

import re
from collections.abc import Mapping

FIRST_PORT, PORTS = 20000, 10000
"""Rank 0 listens at one of these ports, by the numbers of the job and its step."""


def torchrun_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that torchrun would have set, from those of ``srun``; empty where
    torchrun or a user has set RANK, or ``srun`` has not started this process as one of several. (A
    batch script that a step has submitted inherits the step's variables, beside its own.)

    MASTER_ADDR and MASTER_PORT are a user's, or else the step's first host, and
    ``20000 + (SLURM_JOB_ID + 1000 * SLURM_STEP_ID) % 10000``.

    Raises ``ValueError`` that names the variable, if one is missing or cannot be read, or if
    MASTER_ADDR is not set and a host file decides where rank 0 is.
    """
    step = environ.get("SLURM_STEP_TASKS_PER_NODE")
    inherited = environ.get("SLURM_TASKS_PER_NODE", step) != step
    if "RANK" in environ or environ.get("SLURM_STEP_NUM_TASKS", "1") == "1" or inherited:
        return {}
    if "MASTER_ADDR" not in environ and environ.get("SLURM_DISTRIBUTION") == "arbitrary":
        raise ValueError(
            "a host file (SLURM_HOSTFILE) places the tasks: set MASTER_ADDR to the host of task 0"
        )
    number = _number(environ, "SLURM_JOB_ID") + 1000 * _number(environ, "SLURM_STEP_ID")
    found = {
        "RANK": str(_number(environ, "SLURM_PROCID")),
        "WORLD_SIZE": str(_number(environ, "SLURM_STEP_NUM_TASKS")),
        "LOCAL_RANK": str(_number(environ, "SLURM_LOCALID")),
        "LOCAL_WORLD_SIZE": str(_tasks_on_this_host(environ)),
        "MASTER_ADDR": first_host(_text(environ, "SLURM_STEP_NODELIST")),
        "MASTER_PORT": str(FIRST_PORT + number % PORTS),
    }
    given = {n: environ[n] for n in ("MASTER_ADDR", "MASTER_PORT") if n in environ}
    return {**found, **given}


def first_host(hosts: str) -> str:
    """The first of ``hosts``, written as Slurm does: ``rack[1-2]node[07,09-12],gpu3``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts)
    if first is None:
        raise ValueError(f"SLURM_STEP_NODELIST has no host in it: {hosts!r}")
    return re.sub(r"\[(\w*)[^\]]*\]", r"\1", first[0])


def _tasks_on_this_host(environ: Mapping[str, str]) -> int:
    """From how many tasks each host has, in their order: ``4(x2),3`` is 4, 4 and 3."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    tasks: list[int] = []
    for part in _text(environ, name).split(","):
        each = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if each is None:
            raise ValueError(f"{name} cannot be read: {environ[name]!r}")
        tasks += [int(each[1])] * int(each[2] or 1)
    place = _number(environ, "SLURM_NODEID")
    if place >= len(tasks):
        raise ValueError(f"{name}={environ[name]} has no host number {place} (SLURM_NODEID)")
    return tasks[place]


def _text(environ: Mapping[str, str], name: str) -> str:
    if name not in environ:
        raise ValueError(f"srun has not set {name}: set RANK and the others, or use torchrun")
    return environ[name]


def _number(environ: Mapping[str, str], name: str) -> int:
    text = _text(environ, name)
    if not text.isdecimal():
        raise ValueError(f"{name} is no number: {text!r}")
    return int(text)
