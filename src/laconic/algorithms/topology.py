"""Gossip graphs: pure functions of (rank, n, k), where k counts the gossips executed.

These are the graphs of SGP (Assran et al., ICML 2019, arXiv 1811.10792, appendix A) and their
relatives. p is the number of peers. All peers are taken mod n:

=========================  ======================================================================
``exponential``            +j*(p+1)^i, j = 1..p, with i = k mod (floor(log_{p+1}(n-1)) + 1)
``directed_exponential``   the list +1, -1, +2, -2, +4, -4, ..., to 2^floor(log2(n-1))
``bipartite_exponential``  the list +1, -1, +3, -3, +5, -5, +9, -9, ...: 1 + 2^i, i as above
``directed_linear``        the list +1, -1, +3, -3, +5, -5, ...: odd distances below n
``bipartite_linear``       the list +1, -1, +2, -2, ...: all distances below n
``ring``                   +1; with two peers +1 and -1
``complete``               all other ranks, whatever p
``random``                 disjoint random pairs for every k (with n odd, one rank has no peer)
=========================  ======================================================================

Where the table gives a list, gossip k uses the p entries that follow those of gossip k-1, and
starts over at the end of the list. In bipartite graphs, odd and even ranks communicate only with
each other: peers of the same parity are left out. All graphs drop a rank's own entry and
duplicates. Except in bipartite graphs, and in random pairs with n odd, all ranks use the same hops.
Each gossip is then doubly stochastic, and all push weights are equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

from laconic.errors import check_choice, check_int

_LISTS: dict[str, Callable[[int, int], Sequence[int]]] = {
    "exponential": lambda p, n: [j * d for d in _powers(p + 1, n) for j in range(1, p + 1)],
    "directed_exponential": lambda p, n: _signed(_powers(2, n)),
    "bipartite_exponential": lambda p, n: _signed([1, *(1 + d for d in _powers(2, n)[1:])]),
    "directed_linear": lambda p, n: _signed(range(1, n, 2)),
    "bipartite_linear": lambda p, n: _signed(range(1, n)),
    "ring": lambda p, n: (1, -1)[:p],
    "complete": lambda p, n: range(1, n),
}
"""The lists of the table above, for p peers and n ranks. That of ``exponential`` has one i after
the other."""
GRAPHS = (*_LISTS, "random")


@dataclass(frozen=True)
class Graph:
    """A sequence of graphs by name. ``peers`` is p.

    ``both``: use every edge in both directions, so that neighbors exchange messages (D-PSGD)
    instead of pushing them (SGP). ``repeats``: a list keeps its duplicate entries (with 4 ranks, +3
    is -1), as in fairscale.
    """

    name: str = "exponential"
    peers: int = 1
    both: bool = False
    repeats: bool = False

    def __post_init__(self) -> None:
        check_choice("graph", self.name, GRAPHS)
        check_int("peers", self.peers, 1)

    def out_peers(self, rank: int, n: int, k: int, seed: int = 0) -> tuple[int, ...]:
        """Return the ranks to which ``rank`` of ``n`` sends in gossip ``k``, ascending."""
        return _edges(self, n, k, seed)[rank]

    def in_peers(self, rank: int, n: int, k: int, seed: int = 0) -> tuple[int, ...]:
        """Return the ranks that send to ``rank`` in gossip ``k``, ascending."""
        return tuple(r for r, out in enumerate(_edges(self, n, k, seed)) if rank in out)

    def cycle(self, n: int) -> int | None:
        """Return after how many gossips the graphs between ``n`` ranks repeat. None: never."""
        if self.name == "random":
            return None
        length = len(_listed_peers(self, 0, n))
        return 1 if self.name == "complete" or n == 1 else length // math.gcd(length, self.peers)

    def share(self, rank: int, source: int, n: int, k: int, seed: int = 0) -> float:
        """Return the Metropolis weight of ``source`` at ``rank``: ``1/(1 + max(both degrees))``.

        Each rank gives itself the rest. The weights are then symmetric and doubly stochastic if
        edges are used in both directions.
        """
        edges = _edges(self, n, k, seed)
        return 1.0 / (1 + max(len(edges[rank]), len(edges[source])))

    def _targets(self, rank: int, n: int, k: int, seed: int) -> Sequence[int]:
        if self.name == "random":
            return [_partners(n, k, seed)[rank]]
        book = _listed_peers(self, rank, n)
        if self.name == "complete" or not book:
            return book
        return [book[(k * self.peers + j) % len(book)] for j in range(self.peers)]


@lru_cache(maxsize=256)
def _edges(graph: Graph, n: int, k: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """Return the out-peers of every rank.

    A rank needs the others' to know who sends to it. The workers of one process share the result.
    """
    out = [set(graph._targets(r, n, k, seed)) - {r} for r in range(n)]
    if graph.both:
        out = [own | {r for r in range(n) if rank in out[r]} for rank, own in enumerate(out)]
    return tuple(tuple(sorted(own)) for own in out)


@lru_cache(maxsize=4096)
def _listed_peers(graph: Graph, rank: int, n: int) -> tuple[int, ...]:
    """Return the ranks to which ``rank`` sends in one gossip after the other."""
    listed = [(rank + hop) % n for hop in _LISTS[graph.name](graph.peers, n)]
    if graph.name != "exponential" and not graph.repeats:
        listed = list(dict.fromkeys(r for r in listed if r != rank))
    return tuple(r for r in listed if not graph.name.startswith("bipartite") or (r - rank) % 2)


def _signed(distances: Sequence[int]) -> list[int]:
    return [sign * d for d in distances for sign in (1, -1)]


def _powers(base: int, n: int) -> list[int]:
    """Return the powers of ``base`` below ``n``, and 1."""
    powers = [1]
    while powers[-1] * base < n:
        powers.append(powers[-1] * base)
    return powers


@lru_cache(maxsize=16)
def _partners(n: int, k: int, seed: int) -> tuple[int, ...]:
    """Return the peer of every rank. A rank without a peer is its own."""

    def draw(r: int) -> bytes:
        return blake2b(f"{seed},{n},{k},{r}".encode(), digest_size=16).digest()

    order = sorted(range(n), key=draw)
    partners = list(range(n))
    for a, b in zip(order[::2], order[1::2], strict=False):
        partners[a], partners[b] = b, a
    return tuple(partners)
