"""The buckets of a gradient round, with the state that its exchange keeps for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from laconic.algorithms.exchange import Exchange
from laconic.algorithms.update import State
from laconic.buckets import BUCKET_BYTES, Bucket, Segment, bucketize
from laconic.engine.channel import Channel
from laconic.engine.flat_gradients import sample_positions
from laconic.links.link import Link
from laconic.tensors import local, state_dtype

FIRST_BYTES = 2**20
"""The first bucket is small, so that sending starts early in the backward pass."""
CODED_BUCKETS, LEAST_BYTES = 3, 2**18
"""Encoded gradients have at most this many buckets, of a multiple of this many bytes. The last
bucket is sent when the backward pass ends, so it must be small. Each bucket has a fixed cost, which
a few bytes are not worth."""


def bucket_bytes(exchange: Exchange, total: int) -> tuple[int, int]:
    """Most bytes in the first bucket, and in the others, for ``total`` bytes of gradients."""
    if not exchange.slots:
        return FIRST_BYTES, BUCKET_BYTES
    least = max(-(-total // CODED_BUCKETS // LEAST_BYTES), 1)
    each = min(least * LEAST_BYTES, BUCKET_BYTES)
    return each, each


def bucket_sizes(exchange: Exchange, total: int, largest: int = 0) -> list[int]:
    """The approximate bytes of each bucket, for ``total`` bytes of gradients, of which the largest
    tensor has ``largest``."""
    first, each = bucket_bytes(exchange, total)
    if exchange.whole:
        first, each = max(first, largest), max(each, largest)
    whole, rest = divmod(max(total - first, 0), each)
    return [min(first, total), *[each] * whole, *([rest] if rest else [])]


def _by_segment(bucket: Bucket, state: State) -> Iterator[tuple[str, Segment, Tensor]]:
    """The views of each segment in the tensors of ``state`` that are as long as ``bucket``."""
    for name, whole in state.items():
        if whole.shape == (bucket.length,):
            for segment, values in zip(bucket.segments, bucket.split(whole), strict=True):
                yield name, segment, values


class GradientChannels:
    """The channels of ``exchange`` over ``link`` for the gradients of ``params``, in the reverse
    order of these. ``elastic``: nothing may depend on the number of workers. ``scale``: the loss
    scale of the gradients not sent yet, which ``unsent`` has, as `left_over` returns them."""

    def __init__(
        self,
        exchange: Exchange,
        link: Link,
        elastic: bool,
        params: Sequence[Tensor] = (),
        unsent: Mapping[tuple[str, int], Tensor] | None = None,
        scale: float = 1.0,
    ) -> None:
        self._exchange, self._link, self.scale = exchange, link, scale
        total = sum(local(p).numel() * p.element_size() for p in params)
        first, each = bucket_bytes(exchange, total)
        buckets = bucketize(
            [params[::-1]],
            exchange.multiple(1 if elastic else link.size),
            most_bytes=each,
            first_bytes=first,
            whole=exchange.whole,
        )
        self.all = [self._open(bucket, unsent or {}) for bucket in buckets]
        self.samples = [sample_positions(bucket) for bucket in buckets]
        members = [{id(s.tensor) for s in bucket.segments} for bucket in buckets]
        self.counts = [len(m) for m in members]
        """By bucket, of how many parameters it has gradients."""
        self.buckets_of: dict[int, list[int]] = {}
        """By the id of a parameter."""
        for index, member in enumerate(members):
            for key in member:
                self.buckets_of.setdefault(key, []).append(index)
        self.largest = 0.0
        """The most bytes that a bucket sends at once; 0 where buckets do not overlap."""
        if link.overlapping is not None:
            self.largest = max(map(self._message_bytes, self.all), default=0.0)

    def _open(self, bucket: Bucket, unsent: Mapping[tuple[str, int], Tensor]) -> Channel:
        exchange = self._exchange.shaped(bucket.shapes)
        region = exchange.region(self._link, bucket.length)
        channel = Channel(bucket, exchange, slice(0, bucket.length), region)
        if not exchange.slots:
            return channel
        zeros = torch.zeros(bucket.length, dtype=state_dtype(bucket.dtype), device=bucket.device)
        channel.exchange_state = state = exchange.init(zeros, channel.owned)
        for name, segment, values in _by_segment(bucket, state):
            if (name, id(segment.tensor)) in unsent:
                whole = unsent[name, id(segment.tensor)]
                values.copy_(whole[segment.start : segment.stop] * self._scale_of(name))
        return channel

    def _message_bytes(self, channel: Channel) -> float:
        """What this rank sends at once for a bucket."""
        bucket = channel.bucket
        size = bucket.length, bucket.dtype.itemsize, self._link.size
        cost = channel.exchange.cost(*size)
        return cost.bytes / max(cost.messages, 1)

    def left_over(self) -> dict[tuple[str, int], Tensor]:
        """The exchange's state by name and parameter, for the round after this one, without the
        GradScaler's factor."""
        found: dict[tuple[str, int], Tensor] = {}
        for channel in self.all:
            state = channel.exchange_state
            if self._exchange.collect is not None:
                self._exchange.collect(state, channel.region, self._link.size)
            for name, segment, values in _by_segment(channel.bucket, state):
                key = name, id(segment.tensor)
                if key not in found:
                    found[key] = values.new_zeros(local(segment.tensor).numel())
                found[key][segment.start : segment.stop] = values / self._scale_of(name)
        return found

    def rescale(self, scale: float) -> None:
        """Bring gradients not sent yet to this scale."""
        if scale != self.scale:
            for channel in self.all:
                for name, values in channel.exchange_state.items():
                    if self._is_gradient(name):
                        values.mul_(scale / self.scale)
            self.scale = scale

    def _scale_of(self, name: str) -> float:
        """The loss scale of this state tensor: 1 if it is no gradient."""
        return self.scale if self._is_gradient(name) else 1.0

    def _is_gradient(self, name: str) -> bool:
        return self._exchange.slots[name] != "everywhere"
