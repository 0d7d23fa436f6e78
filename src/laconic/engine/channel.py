"""A channel: one bucket, the exchange for it, and the state that both keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from laconic.algorithms.exchange import Exchange
from laconic.algorithms.update import Clock, State, Update
from laconic.buckets import BUCKET_BYTES, Bucket, Segment, bucketize
from laconic.engine.offload import HostState
from laconic.links.link import Link


@dataclass
class Channel:
    """``bucket`` over ``exchange``, which is the round's for the shapes in the bucket.

    ``part``: the slice of the bucket that this rank carries for its worker: the ranks of one worker
    share its messages. ``region``: the slice within it whose ``owner`` state is kept here.
    ``state``: the update's; ``exchange_state``: the exchange's, for the ``part``. They may be in
    host memory (`HostState`), and are computed with inside `states`.
    """

    bucket: Bucket
    exchange: Exchange
    part: slice
    region: slice
    state: State = field(default_factory=dict)
    exchange_state: State = field(default_factory=dict)

    @property
    def owned(self) -> slice:
        """`region` within `part`, as exchanges count."""
        start = self.part.start
        return slice(self.region.start - start, self.region.stop - start)

    def home(self, state: State) -> torch.device:
        """Where the tensors of ``state``, one of the two, are between rounds."""
        return torch.device("cpu") if isinstance(state, HostState) else self.bucket.device

    @contextmanager
    def states(self) -> Iterator[tuple[State, State]]:
        """Both states on the bucket's device, where they may be changed."""
        with ExitStack() as stack:
            kept = self.state, self.exchange_state
            state, exchange_state = (
                stack.enter_context(s.on_device()) if isinstance(s, HostState) else s for s in kept
            )
            yield state, exchange_state


def open_channels(
    groups: Sequence[Sequence[Tensor | Segment]],
    update: Update,
    exchange: Exchange,
    link: Link,
    replica: Link,
    number: int = 0,
    *,
    elastic: bool = False,
) -> list[Channel]:
    """Cut ``groups`` of tensors into buckets, and give each a channel without state.

    ``link``: to the other workers; ``replica``: to the other ranks of this worker, which share its
    messages. ``number``: of the first bucket. ``elastic``: nothing may depend on the number of
    workers.
    """
    workers = 1 if elastic else link.size
    owners = exchange.owners(workers) or workers
    multiple = exchange.multiple(workers) * replica.size
    # each owner gets a slice from every other worker: with fewer owners buckets are smaller
    most_bytes = BUCKET_BYTES * owners // workers if owners < workers else None
    # buckets span groups, since a few biases by themselves would need as many messages as the rest
    spans = groups if update.uses_lr else [[t for group in groups for t in group]]
    found = []
    whole = exchange.whole or update.whole
    for bucket in bucketize(spans, multiple, most_bytes=most_bytes, whole=whole):
        bucket.number, number = number, number + 1
        each = bucket.length // replica.size
        part = slice(replica.rank * each, (replica.rank + 1) * each)
        within = exchange.region(link, each)
        region = slice(part.start + within.start, part.start + within.stop)
        found.append(Channel(bucket, exchange.shaped(bucket.shapes), part, region))
    return found


def by_tensor(
    channel: Channel, update: Update, clock: Clock
) -> Iterator[tuple[Tensor, State, Clock]]:
    """Each tensor of the bucket, with its part of the state that lives on all workers. Changes made
    in place are written back."""
    bucket = channel.bucket
    pieces = {
        name: bucket.split(t)
        for name, t in channel.state.items()
        if t.dim() and not is_owned(update, name, t)
    }
    rest = {name: t for name, t in channel.state.items() if name not in pieces}
    views = bucket.views()
    for index, segment in enumerate(bucket.segments):
        x = segment.view() if views is None else views[index]
        own = {name: split[index] for name, split in pieces.items()}
        only = replace(clock, tensors=clock.tensors.only(index)) if update.whole else clock
        yield x, rest | own, only
        if views is None:
            segment.write(x)


def is_owned(update: Update, name: str, tensor: Tensor) -> bool:
    """Whether this rank keeps the state tensor ``name`` of ``update`` only for its
    `Channel.region`, rather than for the whole bucket."""
    return tensor.dim() > 0 and update.slots.get(name, "owner") == "owner"
