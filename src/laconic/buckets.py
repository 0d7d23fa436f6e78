"""The tensors of a round: selectors choose them, and flat buckets cover them.

Only this file handles sharded tensors (`torch.distributed.tensor.DTensor`): a round averages each
rank's local shard.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from laconic.errors import check_choice, check_int
from laconic.tensors import overwrite, parts, with_mean, writing

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

    def view(self) -> Tensor:
        """The elements, flat, sharing storage where the tensor is contiguous."""
        return local(self.tensor).reshape(-1)[self.start : self.stop]

    def write(self, values: Tensor) -> None:
        """Write ``values`` to the elements."""
        shard = local(self.tensor)
        if shard.is_contiguous():
            overwrite(shard.view(-1)[self.start : self.stop], values)
        else:
            assert (self.start, self.stop) == (0, shard.numel()), "a strided tensor is never cut"
            overwrite(shard, values.view(shard.shape))


Selector = Callable[[nn.Module, Optimizer], list[dict[str, Tensor]]]
"""Returns a round's tensors by name, one dict per parameter group. It is called once if it is
`parameters` or the update has state; otherwise before every round, which then uses the names that
all ranks have."""


def parameters(model: nn.Module, optimizer: Optimizer) -> list[dict[str, Tensor]]:
    """The parameters of the optimizer, in group order; those that are trained are the papers'
    ``x``. Rounds leave out the others (`Session.groups`)."""
    return [
        {str(index): p for index, p in enumerate(group["params"])}
        for group in optimizer.param_groups
    ]


@dataclass(frozen=True)
class Fragment:
    """Fragment ``index``, from 0, of ``count``: consecutive parameters of the optimizer with about
    equal bytes, in the order of their group (for most models that of the forward pass). Each group
    is divided on its own, so that a group added later changes no other fragment.

    ``by="bytes"`` divides between tensors. A tensor larger than a fragment's share of its group is
    first cut into equal segments that are not, unless it is strided. A fragment may be empty.
    ``by="layers"`` divides between layers: the tensors whose names are equal up to the first number
    (``blocks.3.``), or, without a number, up to the first dot. A unit of s bytes that begins at
    byte b of a group of B bytes is in fragment ``floor(count * (b + s/2) / B)``.
    """

    index: int
    count: int
    by: str = "bytes"

    def __post_init__(self) -> None:
        check_int("count", self.count, 1)
        if check_int("index", self.index, 0) >= self.count:
            raise ValueError(f"index must be below count, {self.count}, not {self.index}")
        check_choice("by", self.by, ("bytes", "layers"))

    def segments(self, model: nn.Module, groups: Sequence[Sequence[Tensor]]) -> list[list[Segment]]:
        """Its segments of ``groups`` of parameters, by group."""
        names = {id(p): name for name, p in model.named_parameters()}
        return [
            self._of([(names.get(id(p), str(index)), p) for index, p in enumerate(group)])
            for group in groups
        ]

    def _of(self, group: Sequence[tuple[str, Tensor]]) -> list[Segment]:
        total = sum(self._bytes(p) for _, p in group)
        units: list[list[Segment]] = []
        layer: str | None = None
        for name, p in group:
            if not self._bytes(p):
                continue
            previous, layer = layer, _layer(name) if self.by == "layers" else None
            if layer is not None and layer == previous:
                units[-1] += self._pieces(p, total)
            else:
                units += [[piece] for piece in self._pieces(p, total)]
        segments, start = [], 0
        for unit in units:
            size = sum(self._bytes(s.tensor, s.stop - s.start) for s in unit)
            if self.count * (2 * start + size) // (2 * total) == self.index:
                segments += unit
            start += size
        return segments

    def _pieces(self, p: Tensor, total: int) -> list[Segment]:
        size = local(p).numel()
        cut = self.by == "bytes" and local(p).is_contiguous()
        count = min(-(-self._bytes(p) * self.count // total), size) if cut else 1
        return [Segment(p, i * size // count, (i + 1) * size // count) for i in range(count)]

    def _bytes(self, p: Tensor, elements: int | None = None) -> int:
        """Of a segment of ``p`` with so many ``elements`` on this rank; None: of all of them. Of a
        layer, those of all shards, so that a worker's ranks agree which fragment it is in."""
        if self.by == "layers":
            return p.numel() * p.element_size()
        return (local(p).numel() if elements is None else elements) * p.element_size()


def _layer(name: str) -> str:
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1 if numbers else 1])


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> list[dict[str, Tensor]]:
    """The optimizer's floating-point state of its parameters, such as momenta; not its counters,
    which are equal on all workers."""
    return [
        {
            f"{index}.{name}": value
            for index, p in enumerate(group["params"])
            for name, value in _tensors_of(optimizer.state.get(p, {}))
            if value.is_floating_point() and value.dim() and _is_plain(value, name)
        }
        for group in optimizer.param_groups
    ]


def _is_plain(value: Tensor, name: str) -> bool:
    """True, or raises ``ValueError`` for a tensor made of others, such as codes of 8 bits."""
    if is_traceable_wrapper_subclass(value) and not is_sharded(value):
        raise ValueError(
            f"the optimizer keeps {name!r} in tensors of {type(value).__name__}, which cannot be "
            "averaged: use optimizer_state='keep', or an optimizer with plain tensors"
        )
    return True


def _tensors_of(state: Mapping[Any, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors in a parameter's state, by name; some optimizers nest dicts."""
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", each) for inner, each in _tensors_of(value))
        elif isinstance(value, Tensor):
            yield str(name), value


SECOND_MOMENTS = (
    *("exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "sum"),
    *("row_var", "col_var", "variance", "acc_delta"),
)
"""What the optimizers of ``torch.optim`` call state that follows the size of squared gradients."""


@dataclass(frozen=True)
class Moments:
    """The part of `optimizer_state` that follows the squares of gradients (``second``, the names in
    `SECOND_MOMENTS`), or all the rest of it, such as momenta."""

    second: bool

    def __call__(self, model: nn.Module, optimizer: Optimizer) -> list[dict[str, Tensor]]:
        return [
            {
                name: value
                for name, value in group.items()
                if (name.partition(".")[2] in SECOND_MOMENTS) == self.second
            }
            for group in optimizer_state(model, optimizer)
        ]


def is_of_optimizer(part: Selector | Fragment) -> bool:
    """Whether ``part`` selects state of the optimizer, of which there is none at the start."""
    return part is optimizer_state or isinstance(part, Moments)


def module_buffers(model: nn.Module, optimizer: Optimizer | None = None) -> list[dict[str, Tensor]]:
    """The numbers of the model's floating-point and complex buffers, such as running statistics;
    not its integer counters. A round leaves out those that are the same on all ranks."""
    found = {name: with_mean(local(b)) for name, b in model.named_buffers()}
    return [{name: numbers for name, numbers in found.items() if numbers is not None}]


def is_sharded(tensor: Tensor) -> bool:
    """Whether each rank has a shard of ``tensor`` (a DTensor, which FSDP makes of parameters)."""
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor  # slow to import, seldom needed

    return isinstance(tensor, DTensor)


def reshard(model: nn.Module) -> None:
    """Have FSDP free the parameters that it has gathered, so that the next forward pass gathers the
    shards anew. FSDP keeps those of the outermost module from a forward pass to its backward pass.
    """
    if "torch.distributed.fsdp" in sys.modules:  # slow to import, seldom needed
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def local(tensor: Tensor) -> Tensor:
    """This rank's elements of ``tensor``, detached: a DTensor's local shard, else all of them."""
    detached = tensor.detach()
    return detached.to_local() if is_sharded(tensor) else detached  # type: ignore[attr-defined]


def itemsize_of(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of an element, averaged over the elements of all ``tensors``."""
    sizes = [t.numel() * t.element_size() for t in tensors]
    return round(sum(sizes) / max(sum(t.numel() for t in tensors), 1)) or 1


def _data_ptr(tensor: Tensor) -> int:
    """Where this rank's elements of ``tensor`` are. A DTensor's own is 0 in some versions."""
    return (local(tensor) if is_sharded(tensor) else tensor).data_ptr()


def on_mesh_of(value: Any, like: Tensor) -> Any:
    """Return ``value`` (dicts, lists and tuples) with its DTensors on the mesh of ``like``. A saved
    mesh names the ranks of its own run, and torch treats it as another mesh."""
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor), "only sharded models have a mesh"
    if isinstance(value, DTensor):
        shape, stride = value.shape, value.stride()
        mesh, placements = like.device_mesh, value.placements
        return DTensor.from_local(value.to_local(), mesh, placements, shape=shape, stride=stride)
    if isinstance(value, dict):
        placed = copy(value)  # with its attributes: a state_dict has its modules' versions
        placed.update({key: on_mesh_of(item, like) for key, item in value.items()})
        return placed
    if type(value) in (list, tuple):
        return type(value)(on_mesh_of(item, like) for item in value)
    return value


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and outer state: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def sums(tensors: Sequence[Tensor]) -> Tensor:
    """The sums of all elements and of their absolute values, in float64, to compare tensors. Adds
    up a piece at a time, so that no large tensor is copied."""
    total = torch.zeros(2, dtype=torch.float64)
    for t in (part for tensor in tensors for part in parts(tensor).values()):
        real = torch.view_as_real(t) if t.is_complex() else t
        for piece in torch.split(real.reshape(-1), 2**16):
            both = piece.sum(dtype=torch.float64), piece.abs().sum(dtype=torch.float64)
            total += torch.stack(both).cpu()
    return total


def mean_in_rank_order(
    tensors: Iterable[Tensor], *, reuse: bool = False, out: Tensor | None = None
) -> Tensor:
    """``(x_0 + x_1 + ... ) / n``, added in this order as the tensors arrive, in at least float32.
    With ``reuse`` the sum overwrites ``x_0``; the mean is in ``out``. Both only if dtypes match."""
    rest = iter(tensors)
    first = next(rest)
    total = first.to(state_dtype(first.dtype), copy=not reuse)
    count = 1
    for x in rest:
        total += x
        count += 1
    fits = out is not None and out.dtype == total.dtype
    # by a tensor: accelerators multiply by the rounded inverse of a Python number
    n = torch.full((), count, dtype=total.dtype, device=total.device)
    return torch.div(total, n, out=out if fits else total)


def _empty(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # it is used again outside the caller's inference mode
        return torch.empty(length, dtype=dtype, device=device)


def whole_of(tensor: Tensor) -> Segment:
    """The segment that is all of ``tensor``."""
    return Segment(tensor, 0, local(tensor).numel())


class Bucket:
    """Segments of tensors with one dtype and device (and one parameter group, ``group``, if it
    matters) as one flat tensor of ``length`` elements. The last ``length - numel`` elements are
    padding, always zero."""

    def __init__(self, segments: Sequence[Segment], group: int, multiple: int) -> None:
        self.segments = tuple(segments)
        self.group = group
        self.number = 0
        """The index in its round."""
        self.dtype = local(segments[0].tensor).dtype
        self.device = local(segments[0].tensor).device
        self.shapes = [local(s.tensor).shape for s in segments]
        self.sizes = [s.stop - s.start for s in segments]
        self.numel = sum(self.sizes)
        """Elements that are not padding."""
        self.length = -(-max(self.numel, 1) // multiple) * multiple
        self._views: list[Tensor] | None = None
        self._pointers: list[int] = []

    def empty(self) -> Tensor:
        """An uninitialized flat tensor of the bucket's length."""
        return _empty(self.length, self.dtype, self.device)

    def views(self) -> list[Tensor] | None:
        """The segments as flat views of the tensors' storage; None if one tensor is strided. Made
        again after a user rebinds ``p.data``, or FSDP pads a shard."""
        pointers = [_data_ptr(s.tensor) for s in self.segments]
        if self._views is None or pointers != self._pointers:
            now = [local(s.tensor) for s in self.segments]
            kinds = {(t.dtype, t.device) for t in now}
            if [t.shape for t in now] != self.shapes or kinds != {(self.dtype, self.device)}:
                raise ValueError(RESHAPED)
            contiguous = all(local(s.tensor).is_contiguous() for s in self.segments)
            self._views = [s.view() for s in self.segments] if contiguous else None
            self._pointers = pointers
        return self._views

    def pack(self, out: Tensor) -> Tensor:
        """Copy the segments' values, one after the other, to ``out``, and return it."""
        torch.cat(self.views() or [s.view() for s in self.segments], out=out[: self.numel])
        out[self.numel :].zero_()
        return out

    def unpack(self, flat: Tensor) -> None:
        """Copy ``flat`` to the segments."""
        views = self.views()
        if views is not None:
            with writing(views):
                torch._foreach_copy_(views, list(self.split(flat)))
        else:
            for segment, values in zip(self.segments, self.split(flat), strict=True):
                segment.write(values)

    def split(self, flat: Tensor) -> Sequence[Tensor]:
        """``flat`` as one view per segment."""
        return torch.split(flat[: self.numel], self.sizes)


def _segments(
    tensors: Iterable[Tensor | Segment], first: int, most: int, whole: bool
) -> Iterable[list[Segment]]:
    """Cut the tensors, in order, into lists of segments with at most ``most`` elements each; the
    first has at most ``first``. With ``whole`` no tensor is cut, and a list may exceed its limit by
    a part of its last tensor."""
    segments: list[Segment] = []
    space = first
    for tensor in tensors:
        piece = tensor if isinstance(tensor, Segment) else whole_of(tensor)
        start, stop = piece.start, piece.stop
        if whole and is_sharded(piece.tensor):  # a worker's ranks have the same buckets
            segments.append(piece)
            space -= -(-piece.tensor.numel() // piece.tensor.device_mesh.size())  # type: ignore[attr-defined]
            start = stop
            if space <= 0:
                yield segments
                segments, space = [], most
        # a strided tensor has no flat view to write to
        cut = local(piece.tensor).is_contiguous() and not whole
        while start < stop:
            end = min(start + space, stop) if cut else stop
            segments.append(Segment(piece.tensor, start, end))
            space -= end - start
            start = end
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
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor | Segment]] = {}
        for tensor in group:
            whole_tensor = tensor.tensor if isinstance(tensor, Segment) else tensor
            kinds.setdefault((whole_tensor.dtype, whole_tensor.device), []).append(tensor)
        for (dtype, _), tensors in kinds.items():
            most = max(most_bytes // dtype.itemsize, 1)
            first = max((first_bytes or most_bytes) // dtype.itemsize, 1)
            for segments in _segments(tensors, first, most, whole):
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
