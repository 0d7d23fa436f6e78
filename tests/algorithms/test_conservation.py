"""What rounds must not create or destroy: push weights and the x that goes with them, the mean of
x, and what elastic workers lose to their center. Read from the running rounds, with the mixing
alone (lr 0) and with training in between."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import laconic as la
from laconic.algorithms.topology import GRAPHS
from laconic.engine.parameter_rounds import ParameterRunner

from tests.support import training
from tests.support.training import Job, build

EXACT = 1e-12


@dataclass
class Seen:
    """One worker's step: x as the optimizer found and left it and as it is after the rounds; the
    push weight here and on its way here (of every bucket); x*w, here and on its way here; the
    anchor where there is one, else x."""

    before: Tensor
    moved: Tensor
    after: Tensor
    weights: list[float]
    arriving: list[float]
    mass: Tensor
    anchor: Tensor


def still(group: int, step: int) -> float:
    """No learning: only the rounds move x."""
    return 0.0


def flat(optimizer: torch.optim.Optimizer) -> Tensor:
    """x in the order of buckets."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return torch.cat([p.detach().reshape(-1) for p in params])


def watch(job: Job, rank: int) -> list[Seen]:
    """Train from a start of this worker's own; what every step did."""
    options = dict(job.options)
    model, optimizer = build(job, rank - rank % options.get("nprocs_per_node", 1))
    own = [p.detach().clone() for p in model.parameters()]
    moments: dict[str, Tensor] = {}
    optimizer.register_step_post_hook(lambda *_: moments.update(moved=flat(optimizer)))
    sync = la.attach(model, optimizer, job.recipe, **options)
    optimizer.register_step_pre_hook(lambda *_: moments.update(before=flat(optimizer)))
    with torch.no_grad():
        for p, value in zip(model.parameters(), own, strict=True):
            p.copy_(value)
    found = []
    for t, batch in enumerate(job.data()[rank], 1):
        training.step(job, model, optimizer, batch, t, sync)
        before, moved = moments["before"], moments["moved"]
        found.append(Seen(before, moved, flat(optimizer), *inside(sync.driver.run.rounds[0])))
    return found


def inside(running: ParameterRunner) -> tuple[list[float], list[float], Tensor, Tensor]:
    """The part of `Seen` that only the round knows."""
    update, weights, arriving, masses, anchors = running.round.update, [], [], [], []
    for i, (bucket, state) in enumerate((c.bucket, c.state) for c in running.channels):
        x = bucket.pack(bucket.empty())
        weights.append(float(state["w"]) if update.weight else 1.0)
        arrivals = [f.buckets[i].pending.wait() for f in running.in_flight if update.weight]
        arriving.append(sum(arrival.weight for arrival in arrivals))
        mass = sum((arrival.flat for arrival in arrivals), start=weights[-1] * x)
        masses.append(mass[: bucket.numel])
        anchors.append((state[update.anchor] if update.anchor else x)[: bucket.numel].clone())
    return weights, arriving, torch.cat(masses), torch.cat(anchors)


def steps_of(job: Job) -> list[tuple[Seen, ...]]:
    """By step, what the workers saw."""
    runs = la.simulate(partial(watch, job), workers=job.workers)
    steps = list(zip(*runs, strict=True))
    assert len(steps) == job.steps
    return steps


def total(step: tuple[Seen, ...], part: Callable[[Seen], Tensor]) -> Tensor:
    return torch.stack([part(seen) for seen in step]).sum(0)


def gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


LRS = {"mixing alone": still, "training": training.changing_lr}


@pytest.mark.parametrize("lr", LRS)
@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("graph", GRAPHS)
def test_push_weights_and_what_they_weigh_are_conserved(graph: str, delay: int, lr: str) -> None:
    """Over workers and messages in flight: weights add up to n, and x*w to what it was, plus
    what the optimizers did to x."""
    n, moved = 5, False
    peers = 1 if graph in ("complete", "random") else 2  # they have a number of their own
    steps = steps_of(Job(la.sgp(graph, peers, delay=delay), n, steps=10, lr=LRS[lr]))
    mass = total(steps[0], lambda seen: seen.before)
    for step in steps:
        mass = mass + total(step, lambda seen: seen.moved - seen.before)
        assert gap(total(step, lambda seen: seen.mass), mass) < EXACT
        for bucket in range(len(step[0].weights)):
            weight = sum(seen.weights[bucket] + seen.arriving[bucket] for seen in step)
            assert abs(weight - n) < EXACT
        moved |= any(abs(w - 1) > 0.01 for seen in step for w in seen.weights)
    assert moved == (delay > 0 or graph.startswith("bipartite")), "weights that leave 1"
    assert lr == "training" or gap(mass, total(steps[0], lambda seen: seen.before)) == 0


def test_weights_are_those_of_the_graph() -> None:
    """In an irregular graph: each of five keeps half and sends half, but not all get as much."""
    graph = la.topology.Graph("bipartite_linear")
    (step,) = steps_of(Job(la.sgp("bipartite_linear"), 5, steps=1))
    received = [len(graph.in_peers(rank, 5, 0)) for rank in range(5)]
    assert len(set(received)) > 1
    assert [seen.weights[0] for seen in step] == [0.5 + 0.5 * count for count in received]


def test_a_slow_step_brings_all_weight_home() -> None:
    steps = steps_of(
        Job(la.slowmo(la.sgp("bipartite_linear", delay=2), 4, momentum=0.5), 5, steps=9)
    )
    for t, step in enumerate(steps, 1):
        weights = [w for seen in step for w in seen.weights]
        assert (set(weights) == {1.0}) == (t % 4 == 0)
        assert abs(sum(weights) + sum(sum(seen.arriving) for seen in step) - len(weights)) < EXACT


KEEP_THE_MEAN = {
    "d_psgd()": la.d_psgd(),
    "d_psgd(delay=2)": la.d_psgd(delay=2),
    "d_psgd(random)": la.d_psgd("random"),
    "d_psgd(bipartite_linear, delay=1)": la.d_psgd("bipartite_linear", delay=1),
    "hierarchical(2, 3)": la.hierarchical(2, 3),
}


@pytest.mark.parametrize("lr", LRS)
@pytest.mark.parametrize("name", KEEP_THE_MEAN)
def test_mixing_keeps_the_mean(name: str, lr: str) -> None:
    options = (("group_size", 3),) if name.startswith("hier") else ()
    n = 6 if options else 5
    steps = steps_of(Job(KEEP_THE_MEAN[name], n, steps=9, lr=LRS[lr], options=options))
    assert any(gap(seen.after, seen.moved) > 0.01 for step in steps for seen in step), "mixed"
    for step in steps:
        after, moved = total(step, lambda s: s.after), total(step, lambda s: s.moved)
        assert gap(after, moved) < EXACT


@pytest.mark.parametrize("lr", LRS)
@pytest.mark.parametrize("beta", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("n", [2, 5])
def test_what_elastic_workers_lose_the_center_gains(n: int, beta: float, lr: str) -> None:
    """sum_i dx_i = -da in every round, and nothing moves in between."""
    steps = steps_of(Job(la.easgd(3, beta), n, steps=9, lr=LRS[lr]))
    anchor = steps[0][0].anchor
    for t, step in enumerate(steps, 1):
        change = step[0].anchor - anchor
        lost = total(step, lambda seen: seen.moved - seen.after)
        assert gap(lost, change) < EXACT
        assert (float(change.abs().max()) > 1e-3) == (t % 3 == 0)
        assert all(torch.equal(seen.anchor, step[0].anchor) for seen in step), "one center"
        anchor = step[0].anchor


def test_elastic_workers_of_two_ranks_and_pulls() -> None:
    """The sum is over workers, not ranks; a local pull takes from x what the center never gets."""
    job = Job(la.easgd(2), 4, steps=6, options=(("nprocs_per_node", 2),))
    steps = steps_of(job)
    for before, step in itertools.pairwise(steps):
        lost = total(step[::2], lambda seen: seen.moved - seen.after)
        assert gap(lost, step[0].anchor - before[0].anchor) < EXACT
    steps = steps_of(Job(la.easgd(4, pull=0.8), 2, steps=3))
    for step in steps:
        for seen in step:
            assert gap(seen.after, seen.moved + 0.2 * (seen.anchor - seen.moved)) < EXACT
        assert torch.equal(step[0].anchor, steps[0][0].anchor)


def test_a_step_that_raised_and_is_tried_again_applies_push_weights_once() -> None:
    """With three workers a bipartite graph has push weights other than 1."""

    class Failing(torch.optim.SGD):
        fail = False

        def step(self, closure: Any = None) -> Any:
            if self.fail:
                raise RuntimeError("on purpose")
            return super().step(closure)

    def run(rank: int, fails: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2).double()
        optimizer = Failing(model.parameters(), lr=0.1)
        la.attach(model, optimizer, la.sgp("bipartite_exponential"))
        for t in range(6):
            model(torch.ones(1, 3).double() * (rank + t)).square().sum().backward()
            if fails and t == 3:
                optimizer.fail = True
                with pytest.raises(RuntimeError, match="on purpose"):
                    optimizer.step()
                optimizer.fail = False
            optimizer.step()
            optimizer.zero_grad()
        return model.weight.detach().clone()

    once, again = (la.simulate(partial(run, fails=fails), workers=3) for fails in (False, True))
    assert all(map(torch.equal, once, again))
