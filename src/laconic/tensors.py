"""What a tensor of a model is made of: its plain parts, their bytes, and which numbers have a mean.

Most tensors are plain: strided elements in memory. A sparse tensor, or a wrapper subclass such as a
quantized weight of torchao, consists of several plain ones. Of a sharded tensor (FSDP's DTensor), a
rank has its `local` shard.
"""

from __future__ import annotations

import ctypes
import io
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter, UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_OF_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""The methods that return the parts of a sparse tensor, by its layout."""
_WITH_MEAN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def parts(tensor: Tensor) -> dict[str, Tensor]:
    """The plain tensors that hold the values of ``tensor``, by name, detached, in its memory: those
    that a wrapper subclass or a sparse tensor consists of; else one without a name. Dimensions in
    which a tensor is expanded have the size 1."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        own = {name: getattr(tensor, name) for name in names}
        return _parts_of({name: t for name, t in own.items() if isinstance(t, Tensor)})
    if tensor.layout in _OF_SPARSE:
        tensor = tensor.detach()
        return _parts_of({name: getattr(tensor, name)() for name in _OF_SPARSE[tensor.layout]})
    tensor = tensor.detach()
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    tensor = tensor.conj() if tensor.is_conj() else tensor
    return {"": torch._neg_view(tensor) if tensor.is_neg() else tensor}


def _parts_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{k}.{name}": t for k, whole in tensors.items() for name, t in parts(whole).items()}


def as_bytes(plain: Tensor) -> Tensor:
    """The bytes of a plain tensor, in its memory, with one dimension more."""
    return plain.unsqueeze(-1).view(torch.uint8)


def with_mean(tensor: Tensor) -> Tensor | None:
    """The real numbers in the memory of ``tensor`` whose mean over ranks makes sense: of a plain
    tensor of floating-point or complex numbers. None: a rank's values can only be taken whole."""
    plain = parts(tensor).get("")
    if plain is not None and plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain if plain is not None and plain.dtype in _WITH_MEAN else None


def describe(tensor: Tensor) -> str:
    """The shapes and dtypes of all parts: equal on ranks that can exchange values."""
    about = {name: (tuple(t.shape), str(t.dtype)) for name, t in parts(tensor).items()}
    return str(about.get("", about))


def writing(tensors: Iterable[Tensor]) -> AbstractContextManager[object]:
    """A context in which ``tensors`` can be written: torch writes to those that were made under
    inference mode only inside that mode."""
    return torch.inference_mode() if any(t.is_inference() for t in tensors) else nullcontext()


def overwrite(tensor: Tensor, values: Tensor) -> None:
    """Copy ``values`` into ``tensor``, also into one that was made under inference mode."""
    with writing([tensor]):
        tensor.copy_(values)


def copies(tensors: Iterable[Tensor]) -> list[tuple[Tensor, list[Tensor]]]:
    """``tensors``, each with copies of its parts, for `restore`."""
    return [(t, [_copy(p) for p in parts(t).values()]) for t in tensors]


def _copy(plain: Tensor) -> Tensor:
    # torch cannot clone 4-bit integers
    return as_bytes(plain).clone().view(plain.dtype).squeeze(-1)


def restore(saved: Iterable[tuple[Tensor, Sequence[Tensor]]]) -> None:
    """Write what `copies` has copied; FSDP may have moved a shard to other memory meanwhile."""
    for tensor, values in saved:
        for part, own in zip(parts(tensor).values(), values, strict=True):
            same = part.dtype == own.dtype
            overwrite(*((as_bytes(part), as_bytes(own)) if same else (part, own)))


def check_values(name: str, tensor: Tensor) -> None:
    """Raise ``ValueError`` if ``tensor``, a parameter or buffer, has no values that ranks can
    compare. ``name``: what the error calls it, such as ``'0.weight'`` in quotes."""
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        raise ValueError(
            f"{name} has no shape yet, as in a LazyLinear: run one batch through the model "
            "before making the optimizer"
        )
    if not is_traceable_wrapper_subclass(tensor) and (
        tensor.is_quantized or tensor.is_nested or tensor.layout not in (torch.strided, *_OF_SPARSE)
    ):
        raise ValueError(
            f"{name} is nested, quantized or of a layout that ranks cannot exchange "
            f"({tensor.layout}, {tensor.dtype}): keep it outside of the model's parameters and "
            "buffers"
        )
    if any(part.numel() and not part.data_ptr() for part in parts(tensor).values()):
        if type(tensor) in (Tensor, Parameter):
            raise ValueError(
                f"{name} has no memory, like one that FSDP has gathered and freed again: make "
                "the optimizer before the first forward pass, or after model.reshard()"
            )
        raise ValueError(
            f"{name} is a {type(tensor).__name__}, which does not tell what it consists of (it "
            "has no __tensor_flatten__), so ranks cannot compare it: keep it outside of the "
            "model's parameters and buffers"
        )


def plain(value: Any) -> Any:
    """``value`` with Python's numbers in place of NumPy's, which schedulers leave in parameter
    groups. Loading NumPy's numbers would run code."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item()
    if type(value) is dict:
        return {plain(key): plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    return value


def packed(state: Any) -> Tensor:
    """``state``, plain data with tensors, as bytes: a copy in host memory, for another rank."""
    buffer = io.BytesIO()
    torch.save(plain(state), buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def unpacked(data: Tensor) -> Any:
    """What was `packed`, in host memory. Runs no code of the sender's."""
    return torch.load(io.BytesIO(raw_bytes(data)), map_location="cpu", weights_only=True)


def raw_bytes(data: Tensor) -> bytes:
    """The bytes of ``data``, contiguous and in host memory. torch may be without NumPy."""
    return ctypes.string_at(data.data_ptr(), data.nbytes)


def is_sharded(tensor: Tensor) -> bool:
    """Whether each rank has a shard of ``tensor`` (a DTensor, which FSDP makes of parameters)."""
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor  # slow to import, seldom needed

    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's elements of ``tensor``, detached: a DTensor's local shard, else all of them."""
    detached = tensor.detach()
    return detached.to_local() if is_sharded(tensor) else detached  # type: ignore[attr-defined]


def reshard(model: nn.Module) -> None:
    """Have FSDP free the parameters that it has gathered, so that the next forward pass gathers the
    shards anew. FSDP keeps those of the outermost module from a forward pass to its backward pass.
    """
    if "torch.distributed.fsdp" in sys.modules:  # slow to import, seldom needed
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def itemsize_of(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of an element, averaged over the elements of all ``tensors``."""
    sizes = [t.numel() * t.element_size() for t in tensors]
    return round(sum(sizes) / max(sum(t.numel() for t in tensors), 1)) or 1


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
