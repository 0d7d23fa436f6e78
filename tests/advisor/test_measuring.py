"""`laconic.advise` in a training: what it measures, and what is wrong on one rank."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import laconic as la
from laconic.advisor.measure import compute_and_skew
from laconic.cli import main
from laconic.links import Throttled
from laconic.policy.predict import work_key

from tests.support import gloo
from tests.support.clock import controlled
from tests.support.loops import descend, refusal


def test_waiting_for_the_slowest_is_told_from_computing() -> None:
    for computes, m_1, m_4, found in (
        ((0.05, 0.03), 0.05, 0.05, (0.05, 0.0)),  # one is slower
        ((0.04, 0.04), 0.05, 0.045, (0.04, 0.01)),  # slow in turn: 0.04 + 0.01 / sqrt(4)
        ((0.05, 0.05), 0.05, 0.045, (0.05, 0.0)),  # not faster together than alone
        ((0.03, 0.06), 0.03, 0.03, (0.04, 0.0)),  # the processors' time is shared
    ):
        assert compute_and_skew(computes, m_1, m_4, 4) == pytest.approx(found)


def training(
    rank: int, pause: Callable[[], object] = lambda: None
) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 30))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        descend(optimizer, nn.functional.mse_loss(model(torch.randn(8, 40)), torch.ones(8, 30)))
        pause()

    return model, optimizer, step


def advised(rank: int, pause: Callable[[], object] = lambda: None, **options: Any) -> la.Advice:
    model, optimizer, step = training(rank, pause)
    return la.advise(model, step, optimizer=optimizer, **{"steps": 4, **options})


def test_workers_are_measured_and_told_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = controlled(monkeypatch)

    def run(rank: int) -> la.Advice:
        pause = partial(clock.sleep, 0.03 if rank == 1 else 0.01)
        return advised(rank, pause, recipes=("power_sgd(2)",))

    found = la.simulate(run, workers=3, link=lambda link: Throttled(link, "20mbit", 0.004))
    first = found[0]
    assert all(other == first for other in found)
    facts = first.facts
    assert facts.workers == 3 and facts.elements == 21_330
    assert facts.rate == pytest.approx(20e6, rel=0.01)
    assert facts.one_way == pytest.approx(0.002, rel=0.05)
    assert facts.compute == pytest.approx(0.03, rel=0.01)
    assert first.computes is not None and facts.compute == max(first.computes)
    assert facts.largest > 0.25, "fragments by layers are unequal"
    assert work_key(la.outer_step(la.ddp(), 8, outer="muon")[-1]) in facts.work, "it computes"
    assert facts.skew == 0.0 and 0 < facts.backward < 1
    assert first.slow[0].startswith("Rank 1 computes 3 times as long")
    assert any("pace='own'" in row.recipe for row in first.rows)
    assert first.rows[-1].recipe == "power_sgd(2)"


@pytest.mark.slow
def test_workers_of_two_ranks() -> None:
    found = la.simulate(lambda rank: advised(rank, nprocs_per_node=2), workers=4)
    assert (found[0].facts.workers, found[0].facts.ranks) == (2, 2)
    assert "nprocs_per_node=2" in found[0].code
    assert all(other == found[0] for other in found)


def slower(rank: int) -> str:
    pause = partial(time.sleep, 0.05 if rank == 1 else 0.03)
    return advised(rank, pause, steps=4, link=gloo.link_of(2)).to_json()


WRONG = {
    "a step": "step_fn raised RuntimeError: out of batches",
    "the optimizer": "the ranks' arguments differ: model, optimizer",
}
"""What is wrong on rank 1 alone, and the message."""


def asking(rank: int) -> list[str]:
    """The errors; no process group is left behind."""
    groups, said = torch.distributed.distributed_c10d._world.pg_map, []
    before = len(groups)
    for what in WRONG:
        model, optimizer, step = training(rank)

        def run(step: Any = step, raises: bool = what == "a step" and rank == 1) -> None:
            if raises:
                raise RuntimeError("out of batches")
            step()

        if what == "the optimizer" and rank == 1:
            optimizer = torch.optim.AdamW([next(iter(model.parameters()))])
        asked = partial(la.advise, model, run, optimizer=optimizer, steps=2, timeout=250)
        said.append(refusal(asked))
    assert len(groups) == before
    return said


def test_over_processes_a_slower_rank_decides_and_errors_are_told_to_all(pool: gloo.Pool) -> None:
    first, second = pool.run(slower, ranks=2)
    assert first == second
    facts = json.loads(first)["facts"]
    # no less than the harmonic mean, however busy the machine
    assert facts["compute"] >= statistics.harmonic_mean([0.03, 0.05]) and facts["skew"] >= 0
    assert facts["parameters"] == 21_330 and facts["rate"] > 0
    for said in pool.run(asking, ranks=4):
        assert all(message in text for message, text in zip(WRONG.values(), said, strict=True))


def test_wrong_arguments_are_refused() -> None:
    def one(rank: int, options: dict[str, Any]) -> str:
        model, _, step = training(rank)
        given = {"model": model, "step_fn": step, "steps": 2, **options}
        return refusal(lambda: la.advise(**given))

    for options, named, workers in (
        ({"model": nn.ReLU()}, "no parameter", 2),
        ({"recipes": ("hierarchical(2, 8)",)}, "groups", 2),
        ({}, "only one worker", 1),
    ):
        assert all(named in said for said in la.simulate(partial(one, options=options), workers))


PROGRAM = """
import os, time
import torch
import laconic
from laconic.lab.race import workloads

laconic.init()
rank, task = int(os.environ["RANK"]), workloads.load("digits")
model = task.model()
optimizer, batches = task.optimizer(model), task.batches(rank, 3, 0)

def step():
    task.loss(model, next(batches)).backward()
    optimizer.step()
    time.sleep(0.2 * (rank == 2))

advice = laconic.advise(model, step, optimizer=optimizer, steps=6)
if rank == 0:
    print("ADVICE", " ".join(advice.to_json().split()), flush=True)
"""


@pytest.mark.slow
@pytest.mark.hosts
def test_emulated_hosts_are_measured_and_lost_packets_found(
    capfd: pytest.CaptureFixture[str],
) -> None:
    network = ["--bandwidth", "20mbit", "--bandwidth", "1=2mbit", "--loss", "2%"]
    options = ["--hosts", "3", "--latency", "5ms", *network]
    assert main(["lab", *options, "--", sys.executable, "-c", PROGRAM]) == 0
    (line,) = (line for line in capfd.readouterr().out.splitlines() if "ADVICE " in line)
    told = json.loads(line.partition("ADVICE ")[2])
    assert 0 < told["facts"]["loss"] < 0.2
    assert told["facts"]["one_way"] > 2.4e-3, "never less than was given"
    steps, network = told["slow"]
    assert steps.startswith("Rank 2 computes ") and network.startswith("Rank 1 sends ")
