"""The part of all tensors that a round is about: selectors choose it, and fragments divide it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from laconic.buckets import Segment
from laconic.errors import check_choice, check_int
from laconic.tensors import is_sharded, local, with_mean

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
    states = optimizer.state
    return [
        {
            f"{index}.{name}": value
            for index, p in enumerate(group["params"])
            for name, value in _tensors_of(states.get(p, {}))
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


def is_of_optimizer(part: Selector | Fragment) -> bool:
    """Whether ``part`` selects state of the optimizer, of which there is none at the start."""
    return part is optimizer_state


def module_buffers(model: nn.Module, optimizer: Optimizer | None = None) -> list[dict[str, Tensor]]:
    """The numbers of the model's floating-point and complex buffers, such as running statistics;
    not its integer counters. A round leaves out those that are the same on all ranks."""
    found = {name: with_mean(local(b)) for name, b in model.named_buffers()}
    return [{name: numbers for name, numbers in found.items() if numbers is not None}]
