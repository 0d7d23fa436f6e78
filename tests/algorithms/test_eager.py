"""Eager updates: outer steps that do not wait, with what the others did a round before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

import laconic as la
from laconic.codecs import Cast, Int8

from tests.references import reference_coded as coded
from tests.references.reference_coded import Array, Params, Worker
from tests.support import gloo, linear
from tests.support.linear import Problem, Training

SHAPES = ((5, 3), (7,), (2, 2, 2))


@dataclass
class Eager(coded.Algorithm):
    """every H, in round t:  d_i(t) = a_i - x_i
                             D = d_i(t)/n + (mean(d(t-1)) - d_i(t-1)/n)         d(0) = 0
                             m_i = mu*m_i + D ;  a_i = a_i - eta*(D + mu*m_i) ;  x_i = a_i

    Kale et al. 2025 (2502.12996). The consensus is the mean of x. With a codec the mean is the
    coded one."""

    period: int
    lr: float = 0.7
    momentum: float = 0.9
    codec: coded.Codec = field(default_factory=coded.exact)

    def start(self, x0: Params, n: int) -> None:
        flat = coded.flat(x0)
        self.a = [flat.copy() for _ in range(n)]
        self.m = [0 * flat for _ in range(n)]
        self.rounds, self.means = [[0 * flat for _ in range(n)]], [0 * flat]
        self.coded = coded.CodedMean(self.codec, n, flat, relative=False)

    def after_step(self, t: int, workers: list[Worker], lr: float) -> None:
        if t % self.period != 0:
            return
        n, before = len(workers), self.rounds[-1]
        self.rounds.append([a - w.vector for a, w in zip(self.a, workers, strict=True)])
        self.means.append(self.coded.round(self.rounds[-1]))
        for i, w in enumerate(workers):
            late = self.means[-2] - before[i] / n
            step = self.rounds[-1][i] / n + late
            self.m[i] = self.momentum * self.m[i] + step
            self.a[i] = self.a[i] - self.lr * (step + self.momentum * self.m[i])
            w.vector = self.a[i]


def problem(workers: int = 3, delay: int = 4, period: int = 4, **options: Any) -> Problem:
    recipe = la.diloco(period, delay=delay, merge="eager", **options)
    return Problem(recipe, workers, SHAPES, steps=18, lr=0.1, momentum=0.5)


# -- the algorithm ----


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("delay", [1, 3, 4])
def test_it_equals_its_reference_whatever_the_delay(workers: int, delay: int) -> None:
    given = problem(workers, delay)
    assert linear.gap(linear.simulated(given), given.expected(Eager(4))) < 1e-12


@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.0), (0.4, 0.3)])
def test_a_round_in_every_step(lr: float, momentum: float) -> None:
    given = problem(3, 1, 1, lr=lr, momentum=momentum)
    assert linear.gap(linear.simulated(given), given.expected(Eager(1, lr, momentum))) < 1e-12


# -- what it becomes ----


def test_one_worker_has_nobody_to_wait_for() -> None:
    given = problem(1)
    plain = linear.simulated(replace(given, recipe=la.diloco(4)))
    assert linear.distance(linear.simulated(given)[0], plain[0]) < 1e-12


def alike(given: Problem, worker: int, step: int) -> Params:
    return replace(given, offset=None).c(0, step)


def test_workers_on_the_same_data_see_most_of_it_a_round_late() -> None:
    """All d_i(t) are one d(t): D = d(t)/n + (1 - 1/n)*d(t-1)."""
    given = replace(problem(4, lr=1.0, momentum=0.0), offset=alike, steps=12)
    with pytest.warns(UserWarning, match="identical on all workers"):
        runs = linear.simulated(given)
    assert all(linear.distance(run, runs[0]) < 1e-12 for run in runs)

    x = a = coded.flat(given.start())
    before, buffer = 0 * x, 0 * x
    for t in range(1, 13):
        c = coded.flat(alike(given, 0, t)) + linear.SLOPE * x
        buffer = given.momentum * buffer + c
        x = x - given.lr * buffer
        if t % 4 == 0:
            d = a - x
            a = a - (d / 4 + 0.75 * before)
            x, before = a, d
        assert np.abs(coded.flat(runs[0][t - 1]) - x).max() < 1e-12


def test_all_that_was_done_is_taken_in_once() -> None:
    """Without momentum and with lr 1 the anchors' way is the sum of the means of all rounds but
    the last, and of the last the own part."""
    given = problem(3, lr=1.0, momentum=0.0)
    expected = Eager(4, 1.0, 0.0)
    trace = given.expected(expected)
    runs = linear.simulated(given)
    assert linear.gap(runs, trace) < 1e-12
    at = 15  # after the round of step 16
    total = sum(coded.mean_of(d) for d in expected.rounds[1:-1])
    for i, run in enumerate(runs):
        way = coded.flat(given.start()) - coded.flat(run[at])
        assert np.abs(way - total - expected.rounds[-1][i] / 3).max() < 1e-12


@pytest.mark.parametrize("steps", [8, 9, 11])
def test_the_consensus_takes_in_what_is_late_right_after_a_round(steps: int) -> None:
    """mean(x) - eta*mean(late), with late = mean(d) - d_i/n of the last round; later mean(x)."""
    given = replace(problem(3), steps=steps)
    expected = Eager(4)
    trace = given.expected(expected)
    mean = coded.mean_of([coded.flat(x) for x in trace.workers[-1]])
    if steps == 8:
        mean = mean - 0.7 * (1 - 1 / 3) * coded.mean_of(expected.rounds[-1])

    def run(rank: int) -> list[Array]:
        training = Training(given, rank)
        training.steps(1, steps)
        return training.consensus()

    for agreed in la.simulate(run, workers=3):
        assert np.abs(coded.flat(agreed) - mean).max() < 1e-12


def test_finished_after_every_round_it_is_local_sgd() -> None:
    """With lr 1 and without momentum: what is late is taken in once, by x and by a."""
    given = problem(3, lr=1.0, momentum=0.0)

    def run(rank: int) -> list[list[Array]]:
        training = Training(given, rank)
        found = []
        for first in range(1, given.steps + 1, 4):
            found += training.steps(first, min(first + 3, given.steps))
            training.sync.finish()
            found[-1] = training.values()
        return found

    averaged = linear.simulated(replace(given, recipe=la.local_sgd(4)))
    for finished, mean in zip(la.simulate(run, workers=3), averaged, strict=True):
        assert linear.distance(finished[:16], mean[:16]) < 1e-12


# -- as it is carried ----


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_gloo_equals_the_simulation(pool: gloo.Pool, workers: int) -> None:
    given = replace(problem(workers), dtype=torch.float32)
    assert linear.same_bits(
        pool.run(linear.over_gloo, given, ranks=workers), linear.simulated(given)
    )


def test_workers_of_two_ranks_hold_the_same_bits() -> None:
    runs, joined = linear.of_two_ranks(problem(4))
    assert linear.gap(runs, joined.expected(Eager(4))) < 1e-12


def test_half_precision_subtracts_what_it_sent() -> None:
    """The own part of the mean is that of the message, which is rounded; so it cancels."""
    given = replace(problem(2), dtype=torch.bfloat16)

    def run(rank: int) -> tuple[Any, Any]:
        training = Training(given, rank)
        training.steps(1, 8)
        running = training.sync.driver.run.rounds[0]
        (message,) = running.in_flight[0].buckets
        (channel,) = running.channels
        state = channel.state
        assert state["late"].dtype == torch.float32
        training.steps(9, 11)
        training.sync.state_dict()  # waits for what is in flight
        return message.pending.wait().flat.float(), state["late"].clone()

    (mean, late), (same, other) = la.simulate(run, workers=2)
    assert torch.equal(mean, same)
    parts = -2 * late, -2 * other
    assert all(torch.equal(part, part.bfloat16().float()) for part in parts), "as they were sent"
    assert torch.equal(((parts[0] + parts[1]) / 2).bfloat16().float(), mean)


@pytest.mark.parametrize(
    ("codec", "expected"), [(Cast("bfloat16"), coded.cast("bfloat16")), (Int8(16), coded.int8(16))]
)
def test_codes_travel_with_their_residuals(codec: Any, expected: coded.Codec) -> None:
    exact, given = problem(3), problem(3, codec=codec)
    trace = given.expected(Eager(4, codec=expected))
    assert linear.gap(linear.simulated(given), trace) < 1e-6
    assert linear.gap(linear.simulated(exact), trace) > 1e-4

    def sent(rank: int, given: Problem) -> int:
        training = Training(given, rank)
        training.steps(1, 1)
        before = training.sync.stats().bytes_sent
        training.steps(2, 18)
        training.sync.state_dict()
        return training.sync.stats().bytes_sent - before

    less, more = (la.simulate(lambda r, g=g: sent(r, g), workers=3)[0] for g in (given, exact))
    assert less < 0.6 * more


# -- going on ----


@pytest.mark.parametrize("delay", [2, 4])
def test_resume_is_exact_with_messages_in_flight(delay: int) -> None:
    assert linear.resumes(replace(problem(3, delay), dtype=torch.float32), (1, 4, 5, 7, 8))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: la.diloco(4, merge="eager"), "delay must be an integer of at least 1"),
        (
            lambda: la.diloco(4, delay=5, merge="eager"),
            "delay must be at most the period, 4, not 5",
        ),
        (
            lambda: la.diloco(4, delay=4, merge="eager", outer=torch.optim.Adam),
            "merge='eager' supports only Nesterov SGD",
        ),
        (lambda: la.diloco(4, delay=4, merge="eagre"), "'loscar', 'eager', not 'eagre'"),  # type: ignore[arg-type]
        (lambda: la.diloco(4, lr=0.0, delay=4, merge="eager"), "lr must be"),
        (lambda: la.diloco(4, momentum=1.0, delay=4, merge="eager"), "momentum must be"),
    ],
)
def test_bad_arguments(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()
