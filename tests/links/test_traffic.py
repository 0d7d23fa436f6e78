"""Who sends what to whom: gossip to its peers alone, each rank of a worker its part, and groups
among themselves. `test_ledger.py` has the bytes of everything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic as la
from laconic.algorithms.topology import Graph
from laconic.links import Link, Metered, Parts

from tests.links.test_ledger import (
    MIXED,
    SINGLE,
    Plain,
)
from tests.support import gloo

RIDER = 8
"""Bytes of the push weight behind every message of SGP."""


# -- messages, one by one ----


@dataclass(frozen=True)
class Call:
    """A collective: its name, the ranks (of the world) that this rank sends to, the bytes."""

    name: str
    to: tuple[int, ...]
    size: int


class Recording:
    """``link``, noting each of its collectives, and those of links split from it."""

    def __init__(self, link: Link, log: list[Call], members: Sequence[int] | None = None) -> None:
        self.link = link
        self.log = log
        self.members = range(link.size) if members is None else members

    def __getattr__(self, name: str) -> Any:
        return getattr(self.link, name)

    def note(self, name: str, x: Tensor, to: Sequence[int] | None = None) -> None:
        others = [r for r in range(self.link.size) if r != self.link.rank] if to is None else to
        there = tuple(self.members[r] for r in others)
        self.log.append(Call(name, there, x.numel() * x.element_size()))

    def mean(self, x: Tensor) -> None:
        self.note("mean", x)
        self.link.mean(x)

    def reduce_scatter(self, x: Tensor, owners: int | None = None) -> Tensor:
        self.note("reduce_scatter", x)
        return self.link.reduce_scatter(x, owners)

    def all_gather(
        self,
        mine: Tensor,
        out: Tensor,
        owners: int | None = None,
        parts: Parts | None = None,
    ) -> None:
        self.note("all_gather", out)
        self.link.all_gather(mine, out, owners, parts)

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        self.note("broadcast", x)
        self.link.broadcast(x, root)

    def gather(self, x: Tensor) -> Tensor:
        self.note("gather", x)
        return self.link.gather(x)

    def swap(self, x: Tensor, to: Sequence[int], source: Sequence[int]) -> Sequence[Tensor | None]:
        self.note("swap", x, to)
        return self.link.swap(x, to, source)

    def split(self, sets: Sequence[Sequence[int]]) -> Link:
        self.log.append(Call("split", (), 0))
        (mine,) = [ranks for ranks in sets if self.link.rank in ranks]
        members = [self.members[r] for r in mine]
        return Recording(self.link.split(sets), self.log, members)


def recorded(
    recipe: la.Recipe, n: int, steps: int = 6, **options: Any
) -> tuple[list[list[Call]], list[list[list[Call]]]]:
    """By rank: what `laconic.attach` does, and what every step does."""

    def run(rank: int) -> tuple[list[Call], list[list[Call]]]:
        torch.manual_seed(rank)
        model = Plain(SINGLE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        la.attach(model, optimizer, recipe, **options)
        log, found = logs[rank], [list(logs[rank])]
        for _ in range(steps):
            log.clear()
            optimizer.zero_grad()
            model(1.0 + rank).backward()
            optimizer.step()
            found.append(list(log))
        return found[0], found[1:]

    logs: dict[int, list[Call]] = {r: [] for r in range(n)}

    def wrap(link: Link) -> Link:
        return Recording(link, logs[link.rank])

    setups, runs = zip(*la.simulate(run, workers=n, link=wrap), strict=True)
    return list(setups), list(runs)


@pytest.mark.parametrize("n", [5, 6])
@pytest.mark.parametrize("graph", ["directed_exponential", "bipartite_linear", "ring"])
def test_gossip_reaches_out_peers_and_nobody_else(graph: str, n: int) -> None:
    recipe = la.slowmo(la.sgp(graph, 2), 3, momentum=0.5)
    for rank, run in enumerate(recorded(recipe, n, steps=8)[1]):
        gossips = [calls for t, calls in enumerate(run[1:], 2) if t % 3]
        for k, calls in enumerate(gossips, 1):  # a slow step does not advance the graph
            (call,) = calls
            assert (call.name, call.to) == ("swap", Graph(graph, 2).out_peers(rank, n, k))


@pytest.mark.parametrize(
    ("recipe", "name", "rider"),
    [
        (la.sgp(), "swap", RIDER),
        (la.sgp("ring", 2, delay=1), "swap", RIDER),
        (la.d_psgd(), "swap", 0),
        (la.easgd(1), "mean", 0),
        (la.downpour(1), "reduce_scatter", 0),
        (la.lsgd(1, local_period=0), "broadcast", 0),
    ],
)
def test_each_of_two_ranks_of_a_worker_sends_half_across(
    recipe: la.Recipe, name: str, rider: int
) -> None:
    """The rest of the model reaches it from the other rank of its own worker."""
    model = 4 * 132
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


# -- links ----


def test_sixty_four_workers_need_no_link_for_each_edge() -> None:
    """Nor does anything but the gossip itself grow with the number of peers."""
    for recipe in (la.sgp(), la.slowmo(la.sgp("complete"), 4, momentum=0.5), la.d_psgd()):
        setups, runs = recorded(recipe, 64, steps=1)
        for calls in [*setups, *(run[0] for run in runs)]:
            assert "split" not in {c.name for c in calls}
        assert len({tuple((c.name, c.size) for c in calls) for calls in setups}) == 1
        # arguments, nprocs_per_node, group_size, metrics, the set-up's digest, the tensors' digests
        assert [c.name for c in setups[0]] == ["gather"] * 7 + ["broadcast"]


# -- over processes ----


def booked(rank: int, recipe: la.Recipe, options: dict[str, Any], link: Link | None) -> Any:
    torch.manual_seed(rank)
    model = Plain(MIXED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = la.attach(model, optimizer, recipe, link=link, **options)
    for _ in range(5):
        optimizer.zero_grad()
        model(1.0 + rank).backward()
        optimizer.step()
    sync.finish()  # what is under way is booked when it is there
    stats = sync.stats()
    sync.detach()
    return stats.bytes_sent, stats.bytes_received, dict(stats.bytes_by_collective)


def booked_over_gloo(rank: int, recipe: la.Recipe, options: dict[str, Any], n: int) -> Any:
    return booked(rank, recipe, options, gloo.link_of(n))


@pytest.mark.parametrize(
    ("recipe", "n", "options"),
    [
        (la.sgp(delay=1), 4, {}),
        (la.sgp("bipartite_linear", 2), 3, {}),
        (la.d_psgd(), 4, {}),
        (la.slowmo(la.sgp(), 2, momentum=0.5), 4, {"nprocs_per_node": 2}),
        (la.easgd(2), 4, {"nprocs_per_node": 2}),
        (la.lsgd(4, local_period=1), 4, {"group_size": 2}),
        (la.hierarchical(1, 2), 4, {"group_size": 2}),
    ],
)
def test_processes_book_what_threads_book(
    pool: gloo.Pool, recipe: la.Recipe, n: int, options: dict[str, Any]
) -> None:
    threads = la.simulate(partial(_booked, recipe, options), workers=n)
    assert pool.run(booked_over_gloo, recipe, options, n, ranks=n) == threads
    assert sum(sent for sent, _, _ in threads) == sum(received for _, received, _ in threads)


def _booked(recipe: la.Recipe, options: dict[str, Any], rank: int) -> Any:
    return booked(rank, recipe, options, None)


def test_a_swap_is_booked_by_what_leaves_and_what_arrives() -> None:
    """In a graph that is not regular they differ."""
    links: dict[int, Link] = {}

    def keep(link: Link) -> Link:
        links[link.rank] = link
        return link

    def run(rank: int) -> tuple[int, int]:
        metered, to = Metered(links[rank]), {0: [1, 2], 1: [2], 2: []}
        sources = [r for r in to if rank in to[r]]
        received = metered.swap(torch.full((3,), float(rank)), to[rank], sources)
        assert [x.tolist() for x in received if x is not None] == [[float(r)] * 3 for r in sources]
        return metered.ledger.bytes_sent, metered.ledger.bytes_received

    assert la.simulate(run, workers=3, link=keep) == [(24, 0), (12, 12), (0, 24)]


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


def twice_and_afterward(rank: int) -> tuple[str, float, list[float]]:
    """What a second `laconic.attach` on a link says; then what calls give after leaving."""
    link, model = gloo.link_of(2), Plain(SINGLE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    said = ""
    with la.attach(model, optimizer, la.local_sgd(2), link=link) as sync:
        other = Plain(SINGLE)
        try:
            la.attach(other, torch.optim.SGD(other.parameters()), la.local_sgd(2), link=link)
        except ValueError as error:
            said = str(error)
    mean = sync.mean(float(rank))
    with sync.consensus():
        found = model.all[1].tolist()
    la.attach(model, optimizer, la.local_sgd(2), link=link).detach()
    return said, mean, found


def test_one_link_carries_one_synchronizer_and_calls_after_leaving_run(pool: gloo.Pool) -> None:
    (said, mean, found), other = pool.run(twice_and_afterward, ranks=2)
    assert "a link for each" in said and mean == 0.5
    assert (said, mean, found) == other
