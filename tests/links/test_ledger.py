"""The byte ledger against arithmetic and the system's own counters, the cost model and the
throttled link against the clock."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import laconic as la
from laconic import buckets
from laconic.engine import gradient_rounds
from laconic.links import Ledger, Link, Metered, Throttled, cost
from laconic.links.sockets import borrowed

from tests.support import gloo
from tests.support.clock import controlled

SHAPES = [(7, 5), (7,), (11, 7), (11,)]
"""Odd sizes, so that the padding is seen."""
ELEMENTS = sum(map(math.prod, SHAPES))


class Plain(nn.Module):
    """Parameters of given shapes, all of which get a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in SHAPES)

    def forward(self, scale: float) -> torch.Tensor:
        return torch.stack([(scale * p + 1).square().mean() for p in self.all]).sum()


def attached(rank: int, recipe: la.Recipe, **options: Any) -> tuple[la.Synchronizer, Any]:
    """A synchronizer, and what takes a step."""
    torch.manual_seed(rank)
    model = Plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = la.attach(model, optimizer, recipe, **options)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        model(1.0 + rank).backward()
        optimizer.step()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    return sync, step


def padded(elements: int, n: int) -> int:
    """Elements of a bucket: a multiple of n."""
    return math.ceil(elements / n) * n


def ring(size: int, n: int) -> int:
    """Bytes that a rank sends in an all-reduce of ``size`` bytes."""
    assert 2 * (n - 1) * size % n == 0
    return 2 * (n - 1) * size // n


def sent_by(sync: la.Synchronizer, call: Callable[[], object]) -> dict[str, int]:
    """The bytes that a call sends, by collective."""
    before = dict(sync.stats().bytes_by_collective)
    call()
    after = sync.stats().bytes_by_collective
    found = {name: size - before.get(name, 0) for name, size in after.items()}
    return {name: size for name, size in found.items() if size}


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("recipe", [la.ddp(), la.local_sgd(2), la.diloco(2)])
def test_cutting_into_many_buckets_costs_padding_alone(
    recipe: la.Recipe, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 40 bytes a bucket, 130 elements make 13 buckets of 10, each padded by itself."""
    for module in (buckets, gradient_rounds):
        monkeypatch.setattr(module, "BUCKET_BYTES", 40)
    monkeypatch.setattr(gradient_rounds, "FIRST_BYTES", 40)
    assert ELEMENTS == 130

    def run(rank: int) -> int:
        sync, step = attached(rank, recipe)
        step()
        found = sent_by(sync, step)
        return sum(found.get(name, 0) for name in ("mean", "reduce_scatter", "all_gather"))

    assert la.simulate(run, workers=n) == [13 * ring(4 * padded(10, n), n)] * n


def test_calls_are_booked_under_their_names() -> None:
    """What is known on each worker costs nothing, and the consensus one mean of the model."""

    def run(rank: int) -> None:
        sync, _ = attached(rank, la.slowmo(la.local_sgd(2), 4, momentum=0.5))
        model = 4 * padded(ELEMENTS, 3)
        for call in (sync.consensus_state_dict, sync.finish):
            found = sent_by(sync, call)
            assert found.pop("mean") == ring(model, 3) and sum(found.values()) < 100
        assert sent_by(sync, lambda: sync.mean(1.0))["mean"] == 2 * 8
        assert sent_by(sync, sync.state_dict) == {}
        total = sync.stats()
        assert total.bytes_sent == total.bytes_received == sum(total.bytes_by_collective.values())

    la.simulate(run, workers=3)


def with_links(run: Callable[[Link], Any], workers: int) -> list[Any]:
    """``run`` with each simulated worker's link."""
    links: dict[int, Link] = {}

    def keep(link: Link) -> Link:
        return links.setdefault(link.rank, link)

    return la.simulate(lambda rank: run(links[rank]), workers=workers, link=keep)


def test_a_metered_link_books_what_passes_through_it() -> None:
    """Every collective by hand, against the table of the cost model. In a swap over a graph that is
    not regular, bytes that leave and that arrive differ."""
    to = {0: [1, 2], 1: [2], 2: []}

    def run(link: Link) -> tuple[int, int]:
        ledger, swaps = Ledger(), Metered(link)
        metered = Metered(link, ledger)
        metered.mean(torch.zeros(6))
        metered.reduce_scatter(torch.zeros(9, dtype=torch.float64))
        metered.all_gather(torch.zeros(2), torch.zeros(6))
        metered.broadcast(torch.zeros(5, dtype=torch.uint8))
        metered.gather(torch.zeros(7))
        metered.split([[0, 1, 2]]).mean(torch.zeros(6))
        assert ledger.bytes_sent == ledger.bytes_received == sum(ledger.by_collective.values())
        assert ledger.by_collective == {
            "mean": 2 * (2 * 2 * 24 // 3),
            "reduce_scatter": 2 * 72 // 3,
            "all_gather": 2 * 24 // 3,
            "broadcast": 2 * 5 // 3,
            "gather": 2 * 28,
        }
        rank = link.rank
        sources = [r for r in to if rank in to[r]]
        received = swaps.swap(torch.full((3,), float(rank)), to[rank], sources)
        assert [x.tolist() for x in received if x is not None] == [[float(r)] * 3 for r in sources]
        return swaps.ledger.bytes_sent, swaps.ledger.bytes_received

    assert with_links(run, 3) == [(24, 0), (12, 12), (0, 24)]


def received_by_sockets() -> int:
    """Bytes that came over this process's connections, as the system counts them on Linux."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), borrowed(int(name)) as end:
            if end.type == socket.SOCK_STREAM and end.family != socket.AF_UNIX:
                info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                total += int.from_bytes(info[128:136], "little")  # tcpi_bytes_received
    return total


def booked_and_counted(rank: int) -> tuple[int, int]:
    link = gloo.link_of(3)
    metered, before = Metered(link), received_by_sockets()
    metered.mean(torch.zeros(2**19))
    metered.all_gather(torch.zeros(2**18), torch.zeros(3 * 2**18))
    metered.broadcast(torch.zeros(2**19 + 1))
    counted = received_by_sockets() - before
    link.close()
    return metered.ledger.bytes_received, counted


def test_the_ledger_counts_what_passes_the_sockets(pool: gloo.Pool) -> None:
    """Beside 4 bytes of checksum for each 16 KiB, and the headers of messages. Ranks receive other
    parts of a broadcast, and book their average."""
    found = pool.run(booked_and_counted, ranks=3)
    booked, counted = (sum(column) for column in zip(*found, strict=True))
    assert booked <= counted <= 1.002 * booked


# -- the cost model, and the throttled link ----


@pytest.mark.parametrize(("n", "seconds"), [(2, 0.320), (3, 0.427), (4, 0.480), (8, 0.560)])
def test_four_megabytes_at_100_mbit(n: int, seconds: float) -> None:
    assert math.isclose(cost.mean(4_000_000, n).seconds(1e8, 0.0), seconds, abs_tol=5e-4)


@pytest.mark.parametrize(
    ("bandwidth", "latency"), [("20mbit", "0"), (None, "100ms"), ("20mbit", "100ms")]
)
def test_a_throttled_mean_takes_the_cost_models_time(
    bandwidth: str | None, latency: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock: Any = controlled(monkeypatch)

    def run(link: Link) -> tuple[float, float]:
        throttled = Throttled(link, bandwidth, latency)
        link.gather(torch.zeros(1))  # all workers stand before the mean
        start = clock.perf_counter()
        throttled.mean(torch.zeros(50_000))
        return start, clock.perf_counter()

    starts, ends = zip(*with_links(run, 2), strict=True)
    rate = math.inf if bandwidth is None else 20e6
    law = cost.mean(200_000, 2).seconds(rate, 0.0 if latency == "0" else 0.05)
    assert law > 0.05 and max(ends) - max(starts) == pytest.approx(law, rel=1e-3)


def test_a_throttled_run_computes_the_same_and_books_the_same() -> None:
    def run(rank: int) -> tuple[list[float], dict[str, int], float]:
        sync, step = attached(rank, la.slowmo(la.local_sgd(1), 2, momentum=0.5))
        for _ in range(4):
            params = step()
        sync.finish()
        stats = sync.stats()
        return params.tolist(), dict(stats.bytes_by_collective), stats.seconds_waiting

    begin = time.perf_counter()
    fast = la.simulate(run, workers=2)
    slow = la.simulate(run, workers=2, link=lambda link: Throttled(link, "100mbit", "2ms"))
    assert [r[:2] for r in fast] == [r[:2] for r in slow]
    assert all(0.004 <= waited <= time.perf_counter() - begin for *_, waited in slow)
