"""Flat buckets, which cover a round's tensors.

Of sharded tensors, a bucket has this rank's local shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.tensors import is_sharded, local, writing

BUCKET_BYTES = 25 * 2**20
"""Most bytes in a bucket: enough that a round's time depends on its bytes, not its messages."""
RESHAPED = (
    "a parameter has another shape, dtype or device than when laconic.attach was called (its .data "
    "was replaced): before such a change call sync.finish() and sync.detach(), and laconic.attach "
    "after it"
)


@dataclass(frozen=True)
class Segment:
    """Elements ``start`` to ``stop`` of a tensor, in the tensor's own order."""

    tensor: Tensor
    start: int
    stop: int


def _data_ptr(tensor: Tensor) -> int:
    """Where this rank's elements of ``tensor`` are. A DTensor's own is 0 in some versions."""
    return (local(tensor) if is_sharded(tensor) else tensor).data_ptr()


def _empty(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # it is used again outside the caller's inference mode
        return torch.empty(length, dtype=dtype, device=device)


class Bucket:
    """Segments of tensors with one dtype and device (and one parameter group, ``group``, if it
    matters) as one flat tensor of ``length`` elements. The last ``length - numel`` elements are
    padding, always zero."""

    def __init__(self, segments: Sequence[Segment], group: int, multiple: int) -> None:
        self.segments = tuple(segments)
        self.group = group
        self.dtype = local(segments[0].tensor).dtype
        self.device = local(segments[0].tensor).device
        self.shapes = [local(s.tensor).shape for s in segments]
        self.sizes = [s.stop - s.start for s in segments]
        self.numel = sum(self.sizes)
        """Elements that are not padding."""
        self.length = -(-max(self.numel, 1) // multiple) * multiple
        self._views: list[Tensor] = []
        self._pointers: list[int] = []
        self._strided = False
        """Whether a tensor is strided, so that its view has its shape."""

    def empty(self) -> Tensor:
        """An uninitialized flat tensor of the bucket's length."""
        return _empty(self.length, self.dtype, self.device)

    def views(self) -> list[Tensor]:
        """The segments as views of the tensors' storage: flat, or in the shape of a strided tensor,
        which is never cut. Made again after a user rebinds ``p.data``, or FSDP pads a shard."""
        pointers = [_data_ptr(s.tensor) for s in self.segments]
        if pointers != self._pointers:
            now = [local(s.tensor) for s in self.segments]
            kinds = {(t.dtype, t.device) for t in now}
            if [t.shape for t in now] != self.shapes or kinds != {(self.dtype, self.device)}:
                raise ValueError(RESHAPED)
            self._views = [
                t.view(-1)[s.start : s.stop] if t.is_contiguous() else t
                for s, t in zip(self.segments, now, strict=True)
            ]
            self._pointers, self._strided = pointers, not all(t.is_contiguous() for t in now)
        return self._views

    def pack(self, out: Tensor) -> Tensor:
        """Copy the segments' values, one after the other, to ``out``, and return it."""
        views = self.views()
        flat = [view.reshape(-1) for view in views] if self._strided else views
        torch.cat(flat, out=out[: self.numel])
        out[self.numel :].zero_()
        return out

    def unpack(self, flat: Tensor) -> None:
        """Copy ``flat`` to the segments."""
        views = self.views()
        with writing(views):
            torch._foreach_copy_(views, list(self.split(flat)))

    def split(self, flat: Tensor) -> Sequence[Tensor]:
        """``flat`` as one view per segment, in the shapes of `views`."""
        pieces = torch.split(flat[: self.numel], self.sizes)
        if self._strided:
            return [p.view(v.shape) for p, v in zip(pieces, self._views, strict=True)]
        return pieces


def _segments(
    pieces: Iterable[Segment], first: int, most: int, whole: bool
) -> Iterable[list[Segment]]:
    """Cut the pieces, in order, into lists of segments with at most ``most`` elements each; the
    first has at most ``first``. With ``whole`` no tensor is cut, and a list may exceed its limit by
    a part of its last tensor."""
    segments: list[Segment] = []
    space = first
    for piece in pieces:
        start, stop = piece.start, piece.stop
        sharded = whole and is_sharded(piece.tensor)
        # a strided tensor has no flat view to write to
        cut = local(piece.tensor).is_contiguous() and not whole
        while start < stop or sharded:
            end = min(start + space, stop) if cut else stop
            segments.append(Segment(piece.tensor, start, end))
            if sharded:  # a worker's ranks have the same buckets, also where a shard is empty
                space -= -(-piece.tensor.numel() // piece.tensor.device_mesh.size())  # type: ignore[attr-defined]
            else:
                space -= end - start
            start, sharded = end, False
            if space <= 0:
                yield segments
                segments, space = [], most
    if segments:
        yield segments


def bucketize(
    groups: Sequence[Sequence[Tensor | Segment]],
    multiple: int,
    *,
    most_bytes: int | None = None,
    first_bytes: int | None = None,
    whole: bool = False,
) -> list[Bucket]:
    """Make buckets of ``groups`` of tensors or segments. Each has one group, dtype and device, and
    at most ``most_bytes`` (the first of each dtype and device: ``first_bytes``). It is padded to a
    multiple of ``multiple`` elements. A tensor larger than a bucket is cut, unless ``whole``. The
    same tensors give the same buckets on every rank."""
    buckets = []
    most_bytes = most_bytes or BUCKET_BYTES
    for index, group in enumerate(groups):
        kinds: dict[tuple[torch.dtype, torch.device], list[Segment]] = {}
        for t in group:
            piece = t if isinstance(t, Segment) else Segment(t, 0, local(t).numel())
            kinds.setdefault((piece.tensor.dtype, piece.tensor.device), []).append(piece)
        for (dtype, _), pieces in kinds.items():
            most = max(most_bytes // dtype.itemsize, 1)
            first = max((first_bytes or most_bytes) // dtype.itemsize, 1)
            for segments in _segments(pieces, first, most, whole):
                buckets.append(Bucket(segments, index, multiple))
    return buckets


class Scratch:
    """Reused memory for one tensor at a time: a round's bucket, or a link's slice. The allocators
    of accelerators reuse memory by themselves, and between rounds it is free for other things."""

    def __init__(self) -> None:
        self._memory: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def take(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of ``length`` elements in the memory of the one before."""
        if device.type != "cpu":
            return _empty(length, dtype, device)
        memory = self._memory.get((dtype, device))
        if memory is None or memory.numel() < length:
            memory = self._memory[dtype, device] = _empty(length, dtype, device)
        return memory[:length]
