"""Who gossips with whom: pure functions of (rank, n, k), k counting the gossips executed.

The graphs of SGP (Assran et al., ICML 2019, arXiv 1811.10792, appendix A) and their relatives; p is
the number of peers, and all peers are taken mod n:

=========================  ======================================================================
``exponential``            +j*(p+1)^i, j = 1..p, with i = k mod (floor(log_{p+1}(n-1)) + 1)
``directed_exponential``   the list +1, -1, +2, -2, +4, -4, ..., to 2^floor(log2(n-1))
``bipartite_exponential``  the list +1, -1, +3, -3, +5, -5, +9, -9, ...: 1 + 2^i, i as above
``directed_linear``        the list +1, -1, +3, -3, +5, -5, ...: odd distances below n
``bipartite_linear``       the list +1, -1, +2, -2, ...: all distances below n
``ring``                   +1; with two peers +1 and -1
``complete``               all other ranks, whatever p
``random``                 disjoint pairs, drawn anew for every k (an odd rank out sits still)
=========================  ======================================================================

From a list, gossip k takes the p entries that follow those of gossip k-1, going round. In bipartite
graphs odd and even ranks talk to each other only: peers of one's own parity are left out. Oneself
and repeats are dropped everywhere. But for bipartite graphs and random pairs with n odd, all ranks
take alike hops: each gossip is then doubly stochastic, and all push weights are equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from laconic.errors import check_choice, check_int

GRAPHS = (
    "exponential",
    "directed_exponential",
    "bipartite_exponential",
    "directed_linear",
    "bipartite_linear",
    "ring",
    "complete",
    "random",
)


@dataclass(frozen=True)
class Graph:
    """A sequence of graphs by name; ``peers`` is p. ``both``: every edge is used both ways, so
    that neighbours exchange (D-PSGD) and do not push (SGP)."""

    name: str = "exponential"
    peers: int = 1
    both: bool = False

    def __post_init__(self) -> None:
        check_choice("graph", self.name, GRAPHS)
        check_int("peers", self.peers, 1)

    def out_peers(self, rank: int, n: int, k: int, seed: int = 0) -> tuple[int, ...]:
        """The ranks to which ``rank`` of ``n`` sends in gossip ``k``, ascending."""
        out = set(self._targets(rank, n, k, seed))
        if self.both:
            out |= {r for r in range(n) if rank in self._targets(r, n, k, seed)}
        return tuple(sorted(out - {rank}))

    def in_peers(self, rank: int, n: int, k: int, seed: int = 0) -> tuple[int, ...]:
        """The ranks that send to ``rank`` in gossip ``k``, ascending."""
        return tuple(r for r in range(n) if rank in self.out_peers(r, n, k, seed))

    def share(self, rank: int, source: int, n: int, k: int, seed: int = 0) -> float:
        """The factor on what ``rank`` gets from ``source``: 1, or, where neighbours exchange, the
        Metropolis weight ``1/(1 + max(degree of either))``, symmetric and doubly stochastic."""
        if not self.both:
            return 1.0
        return 1.0 / (1 + max(len(self.out_peers(r, n, k, seed)) for r in (rank, source)))

    def _targets(self, rank: int, n: int, k: int, seed: int) -> list[int]:
        if n == 1:
            return []
        if self.name == "complete":
            return list(range(n))
        if self.name == "random":
            return [_partner(rank, n, k, seed)]
        if self.name == "ring":
            return [(rank + hop) % n for hop in (1, -1)[: self.peers]]
        if self.name == "exponential":
            base = self.peers + 1
            scale = base ** (k % (_log(base, n - 1) + 1))
            return [(rank + j * scale) % n for j in range(1, base)]
        hops = [sign * d for d in self._distances(n) for sign in (1, -1)]
        listed = dict.fromkeys((rank + hop) % n for hop in hops if hop % n)
        if self.name.startswith("bipartite"):
            listed = {r: None for r in listed if (r - rank) % 2}
        book = list(listed)
        return [book[(k * self.peers + j) % len(book)] for j in range(self.peers)]

    def _distances(self, n: int) -> list[int]:
        powers = [2**i for i in range(_log(2, n - 1) + 1)]
        if self.name == "directed_exponential":
            return powers
        if self.name == "bipartite_exponential":
            return [1, *(1 + power for power in powers[1:])]
        return list(range(1, n, 2 if self.name == "directed_linear" else 1))


def _log(base: int, x: int) -> int:
    """floor(log_base(x)), exactly."""
    power = 0
    while base ** (power + 1) <= x:
        power += 1
    return power


def _partner(rank: int, n: int, k: int, seed: int) -> int:
    """The other rank of this one's pair; itself where there is none."""

    def draw(r: int) -> bytes:
        return blake2b(f"{seed},{n},{k},{r}".encode(), digest_size=16).digest()

    order = sorted(range(n), key=draw)
    place = order.index(rank) ^ 1
    return order[place] if place < n else rank
