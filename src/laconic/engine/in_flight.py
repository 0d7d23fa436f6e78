"""What a parameter round shares with others, and what it has in flight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.algorithms.exchange import Arrival
from laconic.algorithms.scores import Scores
from laconic.buckets import Bucket, Scratch
from laconic.engine.channel import Channel
from laconic.engine.nonfinite import NonfiniteCheck
from laconic.engine.overlap import Result
from laconic.links.comm_thread import CommThread, Pending
from laconic.links.link import Link

X = -1
"""The number of memory for x next to messages."""


@dataclass
class RoundContext:
    """What all rounds of one recipe run share. ``replica``, ``shards``: the links inside this
    worker, where each rank has the whole model or a part of it. ``elastic``: workers come and go,
    so a message may be exchanged again among others. ``offload``: outer state is in host memory.
    ``scratch``: memory for the messages being sent, by number, and for `X` next to them."""

    model: nn.Module
    optimizer: Optimizer
    comm: CommThread
    replica: Link
    shards: Link
    nonfinite: NonfiniteCheck
    scores: Scores | None
    seed: int
    elastic: bool = False
    offload: bool = False
    scratch: dict[int, Scratch] = field(default_factory=lambda: defaultdict(Scratch))

    def memory(self, bucket: Bucket, number: int = 0) -> Tensor:
        """Memory for one flat copy of ``bucket``, until that of this ``number`` is asked for
        again."""
        return self.scratch[number].take(bucket.length, bucket.dtype, bucket.device)


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
