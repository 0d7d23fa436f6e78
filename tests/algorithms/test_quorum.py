"""Rounds that close with a quorum, in virtual time: references, sums, identities, and errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import laconic as la
from laconic.algorithms.exchanges import QuorumMean
from laconic.algorithms.exchanges.quorum import Contribution
from laconic.algorithms.schedules import own_pace
from laconic.algorithms.updates import DelayedNesterov, OuterStep
from laconic.errors import NotFiniteError
from laconic.links.quorum.port import Announcement, Appointment, Closing, Delivery, Rules
from laconic.links.quorum.syncer import Syncer

from tests.references import reference as ref
from tests.references import reference_coded as ref_coded
from tests.references.reference_quorum import Quorum
from tests.support import quorum_training as quorum
from tests.support import training
from tests.support.training import Job

SECONDS = {"one is slow": (1, 1, 1, 3), "all differ": (1, 1.7, 2.1, 0.9)}
STEPS = (24, 24, 25, 11)
NAIVE = (la.Round(la.every(4), OuterStep(0.5, 0.6), QuorumMean(1)),)
LAYERS = (("w1", "b1"), ("w2", "b2"))
ROWS: dict[str, tuple[la.Recipe, Quorum]] = {
    "local_sgd": (la.local_sgd(4, quorum=3), Quorum(4, 3)),
    "local_sgd, first come": (la.local_sgd(4, quorum=1), Quorum(4, 1)),
    "local_sgd, grace": (la.local_sgd(4, quorum=2, grace=1.5), Quorum(4, 2, 1.5)),
    "local_sgd, all": (la.local_sgd(4, quorum=4), Quorum(4, 4)),
    "local_sgd, reset": (
        la.local_sgd(4, quorum=3, optimizer_state="reset"),
        Quorum(4, 3, reset=True),
    ),
    "local_sgd, own pace": (la.local_sgd(6, pace="own"), Quorum(6, 4, own=True)),
    "local_sgd, own pace, quorum, steps": (
        la.local_sgd(6, quorum=2, grace=0.5, pace="own", weigh="steps"),
        Quorum(6, 2, 0.5, own=True, weigh="steps"),
    ),
    "diloco": (la.diloco(4, quorum=3), Quorum(4, 3, rule="delayed", lr=0.7, momentum=0.9)),
    "diloco, first come": (
        la.diloco(4, quorum=1, momentum=0.5),
        Quorum(4, 1, rule="delayed", lr=0.7, momentum=0.5),
    ),
    "diloco, own pace": (
        la.diloco(6, momentum=0.5, quorum=3, pace="own"),
        Quorum(6, 3, own=True, rule="delayed", lr=0.7, momentum=0.5),
    ),
    "diloco, grace, steps": (
        la.diloco(4, momentum=0.5, quorum=2, grace=5.0, weigh="steps"),
        Quorum(4, 2, 5.0, rule="delayed", lr=0.7, momentum=0.5, weigh="steps"),
    ),
    "diloco, rda": (
        la.diloco(4, average="rda", momentum=0.5, quorum=3),
        Quorum(4, 3, rule="delayed", lr=0.7, momentum=0.5, radial=True),
    ),
    "diloco, rda, own pace, steps": (
        la.diloco(6, average="rda", momentum=0.5, quorum=2, grace=0.5, pace="own", weigh="steps"),
        Quorum(
            *(6, 2, 0.5, True),
            rule="delayed",
            lr=0.7,
            momentum=0.5,
            weigh="steps",
            radial=True,
        ),
    ),
    "diloco, Nesterov at each arrival": (
        NAIVE,
        Quorum(4, 1, rule="nesterov", lr=0.5, momentum=0.6),
    ),
    "slowmo": (
        la.slowmo(None, 4, 0.5, 0.9, quorum=2),
        Quorum(4, 2, rule="slow", lr=0.9, momentum=0.5),
    ),
    "slowmo, own pace": (
        la.slowmo(None, 4, 0.5, 0.9, quorum=1, pace="own"),
        Quorum(4, 1, own=True, rule="slow", lr=0.9, momentum=0.5),
    ),
    "streaming_diloco, one fragment": (
        la.streaming_diloco(4, 1, 0, codec=None, quorum=3, momentum=0.5),
        Quorum(4, 3, rule="delayed", lr=0.7, momentum=0.5),
    ),
    "streaming_diloco": (
        la.streaming_diloco(5, 2, 0, codec=None, quorum=2, momentum=0.5, by="layers"),
        Quorum(5, 2, rule="delayed", lr=0.7, momentum=0.5, fragments=LAYERS),
    ),
    "local_sgd, int8": (
        la.local_sgd(4, quorum=2, codec=la.codecs.Int8(8)),
        Quorum(4, 2, codec=ref_coded.int8(8)),
    ),
    "diloco, int4, own pace": (
        la.diloco(6, momentum=0.5, quorum=3, pace="own", codec=la.codecs.Int4(8)),
        Quorum(6, 3, own=True, rule="delayed", lr=0.7, momentum=0.5, codec=ref_coded.int4(8)),
    ),
    "diloco, int8, own pace, steps": (
        la.diloco(
            *(6, 0.7, 0.5),
            quorum=2,
            grace=0.5,
            pace="own",
            weigh="steps",
            codec=la.codecs.Int8(8),
        ),
        Quorum(
            *(6, 2, 0.5, True, "steps"),
            rule="delayed",
            lr=0.7,
            momentum=0.5,
            codec=ref_coded.int8(8),
        ),
    ),
    "slowmo, bfloat16": (
        la.slowmo(None, 4, 0.5, 0.9, quorum=2, codec="bfloat16"),
        Quorum(4, 2, rule="slow", lr=0.9, momentum=0.5, codec=ref_coded.cast("bfloat16")),
    ),
    "streaming_diloco, int4": (
        la.streaming_diloco(5, 2, 0, codec=la.codecs.Int4(8), quorum=2, momentum=0.5, by="layers"),
        Quorum(
            *(5, 2),
            rule="delayed",
            lr=0.7,
            momentum=0.5,
            fragments=LAYERS,
            codec=ref_coded.int4(8),
        ),
    ),
    "streaming_diloco, own pace, grace": (
        la.streaming_diloco(
            6, 2, 0, codec=None, quorum=3, grace=0.6, pace="own", momentum=0.5, by="layers"
        ),
        Quorum(6, 3, 0.6, own=True, rule="delayed", lr=0.7, momentum=0.5, fragments=LAYERS),
    ),
}


@pytest.mark.parametrize("optimizer", ["nesterov", "adamw"])
@pytest.mark.parametrize("times", SECONDS)
@pytest.mark.parametrize("row", ROWS)
def test_a_quorum_equals_its_reference(row: str, times: str, optimizer: str) -> None:
    recipe, wanted = ROWS[row]
    job = Job(recipe, 4, max(STEPS), optimizer)
    expected = quorum.expected(job, wanted, STEPS, SECONDS[times])
    runs = quorum.simulated(job, STEPS, SECONDS[times])
    assert [(c.kind, c.roster) for c in runs[0].closings] == expected.rosters
    assert quorum.gap(runs, expected) < 1e-10


MESSAGES = {"one is slow": (0.0, 0.1, 1.6, 0.2), "very slow": (0.0, 0.3, 0.3, 9.5)}


@pytest.mark.parametrize("messages", MESSAGES)
@pytest.mark.parametrize("times", SECONDS)
@pytest.mark.parametrize("row", [r for r in ROWS if "steps" not in r and "reset" not in r])
def test_a_quorum_whose_messages_take_time_equals_its_reference(
    row: str, times: str, messages: str
) -> None:
    recipe, wanted = ROWS[row]
    job = Job(recipe, 4, max(STEPS))
    expected = quorum.expected(job, wanted, STEPS, SECONDS[times], MESSAGES[messages])
    runs = quorum.simulated(job, STEPS, SECONDS[times], messages=MESSAGES[messages])
    assert [(c.kind, c.roster) for c in runs[0].closings] == expected.rosters
    assert quorum.gap(runs, expected) < 1e-10


def test_the_rows_differ() -> None:
    """Each option changes something that the tests above can see."""

    def final(row: str) -> np.ndarray[Any, Any]:
        job = Job(ROWS[row][0], 4, max(STEPS))
        runs = quorum.simulated(job, STEPS, SECONDS["one is slow"])
        return np.concatenate([v.ravel() for v in runs[0].final.values()])

    found = {row: final(row) for row in ROWS if "one fragment" not in row}
    for row, values in found.items():
        for other, others in found.items():
            assert row == other or np.abs(values - others).max() > 1e-4, (row, other)


# -- sums ----


@pytest.mark.parametrize("times", SECONDS)
@pytest.mark.parametrize(
    "row", [r for r in ROWS if "local_sgd" in r and "steps" not in r and "int" not in r]
)
def test_every_step_is_delivered_once(row: str, times: str) -> None:
    """With averages alone, the common model is x0 minus a coefficient of every step's change: one
    n-th, whatever round it came in. So nothing is lost, and nothing comes twice. Weights by steps
    are normalized in every round, so they have no such sum."""
    recipe, _ = ROWS[row]
    job = replace(Job(recipe, 4, max(STEPS), "sgd"), lr=training.constant_lr)
    changes = la.simulate(partial(_changes, job), workers=4, step_seconds=SECONDS[times])
    start, total = changes[0][0], sum(change for _, change, _ in changes) / 4
    for _, _, final in changes:
        assert float((final - (start + total)).abs().max()) < 1e-12


def _changes(job: Job, rank: int, keep: list[Any] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """x0, the sum of what this worker's own optimizer did to x, and x after finish(). ``keep``
    receives the synchronizer."""
    model, optimizer = training.build(job, rank)
    own: list[Tensor] = []
    before: list[Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: before.append(training.flat(model).clone()))
    optimizer.register_step_post_hook(lambda *_: own.append(training.flat(model) - before[-1]))
    sync = la.attach(model, optimizer, job.recipe)
    start = training.flat(model).clone()
    for t in range(1, STEPS[rank] + 1):
        training.step(job, model, optimizer, job.data()[rank][t - 1], t)
    sync.finish()
    if keep is not None:
        keep.append(sync)
    assert len(own) == STEPS[rank]
    return start, torch.stack(own).sum(0), training.flat(model).clone()


@pytest.mark.parametrize("times", SECONDS)
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_what_codes_leave_out_is_kept(codec: str, times: str) -> None:
    """The mean of x at the end, what the workers have not sent of their steps, and what they have
    not received of the common model: together they are x0 and one n-th of every step's change."""
    recipe = la.local_sgd(4, quorum=2, codec=codec)
    job = replace(Job(recipe, 4, max(STEPS), "sgd"), lr=training.constant_lr)

    def train(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        sync: list[Any] = []
        start, total, final = _changes(job, rank, sync)
        (running,) = sync[0].driver.run.rounds
        (channel,) = running.channels
        left, bucket = channel.exchange_state["residual"], channel.bucket
        merger = sync[0].driver.run.quorum._merger
        if merger is not None:
            left = left + 4 * (channel.state["anchor"] - merger.results[0][0])
        parts = {id(s.tensor): v for s, v in zip(bucket.segments, bucket.split(left), strict=True)}
        left = torch.cat([parts[id(p)] for p in sync[0].driver.session.model.parameters()])
        return start + total, left, final

    runs = la.simulate(train, workers=4, step_seconds=SECONDS[times])
    wanted, left = (sum(run[k] for run in runs) / 4 for k in (0, 1))
    assert float(left.abs().max()) > 1e-6
    for _, _, final in runs:
        assert float((final + left - wanted).abs().max()) < 1e-12


def test_a_delayed_contribution_enters_momentum_once() -> None:
    """From a state at rest, pseudo-gradients that come one by one move the anchor, once momentum
    has taken in all, as if they had come together."""
    update, x = DelayedNesterov(0.7, 0.9), torch.zeros(3, dtype=torch.float64)
    clock = la.Clock(1, 1.0, 0, 0, 4)
    parts = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    apart, together = update.init(x.clone()), update.init(x.clone())
    for d in parts:
        update.combine(apart["anchor"] - d / 4, apart, replace(clock, arrived=1))
    update.combine(together["anchor"] - parts.mean(0), together, replace(clock, arrived=4))
    for name in together:
        assert torch.allclose(apart[name], together[name], rtol=0, atol=1e-15), name
    update.combine(apart["anchor"].clone(), apart, replace(clock, arrived=3))
    assert int(apart["count"]) == 3, "momentum waits for the fourth"


# -- identities ----

PLAIN: dict[str, tuple[la.Recipe, Callable[[int], la.Recipe]]] = {
    "local_sgd": (la.local_sgd(4), lambda n: la.local_sgd(4, quorum=n)),
    "local_sgd, reset": (
        la.local_sgd(4, optimizer_state="reset"),
        lambda n: la.local_sgd(4, quorum=n, optimizer_state="reset"),
    ),
    "diloco": (la.diloco(4), lambda n: la.diloco(4, quorum=n)),
    "diloco, grace": (la.diloco(4), lambda n: la.diloco(4, quorum=n, grace=3.0, weigh="steps")),
    "diloco, no momentum": (
        la.diloco(4, momentum=0.0),
        lambda n: la.diloco(4, momentum=0.0, quorum=n),
    ),
    "diloco, Adam": (
        la.diloco(4, outer=partial(torch.optim.Adam, lr=0.03)),
        lambda n: la.diloco(4, outer=partial(torch.optim.Adam, lr=0.03), quorum=n),
    ),
    "slowmo": (la.slowmo(None, 4, 0.5, 0.9), lambda n: la.slowmo(None, 4, 0.5, 0.9, quorum=n)),
    "streaming_diloco": (
        la.streaming_diloco(6, 3, 0, codec=None),
        lambda n: la.streaming_diloco(6, 3, 0, codec=None, quorum=n),
    ),
}


@pytest.mark.parametrize("seconds", [None, (1, 3, 2, 5)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PLAIN)
def test_a_quorum_of_all_is_the_plain_recipe(
    name: str, dtype: torch.dtype, seconds: tuple[float, ...] | None
) -> None:
    """Bit for bit, whatever the times: x, the optimizer's state, buffers, and what finish() leaves.
    bfloat16 sums in float32, as a sharded mean does."""
    plain, with_quorum = PLAIN[name]
    if dtype == torch.bfloat16 and name.startswith("local_sgd"):
        plain = (replace(plain[0], exchange=la.exchanges.ShardedMean()),)  # type: ignore[arg-type]
    for workers in (1, 3, 4):
        times = None if seconds is None else seconds[:workers]
        one = la.simulate(partial(_train, plain, dtype), workers=workers)
        other = la.simulate(
            partial(_train, with_quorum(workers), dtype), workers=workers, step_seconds=times
        )
        for a, b in zip(one, other, strict=True):
            assert all(map(torch.equal, a, b))


def _train(recipe: la.Recipe, dtype: torch.dtype, rank: int) -> list[Tensor]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    sync = la.attach(model, optimizer, recipe)
    found = []
    for t in range(13):
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(10 * t + rank)).to(dtype)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        found += [t.clone() for t in model.state_dict().values()]
        found += [optimizer.state[p].get("momentum_buffer") for p in model.parameters()]
    with sync.consensus():
        found += [t.clone() for t in model.state_dict().values()]
    sync.finish()
    found += [t.clone() for t in model.state_dict().values()]
    return [torch.zeros(0) if t is None else t.clone() for t in found]


@pytest.mark.parametrize("codec", ["int8", "int4", "bfloat16"])
@pytest.mark.parametrize("name", ["local_sgd", "diloco", "slowmo", "streaming_diloco"])
def test_a_coded_quorum_of_all_is_the_plain_coded_recipe(name: str, codec: str) -> None:
    """Except for rounding, which may be another where a result is between two levels."""
    options: dict[str, Any] = {"codec": codec}
    recipes = {
        "local_sgd": partial(la.local_sgd, 4, **options),
        "diloco": partial(la.diloco, 4, momentum=0.0, **options),
        "slowmo": partial(la.slowmo, None, 4, 0.5, 0.9, **options),
        "streaming_diloco": partial(la.streaming_diloco, 6, 3, 0, momentum=0.0, **options),
    }
    dtype, times = torch.float64, [1, 3, 2, 5]
    one = la.simulate(partial(_train, recipes[name](), dtype), workers=4)
    other = la.simulate(
        partial(_train, recipes[name](quorum=4), dtype), workers=4, step_seconds=times
    )
    uncoded = la.simulate(partial(_train, recipes[name](codec=None), dtype), workers=4)
    for a, b, c in zip(one, other, uncoded, strict=True):
        apart = max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True) if x.numel())
        coded = max(float((x - y).abs().max()) for x, y in zip(a, c, strict=True) if x.numel())
        assert apart < 0.05 * coded


def test_codes_of_missed_rounds_or_the_whole_result() -> None:
    """A worker that missed two rounds of Int8 receives three codes, and one that missed five the
    whole result, which is shorter. Both then hold what the others do."""

    def train(rank: int) -> tuple[list[int], list[Tensor]]:
        torch.manual_seed(0)
        model = nn.Linear(64, 64, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        sync = la.attach(model, optimizer, la.local_sgd(1, quorum=2, codec="int8"))
        received, results, steps = [], [], 20 if rank < 2 else 5
        for t in range(steps):
            before = sync.stats().bytes_received
            model(torch.full((1, 64), 1.0 + rank + t)).square().mean().backward()
            optimizer.step()
            received.append(sync.stats().bytes_received - before)
            results.append(training.flat(model).clone())
        return received, results

    padded = 4608  # a multiple of the block, 256, and of 3 workers
    code, whole = la.codecs.Int8().nbytes(padded), 4 * padded
    closings = [Closing(0, n + 1, r, (0,) * len(r)) for n, r in enumerate(ROSTERS)]
    runs = la.simulate(train, workers=3, closings=closings)
    assert runs[2][0][1:] == [code, 3 * code, whole, code]
    assert all(n == code for n in runs[1][0][1:])
    for own, number in zip(runs[2][1], (1, 2, 5, 11, 12), strict=True):
        assert torch.equal(own, runs[1][1][number - 1])


ROSTERS = [
    *[(0, 1, 2)] * 2,
    *[(0, 1)] * 2,
    (0, 1, 2),
    *[(0, 1)] * 5,
    *[(0, 1, 2)] * 2,
    *[(0, 1)] * 8,
]


def test_a_change_that_is_not_finite_ends_the_run() -> None:
    def train(rank: int) -> str:
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        la.attach(model, optimizer, la.diloco(2, quorum=1, codec="int8"))
        try:
            for t in range(9):
                model(
                    torch.full((1, 3), math.inf if (rank, t) == (1, 4) else 1.0 + rank)
                ).sum().backward()
                optimizer.step()
        except NotFiniteError as error:
            return str(error)
        return ""

    told = la.simulate(train, workers=2)
    label = "DelayedNesterov round after step 6"
    assert told == [f"{label}: ranks [1] had NaN or infinite values to send"] * 2


@pytest.mark.parametrize("codec", [None, "int8"])
def test_buffers_are_averaged_over_those_that_arrive(codec: str | None) -> None:
    def train(rank: int) -> tuple[list[float], list[Any]]:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, momentum=1.0))
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        sync = la.attach(model, optimizer, la.local_sgd(2, quorum=2, codec=codec))
        means = []
        for t in range(4):
            torch.manual_seed(7 * t + rank)
            model(torch.randn(4, 2)).sum().backward()
            means.append(float(model[1].running_mean[0]))
            optimizer.step()
            means.append(float(model[1].running_mean[0]))
        sync.finish()
        return means, sync.closings

    runs = la.simulate(train, workers=3, step_seconds=[1, 1, 9])
    (a, closings), (b, _), (c, _) = runs
    assert [each.roster for each in closings][:2] == [(0, 1), (0, 1)]
    for at in (2, 6):
        assert a[at + 1] == b[at + 1] == pytest.approx((a[at] + b[at]) / 2, abs=1e-6)
    assert c[2] == c[3], "a round of its own"
    assert closings[2].roster == (2,)


def test_finish_averages_the_buffers_of_late_workers_as_they_are() -> None:
    """Adding to a variance what others have changed could make it negative."""

    def train(rank: int) -> tuple[float, float]:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, momentum=1.0))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        sync = la.attach(model, optimizer, la.local_sgd(2, quorum=2))
        for t in range((8, 8, 1)[rank]):
            torch.manual_seed(7 * t + rank)
            model(torch.randn(4, 2) * 10.0 ** (rank - t)).sum().backward()
            optimizer.step()
        own = float(model[1].running_var[0])
        sync.finish()
        return own, float(model[1].running_var[0])

    runs = la.simulate(train, workers=3, step_seconds=[1, 1, 9])
    mean = sum(own for own, _ in runs) / 3
    assert all(found == pytest.approx(mean, rel=1e-5) and found > 0 for _, found in runs)


def test_fragments_close_by_themselves() -> None:
    """A slow worker misses some rounds of one fragment, and others of another one; at the end every
    tensor has every step."""
    recipe = la.streaming_diloco(6, 3, 0, codec=None, quorum=2, lr=1.0, momentum=0.0)
    job = Job(recipe, 3, max(STEPS), "sgd", training.constant_lr)
    changes = la.simulate(partial(_changes, job), workers=3, step_seconds=[1, 1.3, 4])
    total = sum(change for _, change, _ in changes) / 3
    for start, _, final in changes:
        assert float((final - (start + total)).abs().max()) < 1e-12


# -- pure parts ----


def test_the_mean_of_late_contributions() -> None:
    a, base = torch.tensor([10.0, 0.0]), torch.tensor([4.0, 4.0])
    fresh, late = torch.tensor([9.0, 1.0]), torch.tensor([3.0, 5.0])
    both = [Contribution(fresh, None, 3), Contribution(late, base, 1)]
    assert QuorumMean(1).mean(both, a, 4).tolist() == [9.5, 0.5]  # a - (1 + 1)/4, 0 - (-1 - 1)/4
    assert QuorumMean(1).mean(both, a, 2).tolist() == [9.0, 1.0]
    assert QuorumMean(1, weigh="steps").mean(both[:1], a, 4).tolist() == [9.0, 1.0]
    late = torch.tensor([0.0, 8.0])
    both[1] = Contribution(late, base, 1)  # y = (6, 4)
    assert QuorumMean(1, weigh="steps").mean(both, a, 4).tolist() == [8.25, 1.75]
    assert QuorumMean(1, anchored=False).mean(both, None, 4).tolist() == [4.5, 4.5]


def test_what_is_published_leaves_the_result_before_as_it_was() -> None:
    """Rank 0 may still be sending it to a worker."""
    exchange = la.exchanges.CodedQuorumMean(codec=la.codecs.Int8(4))
    before, result = torch.zeros(4), torch.tensor([1.0, -2.0, 0.3, 0.0])
    after, code = exchange.publish(result, before, la.Clock(1, 1.0, 0, 0, 2))
    assert before.tolist() == [0.0] * 4 and result.tolist()[1] == -2.0
    assert code is not None and torch.equal(after, la.codecs.Int8(4).decode(code, 4))


def test_own_pace() -> None:
    speeds = (3.0, 1.0, 1.49, 2.99, 0.01)
    assert [own_pace(12, v, 3.0) for v in speeds] == [(s, 1) for s in (12, 4, 5, 11, 1)]
    assert own_pace(12, 1 / 3, 1.0) == (4, 1)
    assert own_pace(12, 0.0, 0.0) == (12, 1), "no speed is known"
    assert own_pace(12, 0.0, 1.0) == (1, 1)


@pytest.mark.parametrize("speed", [3.0, 1.0, 0.3])
@pytest.mark.parametrize("sending", [-1.0, 0.0, 0.7, 2.0, 2.1, 9.9])
def test_own_pace_leaves_time_to_send(speed: float, sending: float) -> None:
    """Rounds are 4 s apart. The message arrives for a round, and one step later would not."""
    for skip in (False, True):
        steps, rounds = own_pace(12, speed, 3.0, sending, skip=skip)
        left = 4.0 * rounds - max(sending, 0.0)
        assert steps == 1 or steps / speed <= left + 1e-6
        assert (steps + 1) / speed > left
        assert rounds == (max(-(-sending // 2), 1) if skip else 1)


def test_own_pace_uses_the_grace_for_a_quarter_of_a_step() -> None:
    speeds = (2.99, 2.94, 2.93, 0.95, 0.93)
    assert [own_pace(12, v, 3.0, grace=9.0)[0] for v in speeds] == [12, 12, 11, 4, 3]
    assert [own_pace(12, v, 3.0, grace=0.02)[0] for v in speeds] == [12, 11, 11, 3, 3]


def syncer(quorum: int, grace: float, workers: int = 4, kinds: int = 1) -> Syncer:
    rules = [Rules(quorum, grace)] * kinds
    return Syncer(
        workers,
        rules,
        lambda c, d: {rank: [] for rank in d},
        lambda kind, speeds, roster: [Appointment(0, 1)] * len(roster),
    )


def arrive(core: Syncer, rank: int, now: float, kind: int = 0) -> None:
    core.arrive(rank, Delivery(Announcement(kind, 0, 1, 1.0, 1), []), now)


def test_when_rounds_close() -> None:
    core = syncer(2, 1.5)
    arrive(core, 3, 1.0)
    assert core.next_closing() is None, "no quorum"
    arrive(core, 1, 2.0)
    assert core.next_closing() == (3.5, 0)
    arrive(core, 0, 9.0)
    assert core.next_closing() == (3.5, 0), "later ones change nothing"
    assert core.close(0, 3.5) == (1, 3)
    assert core.closings[-1].roster == (1, 3)
    for rank in (1, 2, 3):
        arrive(core, rank, 9.5)
    assert core.next_closing() == (9.5, 0), "all are there, so nobody waits for the grace"
    assert core.close(0, 9.5) == (0, 1, 2, 3)
    assert core.rounds == [2]


def test_the_grace_is_not_for_those_that_are_expected_later() -> None:
    """Worker 3 is expected every third round, and takes part when it comes."""

    def paces(kind: int, speeds: Any, roster: Any) -> list[Appointment]:
        return [Appointment(1, 3 if rank == 3 else 1) for rank in roster]

    core = Syncer(4, [Rules(2, 9.0)], lambda c, d: {rank: [] for rank in d}, paces)
    now, rosters, waited = 0.0, [], []
    for number in range(1, 8):
        for rank in range(4):
            if rank < 3 or number in (1, 4, 6):
                arrive(core, rank, now + rank % 3 / 4)
        found = core.next_closing()
        assert found is not None
        rosters.append(3 in core.close(0, found[0]))
        waited.append(found[0] - now)
        now = found[0]
        state = core.state()
        core = Syncer(4, [Rules(2, 9.0)], lambda c, d: {rank: [] for rank in d}, paces)
        core.load(state)
    assert rosters == [True, False, False, True, False, True, False]
    assert waited == [0.5] * 7
    arrive(core, 0, now)
    arrive(core, 1, now)
    assert core.next_closing() == (now + 9.0, 0), "worker 2 is expected"


def test_who_counts_as_arrived() -> None:
    core = syncer(3, 0.0, kinds=2)
    core.leave(0)
    core.meet(1, 1.0)
    assert core.next_closing() is None, "nobody brings anything"
    arrive(core, 2, 5.0, kind=1)
    assert core.next_closing() == (5.0, 1)
    core.close(1, 5.0)
    arrive(core, 2, 6.0)
    arrive(core, 3, 7.0, kind=1)
    assert core.next_closing() == (6.0, 0)
    core.close(0, 6.0)
    core.close(1, 7.0)
    assert core.meet(2, 8.0) is None
    assert core.meet(3, 9.0) == 9.0, "the last one that is left: the call goes on"
    arrive(core, 1, 10.0)
    assert core.next_closing() is None, "nobody is in a call any more"


def test_a_call_that_is_over_keeps_nobody_in_it() -> None:
    """Worker 2 says late that it has entered a call which the others have left since."""
    core = syncer(3, 0.0, workers=3)
    core.meet(0, 1.0)
    core.meet(1, 1.0)
    arrive(core, 0, 2.0)
    assert core.next_closing() is None, "worker 1 has left the call, too, and trains"
    assert core.meet(2, 2.1) is None
    assert core.next_closing() is None
    arrive(core, 1, 3.0)
    arrive(core, 2, 4.0)
    assert core.next_closing() == (4.0, 0) and core.close(0, 4.0) == (0, 1, 2)
    assert [core.meet(rank, 5.0 + rank) for rank in range(3)] == [None, None, 7.0]


def test_a_speed_beyond_all_numbers_is_ignored() -> None:
    core = syncer(1, 0.0)
    core.arrive(0, Delivery(Announcement(0, 0, 8, 1e-320, 8), []), 1.0)
    assert core.state()["speeds"] == {}
    with pytest.raises(ValueError, match="finite"):
        Announcement.of({**vars(Announcement(0, 0, 8, 1.0, 8)), "seconds": math.inf})


def test_recorded_rounds_are_repeated_whatever_the_times() -> None:
    row = ROWS["diloco, own pace"][0]
    job = Job(row, 4, max(STEPS))
    first = quorum.simulated(job, STEPS, SECONDS["all differ"])
    again = quorum.simulated(job, STEPS, None, closings=first[0].closings)
    assert quorum.same(first, again)
    assert not quorum.same(first, quorum.simulated(job, STEPS, None))
    as_text = [Closing.of(c.as_json()) for c in first[0].closings]
    assert as_text == first[0].closings


def test_a_record_of_another_program() -> None:
    job = Job(la.local_sgd(4, quorum=1), 3, 8)
    record = [Closing(0, 1, (0, 1, 2), (0, 0, 0)), Closing(0, 2, (0, 3), (0, 0))]
    with pytest.raises(la.LinkError, match="closings"):
        quorum.simulated(job, (8, 8, 8), None, closings=record)


# -- calls of all workers ----


def test_calls_of_all_workers_come_after_different_steps() -> None:
    """consensus() has every step so far of every worker, also of a late one, and changes nothing.
    A worker that waits there does not hold up the others."""
    job = Job(la.local_sgd(4, quorum=3), 4, 30, "sgd", training.constant_lr)
    steps, at = (30, 30, 30, 11), (18, 19, 17, 6)

    def train(rank: int) -> tuple[Tensor, Tensor, Tensor, int]:
        model, optimizer = training.build(job, rank)
        before: list[Tensor] = []
        own: list[Tensor] = []
        optimizer.register_step_pre_hook(lambda *_: before.append(training.flat(model).clone()))
        optimizer.register_step_post_hook(lambda *_: own.append(training.flat(model) - before[-1]))
        sync = la.attach(model, optimizer, job.recipe)
        start, found = training.flat(model).clone(), torch.zeros(0)
        for t in range(1, steps[rank] + 1):
            training.step(job, model, optimizer, job.data()[rank][t - 1], t)
            if t == at[rank]:
                x = training.flat(model).clone()
                with sync.consensus():
                    found = training.flat(model).clone()
                assert torch.equal(training.flat(model), x)
                assert sync.mean(float(rank)) == 1.5
                with sync.consensus(mean=False):
                    assert not torch.equal(training.flat(model), found)
        rounds = len(sync.closings)
        sync.finish()
        return start, torch.stack(own[: at[rank]]).sum(0), found, rounds

    runs = la.simulate(train, workers=4, step_seconds=SECONDS["one is slow"])
    wanted = runs[0][0] + torch.stack([run[1] for run in runs]).sum(0) / 4
    for _, _, found, _ in runs:
        assert float((found - wanted).abs().max()) < 1e-12
    assert runs[0][3] >= 7


def test_several_synchronizers_one_after_the_other() -> None:
    job = Job(la.local_sgd(4, quorum=2), 3, 20)

    def train(rank: int) -> list[Any]:
        return [quorum.work(job, rank, 18) for _ in range(2)]

    first, second = zip(*la.simulate(train, workers=3, step_seconds=[1, 1, 3]), strict=True)
    assert first[0].closings and quorum.same(first, second)


def test_from_one_quorum_to_another() -> None:
    """Calls of all workers are announced under the new recipe, too."""
    job = Job(la.local_sgd(4, quorum=2), 3, 40)

    def train(rank: int) -> list[float]:
        model, optimizer = training.build(job, rank)
        sync = la.attach(model, optimizer, job.recipe)
        means = []
        for t in range(1, (30, 30, 10)[rank] + 1):
            training.step(job, model, optimizer, job.data()[rank][t - 1], t)
            if t == (10, 10, 3)[rank]:
                sync.switch(la.diloco(4, quorum=2))
            if t in ((10, 20), (10, 20), (3, 7))[rank]:
                means.append(sync.mean(float(rank)))
        sync.finish()
        return means

    assert la.simulate(train, workers=3, step_seconds=[1, 1, 3]) == [[1.0, 1.0]] * 3


def test_switching_to_a_quorum_and_back() -> None:
    job = Job(la.local_sgd(4), 3, 40)

    def train(rank: int) -> list[Tensor]:
        model, optimizer = training.build(job, rank)
        sync = la.attach(model, optimizer, job.recipe)
        found = []
        for t in range(1, 37):
            training.step(job, model, optimizer, job.data()[rank][t - 1], t)
            if t == 6:
                sync.switch(la.diloco(4, quorum=2))
                found.append(training.flat(model).clone())
            if t == (22, 22, 10)[rank]:
                sync.switch(la.local_sgd(5))
                sync.step = 0
                found.append(training.flat(model).clone())
            if t == (36, 36, 24)[rank]:
                break
        sync.finish()
        return [*found, training.flat(model).clone()]

    runs = la.simulate(train, workers=3, step_seconds=[1, 1, 3])
    assert len(runs[0]) == 3
    for run in runs[1:]:
        assert all(map(torch.equal, run, runs[0]))


# -- errors ----

WRONG: dict[str, tuple[Callable[[], la.Recipe], str]] = {
    "quorum 0": (lambda: la.diloco(4, quorum=0), "quorum must be an integer of at least 1"),
    "grace": (
        lambda: la.diloco(4, quorum=2, grace=-1),
        "grace must be a finite number at least 0, not -1",
    ),
    "pace": (lambda: la.local_sgd(4, pace="slow"), "pace must be one of 'equal', 'own'"),  # type: ignore[arg-type]
    "weigh": (lambda: la.local_sgd(4, quorum=2, weigh="x"), "one of 'alike', 'steps'"),  # type: ignore[arg-type]
    "grace alone": (lambda: la.diloco(4, grace=2.0), "give quorum= or pace='own'"),
    "weigh alone": (lambda: la.slowmo(None, 4, weigh="steps"), "give quorum= or pace='own'"),
    "codec": (lambda: la.diloco(4, quorum=2, codec="int9"), "codec must be one of"),  # type: ignore[arg-type]
    "code of a few": (
        lambda: la.diloco(4, quorum=2, codec="top64"),
        "needs a codec such as float32, .*int4",
    ),
    "delay": (lambda: la.local_sgd(4, quorum=2, delay=1), "use delay=0"),
    "streaming": (lambda: la.streaming_diloco(quorum=2), "use delay=0"),
    "average": (
        lambda: la.local_sgd(4, quorum=2, optimizer_state="average"),
        "use optimizer_state='keep' or 'reset'",
    ),
    "eager": (lambda: la.diloco(4, delay=2, merge="eager", quorum=2), "use delay=0"),
    "base": (lambda: la.slowmo(la.local_sgd(2), 4, quorum=2), "use base=None"),
    "no average": (lambda: la.slowmo(None, 4, average=False, quorum=2), "average=True"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options(name: str) -> None:
    make, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        make()


ATTACHED: dict[str, tuple[la.Recipe, dict[str, Any], str]] = {
    "too many": (la.diloco(4, quorum=5), {}, "at most the number of workers, 4, not 5"),
    "mixed": ((*la.local_sgd(2), *la.local_sgd(4, quorum=2)), {}, "waits for all workers"),
    "gradients": ((*la.ddp(), *la.local_sgd(4, quorum=2)), {}, "waits for all workers"),
    "over": (la.slowmo(la.local_sgd(2, quorum=2), 4), {}, "every so many steps|waits for all"),
    "ranks": (la.diloco(4, quorum=2), {"nprocs_per_node": 2}, "workers of one rank"),
    "update": (
        (la.Round(la.every(4), la.updates.Average(), QuorumMean(2)),),
        {},
        "cannot have a quorum: .* OuterStep",
    ),
    "delay": (
        (la.Round(la.every(4), OuterStep(0.7, 0.9), QuorumMean(2), delay=1),),
        {},
        "without delay",
    ),
    "rules": (
        (*la.diloco(4, quorum=2), *la.diloco(4, quorum=3)),
        {},
        "have the same rules",
    ),
}


@pytest.mark.parametrize("name", ATTACHED)
def test_wrong_uses(name: str) -> None:
    recipe, options, message = ATTACHED[name]

    def attach(rank: int) -> None:
        model = nn.Linear(2, 2)
        with pytest.raises(ValueError, match=message):
            la.attach(model, torch.optim.SGD(model.parameters(), 0.1), recipe, **options)

    la.simulate(attach, workers=4)


def test_elastic_runs_have_no_quorum() -> None:
    def attach(rank: int) -> None:
        model = nn.Linear(2, 2)
        with pytest.raises(ValueError, match="come and go"):
            la.attach(model, torch.optim.SGD(model.parameters(), 0.1), la.local_sgd(2, quorum=1))

    la.simulate(attach, faults=la.Faults(2))


def test_throttled_links_have_no_quorum() -> None:
    def attach(rank: int) -> None:
        model = nn.Linear(2, 2)
        with pytest.raises(ValueError, match="without link="):
            la.attach(model, torch.optim.SGD(model.parameters(), 0.1), la.local_sgd(2, quorum=1))

    la.simulate(attach, workers=2, link=lambda link: la.links.Throttled(link, "1gbit"))


def test_wrong_step_seconds() -> None:
    with pytest.raises(ValueError, match="one for each"):
        la.simulate(lambda rank: None, workers=2, step_seconds=[1.0])
    with pytest.raises(ValueError, match="step_seconds must be a finite number"):
        la.simulate(lambda rank: None, workers=2, step_seconds=[1.0, 0.0])


def test_a_worker_that_fails_ends_the_run() -> None:
    job = Job(la.local_sgd(4, quorum=1), 3, 20)

    def train(rank: int) -> None:
        model, optimizer = training.build(job, rank)
        la.attach(model, optimizer, job.recipe)
        for t in range(1, 20):
            if (rank, t) == (1, 6):
                raise RuntimeError("on purpose")
            training.step(job, model, optimizer, job.data()[rank][t - 1], t)

    with pytest.raises(RuntimeError, match="on purpose"):
        la.simulate(train, workers=3)


def test_new_groups_are_refused() -> None:
    def train(rank: int) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model[0].parameters(), 0.1)
        la.attach(model, optimizer, la.local_sgd(2, quorum=1))
        optimizer.add_param_group({"params": [*model[1].parameters()]})
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(ValueError, match="parameters of the start"):
            optimizer.step()

    la.simulate(train, workers=2)


# -- resuming ----


def _save_and_go_on(
    row: str, folder: Path | None, at: tuple[int, ...], steps: tuple[int, ...], rank: int
) -> tuple[list[Any], Any, list[Any]]:
    """Train; with ``folder``, save after ``at[rank]`` steps, where this worker waits for nobody."""
    job = Job(ROWS[row][0], 4, max(STEPS), "adamw", training.plain_lr)
    model, optimizer = training.build(job, rank)
    sync = la.attach(model, optimizer, job.recipe)
    trace = []
    for t in range(1, steps[rank] + 1):
        training.step(job, model, optimizer, job.data()[rank][t - 1], t)
        trace.append(training.values(model))
        if t == at[rank]:
            sync.mean(0.0)  # all workers come here
            if folder is not None:
                parts = {"model": model, "optimizer": optimizer, "sync": sync}
                torch.save({k: v.state_dict() for k, v in parts.items()}, folder / f"{rank}.pt")
            sync.mean(0.0)
    closings = sync.closings
    sync.finish()
    return trace, training.values(model), closings


def _resume(
    row: str, folder: Path, at: tuple[int, ...], steps: tuple[int, ...], rank: int
) -> tuple[list[Any], Any, list[Any]]:
    job = Job(ROWS[row][0], 4, max(STEPS), "adamw", training.plain_lr)
    model, optimizer = training.build(job, rank)
    sync = la.attach(model, optimizer, job.recipe)
    saved = torch.load(folder / f"{rank}.pt", weights_only=True)
    for name, part in (("model", model), ("optimizer", optimizer), ("sync", sync)):
        part.load_state_dict(saved[name])
    assert sync.step == at[rank]
    trace = []
    for t in range(at[rank] + 1, steps[rank] + 1):
        training.step(job, model, optimizer, job.data()[rank][t - 1], t)
        trace.append(training.values(model))
    closings = sync.closings
    sync.finish()
    return trace, training.values(model), closings


RESUMED = [row for row in ROWS if "one fragment" not in row and "all" not in row]


@pytest.mark.parametrize("at", [(18, 19, 17, 6), (14, 15, 13, 5), (1, 1, 1, 1)])
@pytest.mark.parametrize("row", RESUMED)
def test_resuming_with_a_late_contribution(row: str, at: tuple[int, ...], tmp_path: Path) -> None:
    """Saved where the slow worker is in the middle of its period and the others are rounds ahead.
    The rounds after that are the same, and so is every bit."""
    seconds = SECONDS["one is slow"]
    options: dict[str, Any] = {"workers": 4, "step_seconds": seconds}
    whole = la.simulate(partial(_save_and_go_on, row, None, at, STEPS), **options)
    saving = la.simulate(partial(_save_and_go_on, row, tmp_path, at, STEPS), **options)
    later = la.simulate(partial(_resume, row, tmp_path, at, STEPS), **options)
    record, rest = whole[0][2], later[0][2]
    assert rest and record[-len(rest) :] == rest
    if "own" not in row and at[0] == 18:
        late = {c.number for c in record[: -len(rest)] if 3 in c.roster}
        assert max(late, default=0) < len(record) - len(rest), "the slow one is late at the save"
    for one, other, end in zip(whole, saving, later, strict=True):
        for a, b in (*zip(one[0], other[0], strict=True), (one[1], other[1]), (one[1], end[1])):
            assert all(np.array_equal(a[k], b[k]) for k in ref.NAMES)
        for a, b in zip(one[0][-len(end[0]) :], end[0], strict=True):
            assert all(np.array_equal(a[k], b[k]) for k in ref.NAMES)


def test_states_of_different_rounds_are_refused(tmp_path: Path) -> None:
    """Worker 1's state is that of a later round than rank 0's."""
    row = "local_sgd, first come"

    def train(rank: int) -> None:
        job = Job(ROWS[row][0], 2, 30, "nesterov", training.plain_lr)
        model, optimizer = training.build(job, rank)
        sync = la.attach(model, optimizer, job.recipe)
        for t in range(1, 14):
            training.step(job, model, optimizer, job.data()[rank][t - 1], t)
            if t == (5, 13)[rank]:
                parts = {"model": model, "optimizer": optimizer, "sync": sync}
                state = {k: v.state_dict() for k, v in parts.items()}
                torch.save(state, tmp_path / f"{rank}.pt")

    def resume(rank: int) -> None:
        job = Job(ROWS[row][0], 2, 30, "nesterov", training.plain_lr)
        model, optimizer = training.build(job, rank)
        sync = la.attach(model, optimizer, job.recipe)
        saved = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for name, part in (("model", model), ("optimizer", optimizer), ("sync", sync)):
            part.load_state_dict(saved[name])
        with pytest.raises(ValueError, match="load states that all ranks saved"):
            for t in range(sync.step + 1, 30):
                training.step(job, model, optimizer, job.data()[rank][t - 1], t)

    la.simulate(train, workers=2)
    la.simulate(resume, workers=2)


def test_saving_and_loading_a_checkpoint(tmp_path: Path) -> None:
    def train(steps: tuple[int, int], load: bool, rank: int) -> Tensor:
        torch.manual_seed(rank)
        model = nn.Linear(3, 3)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        sync = la.attach(model, optimizer, la.diloco(4, quorum=1))
        if load:
            la.load(tmp_path, model, optimizer)
        while sync.step < steps[rank]:
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(sync.step + 99 * rank))
            optimizer.zero_grad()
            (model(x) - x).square().mean().backward()
            optimizer.step()
            if not load and sync.step == (10, 4)[rank]:
                la.save(tmp_path, model, optimizer)
        sync.finish()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    options: dict[str, Any] = {"workers": 2, "step_seconds": [1, 3]}
    whole = la.simulate(partial(train, (25, 9), False), **options)
    again = la.simulate(partial(train, (25, 9), True), **options)
    assert torch.equal(whole[0], again[0]) and torch.equal(whole[1], again[1])


def test_another_number_of_ranks_is_refused() -> None:
    def train(saved: list[Any] | None, rank: int) -> Any:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        sync = la.attach(model, optimizer, la.local_sgd(2, quorum=1))
        if saved is None:
            return sync.state_dict()
        with pytest.raises(ValueError, match="resumed by the same ranks"):
            sync.load_state_dict(saved)
        return None

    saved = la.simulate(partial(train, None), workers=3)
    la.simulate(partial(train, saved), workers=2)
