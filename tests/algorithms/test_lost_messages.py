"""`Push` where workers are lost on the way: what is left counts, and its mean is conserved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from laconic.algorithms.exchanges.push import Push
from laconic.algorithms.topology import Graph
from laconic.algorithms.update import Clock, State
from laconic.algorithms.updates.mix import Mix
from laconic.algorithms.updates.push_sum import PushSum
from laconic.links.simulated import current_link
from laconic.links.simulation import simulate

from tests.support.exchanges import sent_by

LENGTH = 5


class Losing:
    """A link on which the messages of the ranks ``lost`` do not arrive, as `Link.swap` says."""

    def __init__(self, lost: Sequence[int]) -> None:
        link = current_link.get()
        assert link is not None
        self._link, self._lost = link, lost
        self.rank, self.size, self.queues = link.rank, link.size, link.queues

    def swap(self, x: Tensor, to: Sequence[int], source: Sequence[int]) -> list[Tensor | None]:
        pieces = self._link.swap(x, to, source)
        return [None if r in self._lost else p for r, p in zip(source, pieces, strict=True)]


def push_sum(
    graph: Graph, x: list[Tensor], states: list[State], k: int, lost: Sequence[int] = (), n: int = 0
) -> None:
    """Gossip number k of `PushSum`. ``n``: how many workers there were when the messages were made;
    those that came since have made theirs now."""

    def work(rank: int) -> None:
        exchange, link = Push(graph), Losing(lost)
        workers = n if rank < n else link.size
        before = Clock(k + 1, 0.1, k, 0, workers, worker=rank)
        before = replace(before, out_degree=exchange.out_degree(before))
        sent = PushSum().send(x[rank].clone(), states[rank], before)
        assert "w" in states[rank]
        clock = replace(before, weight=float(states[rank]["w"]), workers=link.size)
        arrival = sent_by(exchange, link, sent, lambda mean: mean, clock, {})
        after = replace(clock, weight=arrival.weight)
        x[rank] = PushSum().fold(x[rank], arrival.flat, None, states[rank], after)

    simulate(work, len(x))


def start(n: int) -> tuple[list[Tensor], list[State]]:
    generator = torch.Generator().manual_seed(n)
    x = [torch.randn(LENGTH, generator=generator, dtype=torch.float64) for _ in range(n)]
    states = [PushSum().init(t) for t in x]
    for rank, state in enumerate(states):
        state["w"] += rank / 4  # as after gossips that are not doubly stochastic
    return x, states


def mass(x: Sequence[Tensor], states: Sequence[State]) -> tuple[Tensor, float]:
    """The sums of x = w*z and of w."""
    total = torch.zeros(LENGTH, dtype=torch.float64)
    for z, state in zip(x, states, strict=True):
        total += float(state["w"]) * z
    return total, sum(float(state["w"]) for state in states)


@pytest.mark.parametrize("name", ["exponential", "ring", "complete"])
def test_what_a_lost_worker_had_is_gone(name: str) -> None:
    """Also what was sent to it: the living keep what they kept, and the pieces that arrive."""
    graph, n, lost = Graph(name), 4, 1
    x, states = start(n)
    z, w = [t.clone() for t in x], [float(s["w"]) for s in states]
    push_sum(graph, x, states, 0, [lost])
    for i in (r for r in range(n) if r != lost):
        share = [1 / (1 + len(graph.out_peers(j, n, 0))) for j in range(n)]
        weight, total = share[i] * w[i], share[i] * w[i] * z[i]
        for j in graph.in_peers(i, n, 0):
            if j != lost:
                weight, total = weight + share[j] * w[j], total + share[j] * w[j] * z[j]
        assert float(states[i]["w"]) == pytest.approx(weight, abs=1e-15)
        torch.testing.assert_close(x[i], total / weight, rtol=0, atol=1e-14)


def test_the_mean_of_the_living_is_conserved_from_then_on() -> None:
    """And it is what all of them come to."""
    graph, lost = Graph("exponential"), 2
    x, states = start(5)
    push_sum(graph, x, states, 0, [lost])
    del x[lost], states[lost]
    total, w = mass(x, states)
    assert w < 5 + 2.5 - 1, "the weight of the lost one is gone"
    for k in range(1, 25):
        push_sum(graph, x, states, k)
    after, weight = mass(x, states)
    torch.testing.assert_close(after, total, rtol=0, atol=1e-12)
    assert weight == pytest.approx(w, abs=1e-12)
    for z in x:
        torch.testing.assert_close(z, total / w, rtol=0, atol=1e-9)


@pytest.mark.parametrize("lost", [[], [1], [1, 3]])
def test_mixing_without_some_neighbors(lost: list[int]) -> None:
    """x_i <- x_i + sum_j W_ij (x_j - x_i) over the neighbors j whose messages have come. So equal
    parameters stay equal."""
    graph, n = Graph("ring", peers=2, both=True), 4
    x = [torch.randn(LENGTH, generator=torch.Generator().manual_seed(r)) for r in range(n)]

    def work(rank: int, x: list[Tensor]) -> Tensor:
        clock = Clock(1, 0.1, 0, 0, n, worker=rank, out_degree=2)
        arrival = sent_by(Push(graph), Losing(lost), x[rank].clone(), lambda m: m, clock, {})
        assert arrival.weight == pytest.approx(
            sum(1 / 3 for j in graph.in_peers(rank, n, 0) if j not in lost)
        )
        return Mix().fold(
            x[rank].clone(), arrival.flat, x[rank], {}, replace(clock, weight=arrival.weight)
        )

    mixed = simulate(lambda rank: work(rank, x), n)
    for i in range(n):
        expected = x[i].clone()
        for j in ((i - 1) % n, (i + 1) % n):
            if j not in lost:
                expected += (x[j] - x[i]) / 3
        torch.testing.assert_close(mixed[i], expected)
    for same in simulate(lambda rank: work(rank, [x[0]] * n), n):
        torch.testing.assert_close(same, x[0])
