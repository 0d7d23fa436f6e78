"""Tensors as the rounds see them: which ones (selectors), cut into flat buckets.

The only code that knows sharded tensors (`torch.distributed.tensor.DTensor`): a round averages
each rank's local shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

BUCKET_BYTES = 25 * 2**20
"""Most bytes a bucket holds: large enough that bytes, not messages, take the time."""

Selector = Callable[[nn.Module, Optimizer], list[dict[str, Tensor]]]
"""Which tensors a round is about: named tensors by parameter group. Asked once by updates that
keep state and for `parameters`; before every round by the others, which then take the names that
all ranks have."""


def parameters(model: nn.Module, optimizer: Optimizer) -> list[dict[str, Tensor]]:
    """All parameters of the optimiser, in group order: the papers' ``x``."""
    return [
        {str(index): p for index, p in enumerate(group["params"])}
        for group in optimizer.param_groups
    ]


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> list[dict[str, Tensor]]:
    """The floating-point state that the optimiser keeps for its parameters (momenta); counters,
    which are alike on all workers, are left alone."""
    return [
        {
            f"{index}.{name}": value
            for index, p in enumerate(group["params"])
            for name, value in optimizer.state.get(p, {}).items()
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim()
        }
        for group in optimizer.param_groups
    ]


def module_buffers(model: nn.Module, optimizer: Optimizer | None = None) -> list[dict[str, Tensor]]:
    """The model's floating-point buffers (running statistics; integer counters are left alone)."""
    return [{name: b for name, b in model.named_buffers() if b.is_floating_point()}]


def is_sharded(tensor: Tensor) -> bool:
    """Whether each rank holds a shard of ``tensor`` (a DTensor, as FSDP makes of parameters)."""
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor  # slow to import, and seldom needed

    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of ``tensor``, without its history: itself, or a DTensor's local shard."""
    part = tensor.detach()
    return part.to_local() if is_sharded(tensor) else part  # type: ignore[attr-defined]


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and outer state: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def sums(tensors: Sequence[Tensor]) -> Tensor:
    """Two sums over all elements, by which one compares what tensors hold, in float64; a piece at a
    time, so that no copy of a large one is made."""
    total = torch.zeros(2, dtype=torch.float64)
    for t in tensors:
        real = torch.view_as_real(t.detach()) if t.is_complex() else t.detach()
        for piece in torch.split(real.reshape(-1), 2**16):
            both = piece.sum(dtype=torch.float64), piece.abs().sum(dtype=torch.float64)
            total += torch.stack(both).cpu()
    return total


def mean_in_rank_order(
    tensors: Iterable[Tensor], *, reuse: bool = False, out: Tensor | None = None
) -> Tensor:
    """``(x_0 + x_1 + ... ) / n``, added in this order, each as it comes, in float32 at least; with
    ``reuse`` the sum is in the room of ``x_0``, and the mean in ``out``, where dtypes allow."""
    rest = iter(tensors)
    first = next(rest)
    total = first.to(state_dtype(first.dtype), copy=not reuse)
    count = 1
    for x in rest:
        total += x
        count += 1
    fits = out is not None and out.dtype == total.dtype
    return torch.div(total, count, out=out if fits else total)


def _empty(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # kept and used again, whatever mode the caller is in
        return torch.empty(length, dtype=dtype, device=device)


@dataclass(frozen=True)
class Segment:
    """Elements ``start`` to ``stop`` of a tensor, in the tensor's own order."""

    tensor: Tensor
    start: int
    stop: int

    def view(self) -> Tensor:
        """The elements, flat, sharing storage where the tensor is contiguous."""
        return local(self.tensor).reshape(-1)[self.start : self.stop]

    def write(self, values: Tensor) -> None:
        """``values`` into the elements."""
        own = local(self.tensor)
        if own.is_contiguous():
            own.view(-1)[self.start : self.stop].copy_(values)
        else:
            assert (self.start, self.stop) == (0, own.numel()), "a strided tensor is never cut"
            own.copy_(values.view(own.shape))


class Bucket:
    """Stretches of tensors of one dtype and device (and of one parameter group, ``group``, where
    it matters), taken as one flat tensor of ``length`` elements; the last ``length - numel`` of
    them are padding, always zero."""

    def __init__(self, segments: Sequence[Segment], group: int, multiple: int) -> None:
        self.segments = tuple(segments)
        self.group = group
        self.dtype = local(segments[0].tensor).dtype
        self.device = local(segments[0].tensor).device
        self.sizes = [s.stop - s.start for s in segments]
        self.numel = sum(self.sizes)
        """Elements that are not padding."""
        self.length = -(-self.numel // multiple) * multiple
        self._views: list[Tensor] | None = None
        self._pointers: list[int] = []

    def empty(self) -> Tensor:
        """A flat tensor of the bucket's length, not filled."""
        return _empty(self.length, self.dtype, self.device)

    def views(self) -> list[Tensor] | None:
        """The stretches as flat views of the tensors' own storage; None if one is strided.

        Made once, and again after a user rebinds ``p.data``."""
        pointers = [s.tensor.data_ptr() for s in self.segments]
        if self._views is None or pointers != self._pointers:
            contiguous = all(local(s.tensor).is_contiguous() for s in self.segments)
            self._views = [s.view() for s in self.segments] if contiguous else None
            self._pointers = pointers
        return self._views

    def pack(self, out: Tensor) -> Tensor:
        """The tensors' values, one after the other, into ``out``; returns it."""
        torch.cat(self.views() or [s.view() for s in self.segments], out=out[: self.numel])
        out[self.numel :].zero_()
        return out

    def unpack(self, flat: Tensor) -> None:
        """``flat`` back into the tensors."""
        views = self.views()
        if views is not None:
            torch._foreach_copy_(views, list(self.split(flat)))
        else:
            for segment, values in zip(self.segments, self.split(flat), strict=True):
                segment.write(values)

    def split(self, flat: Tensor) -> Sequence[Tensor]:
        """``flat`` as one view for each segment."""
        return torch.split(flat[: self.numel], self.sizes)


def _segments(tensors: Iterable[Tensor], first: int, most: int) -> Iterable[list[Segment]]:
    """Tensors in order, cut into lists of segments of at most ``most`` elements each, the first
    of at most ``first``."""
    segments: list[Segment] = []
    room = first
    for tensor in tensors:
        own = local(tensor)
        size, start = own.numel(), 0
        while start < size:
            # a strided tensor has no flat view to write to, so it is never cut
            take = min(room, size - start) if own.is_contiguous() else size
            segments.append(Segment(tensor, start, start + take))
            start += take
            room -= take
            if room <= 0:
                yield segments
                segments, room = [], most
    if segments:
        yield segments


def bucketize(
    groups: Sequence[Sequence[Tensor]],
    multiple: int,
    *,
    first_group: int = 0,
    most_bytes: int | None = None,
    first_bytes: int | None = None,
) -> list[Bucket]:
    """Buckets over ``groups`` of tensors: each of one group, dtype and device, at most
    ``most_bytes`` long (the first of a kind at most ``first_bytes``), padded to a multiple of
    ``multiple`` elements. A tensor larger than a bucket is cut. The same tensors give the same
    buckets on every rank. ``first_group`` is the number of the first group."""
    buckets = []
    most_bytes = most_bytes or BUCKET_BYTES
    for index, group in enumerate(groups, first_group):
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in group:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for (dtype, _), tensors in kinds.items():
            most = max(most_bytes // dtype.itemsize, 1)
            first = max((first_bytes or most_bytes) // dtype.itemsize, 1)
            for segments in _segments(tensors, first, most):
                buckets.append(Bucket(segments, index, multiple))
    return buckets


class Scratch:
    """Reused room for one bucket at a time: a round holds one bucket, and the link a slice."""

    def __init__(self) -> None:
        self._room: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def take(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """``length`` elements; what was taken before is overwritten."""
        room = self._room.get((dtype, device))
        if room is None or room.numel() < length:
            room = _empty(length, dtype, device)
            self._room[dtype, device] = room
        return room[:length]
