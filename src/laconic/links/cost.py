"""The cost model: bytes and seconds of each collective. The throttled link, the ledger and all
predictions use it.

For ``B`` bytes on each of ``n`` ranks, what one rank sends, and how many messages follow one
another:

==============  ===============  ==========  ========================================
collective      bytes sent       messages    how it is carried
==============  ===============  ==========  ========================================
mean            2(n-1)/n * B     2           reduce_scatter, then all_gather
reduce_scatter  (n-1)/n * B      1           direct exchange, then a local sum
all_gather      (n-1)/n * B      1           direct exchange (B: the gathered bytes)
all_to_all      (n-1)/n * B      1           direct exchange (B: the rows for all ranks)
broadcast       (n-1)/n * B      ceil(lb n)  tree; the mean over the ranks
gather          (n-1) * B        1           direct exchange (B: one rank's bytes)
swap            p * B            1           to p peers (B: one message's bytes)
==============  ===============  ==========  ========================================

Seconds are ``messages * one_way + 8 * bytes / rate``: one_way in seconds, half of a round trip;
rate in bit/s of one host's network interface in one direction.

Where ranks share a connection, such as the uplink of a site, ``rate`` is that of the resource that
is busy for longest: the slowest interface, or what `Shared` leaves for each rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """What one rank sends for a collective: payload bytes, and messages that follow one another."""

    bytes: int
    messages: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.messages + other.messages)

    def seconds(self, rate: float, one_way: float) -> float:
        """Time on a link of ``rate`` bit/s on which a message takes ``one_way`` seconds."""
        return self.messages * one_way + 8 * self.bytes / rate


@dataclass(frozen=True)
class Shared:
    """A connection of ``rate`` bit/s that carries all that ``ranks`` ranks send to ``others``: from
    rank ``begin`` on, and from ``end`` on (None: all that are not among the ``ranks``)."""

    ranks: int
    others: int
    rate: float
    begin: int = 0
    end: int | None = None

    def sends(self, rank: int) -> bool:
        """Whether it carries what this ``rank`` sends."""
        return self.begin <= rank < self.begin + self.ranks

    def receives(self, rank: int) -> bool:
        """Whether it carries what this ``rank`` receives."""
        if self.end is None:
            return not self.sends(rank)
        return self.end <= rank < self.end + self.others

    def per_rank(self, n: int) -> float:
        """The bit/s that it leaves for each of ``n`` ranks if all send equally much to each other:
        ``rate * (n-1) / (ranks * others)``. Of the v bytes that a rank sends in a collective,
        v/(n-1) go to each other rank, so ``ranks * others * v / (n-1)`` pass the connection."""
        pairs = self.ranks * self.others
        return self.rate * (n - 1) / pairs if pairs else math.inf


def mean(size: int, n: int, even: bool = True) -> Cost:
    """All-reduce of ``size`` bytes; where n does not divide the elements (not ``even``), which is
    for numbers and not for models, every rank sends all to every other."""
    if not even:
        return gather(size, n)
    return Cost(2 * (n - 1) * size // n, 2 * min(n - 1, 1))


def all_to_all(size: int, n: int) -> Cost:
    """``size`` bytes of rows, one for each rank. Reduce-scatter and all-gather of ``size`` bytes
    send as much."""
    return Cost((n - 1) * size // n, min(n - 1, 1))


reduce_scatter = all_gather = all_to_all


def broadcast(size: int, n: int) -> Cost:
    """Broadcast of ``size`` bytes, as the mean over the ranks."""
    return Cost((n - 1) * size // n, math.ceil(math.log2(n)))


def swap(size: int, peers: int) -> Cost:
    """``size`` bytes to each of ``peers`` ranks."""
    return Cost(peers * size, min(peers, 1))


def gather(size: int, n: int) -> Cost:
    """Every rank's ``size`` bytes to every other."""
    return Cost((n - 1) * size, min(n - 1, 1))
