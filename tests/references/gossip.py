"""Plain-loop references of gossip: the graphs, SGP, D-PSGD.

Graphs are pure functions. k counts the gossips executed before this one, from 0; all peers are
taken mod n. Where a graph leaves something open, this is what is meant here:

exponential           gossip k has i = k mod (I + 1), I = floor(log_{p+1}(n - 1)), and the hops
                      j*(p+1)^i, j = 1..p. Self-hops and repeats *within one gossip* are dropped
                      and not made up for: the out-degree may be below p.
the listed graphs     a rank has a list of peers, written from the hops below in this order with
                      self-hops and repeats dropped from the *whole* list; gossip k takes its
                      entries k*p .. k*p + p - 1, cyclically (repeats dropped where p exceeds L).
  directed_exponential   +1, -1, +2, -2, +4, -4 .. +-2^i, i = 0..floor(log2(n - 1))
  directed_linear        +1, -1, +3, -3, +5, -5 .. all odd distances < n
  bipartite_exponential  +1, -1, +3, -3, +5, -5, +9, -9 .. +-(1 + 2^i), same i (i = 0: +-1)
  bipartite_linear       +1, -1, +2, -2 .. all distances < n
                      In the bipartite ones a peer of the rank's own parity is left out, edges
                      join odd and even ranks only. With n even each hop is then a permutation;
                      with n odd, lists differ in length by rank, and push-sum weights leave 1.
                      "Even ranks are passive" only says who sends first when messages cross:
                      both kinds send, nothing in the mathematics depends on it.
ring                  static: +1 with one peer, +1 and -1 with two or more.
complete              everyone else, whatever p.
random_pairs          the pairing is an input: pairing(k, n) -> disjoint pairs of ranks. Who is in
                      none gossips with nobody at k and keeps everything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from tests.references.parameters import Mixing
from tests.references.problem import Array, Params, Rates, Recipe, Worker, add, copy, scale

Pairing: TypeAlias = Callable[[int, int], list[tuple[int, int]]]  # (k, n) -> pairs
Peers: TypeAlias = Callable[[int, int, int, int], list[int]]  # (rank, n, k, peers) -> ranks
Graph: TypeAlias = str | Peers  # one of GRAPHS, or any function

GRAPHS = (
    "exponential",
    "ring",
    "directed_exponential",
    "bipartite_exponential",
    "directed_linear",
    "bipartite_linear",
    "complete",
)  # and random_pairs, which needs a pairing


# ---------------------------------------------------------------- graphs
def floor_log(base: int, x: int) -> int:
    """The largest i with base^i <= x, in integers: no rounding."""
    i = 0
    while base ** (i + 1) <= x:
        i += 1
    return i


def alternating_hops(graph: str, n: int) -> list[int]:
    top = floor_log(2, n - 1)
    if graph == "directed_exponential":
        distances = [2**i for i in range(top + 1)]
    elif graph == "bipartite_exponential":
        distances = [1] + [1 + 2**i for i in range(1, top + 1)]
    elif graph == "directed_linear":
        distances = list(range(1, n, 2))
    elif graph == "bipartite_linear":
        distances = list(range(1, n))
    else:
        raise ValueError(f"unknown graph {graph!r}")
    hops = []
    for distance in distances:
        hops += [distance, -distance]
    return hops


def without_repeats(rank: int, peers: list[int]) -> list[int]:
    kept: list[int] = []
    for peer in peers:
        if peer != rank and peer not in kept:
            kept.append(peer)
    return kept


def out_peers(
    graph: Graph, rank: int, n: int, k: int, peers: int = 1, pairing: Pairing | None = None
) -> list[int]:
    """To whom `rank` sends in gossip k."""
    if callable(graph):
        return graph(rank, n, k, peers)
    if n == 1:
        return []
    if graph == "complete":
        return [peer for peer in range(n) if peer != rank]
    if graph == "random_pairs":
        assert pairing is not None
        mine = [pair for pair in pairing(k, n) if rank in pair]
        return [a if b == rank else b for a, b in mine]
    if graph == "ring":
        return without_repeats(rank, [(rank + hop) % n for hop in (1, -1)[:peers]])
    if graph == "exponential":
        i = k % (floor_log(peers + 1, n - 1) + 1)
        return without_repeats(
            rank, [(rank + j * (peers + 1) ** i) % n for j in range(1, peers + 1)]
        )
    book = [(rank + hop) % n for hop in alternating_hops(graph, n)]
    if graph.startswith("bipartite"):
        book = [peer for peer in book if peer % 2 != rank % 2]
    book = without_repeats(rank, book)
    return without_repeats(rank, [book[(k * peers + j) % len(book)] for j in range(peers)])


def push_matrix(
    graph: Graph, n: int, k: int, peers: int = 1, pairing: Pairing | None = None
) -> Array:
    """P[i, j] = the share of worker j's x that worker i holds after gossip k: lo = 1/(deg + 1)."""
    p = np.zeros((n, n))
    for j in range(n):
        out = out_peers(graph, j, n, k, peers, pairing)
        for i in [j, *out]:
            p[i, j] = 1.0 / (len(out) + 1)
    return p


def symmetric_matrix(graph: Graph, n: int, k: int, pairing: Pairing | None = None) -> Array:
    """W for D-PSGD: i and j are neighbours if either sends to the other in the one-peer graph
    (so the ring has both neighbours, the exponential graph i + 2^e and i - 2^e), and
    W[i, j] = 1/(1 + max(deg i, deg j)), the rest of every row on the diagonal; that is
    1/(deg + 1) for itself and each neighbour wherever all degrees are equal."""
    linked = [set(out_peers(graph, i, n, k, 1, pairing)) for i in range(n)]
    near = [{j for j in range(n) if j in linked[i] or i in linked[j]} for i in range(n)]
    w = np.zeros((n, n))
    for i in range(n):
        for j in near[i]:
            w[i, j] = 1.0 / (1 + max(len(near[i]), len(near[j])))
        w[i, i] = 1.0 - w[i].sum()
    return w


# ---------------------------------------------------------------- recipes
@dataclass
class SGP(Recipe):
    """w = 1 ; z = x/w, at which forward and backward run
    each step: the local optimizer moves x (it sees x, and the gradient at z)
               messages sent `delay` steps ago fold: x <- x + sum of received x ; w likewise
               lo = 1/(out_degree + 1) ; send lo*x, lo*w to each out-peer ; x <- lo*x, w <- lo*w
               delay 0: the messages just sent fold now
               z = x/w

    Worker.x is x from `rebias` to `debias` and z between two steps. The sum of w over workers
    and messages in flight is n. Consensus: sum(x)/sum(w) over workers and messages in flight.
    settle, called between rebias and debias: all messages fold, then w <- 1; where no mean of x
    follows, x <- x/w before."""

    graph: Graph = "exponential"
    peers: int = 1
    delay: int = 0
    pairing: Pairing | None = None

    def start(self, x0: Params, n: int) -> None:
        self.k = 0
        self.w = [1.0] * n
        # (step it is due, receiver, x, w), in the order of sending
        self.flight: list[tuple[int, int, Params, float]] = []

    def rebias(self, workers: list[Worker]) -> None:
        for i, worker in enumerate(workers):
            worker.x = scale(self.w[i], worker.x)

    def debias(self, workers: list[Worker]) -> None:
        for i, worker in enumerate(workers):
            worker.x = scale(1.0 / self.w[i], worker.x)

    def after_step(self, t: int, workers: list[Worker], lr: Rates) -> None:
        self._fold(t, workers)
        n = len(workers)
        for i, worker in enumerate(workers):
            out = out_peers(self.graph, i, n, self.k, self.peers, self.pairing)
            lo = 1.0 / (len(out) + 1)
            worker.x, self.w[i] = scale(lo, worker.x), lo * self.w[i]
            for peer in out:
                self.flight.append((t + self.delay, peer, copy(worker.x), self.w[i]))
        self.k += 1
        if self.delay == 0:
            self._fold(t, workers)

    def _fold(self, t: int, workers: list[Worker]) -> None:
        while self.flight and self.flight[0][0] <= t:
            _, i, x, w = self.flight.pop(0)
            workers[i].x, self.w[i] = add(workers[i].x, x), self.w[i] + w

    def settle(self, workers: list[Worker]) -> None:
        while self.flight:
            self._fold(self.flight[0][0], workers)
        if not self.averaged:
            self.debias(workers)
        self.w = [1.0] * len(workers)

    def total_weight(self) -> float:
        return sum(self.w) + sum(w for _, _, _, w in self.flight)

    def consensus(self, workers: list[Worker]) -> Params:
        total = scale(0.0, workers[0].x)
        for i, worker in enumerate(workers):
            total = add(total, scale(self.w[i], worker.x))
        for _, _, x, _ in self.flight:
            total = add(total, x)
        return scale(1.0 / self.total_weight(), total)


@dataclass
class DPSGD(Mixing):
    """every step, after the local optimizer's: y = x ; x_i <- sum_j W_ij y_j
    Consensus: mean(x), which the messages in flight do not change."""

    graph: Graph = "ring"
    delay: int = 0
    pairing: Pairing | None = None

    def start(self, x0: Params, n: int) -> None:
        super().start(x0, n)
        self.k = 0

    def send(self, t: int, workers: list[Worker]) -> list[Params]:
        mixing = symmetric_matrix(self.graph, len(workers), self.k, self.pairing)
        self.k += 1
        received = []
        for row in mixing:
            total = scale(0.0, workers[0].x)
            for share, w in zip(row, workers, strict=True):
                total = add(total, scale(float(share), w.x))
            received.append(total)
        return received


sgp, d_psgd = SGP, DPSGD
