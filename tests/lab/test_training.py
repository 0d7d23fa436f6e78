"""How a race trains: its workloads, how long it runs, and what its ranks record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import pytest
import torch
from torch import Tensor

import laconic as la
from laconic.lab.race import rivals
from laconic.lab.race.plan import Schedule, last_step, outermost
from laconic.lab.race.workloads import Workload, load, lr_factor

# -- workloads ----

TEXT = b"".join(b"line %d of a text that repeats itself, nearly\n" % i for i in range(2000))


@pytest.fixture(scope="module", params=["digits", "text"])
def workload(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Workload:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_bytes(TEXT)
    return load("text", data=path) if request.param == "text" else load("digits")


def test_a_workload_is_determined_by_worker_and_seed_and_learns(workload: Workload) -> None:
    def batches(worker: int, seed: int) -> list[Tensor]:
        torch.manual_seed(123 + seed)  # the global generator has no say
        return [torch.cat([t.flatten() for t in b]) for b in islice(
            workload.batches(worker, 4, seed), 3)]  # fmt: skip

    one, again, worker, seed = (batches(*given) for given in ((1, 7), (1, 7), (2, 7), (1, 8)))
    assert all(map(torch.equal, one, again))
    assert not any(all(map(torch.equal, one, other)) for other in (worker, seed))
    assert len({len(inputs) for inputs, _ in workload.validation}) == 1
    torch.manual_seed(0)
    model = workload.model()
    optimizer = workload.optimizer(model)
    before = workload.loss(model, workload.validation[0]).item()
    for batch in islice(workload.batches(0, 1, 0), 12):
        optimizer.zero_grad()
        torch.autograd.backward(workload.loss(model, batch))
        optimizer.step()
    assert workload.loss(model, workload.validation[0]).item() < 0.9 * before
    if workload.name == "text":
        assert sum(p.numel() for p in model.parameters()) == 865_280
        held_out = TEXT[len(TEXT) * 9 // 10 :]
        assert all(bytes(c) in held_out for x, _ in workload.validation for c in x.tolist())
        for inputs, targets in islice(workload.batches(0, 2, 0), 10):
            assert torch.equal(inputs[:, 1:], targets[:, :-1])
            assert bytes([*inputs[0].tolist(), int(targets[0, -1])]) in TEXT[: len(TEXT) * 9 // 10]


def test_digits_are_dealt_out_without_loss_or_overlap() -> None:
    digits, workers = load("digits"), 3
    seen: list[tuple[float, ...]] = []
    for worker in range(workers):
        share = len(range(worker, 1797 - 360, workers))
        stream = (pair for b in digits.batches(worker, workers, 0) for pair in zip(*b, strict=True))
        epoch = [(*x.tolist(), float(y)) for x, y in islice(stream, share)]
        assert len(set(epoch)) == share  # each once before any comes again
        seen += epoch
    held_out = {(*x.tolist(), float(y)) for b in digits.validation for x, y in zip(*b, strict=True)}
    assert len(set(seen)) == len(seen) and not held_out & set(seen)
    assert len(held_out) + len(seen) == 1797


def test_the_learning_rate_rises_then_falls_along_a_cosine() -> None:
    schedule = replace(load("digits"), warmup=0.1, final=0.2)
    for step, factor in ((1, 0.1), (5, 0.5), (10, 1.0), (55, 0.6), (100, 0.2), (101, 0.2)):
        assert lr_factor(step, 100, schedule) == pytest.approx(factor)
    assert lr_factor(12.5, 50.0, schedule) == lr_factor(25, 100, schedule)


# -- how long a race runs, against doing the sums step by step ----

RECIPES: list[tuple[la.Recipe, Callable[[int], bool]]] = [
    ((), lambda t: True),
    (la.local_sgd(7, delay=3), lambda t: t > 3 and t % 7 == 3),
    (la.slowmo(la.local_sgd(5), 7), lambda t: t % 7 == 0),
    (la.post_local_sgd(20, 8), lambda t: t <= 20 or t % 8 == 0),
]
"""Recipes, and the steps after which each is at rest."""


@pytest.mark.parametrize(("recipe", "fresh"), RECIPES)
@pytest.mark.parametrize("guess", [1, 5000])
def test_a_race_runs_as_long_as_it_should(
    recipe: la.Recipe, fresh: Callable[[int], bool], guess: int
) -> None:
    """Whatever was guessed at first, and although steps with a round take longer."""
    assert [outermost(recipe, t) for t in range(1, 200)] == [fresh(t) for t in range(1, 200)]
    now, step, validated, planned = 0.0, 0, list[int](), Schedule(recipe, 20.0, guess, 8)
    while step < planned.steps:
        step += 1
        now += 0.0307 + 0.0613 * sum(r.when(step) for r in recipe)
        if planned.is_check(step) and planned.check(step, now):
            validated.append(step)
    assert validated[-1] == step and fresh(step) and 19.0 < now < 20.1
    assert 8 <= len(validated) <= 10 and all(map(fresh, validated))
    assert last_step(recipe, step) == step > last_step(recipe, step - 1)
    counted = Schedule(recipe, None, 50, 8)
    assert not counted.is_check(49) or fresh(49)
    assert counted.is_check(50) and counted.check(50, 0.0), "a race of steps ends at the last one"


def test_a_race_does_not_end_a_period_early_for_a_moment() -> None:
    planned = Schedule(la.slowmo(la.local_sgd(24), 24), 14.9, 1, 8)
    step = 0
    while step < planned.steps:
        step += 1
        if planned.is_check(step):
            planned.check(step, step * 15.0 / 144)
    assert step == 144


def test_every_adapter_is_found_and_pinned() -> None:
    """What a row says to install is what make peers installs."""
    pinned = (rivals.ADAPTERS / "requirements.txt").read_text().splitlines()
    assert not any(line.startswith("torch==") for line in pinned)
    for name in ("accelerate", "fairscale", "hivemind", "torch-ddp", "torch-postlocal", "torchft"):
        peer = rivals.find(name)
        assert (peer.package in pinned or peer.package == "torch") and peer.rounds
    (streaming,) = rivals.find("torchft(12, outer=True, fragments=2, delay=2)").rounds
    assert [s for s in range(1, 25) if streaming.when(s)] == [4, 10, 16, 22], "when they send"
