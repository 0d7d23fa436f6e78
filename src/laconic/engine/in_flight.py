"""What a parameter round has in flight, and what its messages tell of the workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from laconic.algorithms.exchange import Arrival
from laconic.engine.channel import Channel
from laconic.engine.overlap import Result
from laconic.links.comm_thread import Pending


class Difference(NamedTuple):
    """The ranks ``others`` differ from the rank ``root``, the first of the largest group."""

    root: int
    others: list[int]

    @classmethod
    def of(cls, digests: Sequence[int]) -> Difference | None:
        """The difference between the ranks' ``digests``; None if there is none. A rank with 0 has
        nothing to compare."""
        counts = Counter(value for value in digests if value)
        if len(counts) < 2:
            return None
        ((most, _),) = counts.most_common(1)
        others = [r for r, value in enumerate(digests) if value not in (0, most)]
        return cls(digests.index(most), others)


class InFlightBucket(NamedTuple):
    """One bucket's message in flight. ``sent``: y, where the update needs it."""

    channel: Channel
    sent: Tensor | None
    pending: Result[Arrival]


@dataclass
class InFlightRound:
    """One delayed round in flight, to be folded after step ``due``. ``executed``: how many were
    started before it. ``copies``: what was sent of tensors that come and go, by group and name.
    ``checked``: raises if a message was not finite. ``apart``: how workers differed before it.
    """

    due: int
    executed: int
    sent: Pending[list[InFlightBucket]]
    copies: Sequence[dict[str, Tensor]] = ()
    checked: Pending[None] = field(default_factory=lambda: Pending.of(None))
    apart: Pending[Difference | None] = field(default_factory=lambda: Pending.of(None))

    @property
    def buckets(self) -> list[InFlightBucket]:
        """Wait until it is known which buckets there are, and return them."""
        self.checked.wait()
        return self.sent.wait()
