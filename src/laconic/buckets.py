"""Tensors as the rounds see them: which ones (selectors), cut into flat buckets.

The only code that knows sharded tensors (`torch.distributed.tensor.DTensor`): a round averages
each rank's local shard.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

BUCKET_BYTES = 25 * 2**20
"""Most bytes a bucket holds: large enough that bytes, not messages, take the time."""


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


@dataclass(frozen=True)
class Fragment:
    """The fragment of number ``index``, from 0, of ``count``: the optimiser's parameters in runs of
    about equal bytes, in the order of their parameter group, which for most models is that of the
    forward pass. Each group is cut on its own, so that one added later moves nothing.

    ``by`` ``"bytes"``: runs of tensors; one larger than a fragment's share of its group is cut into
    equal stretches that are not, unless it is strided. A fragment may stay empty.
    ``"layers"``: runs of whole layers, which are the tensors whose names are alike up to the first
    number (``blocks.3.``), or, where there is none, up to the first dot. What has s bytes and
    begins at byte b of a group of B is in fragment ``floor(count * (b + s/2) / B)``.
    """

    index: int
    count: int
    by: str = "bytes"

    def segments(self, model: nn.Module, optimizer: Optimizer) -> list[list[Segment]]:
        """Its stretches of the parameters, by parameter group."""
        names = {id(p): name for name, p in model.named_parameters()}
        return [
            self._of([(names.get(id(p), str(index)), p) for index, p in enumerate(group["params"])])
            for group in optimizer.param_groups
        ]

    def _of(self, group: Sequence[tuple[str, Tensor]]) -> list[Segment]:
        total = sum(_bytes(p) for _, p in group)
        units: list[list[Segment]] = []
        layer: str | None = None
        for name, p in group:
            if not local(p).numel():
                continue
            before, layer = layer, _layer(name) if self.by == "layers" else None
            if layer is not None and layer == before:
                units[-1] += self._pieces(p, total)
            else:
                units += [[piece] for piece in self._pieces(p, total)]
        found, start = [], 0
        for unit in units:
            size = sum((s.stop - s.start) * s.tensor.element_size() for s in unit)
            if self.count * (2 * start + size) // (2 * total) == self.index:
                found += unit
            start += size
        return found

    def _pieces(self, p: Tensor, total: int) -> list[Segment]:
        size = local(p).numel()
        cut = self.by == "bytes" and local(p).is_contiguous()
        count = min(-(-_bytes(p) * self.count // total), size) if cut and size else min(size, 1)
        return [Segment(p, i * size // count, (i + 1) * size // count) for i in range(count)]


def _bytes(p: Tensor) -> int:
    return local(p).numel() * p.element_size()


def _layer(name: str) -> str:
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1 if numbers else 1])


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


def reshard(model: nn.Module) -> None:
    """Have FSDP let go of parameters that it holds whole, as it does of the outermost module's from
    a forward pass until the backward pass: the next one then gathers the shards as they are."""
    if "torch.distributed.fsdp" in sys.modules:  # slow to import, and seldom needed
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def local(tensor: Tensor) -> Tensor:
    """This rank's part of ``tensor``, without its history: itself, or a DTensor's local shard."""
    part = tensor.detach()
    return part.to_local() if is_sharded(tensor) else part  # type: ignore[attr-defined]


def on_mesh_of(value: Any, like: Tensor) -> Any:
    """``value``, plain data in dicts, lists and tuples, with its shards on the mesh of ``like``: a
    saved mesh names the ranks of its own run, which torch takes for another mesh."""
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor), "asked of sharded models alone"
    if isinstance(value, DTensor):
        shape, stride = value.shape, value.stride()
        mesh, placements = like.device_mesh, value.placements
        return DTensor.from_local(value.to_local(), mesh, placements, shape=shape, stride=stride)
    if isinstance(value, dict):
        return type(value)((key, on_mesh_of(item, like)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(on_mesh_of(item, like) for item in value)
    return value


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


def whole_of(tensor: Tensor) -> Segment:
    """All of ``tensor``."""
    return Segment(tensor, 0, local(tensor).numel())


class Bucket:
    """Stretches of tensors of one dtype and device (and of one parameter group, ``group``, where
    it matters), taken as one flat tensor of ``length`` elements; the last ``length - numel`` of
    them are padding, always zero."""

    def __init__(self, segments: Sequence[Segment], group: int, multiple: int) -> None:
        self.segments = tuple(segments)
        self.group = group
        self.number = 0
        """Among those of its round."""
        self.dtype = local(segments[0].tensor).dtype
        self.device = local(segments[0].tensor).device
        self.shapes = [local(s.tensor).shape for s in segments]
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


def _segments(
    tensors: Iterable[Tensor | Segment], first: int, most: int, whole: bool
) -> Iterable[list[Segment]]:
    """Tensors in order, cut into lists of segments of at most ``most`` elements each, the first
    of at most ``first``; ``whole`` ones are not cut, and the last of a list may go beyond."""
    segments: list[Segment] = []
    room = first
    for tensor in tensors:
        piece = tensor if isinstance(tensor, Segment) else whole_of(tensor)
        own, start, size = local(piece.tensor), piece.start, piece.stop
        while start < size:
            # a strided tensor has no flat view to write to, so it is never cut
            cut = own.is_contiguous() and not whole
            take = min(room, size - start) if cut else size
            segments.append(Segment(piece.tensor, start, start + take))
            start += take
            room -= take
            if room <= 0:
                yield segments
                segments, room = [], most
    if segments:
        yield segments


def bucketize(
    groups: Sequence[Sequence[Tensor | Segment]],
    multiple: int,
    *,
    first_group: int = 0,
    most_bytes: int | None = None,
    first_bytes: int | None = None,
    whole: bool = False,
) -> list[Bucket]:
    """Buckets over ``groups`` of tensors, or of stretches of them: each of one group, dtype and
    device, at most ``most_bytes`` long (first of a kind: ``first_bytes``), padded to a multiple of
    ``multiple`` elements. A tensor larger than a bucket is cut. The same tensors give the same
    buckets on every rank. ``first_group`` is the number of the first group. ``whole``: no tensor is
    cut."""
    buckets = []
    most_bytes = most_bytes or BUCKET_BYTES
    for index, group in enumerate(groups, first_group):
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor | Segment]] = {}
        for tensor in group:
            held = tensor.tensor if isinstance(tensor, Segment) else tensor
            kinds.setdefault((held.dtype, held.device), []).append(tensor)
        for (dtype, _), tensors in kinds.items():
            most = max(most_bytes // dtype.itemsize, 1)
            first = max((first_bytes or most_bytes) // dtype.itemsize, 1)
            for segments in _segments(tensors, first, most, whole):
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
