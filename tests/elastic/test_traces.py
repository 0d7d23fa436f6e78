"""A recorded run over processes, repeated in the simulator; and simulated runs with faults."""

from __future__ import annotations

import hashlib
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import laconic

from tests.support.elastic_runs import MANY, Run
from tests.support.elastic_worker import train

KILL, TERM = signal.SIGKILL, signal.SIGTERM
RECORDED = [
    ("laconic.ddp()", KILL),
    ("laconic.local_sgd(4, delay=2, codec='int8')", KILL),
    ("laconic.sgp()", KILL),
    ("laconic.ddp(codec='int4')", TERM),
    ("laconic.sgp(delay=1)", TERM),
]
ALL = [
    "laconic.ddp()",
    "laconic.local_sgd(4, delay=2, codec='int8')",
    "laconic.diloco(8)",
    "laconic.sgp()",
    "laconic.ddp(codec='int4')",
    "laconic.slowmo(laconic.local_sgd(3), period=6)",
    "laconic.diloco(8, merge='eager', delay=3)",
    "laconic.streaming_diloco(8)",
    "laconic.sparse_loco(6)",
    "laconic.easgd(3)",
    "laconic.sgp(delay=1)",
    "laconic.d_psgd()",
    "laconic.noloco(4)",
]


@pytest.mark.parametrize(("recipe", "number"), RECORDED)
def test_a_trace_repeats_a_run_bit_for_bit(
    recipe: str, number: signal.Signals, tmp_path: Path
) -> None:
    options = {"samples": 5000, "clip": True}
    with Run(recipe, 3, MANY, trace=str(tmp_path), **options) as run:
        replacement = run.add(hold=True)
        for worker in run.workers[:3]:
            worker.wait_for("ready")
        run.workers[1].send(number)
        run.workers[0].wait_for("view", workers=2)
        replacement.go()
        ids = {w.wait_for("ready")["id"]: w for w in run.workers if w is not run.workers[1]}
        run.end_soon(run.workers[1])
        done = {id: worker.wait_for("done") for id, worker in ids.items()}
    (steps,) = {event["step"] for event in done.values()}
    trace = laconic.Trace(tmp_path)
    assert trace.workers == 4

    def repeat(number: int) -> dict[str, Any]:
        events: list[dict[str, Any]] = []
        elastic = laconic.Elastic("simulated")
        train(lambda event, **more: events.append(more), recipe, steps, elastic, options, number, 0)
        return events[-1]

    repeated = laconic.simulate(repeat, faults=trace)
    for id, result in zip(trace.ids, repeated, strict=True):
        if id in done:
            assert result is not None
            assert result["digest"] == done[id]["digest"]
        else:
            assert result is None, "it was killed, or has left"
    taken = [key for key in trace._bequests if number == TERM]
    assert len(taken) == (number == TERM), "another worker takes over what only it held"
    assert len({event["digest"] for event in done.values()}) == 1


def program(recipe: str, steps: int, clip: bool = False) -> Any:
    """What a simulated worker runs: returns its model's digest and the samples it has drawn."""

    def worker(number: int) -> tuple[str, list[int], int, float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 5)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
        sampler = laconic.ElasticSampler(10_000, seed=1)
        elastic = laconic.Elastic("simulated", others={"data": sampler, "rate": schedule})
        sync = laconic.attach(model, optimizer, eval(recipe), elastic=elastic)
        data = torch.randn(10_000, 20, generator=torch.Generator().manual_seed(5))
        samples, drawn = iter(sampler), list[int]()
        while sync.step < steps:
            batch = [next(samples) for _ in range(4)]
            drawn += batch
            loss = (model(data[batch]) - data[batch][:, :5].sin()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            schedule.step()
        sync.finish()
        raw = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        lost = sync.stats().workers_lost
        return hashlib.sha256(raw).hexdigest(), drawn, lost, optimizer.param_groups[0]["lr"]

    return worker


@pytest.mark.parametrize("recipe", ALL)
@pytest.mark.parametrize("clip", [False, True])
def test_workers_come_and_go_in_the_simulator(recipe: str, clip: bool) -> None:
    faults = laconic.Faults(4, kill=((0, 3), (2, 9), (4, 20)), join=(5, 14))
    results = laconic.simulate(program(recipe, 30, clip), faults=faults)
    left = [result for result in results if result is not None]
    assert [number for number, result in enumerate(results) if result is None] == [0, 2, 4]
    assert len({digest for digest, *_ in left}) == 1
    assert {lost for _, _, lost, _ in left} == {3}
    assert {rate for *_, rate in left} == {1e-3 * 0.9**6}
    drawn = [sample for _, samples, *_ in left for sample in samples]
    assert len(drawn) == len(set(drawn)), "no sample twice among those that are left"


@pytest.mark.parametrize("recipe", ["laconic.local_sgd(4)", "laconic.ddp()"])
def test_without_faults_it_is_the_mean_of_all(recipe: str) -> None:
    results = laconic.simulate(program(recipe, 12), faults=laconic.Faults(3))
    assert len({digest for digest, *_ in results}) == 1


@pytest.mark.fault("a worker that joined at the end of a run did not get its result")
@pytest.mark.parametrize("recipe", ["laconic.local_sgd(4)", "laconic.ddp()"])
def test_a_newcomer_that_joins_at_the_end_finishes(recipe: str) -> None:
    results = laconic.simulate(program(recipe, 8), faults=laconic.Faults(2, join=(8,)))
    assert None not in results and len({digest for digest, *_ in results}) == 1


def test_faults_by_chance() -> None:
    faults = laconic.Faults.random(4, 1000, 10, seed=3, restart=2)
    assert faults == laconic.Faults.random(4, 1000, 10, seed=3, restart=2)
    assert faults != laconic.Faults.random(4, 1000, 10, seed=4, restart=2)
    assert 70 <= len(faults.kill) <= 130, "1000 steps, one every 10"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"start": 0}, "start must be"),
        ({"start": 2, "kill": ((2, 5),)}, "workers 0 to 1, not 2"),
        ({"start": 2, "kill": ((0, 5), (0, 6))}, "killed once"),
        ({"start": 2, "kill": ((0, 5), (1, 6))}, "no worker is left after step 6"),
        ({"start": 2, "join": (5, 4)}, "must ascend"),
    ],
)
def test_plans_that_cannot_work(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        laconic.Faults(**options)


def test_a_directory_without_a_trace(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no worker has recorded"):
        laconic.Trace(tmp_path)


def test_a_checkpoint_deals_the_samples_to_other_workers(tmp_path: Path) -> None:
    def worker(load: bool, steps: int) -> Any:
        def run(number: int) -> list[int]:
            torch.manual_seed(0)
            model = torch.nn.Linear(4, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            sampler = laconic.ElasticSampler(10_000, seed=1)
            elastic = laconic.Elastic("simulated", others={"data": sampler})
            sync = laconic.attach(model, optimizer, laconic.diloco(4), elastic=elastic)
            if load:
                laconic.load(tmp_path, model, optimizer, others={"data": sampler})
            samples, drawn = iter(sampler), list[int]()
            while sync.step < steps:
                drawn.append(next(samples))
                model(torch.ones(1, 4) * drawn[-1] / 1e4).sum().backward()
                optimizer.step()
            if not load:
                laconic.save(tmp_path, model, optimizer, others={"data": sampler})
            return drawn

        return run

    before = laconic.simulate(worker(False, 10), faults=laconic.Faults(3))
    for workers in (3, 4, 2):
        after = laconic.simulate(worker(True, 20), faults=laconic.Faults(workers))
        drawn = sorted(sample for samples in (*before, *after) for sample in samples)
        assert len(drawn) == len(set(drawn)) == 30 + 10 * workers
