"""Plain-loop float64 reference of SlowMoDistributedDataParallel, in fairscale's order of steps.

The ranks of all nodes live in one list, node by node; the first rank of a node is its master, and
communication is a loop over the list. One iteration of `run`, counted from 1, is

    g_r = gradient of rank r's own batch at z_r = x_r / w_r      w is 1 but on uneven graphs
    g_r <- mean of g over the ranks of r's node
    x_r <- the local optimizer's step from x_r with g_r
    perform_slowmo: gossip or exact mean over the masters, their x to their nodes, slow step

Symbols: x parameters (under push-sum the numerator), w push weight, z = x/w the de-biased
parameters, a anchor, u slow momentum, k gossips executed so far, lr that of the parameter's group.
Where the original (fairscale 0.4.13, experimental.nn.data_parallel.gossip) is wrong, or cannot
run, a comment that begins with "Not the original" says what is computed instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tests.references import problem
from tests.references.problem import (
    NAMES,
    Array,
    Data,
    Optimizer,
    Params,
    Rates,
    State,
    copy,
    mean,
)

GRAPHS = (
    "NPeerDynamicDirectedExponentialGraph",
    "DynamicDirectedExponentialGraph",
    "DynamicBipartiteExponentialGraph",
    "DynamicDirectedLinearGraph",
    "DynamicBipartiteLinearGraph",
    "RingGraph",
)


@dataclass(frozen=True)
class Settings:
    """The constructor's arguments under shorter names; `graph` is the name of the class."""

    nodes: int
    ranks_per_node: int = 1
    base: Literal["localsgd", "sgp"] = "localsgd"
    momentum: float = 0.5
    slowmo_lr: float = 1.0
    slowmo_frequency: int = 48
    localsgd_frequency: int = 3
    memory_efficient: bool = True
    sgp_average_params: bool = False
    graph: str = "NPeerDynamicDirectedExponentialGraph"
    peers_per_itr: int = 1
    push_sum: bool = True


# ---------------------------------------------------------------- graphs
def hops(graph: str, nodes: int, peers: int) -> list[int]:
    """A phone book's distances in order, repeats and multiples of `nodes` included.

    `levels` are i = 0..floor(log_b(nodes - 1)), b = peers + 1 for the N-peer graph, else 2."""
    b = peers + 1 if graph.startswith("NPeer") else 2
    levels = [i for i in range(nodes) if b**i <= nodes - 1]
    if graph == "NPeerDynamicDirectedExponentialGraph":
        return [j * b**i for i in levels for j in range(1, peers + 1)]
    both_ways = {
        "DynamicDirectedExponentialGraph": [2**i for i in levels],
        "DynamicBipartiteExponentialGraph": [1 if i == 0 else 1 + 2**i for i in levels],
        "DynamicDirectedLinearGraph": list(range(1, nodes, 2)),
        "DynamicBipartiteLinearGraph": list(range(1, nodes)),
        "RingGraph": [1],
    }
    if graph not in both_ways:
        raise ValueError(f"graph {graph!r} is none of {GRAPHS}")
    return [hop for d in both_ways[graph] for hop in (d, -d)]


def phone_book(graph: str, node: int, nodes: int, peers: int) -> list[int]:
    """All that `node` ever sends to, in order. Bipartite: +d and -d are kept where both lead to
    nodes of the other parity; with an odd number of nodes some books stay empty."""
    found = [(node + hop) % nodes for hop in hops(graph, nodes, peers)]
    if "Bipartite" in graph:
        pairs = zip(found[0::2], found[1::2], strict=True)
        found = [e for pair in pairs if all((e - node) % 2 == 1 for e in pair) for e in pair]
    return found


def out_peers(s: Settings, node: int, k: int) -> list[int]:
    """Whom `node` sends to in gossip k, counted from 0: the next `peers_per_itr` entries of its
    book, round and round. The ring is static: always the first ones."""
    book = phone_book(s.graph, node, s.nodes, s.peers_per_itr)
    if not book:
        return []  # Not the original, which fails on an empty book.
    if s.peers_per_itr > len(book):
        raise ValueError(f"peers_per_itr {s.peers_per_itr} exceeds a phone book's {len(book)}")
    first = 0 if s.graph == "RingGraph" else k * s.peers_per_itr
    found: list[int] = []
    for entry in range(first, first + s.peers_per_itr):
        peer = book[entry % len(book)]
        # Not the original, which in one gossip sends twice to one peer, and fails on itself.
        if peer != node and peer not in found:
            found.append(peer)
    return found


def mixing(s: Settings, k: int) -> Array:
    """P[i, j], the share of node j that node i gets in gossip k: lo = 1/(out-degree of j + 1) for
    each of j's peers and for j itself. Columns sum to 1; on a regular graph rows do too."""
    p = np.zeros((s.nodes, s.nodes))
    for j in range(s.nodes):
        peers = out_peers(s, j, k)
        for i in [j, *peers]:
            p[i, j] = 1.0 / (len(peers) + 1)
    # Not the original, which takes every graph for regular. Without push weights it has to be.
    if not s.push_sum and not np.allclose(p.sum(axis=1), 1.0):
        raise ValueError(f"push_sum=False: {s.graph} is not regular on {s.nodes} nodes")
    return p


# ---------------------------------------------------------------- perform_slowmo
@dataclass
class Rank:
    x: Params
    a: Params
    u: Params
    w: float = 1.0

    def debiased(self) -> Params:
        return {name: value / self.w for name, value in self.x.items()}


class Cluster:
    """All ranks of all nodes. `perform_slowmo` follows every step of their local optimizers."""

    def __init__(self, settings: Settings, x0: Params) -> None:
        self.settings = settings
        zero = {name: np.zeros_like(value) for name, value in x0.items()}
        # Not the original: each rank starts from its own x there, and a is x after the first step.
        count = settings.nodes * settings.ranks_per_node
        self.ranks = [Rank(copy(x0), copy(x0), copy(zero)) for _ in range(count)]
        self.masters = self.ranks[:: settings.ranks_per_node]
        self.n = 0  # calls of perform_slowmo
        self.k = 0  # gossips executed

    def perform_slowmo(self, lr: Mapping[str, float]) -> bool:
        """One call, `lr` being every parameter's current local rate; whether it was a slow step."""
        s = self.settings
        self.n += 1
        # Not the original, which switches the base off only for one node of several ranks.
        local_sgd = s.base == "localsgd" and s.nodes > 1
        sgp = s.base == "sgp" and s.nodes > 1
        in_use = not (s.momentum == 0.0 and s.slowmo_lr == 1.0)
        slow = in_use and self.n % s.slowmo_frequency == 0
        skip = slow and s.memory_efficient

        exact = local_sgd and self.n % s.localsgd_frequency == 0 and not skip
        exact = exact or (sgp and slow and s.sgp_average_params)
        gossip = sgp and not skip and not exact
        if gossip:
            self.gossip()
        if exact:
            self.average_masters()
        if gossip or exact:
            self.sync_inside_nodes()
        if slow:
            # Not the original, whose unsharded step over local SGD takes each rank's own x too.
            self.slow_step(lr, average=not sgp or s.memory_efficient or s.sgp_average_params)
        return slow

    def gossip(self) -> None:
        """x_i <- sum_j P_ij x_j ; w_i <- sum_j P_ij w_j ; k <- k + 1"""
        p = mixing(self.settings, self.k)
        self.k += 1
        sent = [(copy(m.x), m.w) for m in self.masters]
        for i, m in enumerate(self.masters):
            for name in m.x:
                m.x[name] = np.zeros_like(m.x[name])
                for j, (x, _) in enumerate(sent):
                    m.x[name] += p[i, j] * x[name]
            m.w = sum(p[i, j] * w for j, (_, w) in enumerate(sent))

    def average_masters(self) -> None:
        """x <- mean(x) ; w <- 1, the mean of w, since gossip only moves weight about."""
        xbar = mean([m.x for m in self.masters])
        for m in self.masters:
            m.x, m.w = copy(xbar), 1.0

    def sync_inside_nodes(self) -> None:
        for r, rank in enumerate(self.ranks):
            master = self.masters[r // self.settings.ranks_per_node]
            rank.x, rank.w = copy(master.x), master.w

    def slow_step(self, lr: Mapping[str, float], average: bool) -> None:
        """y = mean(x) over all ranks, or where `average` is false the rank's own z
        u <- momentum*u + (a - y)/lr ; a <- a - slowmo_lr*lr*u ; x <- a ; w <- 1"""
        s = self.settings
        xbar = mean([rank.x for rank in self.ranks])
        for rank in self.ranks:
            # Not the original, whose own y is the numerator and whose w stays (there always 1).
            y = xbar if average else rank.debiased()
            for name in rank.x:
                d = rank.a[name] - y[name]
                if lr[name] == 0.0:
                    # Not the original, which divides by zero.
                    rank.a[name] = rank.a[name] - s.slowmo_lr * d
                else:
                    rank.u[name] = s.momentum * rank.u[name] + d / lr[name]
                    rank.a[name] = rank.a[name] - s.slowmo_lr * lr[name] * rank.u[name]
            rank.x, rank.w = copy(rank.a), 1.0


# ---------------------------------------------------------------- training
@dataclass
class Trace:
    """What every call of perform_slowmo left behind: entry n - 1 is that of call n."""

    z: list[list[Params]] = field(default_factory=list)  # [n - 1][rank]
    w: list[list[float]] = field(default_factory=list)  # [n - 1][rank], so that x = w*z
    slow: list[bool] = field(default_factory=list)  # [n - 1], whether a slow step was due
    gossips: list[int] = field(default_factory=list)  # [n - 1], executed so far


def run(
    settings: Settings,
    steps: int,
    rules: Sequence[Optimizer],
    lr: Rates,
    data: Data,
    init: Sequence[Params],
) -> Trace:
    """`data[rank][step - 1]`, ranks counted node by node; one of `rules` per parameter group;
    every rank starts from init[0]."""
    cluster, trace = Cluster(settings, init[0]), Trace()
    ranks, size, group = cluster.ranks, settings.ranks_per_node, problem.GROUP_OF
    states: list[dict[str, State]] = [{name: {} for name in NAMES} for _ in ranks]
    for t in range(1, steps + 1):
        rates = {name: lr(group[name], t) for name in NAMES}
        own = [problem.gradient(rank.debiased(), data[r][t - 1]) for r, rank in enumerate(ranks)]
        for r, rank in enumerate(ranks):
            first = r - r % size
            g = mean(own[first : first + size])
            for name in NAMES:
                rule, state = rules[group[name]], states[r][name]
                rank.x[name] = rule.step(rank.x[name], g[name], state, rates[name])
        trace.slow.append(cluster.perform_slowmo(rates))
        trace.z.append([rank.debiased() for rank in ranks])
        trace.w.append([rank.w for rank in ranks])
        trace.gossips.append(cluster.k)
    return trace
