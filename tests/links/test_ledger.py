"""The byte ledger against the law it claims, the cost model against arithmetic, the throttled link
against the clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import laconic as la
from laconic import buckets
from laconic.engine import gradient_rounds
from laconic.links import Ledger, Metered, Throttled, cost

from tests.support.clock import controlled

PERIOD, STEPS = 4, 14
SHAPES = [(7, 5), (7,), (11, 7), (11,)]
"""Odd sizes, so that the padding is seen."""
WORKERS = [2, 3, 4]


class Plain(nn.Module):
    """Parameters of given shapes and dtypes, all of which get a gradient."""

    def __init__(self, dtypes: list[torch.dtype]) -> None:
        super().__init__()
        self.all = nn.ParameterList(
            nn.Parameter(torch.randn(shape, dtype=dtype))
            for shape, dtype in zip(SHAPES, dtypes, strict=True)
        )

    def forward(self, scale: float) -> torch.Tensor:
        return torch.stack([(scale * p.float() + 1).square().mean() for p in self.all]).sum()


SINGLE = [torch.float32] * 4
MIXED = [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16]


def padded(elements: int, n: int) -> int:
    """Elements of a bucket: a multiple of n."""
    return math.ceil(elements / n) * n


def parameter_bytes(dtypes: list[torch.dtype], n: int) -> int:
    """One bucket for each dtype (all of them small), padded to a multiple of n elements."""
    total = 0
    for dtype in set(dtypes):
        pairs = zip(SHAPES, dtypes, strict=True)
        elements = sum(math.prod(shape) for shape, d in pairs if d == dtype)
        total += padded(elements, n) * dtype.itemsize
    return total


def ring(size: int, n: int) -> int:
    """Bytes that a rank sends in an all-reduce of ``size`` bytes."""
    assert 2 * (n - 1) * size % n == 0
    return 2 * (n - 1) * size // n


def deltas(
    recipe: la.Recipe, n: int, dtypes: list[torch.dtype] = SINGLE
) -> list[list[dict[str, int]]]:
    """By rank and step: bytes by collective that the step sent, those of nothing left out."""

    def run(rank: int) -> list[dict[str, int]]:
        torch.manual_seed(rank)
        model = Plain(dtypes)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        sync, found = la.attach(model, optimizer, recipe), []
        before = dict(sync.stats().bytes_by_collective)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(1.0 + rank).backward()
            optimizer.step()
            after = dict(sync.stats().bytes_by_collective)
            found.append(difference(before, after))
            before = after
        return found

    return la.simulate(run, workers=n)


def difference(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    changes = {name: size - before.get(name, 0) for name, size in after.items()}
    return {name: size for name, size in changes.items() if size}


FINGERPRINT = 24
"""Bytes of what ranks compare of their first gradients, gathered once: two sums, and whether a
DistributedDataParallel is in use."""


def announcement(n: int) -> int:
    """Bytes of the one word by which a rank tells every other which call comes next, where they
    must have met before it; that of a round rides on the tags of its messages."""
    return (n - 1) * 8


@pytest.mark.parametrize("dtypes", [SINGLE, MIXED])
@pytest.mark.parametrize("n", WORKERS)
def test_local_sgd_sends_the_same_once_a_period(n: int, dtypes: list[torch.dtype]) -> None:
    expected = ring(parameter_bytes(dtypes, n), n)
    for run in deltas(la.local_sgd(PERIOD), n, dtypes):
        for t, step in enumerate(run, 1):
            due = t % PERIOD == 0
            assert step.get("mean", 0) == due * expected
            assert step.get("agree", 0) == (t == 1) * announcement(n)
            assert step.get("gather", 0) == (t == 1) * (n - 1) * FINGERPRINT
            assert set(step) <= {"mean", "agree", "gather"}


@pytest.mark.parametrize("n", WORKERS)
@pytest.mark.parametrize("recipe", [la.ddp(), la.local_sgd(2), la.diloco(2)])
def test_cutting_into_many_buckets_costs_padding_alone(
    recipe: la.Recipe, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 40 bytes a bucket, 130 elements make 13 buckets of 10, each padded by itself."""
    for module in (buckets, gradient_rounds):
        monkeypatch.setattr(module, "BUCKET_BYTES", 40)
    monkeypatch.setattr(gradient_rounds, "FIRST_BYTES", 40)
    elements = sum(map(math.prod, SHAPES))
    assert elements == 130
    expected = 13 * ring(4 * padded(10, n), n)
    for run in deltas(recipe, n):
        collectives = ("mean", "reduce_scatter", "all_gather")
        assert sum(run[1].get(name, 0) for name in collectives) == expected


@pytest.mark.parametrize("n", WORKERS)
def test_calls_are_booked_each_under_its_own_name(n: int) -> None:
    size = parameter_bytes(SINGLE, n)

    def run(rank: int) -> dict[str, dict[str, int]]:
        torch.manual_seed(rank)
        model = Plain(SINGLE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        sync = la.attach(model, optimizer, la.slowmo(la.local_sgd(2), 4, momentum=0.5))
        book = {"attach": dict(sync.stats().bytes_by_collective)}

        def booked(name: str, call: Callable[[], Any]) -> None:
            before = dict(sync.stats().bytes_by_collective)
            call()
            book[name] = difference(before, dict(sync.stats().bytes_by_collective))

        booked("consensus", sync.consensus_state_dict)
        booked("mean", partial(sync.mean, 1.0))
        booked("finish", sync.finish)
        booked("state_dict", sync.state_dict)
        booked("load_state_dict", partial(sync.load_state_dict, sync.state_dict()))
        total = sync.stats()
        assert total.bytes_sent == total.bytes_received == sum(total.bytes_by_collective.values())
        return book

    anchors = 4 * padded(sum(map(math.prod, SHAPES)), n)
    for book in la.simulate(run, workers=n):
        attached = {name: value for name, value in book["attach"].items() if value}
        assert attached == {
            "gather": (n - 1) * 8 * 10,  # of the set-up, and of the tensors to compare
            "broadcast": (n - 1) * 4 * sum(map(math.prod, SHAPES)) // n,
        }
        nothing = (n - 1) * 8  # no other tensors to compare
        consensus = {"agree": announcement(n), "mean": ring(anchors, n), "gather": nothing}
        assert book["consensus"] == consensus
        assert book["finish"] == consensus
        one_number = (n - 1) * 8  # it has no slices
        assert book["mean"] == {"agree": announcement(n), "mean": one_number}
        assert book["state_dict"] == {}
        assert book["load_state_dict"].keys() == {"agree", "gather"}
    assert size == anchors


def test_a_metered_link_books_what_passes_through_it() -> None:
    """Every collective by hand, against the table of the cost model."""

    def run(rank: int) -> dict[str, int]:
        def wrap(link: la.links.Link) -> dict[str, int]:
            ledger = Ledger()
            metered = Metered(link, ledger)
            metered.mean(torch.zeros(6))
            metered.reduce_scatter(torch.zeros(9, dtype=torch.float64))
            metered.all_gather(torch.zeros(2), torch.zeros(6))
            metered.broadcast(torch.zeros(5, dtype=torch.uint8))
            metered.gather(torch.zeros(7))
            metered.split([[0, 1, 2]]).mean(torch.zeros(6))
            assert ledger.bytes_sent == ledger.bytes_received == sum(ledger.by_collective.values())
            return ledger.by_collective

        return wrap(links[rank])

    links: dict[int, la.links.Link] = {}

    def keep(link: la.links.Link) -> la.links.Link:
        links[link.rank] = link
        return link

    assert (
        la.simulate(run, workers=3, link=keep)
        == [
            {
                "mean": 2 * (2 * 2 * 24 // 3),
                "reduce_scatter": 2 * 72 // 3,
                "all_gather": 2 * 24 // 3,
                "broadcast": 2 * 5 // 3,
                "gather": 2 * 28,
            }
        ]
        * 3
    )


# -- the cost model ----


@pytest.mark.parametrize(("n", "seconds"), [(2, 0.320), (3, 0.427), (4, 0.480), (8, 0.560)])
def test_four_megabytes_at_100_mbit(n: int, seconds: float) -> None:
    assert math.isclose(cost.mean(4_000_000, n).seconds(1e8, 0.0), seconds, abs_tol=5e-4)


# -- the throttled link ----


def timed(
    elements: int, workers: int, bandwidth: str | None, latency: str, clock: Any = time
) -> list[float]:
    """Seconds of one mean, from the moment at which all workers stand before it."""

    links: dict[int, la.links.Link] = {}

    def keep(link: la.links.Link) -> la.links.Link:
        links[link.rank] = link
        return link

    def run(rank: int) -> tuple[float, float]:
        link = Throttled(links[rank], bandwidth, latency)
        links[rank].gather(torch.zeros(1))
        start = clock.perf_counter()
        link.mean(torch.zeros(elements))
        return start, clock.perf_counter()

    times = la.simulate(run, workers=workers, link=keep)
    last = max(start for start, _ in times)
    return [end - last for _, end in times]


@pytest.mark.parametrize(
    ("bandwidth", "latency"), [("20mbit", "0"), (None, "100ms"), ("20mbit", "100ms")]
)
def test_a_throttled_mean_takes_the_cost_models_time(
    bandwidth: str | None, latency: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    elements = 50_000
    amount = cost.mean(4 * elements, 2)
    rate = math.inf if bandwidth is None else 20e6
    law = amount.seconds(rate, 0.0 if latency == "0" else 0.05)
    assert law > 0.05
    clock = controlled(monkeypatch)
    assert max(timed(elements, 2, bandwidth, latency, clock)) == pytest.approx(law, rel=1e-3)


def test_a_throttled_run_computes_the_same_and_books_the_same() -> None:
    def run(rank: int) -> tuple[list[float], dict[str, int], bool]:
        torch.manual_seed(rank)
        model = Plain(SINGLE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with la.attach(model, optimizer, la.slowmo(la.local_sgd(1), 2, momentum=0.5)) as sync:
            for _ in range(4):
                optimizer.zero_grad()
                model(1.0 + rank).backward()
                optimizer.step()
        stats = sync.stats()
        flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()
        return flat, dict(stats.bytes_by_collective), stats.seconds_waiting >= 0.004

    fast = la.simulate(run, workers=2)
    slow = la.simulate(run, workers=2, link=lambda link: Throttled(link, "100mbit", "2ms"))
    assert [r[:2] for r in fast] == [r[:2] for r in slow]
    assert all(waited for _, _, waited in slow)
