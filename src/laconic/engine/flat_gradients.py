"""Flat memory for the gradients of a bucket."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from laconic.buckets import Bucket, Segment
from laconic.tensors import is_sharded, local

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


def sample_positions(bucket: Bucket) -> Tensor:
    """The positions of `_SAMPLES` elements of each segment. Any nonzero one proves that there is a
    gradient. Int4 rounds many to zero, so one sample is not enough."""
    starts = [0, *accumulate(bucket.sizes[:-1])]
    rows = [
        [start + size * k // _SAMPLES for k in range(_SAMPLES)]
        for start, size in zip(starts, bucket.sizes, strict=True)
    ]
    return torch.tensor(rows, device=bucket.device)


def nonzero(bucket: Bucket, flat: FlatGradients, samples: Tensor) -> set[int]:
    """The ids of parameters whose gradients are not all zeros. ``samples``: `sample_positions`."""
    found = flat.whole[samples].any(1).tolist()
    pieces = zip(bucket.segments, flat.pieces, found, strict=True)
    return {id(segment.tensor) for segment, piece, some in pieces if some or bool(piece.any())}
