"""Elastic runs with workers of two ranks, of which each has a shard of the model."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import laconic as la

from tests.support import gloo
from tests.support.elastic_ranks import ByStep, RanksRun, repeat
from tests.support.loops import refusal

slow = pytest.mark.slow
KILL, TERM = signal.SIGKILL, signal.SIGTERM


def late(text: str) -> Any:
    return pytest.param(text, marks=slow)


@pytest.mark.parametrize(
    "recipe",
    ["local_sgd(2, delay=1)", late("ddp()"), late("diloco(4, outer='muon')")],
)
def test_a_killed_rank_ends_its_worker_and_another_one_joins(recipe: str, tmp_path: Path) -> None:
    """All ranks end with the same bits, which the trace repeats with the whole model."""
    recipe = f"laconic.{recipe}"
    with RanksRun(recipe, 2, buffers="keep", trace=str(tmp_path)) as run:
        first = run.ready()[0]
        other, killed = run.ranks[1]
        killed.send(KILL)
        assert other.end() == 1
        assert other.errors.splitlines()[-1].startswith(
            "ERROR:laconic:rank 1 of this worker has ended, and so does rank 0: "
        )
        first.wait_for("view", workers=1)
        id = run.add().wait_for("ready")["id"]
        first.wait_for("view", workers=2)
        done = run.finished(1, 3)
    check_repeated(recipe, tmp_path, done, id)


def check_repeated(recipe: str, folder: Path, done: list[dict[str, Any]], id: str) -> None:
    """All ranks were ``done`` with the same model, and so is the worker ``id`` in one process."""
    assert len({(event["digest"], event["step"]) for event in done}) == 1
    trace = ByStep(folder)
    repeated = la.simulate(partial(repeat, recipe, trace.ids, done[0]["step"]), faults=trace)
    assert repeated[trace.ids.index(id)] == done[0]["digest"]


@slow
def test_a_newcomer_whose_repeated_steps_differ_gets_all_shards_again() -> None:
    with RanksRun("laconic.ddp()", 2, buffers="keep", clip=True) as run:
        first = run.ready()[0]
        run.add().wait_for("ready")
        first.wait_for("view", workers=3)
        done = run.finished(1, 2, 3)
        assert all("gets the state again" in rank.errors for rank in run.ranks[2])
    assert len({event["digest"] for event in done}) == 1


@slow
def test_calls_of_all_ranks(tmp_path: Path) -> None:
    """Means, the consensus, and a checkpoint, which has all shards."""
    with RanksRun("laconic.local_sgd(4)", 2, folder=str(tmp_path / "saved")) as run:
        run.ready()
        done = run.finished(1, 2)
    assert len({event["digest"] for event in done}) == 1


@slow
def test_all_ranks_leave_on_sigterm(tmp_path: Path) -> None:
    """Also if only one of them gets it."""
    with RanksRun("laconic.sgp(delay=1)", 2, buffers="keep", trace=str(tmp_path)) as run:
        first = run.ready()[0]
        id, leaves = first.wait_for("ready")["id"], run.ranks[1]
        leaves[1].send(TERM)
        assert [rank.end() for rank in leaves] == [128 + TERM] * 2
        first.wait_for("view", workers=1)
        done = run.finished(1)
    check_repeated("laconic.sgp(delay=1)", tmp_path, done, id)


def refusals(rank: int) -> list[str]:
    """What four ranks in one process group are told."""
    elastic = la.Elastic("127.0.0.1:1", wait=0.1)
    mesh, found = init_device_mesh("cpu", (4,)), list[str]()
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("workers", "shards"))

    def refused(model: Any, recipe: Any = "local_sgd(2)", **options: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"elastic": elastic, "timeout": 20.0, **options}
        found.append(refusal(lambda: la.attach(model, optimizer, recipe, **options)))

    sampler = la.Elastic("127.0.0.1:1", others={"data": la.ElasticSampler(4)})
    refused(nn.Linear(2, 2), nprocs_per_node=2)
    refused(nn.Linear(2, 2), nprocs_per_node=4)
    refused(nn.Linear(2, 2), mesh=pairs)
    refused(fully_shard(nn.Linear(4, 4), mesh=mesh))
    refused(fully_shard(nn.Linear(4, 4), mesh=mesh), mesh=mesh, elastic=sampler)
    refused(fully_shard(nn.Linear(4, 4), mesh=mesh), "auto()", mesh=mesh)
    return found


def test_what_workers_of_several_ranks_cannot_do(pool: gloo.Pool) -> None:
    """It is refused on every rank."""
    for found in pool.run(refusals, ranks=4):
        texts = [
            "2 ranks are one worker, and the process group has 4 ranks",
            "each has the whole model: in an elastic run, shard",
            "mesh is of the ranks of this worker",
            "pass the mesh of this worker's ranks",
            "'data' is an ElasticSampler",
            "auto() is for workers of one rank",
        ]
        for text, said in zip(texts, found, strict=True):
            assert text in said
