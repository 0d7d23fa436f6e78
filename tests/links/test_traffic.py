"""Who sends what to whom: gossip to its peers alone, each rank of a worker its part, and groups
among themselves. `test_ledger.py` has the bytes of everything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic as la
from laconic.algorithms.topology import Graph
from laconic.links import Link

from tests.links.test_ledger import ELEMENTS, attached
from tests.support import gloo


@dataclass(frozen=True)
class Call:
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
) -> tuple[list[list[Call]], list[list[list[Call]]]]:
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
    return list(setups), list(runs)


@pytest.mark.parametrize(
    ("graph", "n"), [("directed_exponential", 5), ("bipartite_linear", 6), ("ring", 5)]
)
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
        (la.sgp(), "swap", 8),
        (la.sgp("ring", 2, delay=1), "swap", 8),
        (la.d_psgd(), "swap", 0),
        (la.easgd(1), "mean", 0),
        (la.downpour(1), "reduce_scatter", 0),
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
    for recipe in (la.sgp(), la.slowmo(la.sgp("complete"), 4, momentum=0.5), la.d_psgd()):
        few, many = (recorded(recipe, n, steps=1)[0][0] for n in (2, 12))
        assert [c.name for c in few] == [c.name for c in many] and len(few) < 12
        assert "split" not in {c.name for c in many}


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
