"""Which kernels serve which tensors. Tensor operations serve those that no kernel does."""

from __future__ import annotations

import warnings
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from laconic.codecs import kernels


def kernels_for(*tensors: Tensor) -> ModuleType | None:
    """`laconic.codecs.kernels` or `laconic.codecs.gpu_kernels`, whichever serves these ``tensors``;
    None if neither does. Both have the functions ``encode``, ``decode`` and ``decode_mean``."""
    device = tensors[0].device
    if not all(_is_plain(t) and t.device == device for t in tensors):
        return None
    if device.type == "cpu":
        return kernels if kernels.library() is not None else None
    return gpu_kernels(device) if device.type == "cuda" else None


def _is_plain(t: Tensor) -> bool:
    """Whether ``t`` is contiguous float32, not lazily negated, and writable (not from inference
    mode)."""
    return (
        t.dtype == torch.float32 and t.is_contiguous() and not t.is_neg() and not t.is_inference()
    )


@cache
def gpu_kernels(device: torch.device) -> ModuleType | None:
    """The kernels for a GPU, if Triton is installed and can compile them there."""
    if find_spec("triton") is None:
        return None
    try:
        from laconic.codecs import gpu_kernels as found

        x = torch.ones(1, device=device)
        payload = torch.empty(3, dtype=torch.uint8, device=device)
        found.encode(8, 1, x, None, None, payload, x, 1.0)
    except Exception as error:  # no compiler for its launcher, or a GPU that it does not know
        reason = (str(error) or type(error).__name__).splitlines()[0]
        warnings.warn(
            f"Triton cannot compile laconic's kernels for {device} ({reason}): codecs use tensor "
            "operations, which are slower and give the same bits",
            stacklevel=2,
        )
        return None
    return found
