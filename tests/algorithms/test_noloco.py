"""NoLoCo: outer steps in pairs that change, without any all-reduce."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import laconic as la
from laconic.algorithms.topology import Graph

from tests.references import reference_coded as coded
from tests.support import gloo, linear
from tests.support.linear import Problem, Training

SHAPES = ((5, 3), (7,), (2, 2, 2))
HEAVY_BALL = partial(torch.optim.SGD, lr=0.7, momentum=0.5)


def problem(workers: int, period: int = 3, **options: float) -> Problem:
    return Problem(la.noloco(period, **options), workers, SHAPES, steps=16, lr=0.1, momentum=0.5)


def pairs(workers: int, gossips: int = 20) -> list[list[int]]:
    """Everyone's partner in each gossip; an odd one's is itself."""
    found = []
    for k in range(gossips):
        out = [Graph("random").out_peers(r, workers, k) for r in range(workers)]
        found.append([own[0] if own else r for r, own in enumerate(out)])
    return found


def anchors(training: Training, name: str = "anchor") -> Tensor:
    running = training.sync.driver.run.rounds[0]
    states = ((channel.bucket, channel.state) for channel in running.channels)
    return torch.cat([state[name][: bucket.numel] for bucket, state in states])


# -- the algorithm ----


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8])
def test_it_equals_its_reference(workers: int) -> None:
    given = problem(workers)
    expected = given.expected(coded.noloco(3, pairs(workers)))
    assert linear.gap(linear.simulated(given), expected) < 1e-12


@pytest.mark.parametrize(
    ("lr", "momentum", "gamma"), [(0.3, 0.0, 0.2), (1.0, 0.9, 0.0), (0.5, 0.2, 1.0)]
)
def test_its_options_are_the_references(lr: float, momentum: float, gamma: float) -> None:
    given = problem(5, 2, lr=lr, momentum=momentum, gamma=gamma)
    expected = given.expected(coded.noloco(2, pairs(5), lr, momentum, gamma))
    assert linear.gap(linear.simulated(given), expected) < 1e-12


def test_its_defaults_are_the_papers() -> None:
    (round_,) = la.noloco()
    update: Any = round_.update
    assert (update.lr, update.momentum, update.gamma) == (0.7, 0.5, 0.7)
    assert [t for t in range(120) if round_.when(t)] == [0, 50, 100]


# -- what it becomes ----


@pytest.mark.parametrize("workers", [1, 2])
def test_one_pair_is_diloco_with_a_heavy_ball(workers: int) -> None:
    """Whatever gamma: the anchors of two that always meet are alike."""
    given = problem(workers, gamma=0.9)
    other = replace(given, recipe=la.diloco(3, outer=HEAVY_BALL))
    for a, b in zip(linear.simulated(given), linear.simulated(other), strict=True):
        assert linear.distance(a, b) < 1e-12


def test_full_strength_and_no_momentum_is_averaging_in_pairs() -> None:
    """a - mean(a - x) - (a - mean(a)) = mean(x)"""
    given = problem(4, lr=1.0, momentum=0.0, gamma=1.0)
    gossips = iter(pairs(4))

    class Pairs(coded.Algorithm):
        def after_step(self, t: int, workers: list[coded.Worker], lr: float) -> None:
            if t % 3 == 0:
                x, partner = [w.vector for w in workers], next(gossips)
                for i, w in enumerate(workers):
                    w.vector = (x[i] + x[partner[i]]) / 2

    assert linear.gap(linear.simulated(given), given.expected(Pairs())) < 1e-12


def test_the_mean_moves_as_with_a_mean_over_all_workers() -> None:
    """Of linear gradients, whose mean is the gradient at the mean; gamma's terms cancel."""
    given = problem(4)
    other = replace(given, recipe=la.diloco(3, outer=HEAVY_BALL))
    one, two = linear.simulated(given), linear.simulated(other)
    assert linear.distance(one[0], one[1]) > 1e-3, "workers differ"
    means = [[np.mean(x, axis=0) for x in zip(*own, strict=True)] for own in zip(*one, strict=True)]
    for mean, alike in zip(means, zip(*two, strict=True), strict=True):
        for i, own in enumerate(mean):
            everyone = np.mean([worker[i] for worker in alike], axis=0)
            assert np.abs(own - everyone).max() < 1e-12


def test_gamma_brings_the_anchors_together() -> None:
    def spread(gamma: float) -> float:
        def run(rank: int) -> Tensor:
            training = Training(replace(problem(4, gamma=gamma), steps=60), rank)
            training.steps(1, 60)
            return anchors(training)

        everyone = torch.stack(la.simulate(run, workers=4))
        return float((everyone - everyone.mean(0)).norm())

    assert spread(0.7) < 0.5 * spread(0.0)


def test_consensus_is_the_mean_of_the_workers() -> None:
    given = problem(3)

    def run(rank: int) -> tuple[list[Any], list[Any], list[Any]]:
        training = Training(given, rank)
        training.steps(1, 7)
        own, agreed = training.values(), training.consensus()
        training.sync.finish()
        return own, agreed, training.values()

    found = la.simulate(run, workers=3)
    for i in range(len(SHAPES)):
        mean = np.mean([own[i] for own, _, _ in found], axis=0)
        for _, agreed, finished in found:
            assert np.abs(agreed[i] - mean).max() < 1e-14
            assert np.array_equal(agreed[i], finished[i])


# -- as it is carried ----


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_gloo_equals_the_simulation(pool: gloo.Pool, workers: int) -> None:
    given = replace(problem(workers), dtype=torch.float32)
    assert linear.same_bits(
        pool.run(linear.over_gloo, given, ranks=workers), linear.simulated(given)
    )


def test_workers_of_two_ranks_are_workers() -> None:
    """Which hold the same bits, and are workers with the mean of their gradients."""
    runs, joined = linear.of_two_ranks(problem(4))
    assert linear.gap(runs, joined.expected(coded.noloco(3, pairs(2)))) < 1e-12


def test_half_precision_sends_float32() -> None:
    """A worker in bfloat16 has an anchor in float32, and so its partner gets it."""
    given = replace(problem(2), dtype=torch.bfloat16, steps=3)

    def run(rank: int) -> tuple[int, torch.dtype, bool]:
        training = Training(given, rank)
        training.steps(1, 2)
        before = training.sync.stats().bytes_sent
        training.steps(3, 3)
        sent = training.sync.stats().bytes_sent - before
        own = torch.cat([p.detach().reshape(-1) for p in training.model])
        a = anchors(training)
        return sent, a.dtype, torch.equal(own, a.bfloat16())

    padded = 15 + 7 + 8
    assert la.simulate(run, workers=2) == [(2 * padded * 4, torch.float32, True)] * 2


@pytest.mark.parametrize("workers", [2, 3, 6])
def test_each_sends_the_model_twice(workers: int) -> None:
    """To one other worker, or, being the odd one out, to none."""
    given = problem(workers)
    padded = -(-30 // workers) * workers

    def run(rank: int) -> list[int]:
        training, sent = Training(given, rank), []
        for t in range(1, 10):
            before = training.sync.stats().bytes_sent
            training.steps(t, t)
            sent.append(training.sync.stats().bytes_sent - before)
        return sent[2::3]

    found = la.simulate(run, workers=workers)
    for k, partner in enumerate(pairs(workers, 3)):
        expected = [0 if partner[r] == r else 2 * 8 * padded for r in range(workers)]
        assert [own[k] for own in found] == expected


# -- going on ----


def test_resume_is_exact() -> None:
    assert linear.resumes(replace(problem(5), dtype=torch.float32), (1, 3, 5))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: la.noloco(0), "period must be an integer of at least 1"),
        (lambda: la.noloco(lr=0.0), "lr must be a finite number greater than 0"),
        (
            lambda: la.noloco(momentum=1.0),
            "momentum must be a finite number at least 0 and below 1",
        ),
        (lambda: la.noloco(gamma=-0.1), "gamma must be a finite number at least 0"),
    ],
)
def test_bad_arguments(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()
