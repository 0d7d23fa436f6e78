"""The buckets of a gradient round, with the state that its exchange keeps for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from laconic.algorithms.exchange import Exchange
from laconic.algorithms.update import State
from laconic.buckets import BUCKET_BYTES, Bucket, Segment, bucketize
from laconic.engine.channel import Channel
from laconic.links.link import Link
from laconic.tensors import is_sharded, local, state_dtype

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


def _by_segment(bucket: Bucket, state: State) -> Iterator[tuple[str, Segment, Tensor]]:
    """The views of each segment in the tensors of ``state`` that are as long as ``bucket``."""
    for name, whole in state.items():
        if whole.shape == (bucket.length,):
            for segment, values in zip(bucket.segments, bucket.split(whole), strict=True):
                yield name, segment, values


@dataclass
class GradientChannel(Channel):
    """A channel whose bucket holds gradients. ``samples``: the positions of `_SAMPLES` elements of
    each segment. ``memory``: for the gradients, while they are averaged. ``missing``: the ids
    of the parameters whose gradients have not arrived."""

    samples: Tensor = field(default_factory=lambda: torch.empty(0))
    memory: FlatGradients | None = None
    missing: set[int] = field(default_factory=set)

    @property
    def params(self) -> set[int]:
        """The ids of the parameters that it has gradients of."""
        return {id(segment.tensor) for segment in self.bucket.segments}

    @property
    def flat(self) -> FlatGradients:
        """The memory."""
        self.memory = self.memory or FlatGradients(self.bucket)
        return self.memory

    def nonzero(self) -> set[int]:
        """The ids of parameters whose gradients are not all zeros. Any nonzero sample proves that.
        Int4 rounds many to zero, so one sample is not enough."""
        found = self.flat.whole[self.samples].any(1).tolist()
        pieces = zip(self.bucket.segments, self.flat.pieces, found, strict=True)
        return {id(segment.tensor) for segment, piece, some in pieces if some or bool(piece.any())}


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
            whole=exchange.scope == "tensors",
        )
        self.all = [self._open(bucket, unsent or {}) for bucket in buckets]
        self.of_param: dict[int, list[GradientChannel]] = {}
        """By the id of a parameter."""
        for channel in self.all:
            for key in channel.params:
                self.of_param.setdefault(key, []).append(channel)
        far = self.all if link.overlapping is not None else []
        sizes = [(c.bucket.length, c.bucket.dtype.itemsize, link.size) for c in far]
        costs = [c.exchange.cost(*size) for c, size in zip(far, sizes, strict=True)]
        self.largest = max((c.bytes / max(c.messages, 1) for c in costs), default=0.0)
        """The most bytes that a bucket sends at once; 0 where buckets do not overlap."""

    def _open(self, bucket: Bucket, unsent: Mapping[tuple[str, int], Tensor]) -> GradientChannel:
        exchange = self._exchange.shaped(bucket.shapes)
        region = exchange.region(self._link, bucket.length)
        channel = GradientChannel(bucket, exchange, slice(0, bucket.length), region)
        channel.samples = _sample_positions(bucket)
        if not exchange.slots:
            return channel
        zeros = torch.zeros(bucket.length, dtype=state_dtype(bucket.dtype), device=bucket.device)
        channel.exchange_state = state = exchange.init(zeros, channel.owned)
        for name, segment, values in _by_segment(bucket, state):
            if (name, id(segment.tensor)) in unsent:
                whole = unsent[name, id(segment.tensor)]
                values.copy_(whole[segment.start : segment.stop])
        return channel

    def left_over(self) -> dict[tuple[str, int], Tensor]:
        """The exchange's state by name and parameter, for other buckets."""
        found: dict[tuple[str, int], Tensor] = {}
        for channel in self.all:
            state = channel.exchange_state
            if self._exchange.collect is not None:
                self._exchange.collect(state, channel.region, self._link.size)
            for name, segment, values in _by_segment(channel.bucket, state):
                key = name, id(segment.tensor)
                if key not in found:
                    found[key] = values.new_zeros(local(segment.tensor).numel())
                found[key][segment.start : segment.stop] = values
        return found

    def rescale(self, scale: float) -> None:
        """Bring gradients not sent yet to this scale."""
        if scale != self.scale:
            for channel in self.all:
                for name, values in channel.exchange_state.items():
                    if self._exchange.slots[name] != "everywhere":
                        values.mul_(scale / self.scale)
            self.scale = scale


_SAMPLES = 8
"""Elements of a gradient that are tested first for being nonzero."""


class FlatGradients:
    """Memory for a bucket's gradients, ``whole``, with a view of each segment, which has its
    tensor's shape if it is the whole tensor."""

    def __init__(self, bucket: Bucket) -> None:
        self.whole = bucket.empty()
        self.pieces = bucket.split(self.whole)
        self._segments = bucket.segments
        self._padding = self.whole[bucket.numel :]
        self._views = [
            piece.view(segment.tensor.shape) if _is_whole(segment) else piece
            for segment, piece in zip(bucket.segments, self.pieces, strict=True)
        ]

    def gather(self) -> None:
        """Copy the parameters' gradients to the views; None counts as zero."""
        views, gradients = [], []
        for segment, view in zip(self._segments, self._views, strict=True):
            gradient = segment.tensor.grad
            if gradient is None:
                view.zero_()
            elif gradient.is_sparse:
                raise ValueError("sparse gradients cannot be averaged: use sparse=False")
            else:
                views.append(view)
                gradients.append(_elements(gradient, segment))
        _copy(gradients, views)
        self._padding.zero_()

    def scatter(self, unused: set[int]) -> None:
        """Copy the views to the gradients, except those of ``unused`` parameters (ids)."""
        views, gradients = [], []
        for segment, view in zip(self._segments, self._views, strict=True):
            p = segment.tensor
            if id(p) in unused:
                continue
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            elif local(p).is_contiguous() and not local(p.grad).is_contiguous():
                # if p is cut its gradient must be too; other layouts stay, since fused optimizers
                # read p and its gradient in the same order
                p.grad = p.grad.contiguous()
            if local(p.grad).is_contiguous():
                views.append(view)
                gradients.append(_elements(p.grad, segment))
            else:
                Segment(p.grad, segment.start, segment.stop).write(view.view(-1))
        _copy(views, gradients)


def _copy(sources: list[Tensor], to: list[Tensor]) -> None:
    if to:  # torch raises for an empty list
        torch._foreach_copy_(to, sources)


def _is_whole(segment: Segment) -> bool:
    return not is_sharded(segment.tensor) and segment.stop - segment.start == segment.tensor.numel()


def _elements(gradient: Tensor, segment: Segment) -> Tensor:
    """The segment's elements of the gradient, in the shape of `FlatGradients`'s view."""
    if _is_whole(segment):
        return gradient.detach()
    return local(gradient).reshape(-1)[segment.start : segment.stop]


def _sample_positions(bucket: Bucket) -> Tensor:
    starts = [0, *accumulate(bucket.sizes[:-1])]
    rows = [
        [start + size * k // _SAMPLES for k in range(_SAMPLES)]
        for start, size in zip(starts, bucket.sizes, strict=True)
    ]
    return torch.tensor(rows, device=bucket.device)
