"""What the rounds of a recipe cost on the workers that are present.

Everything is read from the recipe: schedules, delays, fragments, codecs, and whom a gossip meets.
Seconds are those of the cost model, `laconic.policy.predict`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from laconic.advisor.plan.cluster import Cluster
from laconic.algorithms.compile import replicated
from laconic.algorithms.exchanges.coded import CodedMean
from laconic.algorithms.exchanges.mean import Mean
from laconic.algorithms.exchanges.push import Push
from laconic.algorithms.round import AnyRound, GradientRound, Recipe, Round
from laconic.algorithms.topology import Graph
from laconic.buckets import BUCKET_BYTES
from laconic.policy.facts import Facts
from laconic.policy.predict import Load, elements, idle, load_of, often

BUFFER = 2**19
"""Bytes that the kernel holds for a worker on each connection: those that it still sends, and those
that have come before the worker is there. Linux lets them grow to 4 MiB (tcp_wmem), as far as its
congestion window has; half a MiB fits the emulated networks of `benchmarks.plan`."""
MOST_STAGES = 16
"""Stages of a round that are told apart. Those of a large model, in many buckets, are merged."""


@dataclass(frozen=True)
class Transfers:
    """Seconds that each worker needs in one round: to ``send`` and to ``receive`` all of it.

    A round has ``stages``. A worker begins to send in the next stage when it has received all that
    the others send it in this one; if it ``forwards``, when the first part has come. It goes on to
    compute when it has received everything. The kernel then still sends up to the last share
    ``buffered`` of it, and receives as much before the worker is there."""

    send: Tensor
    receive: Tensor
    buffered: float
    stages: int
    forwards: bool


@dataclass(frozen=True)
class Price:
    """Seconds of one round: ``exposed``, of a round on gradients after the backward pass; the
    ``network``'s, of which it takes ``sending`` to send and the rest is latency; and ``idle``,
    until the last rank has joined. ``sent``: bytes of each worker. ``transfers``: None if all wait
    for a connection that they share, or for one worker."""

    exposed: float = 0.0
    network: float = 0.0
    sending: float = 0.0
    idle: float = 0.0
    sent: float = 0.0
    messages: int = 0
    units: int = 1
    transfers: Transfers | None = None


class Rounds:
    """The rounds of ``recipe`` on a ``cluster``."""

    def __init__(self, recipe: Recipe, cluster: Cluster) -> None:
        elastic = cluster.failures.happen and cluster.failures.policy == "elastic"
        self.all = replicated(recipe) if elastic else recipe
        self.cluster = cluster
        self._prices: dict[tuple[int, ...], tuple[Price, ...]] = {}

    @cached_property
    def communicating(self) -> tuple[int, ...]:
        """The indexes of the rounds that send anything."""
        return tuple(
            k
            for k, r in enumerate(self.all)
            if r.exchange.communicates and r.over not in ("group", "replica")
        )

    def prices(self, present: tuple[int, ...]) -> tuple[Price, ...]:
        """What each round costs, with so many workers on each site."""
        if present not in self._prices:
            facts = self.cluster.facts(present)
            prices = [self._price(k, r, facts) for k, r in enumerate(self.all)]
            self._prices[present] = tuple(_scaled(self.all, prices, facts))
        return self._prices[present]

    def _price(self, k: int, r: AnyRound, facts: Facts) -> Price:
        if k not in self.communicating or facts.workers == 1:
            return Price()
        load = load_of(r, facts)
        net = facts.net(r.over, "workers")
        sending = min(8 * load.sent / net.rate, load.network)
        size = elements(r, facts, facts.workers) * facts.itemsize
        messages = self._messages(r, facts, load)
        return Price(
            exposed=load.exposed,
            network=load.network,
            sending=sending,
            idle=idle(r, load),
            sent=load.sent,
            messages=messages,
            units=max(math.ceil(size / BUCKET_BYTES), 1),
            transfers=self._transfers(r, facts, net.rate, sending, size, messages),
        )

    def _transfers(
        self, r: AnyRound, facts: Facts, rate: float, sending: float, size: int, messages: int
    ) -> Transfers | None:
        sent = sending * rate / 8
        alike = isinstance(r, Round) and not r.exchange.score_window  # all send as much
        if not sent or not alike:
            return None
        rates = torch.tensor(facts.rates or (rate,) * facts.workers, dtype=torch.float64)
        receives = torch.tensor(facts.receives, dtype=torch.float64) if facts.receives else rates
        if rate < (1 - 1e-9) * float(torch.minimum(rates, receives).min()):
            return None  # a connection that they share takes longer than each one's own
        gossip = r.exchange.out_degree is not None
        connections = max(round(sent / size), 1) if gossip else facts.workers - 1
        whole, buffered = sending * rate, min(BUFFER * connections / sent, 1.0)
        stages = min(max(messages, 1), MOST_STAGES)
        forwards = isinstance(r.exchange, (Mean, CodedMean))
        return Transfers(whole / rates, whole / receives, buffered, stages, forwards)

    def _messages(self, r: AnyRound, facts: Facts, load: Load) -> int:
        """Return how many messages of a round follow one another."""
        later = load_of(r, replace(facts, one_way=facts.one_way + 1.0, nets={}, loss=0.0))
        sooner = load_of(r, replace(facts, nets={}, loss=0.0))
        return round(later.network - sooner.network)

    def events(self, step: int) -> Iterator[tuple[int, str]]:
        """Yield what happens at ``step``, in the engine's order: the index of a round, and whether
        it is exchanged during "backward", "folded", or "sent"."""
        for k in self.communicating:
            r = self.all[k]
            if isinstance(r, GradientRound) and r.when(step):
                yield k, "backward"
        for k in self.communicating:
            r = self.all[k]
            if not isinstance(r, Round):
                continue
            if r.delay and step > r.delay and r.when(step - r.delay):
                yield k, "folded"
            if r.when(step):
                yield k, "sent"

    def sources(self, k: int, executed: int, n: int) -> Tensor:
        """Return, for each of ``n`` ranks, those that send to it in gossip ``executed`` of round
        ``k``, padded with its own."""
        exchange = self.all[k].exchange
        assert isinstance(exchange, Push), "the only gossip"
        cycle = exchange.graph.cycle(n)
        return _sources(exchange.graph, executed % cycle if cycle else executed, n)


@lru_cache(64)
def _sources(graph: Graph, executed: int, n: int) -> Tensor:
    found: list[list[int]] = [[] for _ in range(n)]
    for rank in range(n):
        for peer in graph.out_peers(rank, n, executed, 0):
            found[peer].append(rank)
    width = max((len(each) for each in found), default=0) or 1
    return torch.tensor([(each + [rank] * width)[:width] for rank, each in enumerate(found)])


def _scaled(recipe: Recipe, prices: Sequence[Price], facts: Facts) -> Iterator[Price]:
    """Yield ``prices`` with the idle seconds that the cost model allows: a step never takes longer
    than it would without overlap."""
    shares = [often(r) for r in recipe]
    pauses = sum(s * p.idle for s, p in zip(shares, prices, strict=True))
    factor = min(1.0, facts.compute / pauses) if pauses else 1.0
    for p in prices:
        yield replace(p, idle=p.idle * factor)
