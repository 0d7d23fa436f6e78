"""Compiled kernels that code in one pass over memory, and which kernels serve which tensors. Tensor
operations serve those that no kernel does.

The kernels for CPUs are compiled from ``kernels.c`` if a C compiler is available when laconic is
installed. They give the same bits as the tensor operations, so workers with and without them agree.
They run without the Python interpreter.
"""

from __future__ import annotations

import ctypes
import sys
import warnings
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from laconic import native

MAX_BLOCK = 4096
"""The longest block that the kernels support."""
VERSION = 3
"""The version of ``kernels.c`` that this module needs."""

_POINTER, _INT64, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, or None if there are none that can be used."""
    found = native.load("laconic.codecs._kernels", VERSION)
    if found is not None:
        shape = [_INT, _INT64, _INT64]
        found.laconic_encode.argtypes = [*shape, *[_POINTER] * 5, ctypes.c_float]
        found.laconic_encode.restype = _INT
        found.laconic_decode.argtypes = [*shape, _POINTER, _POINTER, _INT]
        found.laconic_decode.restype = None
        found.laconic_decode_mean.argtypes = [*shape, _INT64, _INT64, *[_POINTER] * 4]
        found.laconic_decode_mean.restype = None
    return found


def encode(
    bits: int,
    block: int,
    x: Tensor,
    less: Tensor | None,
    plus: Tensor | None,
    payload: Tensor,
    residual: Tensor | None,
    max_scale: float,
) -> bool:
    """Encode ``v = x - less + plus`` into ``payload``, and store v - Q(v) in ``residual``.

    ``residual`` may be x. Returns whether all of v is finite. If not, v is in ``residual``.
    """
    at = (_address(x), _address(less), _address(plus), _address(payload), _address(residual))
    return bool(_library().laconic_encode(bits, block, x.numel(), *at, max_scale))


def decode(bits: int, block: int, payload: Tensor, out: Tensor, add: bool) -> None:
    """Decode ``payload`` into ``out``, or add the result to ``out`` with ``add``."""
    _library().laconic_decode(bits, block, out.numel(), _address(payload), _address(out), add)


def decode_mean(
    bits: int,
    block: int,
    rows: Tensor,
    out: Tensor,
    first: Tensor | None = None,
    second: Tensor | None = None,
) -> None:
    """Compute the mean of the decoded ``rows``, added in order, plus ``first``, plus ``second``,
    into ``out``."""
    n, stride = len(rows), rows.stride(0)
    at = _address(rows), _address(first), _address(second), _address(out)
    _library().laconic_decode_mean(bits, block, out.numel(), n, stride, *at)


def _library() -> ctypes.CDLL:
    found = library()
    assert found is not None, "there are kernels"
    return found


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def kernels_for(*tensors: Tensor) -> ModuleType | None:
    """This module or `laconic.codecs.gpu_kernels`, whichever serves these ``tensors``;
    None if neither does. Both have the functions ``encode``, ``decode`` and ``decode_mean``. After
    ``encode`` on a GPU, the code says whether all was finite."""
    device = tensors[0].device
    if not all(_is_plain(t) and t.device == device for t in tensors):
        return None
    if device.type == "cpu":
        return sys.modules[__name__] if library() is not None else None
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
