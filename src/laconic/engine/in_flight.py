"""What a parameter round has in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from laconic.algorithms.exchange import Arrival
from laconic.engine.channel import Channel
from laconic.engine.overlap import Result
from laconic.links.comm_thread import Pending


class InFlightBucket(NamedTuple):
    """One bucket's message in flight. ``sent``: y, where the update needs it."""

    channel: Channel
    sent: Tensor | None
    pending: Result[Arrival]


@dataclass
class InFlightRound:
    """One delayed round in flight, to be folded after step ``due``. ``executed``: how many were
    started before it. ``copies``: what was sent of tensors that come and go, by group and name.
    ``checked``: raises if a message was not finite."""

    due: int
    executed: int
    sent: Pending[list[InFlightBucket]]
    copies: Sequence[dict[str, Tensor]] = ()
    checked: Pending[None] = field(default_factory=lambda: Pending.of(None))

    @property
    def buckets(self) -> list[InFlightBucket]:
        """Wait until it is known which buckets there are, and return them."""
        self.checked.wait()
        return self.sent.wait()
