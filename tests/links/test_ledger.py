"""The byte ledger against arithmetic and the system's own counters, the throttled link against the
clock, and who sends what to whom: gossip to its peers alone, each rank of a worker its part, and
groups among themselves."""

from __future__ import annotations

import inspect
import math
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import laconic as la
from laconic.algorithms.topology import Graph
from laconic.links import Ledger, Link, Metered, Throttled, cost
from laconic.links.link import AsyncLink

from tests.support import forgetful, gloo
from tests.support.clock import controlled
from tests.support.loops import descend

COLLECTIVES = [name for name, f in vars(AsyncLink).items() if inspect.iscoroutinefunction(f)]

SHAPES = [(7, 5), (7,), (11, 7), (11,)]
"""Odd sizes, so that the padding is seen."""
ELEMENTS = sum(map(math.prod, SHAPES))


def attached(rank: int, recipe: la.Recipe, **options: Any) -> tuple[la.Synchronizer, Any]:
    """A synchronizer, and what takes a step, in which all parameters get a gradient."""
    torch.manual_seed(rank)
    model = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in SHAPES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = la.attach(model, optimizer, recipe, **options)

    def step() -> torch.Tensor:
        descend(optimizer, torch.stack([((1 + rank) * p + 1).square().mean() for p in model]).sum())
        return torch.cat([p.detach().reshape(-1) for p in model])

    return sync, step


def test_calls_are_booked_under_their_names() -> None:
    """What is known on each worker costs nothing, and the consensus one mean of the model."""

    def run(rank: int) -> None:
        sync, _ = attached(rank, la.slowmo(la.local_sgd(2), 4, momentum=0.5))

        def sent_by(call: Callable[[], object]) -> dict[str, int]:
            before = dict(sync.stats().bytes_by_collective)
            call()
            after = sync.stats().bytes_by_collective.items()
            found = {name: size - before.get(name, 0) for name, size in after}
            return {name: size for name, size in found.items() if size}

        for call in (sync.consensus_state_dict, sync.finish):
            found = sent_by(call)
            # a ring sends 2 (n - 1) / n of the elements, which are padded to a multiple of n = 3
            assert found.pop("mean") == 4 * 4 * math.ceil(ELEMENTS / 3)
            assert sum(found.values()) < 100
        assert sent_by(lambda: sync.mean(1.0))["mean"] == 2 * 8
        assert sent_by(sync.state_dict) == {}
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


def received_by_sockets() -> dict[int, int]:
    """Bytes that came over each of this process's connections, as Linux counts them."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), forgetful.borrowed(int(name)) as end:
            if end.type == socket.SOCK_STREAM and end.family != socket.AF_UNIX:
                info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                received = int.from_bytes(info[128:136], "little")  # tcpi_bytes_received
                found[os.fstat(end.fileno()).st_ino] = received
    return found


def booked_and_counted(rank: int) -> dict[str, tuple[int, int]]:
    """Counted of the link's connections alone: those of earlier tests may be closed meanwhile."""
    earlier, link, found = received_by_sockets(), gloo.link_of(3), {}
    metered, x = Metered(link), torch.zeros(3, 2**17)
    calls: dict[str, Callable[[], object]] = {
        "mean": lambda: metered.mean(x),
        "reduce_scatter": lambda: metered.reduce_scatter(x.ravel()),
        "all_gather": lambda: metered.all_gather(x[0], torch.zeros(3 * 2**17)),
        "all_to_all": lambda: metered.all_to_all(x, torch.zeros(3, 2**17)),
        "broadcast": lambda: metered.broadcast(torch.zeros(2**19 + 1)),
        "swap": lambda: metered.swap(x, [(rank + 1) % 3], [(rank - 1) % 3]),
        "gather": lambda: metered.gather(x),
    }
    assert [*calls] == COLLECTIVES
    before = 0
    for name, call in calls.items():
        booked = metered.ledger.bytes_received
        call()
        counted = sum(size for end, size in received_by_sockets().items() if end not in earlier)
        found[name] = metered.ledger.bytes_received - booked, counted - before
        before = counted
        link.gather(torch.zeros(1))  # no rank begins the next one while another one counts
    link.close()
    return found


def test_the_ledger_counts_what_passes_the_sockets(pool: gloo.Pool) -> None:
    """Beside the headers and checksums of messages. Ranks receive other
    parts of a broadcast, and book their average."""
    found = pool.run(booked_and_counted, ranks=3)
    for name in COLLECTIVES:
        booked, counted = map(sum, zip(*(each[name] for each in found), strict=True))
        assert booked <= counted <= 1.002 * booked + 1000, name


# -- the cost model, and the throttled link ----


def test_a_throttled_mean_takes_the_cost_models_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Any = controlled(monkeypatch)
    for n, seconds in ((2, 0.320), (3, 0.427), (8, 0.560)):
        assert math.isclose(cost.mean(4_000_000, n).seconds(1e8, 0.0), seconds, abs_tol=5e-4)

    def took(bandwidth: str | None, latency: str) -> float:
        def run(link: Link) -> tuple[float, float]:
            throttled = Throttled(link, bandwidth, latency)
            link.gather(torch.zeros(1))  # all workers stand before the mean
            start = clock.perf_counter()
            throttled.mean(torch.zeros(50_000))
            return start, clock.perf_counter()

        starts, ends = zip(*with_links(run, 2), strict=True)
        return float(max(ends) - max(starts))

    law = cost.mean(200_000, 2)
    for bandwidth, latency, rate, seconds in (
        ("20mbit", "0", 20e6, 0.0),
        (None, "100ms", math.inf, 0.05),
        ("20mbit", "100ms", 20e6, 0.05),
    ):
        expected = law.seconds(rate, seconds)
        assert expected > 0.05 and took(bandwidth, latency) == pytest.approx(expected, rel=1e-3)


def test_a_throttled_run_computes_the_same_and_books_the_same() -> None:
    def run(rank: int) -> tuple[Any, float]:
        sync, step = attached(rank, la.slowmo(la.local_sgd(1), 2, momentum=0.5))
        params = [step().tolist() for _ in range(4)]
        sync.finish()
        stats = sync.stats()
        return (params, dict(stats.bytes_by_collective)), stats.seconds_waiting

    fast = la.simulate(run, workers=2)
    slow = la.simulate(run, workers=2, link=lambda link: Throttled(link, "100mbit", "2ms"))
    assert [ran for ran, _ in fast] == [ran for ran, _ in slow]
    assert all(waited >= 0.004 for _, waited in slow)


class Call(NamedTuple):
    """A collective: its name, the ranks (of the world) that this rank sends to, the bytes."""

    name: str
    to: tuple[int, ...]
    size: int


class Recording:
    """``link``, noting each of its collectives, and those of links split from it."""

    def __init__(self, link: Link, log: list[Call], members: Sequence[int] | None = None) -> None:
        self.link, self.log = link, log
        self.members = range(link.size) if members is None else members

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.link, name)
        if name not in ("mean", "reduce_scatter", "all_gather", "broadcast", "gather", "swap"):
            return method

        def noted(*at: Any, **more: Any) -> Any:
            x: Tensor = at[1] if name == "all_gather" else at[0]
            others = [r for r in range(self.link.size) if r != self.link.rank]
            to = tuple(self.members[r] for r in (at[1] if name == "swap" else others))
            self.log.append(Call(name, to, x.numel() * x.element_size()))
            return method(*at, **more)

        return noted

    def split(self, sets: Sequence[Sequence[int]]) -> Any:
        self.log.append(Call("split", (), 0))
        (mine,) = [ranks for ranks in sets if self.link.rank in ranks]
        return Recording(self.link.split(sets), self.log, [self.members[r] for r in mine])


def recorded(
    recipe: la.Recipe, n: int, steps: int = 6, **options: Any
) -> tuple[Sequence[list[Call]], Sequence[list[list[Call]]]]:
    """By rank: what `laconic.attach` does, and what every step does."""

    def run(rank: int) -> tuple[list[Call], list[list[Call]]]:
        _, step = attached(rank, recipe, **options)
        log, found = logs[rank], [list(logs[rank])]
        for _ in range(steps):
            log.clear()
            step()
            found.append(list(log))
        return found[0], found[1:]

    logs: dict[int, list[Call]] = {r: [] for r in range(n)}
    wrap: Any = lambda link: Recording(link, logs[link.rank])  # noqa: E731
    setups, runs = zip(*la.simulate(run, workers=n, link=wrap), strict=True)
    return setups, runs


@pytest.mark.parametrize(("graph", "n"), [("directed_exponential", 5), ("bipartite_linear", 6)])
def test_gossip_reaches_out_peers_and_nobody_else(graph: str, n: int) -> None:
    recipe = la.slowmo(la.sgp(graph, 2), 3, momentum=0.5)
    for rank, run in enumerate(recorded(recipe, n, steps=8)[1]):
        gossips = [calls for t, calls in enumerate(run[1:], 2) if t % 3]
        for k, (call,) in enumerate(gossips, 1):  # a slow step does not advance the graph
            assert (call.name, call.to) == ("swap", Graph(graph, 2).out_peers(rank, n, k))


@pytest.mark.parametrize(
    ("recipe", "name", "rider"),
    [
        (la.sgp("ring", 2, delay=1), "swap", 8),
        (la.easgd(1), "mean", 0),
        (la.diloco(1), "reduce_scatter", 0),
        (la.lsgd(1, local_period=0), "broadcast", 0),
    ],
)
def test_each_of_two_ranks_of_a_worker_sends_half_across(
    recipe: la.Recipe, name: str, rider: int
) -> None:
    """The rest of the model reaches it from the other rank of its own worker. ``rider``: the bytes
    of the push weight behind every message of SGP."""
    model = 4 * (ELEMENTS + 2)  # padded
    for rank, run in enumerate(recorded(recipe, 6, nprocs_per_node=2)[1]):
        for calls in run[1:]:
            worker = {rank - rank % 2, rank - rank % 2 + 1}
            crossing = [c for c in calls if not set(c.to) <= worker and c.name == name]
            assert [c.size - rider for c in crossing] == [model // 2]
            assert {r % 2 for c in crossing for r in c.to} == {rank % 2}, "equal places"
            inside = [c for c in calls if set(c.to) <= worker]
            assert {"mean", "all_gather"} <= {c.name for c in inside}, "gradients, and the rest"


def test_rounds_inside_groups_stay_there() -> None:
    recipe = la.hierarchical(2, 4)
    for rank, run in enumerate(recorded(recipe, 6, group_size=3)[1]):
        first = rank - rank % 3
        neighbours = tuple(r for r in range(first, first + 3) if r != rank)
        everyone = tuple(r for r in range(6) if r != rank)
        said = [[(c.name, c.to) for c in calls] for calls in run]
        inner, outer = [("mean", neighbours)], [("mean", everyone)]
        assert said[1:] == [inner, [], outer, [], inner]


def test_attaching_takes_as_many_calls_among_many_workers() -> None:
    """And gossip needs no link for each edge."""
    recipe = la.slowmo(la.sgp("complete"), 4, momentum=0.5)
    few, many = ([call.name for call in recorded(recipe, n, steps=1)[0][0]] for n in (2, 12))
    assert few == many and len(few) < 12 and "split" not in many


def test_buffers_of_gossip_go_to_the_peers_alone() -> None:
    """And not to everyone at every step; the running mean is mixed as the graph says."""

    def run(rank: int) -> tuple[set[str], Tensor, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before: list[Tensor] = []
        norm: Any = model[1]
        optimizer.register_step_post_hook(lambda *_: before.append(norm.running_mean.clone()))
        sync = la.attach(model, optimizer, la.sgp("ring"))
        for step in range(2):
            booked = dict(sync.stats().bytes_by_collective)
            torch.manual_seed(10 * rank + step)
            model(torch.randn(6, 4)).square().mean().backward()
            optimizer.step()
        after = sync.stats().bytes_by_collective
        used = {name for name, size in after.items() if size > booked.get(name, 0)}
        return used, before[-1], norm.running_mean.clone()

    runs = la.simulate(run, workers=4)
    for rank, (used, own, mixed) in enumerate(runs):
        assert "mean" not in used and "swap" in used
        assert torch.allclose(mixed, (own + runs[rank - 1][1]) / 2)


# -- a link and its synchronizer ----


def twice_and_afterward(rank: int) -> tuple[float, list[float]]:
    """A second `laconic.attach` on a link, and what calls give after leaving."""
    link = gloo.link_of(2)
    sync, _ = attached(rank, la.local_sgd(2), link=link)
    with sync, pytest.raises(ValueError, match="a link for each"):
        attached(rank, la.local_sgd(2), link=link)
    mean = sync.mean(float(rank))
    found = [float(x.sum()) for x in sync.consensus_state_dict().values()]
    attached(rank, la.local_sgd(2), link=link)[0].detach()
    return mean, found


def test_one_link_carries_one_synchronizer_and_calls_after_leaving_run(pool: gloo.Pool) -> None:
    one, other = pool.run(twice_and_afterward, ranks=2)
    assert one == other and one[0] == 0.5
