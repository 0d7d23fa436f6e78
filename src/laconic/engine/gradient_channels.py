"""The buckets of a gradient round, with the state that its exchange keeps for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from laconic.algorithms.exchange import Exchange
from laconic.algorithms.update import State
from laconic.buckets import BUCKET_BYTES, Bucket, Segment, bucketize
from laconic.device import use_on_current_stream
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
                yield name, segment, values.view(-1)


_SAMPLES = 8
"""Elements of a gradient that are tested first for being nonzero."""


@dataclass
class GradientChannel(Channel):
    """A channel whose bucket holds gradients. ``missing``: the ids of the parameters whose
    gradients have not arrived. ``memory``: for the gradients, while they are averaged; ``pieces``:
    each segment with its part of it, in the tensor's shape if it is a whole tensor."""

    missing: set[int] = field(default_factory=set)
    memory: Tensor | None = None
    pieces: list[tuple[Segment, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        sizes = torch.tensor(self.bucket.sizes)[:, None]
        within = sizes * torch.arange(_SAMPLES) // _SAMPLES
        self.samples = (sizes.cumsum(0) - sizes + within).to(self.bucket.device)
        """The positions of `_SAMPLES` elements of each segment."""

    @property
    def params(self) -> set[int]:
        """The ids of the parameters that it has gradients of."""
        return {id(segment.tensor) for segment in self.bucket.segments}

    @property
    def flat(self) -> Tensor:
        """The gradients, one after the other."""
        if self.memory is None:
            self.memory = self.bucket.empty()
            self.pieces = [
                (segment, piece.view(segment.tensor.shape) if _is_whole(segment) else piece)
                for segment, piece in zip(
                    self.bucket.segments, self.bucket.split(self.memory), strict=True
                )
            ]
        return self.memory

    def free(self) -> None:
        """Free the memory until it is needed again."""
        self.memory, self.pieces = None, []

    def gather(self) -> None:
        """Copy the parameters' gradients to `flat`; None counts as zero."""
        self.flat[self.bucket.numel :].zero_()
        pieces, gradients = [], []
        for segment, piece in self.pieces:
            gradient = segment.tensor.grad
            if gradient is None:
                piece.zero_()
            elif gradient.is_sparse:
                raise ValueError("sparse gradients cannot be averaged: use sparse=False")
            else:
                pieces.append(piece)
                gradients.append(_elements(gradient, segment))
        _copy(gradients, pieces)

    def scatter(self, unused: set[int]) -> None:
        """Copy `flat` to the gradients, except those of ``unused`` parameters (ids)."""
        use_on_current_stream(self.flat)  # made on that of a gradient, and perhaps freed soon
        pieces, gradients = [], []
        for segment, piece in self.pieces:
            p = segment.tensor
            if id(p) in unused:
                continue
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            flat = local(p).is_contiguous() or not _is_whole(segment)
            if flat and not local(p.grad).is_contiguous():
                # if p is cut its gradient must be too; other layouts stay, since fused optimizers
                # read p and its gradient in the same order
                p.grad = p.grad.contiguous()
            pieces.append(piece)
            gradients.append(_elements(p.grad, segment))
        _copy(pieces, gradients)


@dataclass
class GradientChannels:
    """The channels of ``exchange`` over ``link`` for the gradients of ``params``, in the reverse
    order of these. ``elastic``: nothing may depend on the number of workers. ``scale``: the loss
    scale of the gradients not sent yet, which ``unsent`` has, as `left_over` returns them."""

    exchange: Exchange
    link: Link
    elastic: bool
    params: Sequence[Tensor] = ()
    unsent: Mapping[tuple[str, int], Tensor] = field(default_factory=dict)
    scale: float = 1.0

    def __post_init__(self) -> None:
        total = sum(local(p).numel() * p.element_size() for p in self.params)
        first, each = bucket_bytes(self.exchange, total)
        buckets = bucketize(
            [self.params[::-1]],
            self.exchange.multiple(1 if self.elastic else self.link.size),
            most_bytes=each,
            first_bytes=first,
            whole=self.exchange.scope == "tensors",
        )
        self.all = [self._open(bucket) for bucket in buckets]
        self.unsent = {}
        self.sizes = [(p.numel(), p.dtype) for p in self.params]
        self.of_param: dict[int, list[GradientChannel]] = {}
        """By the id of a parameter."""
        for channel in self.all:
            for key in channel.params:
                self.of_param.setdefault(key, []).append(channel)
        far = self.all if self.link.overlapping is not None else []
        sizes = [(c.bucket.length, c.bucket.dtype.itemsize, self.link.size) for c in far]
        costs = [c.exchange.cost(*size) for c, size in zip(far, sizes, strict=True)]
        self.largest = max((c.bytes / max(c.messages, 1) for c in costs), default=0.0)
        """The most bytes that a bucket sends at once; 0 where buckets do not overlap."""

    def _open(self, bucket: Bucket) -> GradientChannel:
        exchange = self.exchange.shaped(bucket.shapes)
        region = exchange.region(self.link, bucket.length)
        channel = GradientChannel(bucket, exchange, slice(0, bucket.length), region)
        if not exchange.slots:
            return channel
        zeros = torch.zeros(bucket.length, dtype=state_dtype(bucket.dtype), device=bucket.device)
        channel.exchange_state = state = exchange.init(zeros, channel.owned)
        for name, segment, values in _by_segment(bucket, state):
            whole = self.unsent.get((name, id(segment.tensor)))
            if whole is not None:
                values.copy_(whole[segment.start : segment.stop])
        return channel

    def left_over(self) -> dict[tuple[str, int], Tensor]:
        """The exchange's state by name and parameter, for other buckets."""
        found: dict[tuple[str, int], Tensor] = {}
        for channel in self.all:
            state = channel.exchange_state
            self.exchange.collect(state, channel.region, self.link.size)
            for name, segment, values in _by_segment(channel.bucket, state):
                key = name, id(segment.tensor)
                if key not in found:
                    found[key] = values.new_zeros(local(segment.tensor).numel())
                found[key][segment.start : segment.stop] = values
        return found

    def nonzero(self) -> set[int]:
        """The ids of parameters whose gradients are not all zeros. Any nonzero sample proves that.
        Int4 rounds many to zero, so one sample is not enough. Waits for the device once, and again
        if the samples of a gradient are zeros."""
        pieces = [piece for channel in self.all for piece in channel.pieces]
        sampled = torch.cat([c.flat[c.samples].any(1) for c in self.all]).tolist()
        found = {id(s.tensor) for (s, _), some in zip(pieces, sampled, strict=True) if some}
        rest = [(s, piece) for s, piece in pieces if id(s.tensor) not in found]
        if rest:
            whole = torch.stack([piece.any() for _, piece in rest]).tolist()
            found |= {id(s.tensor) for (s, _), some in zip(rest, whole, strict=True) if some}
        return found

    def rescale(self, scale: float) -> None:
        """Bring gradients not sent yet to this scale."""
        if scale != self.scale:
            for channel in self.all:
                for name, values in channel.exchange_state.items():
                    if self.exchange.slots[name] != "everywhere":
                        values.mul_(scale / self.scale)
            self.scale = scale


def _copy(sources: list[Tensor], to: list[Tensor]) -> None:
    if to:  # torch raises for an empty list
        torch._foreach_copy_(to, sources)


def _is_whole(segment: Segment) -> bool:
    return not is_sharded(segment.tensor) and segment.stop - segment.start == segment.tensor.numel()


def _elements(gradient: Tensor, segment: Segment) -> Tensor:
    """The segment's elements of the gradient, in the shape of its piece."""
    if _is_whole(segment):
        return gradient.detach()
    return local(gradient).reshape(-1)[segment.start : segment.stop]
