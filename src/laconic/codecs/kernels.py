"""Codecs in one pass over memory, compiled from ``kernels.c`` where laconic was installed with a C
compiler at hand. They give the same bits as the tensor operations that do it
elsewhere, so that workers with and without them agree, and they run without the interpreter.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from laconic import native

MOST_BLOCK = 4096
"""The longest block that they take."""
VERSION = 2
"""What ``kernels.c`` must be."""

_POINTER, _INT64, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, if there are any that can be used."""
    found = native.load("laconic.codecs._kernels", VERSION)
    return None if found is None else _declared(found)


def _declared(found: ctypes.CDLL) -> ctypes.CDLL:
    shape = [_INT, _INT64, _INT64]
    found.laconic_encode.argtypes = [*shape, *[_POINTER] * 5, ctypes.c_float]
    found.laconic_encode.restype = _INT
    found.laconic_decode.argtypes = [*shape, _POINTER, _POINTER, _INT]
    found.laconic_decode.restype = None
    found.laconic_decode_mean.argtypes = [*shape, _INT64, _INT64, _POINTER, _POINTER]
    found.laconic_decode_mean.restype = None
    return found


def take(block: int, *tensors: Tensor) -> bool:
    """Whether there are kernels for such tensors: contiguous float32 in a CPU's memory, as they
    look (not lazily negated), and that may be written to (not those of inference mode)."""
    return (
        block <= MOST_BLOCK
        and library() is not None
        and all(
            t.dtype == torch.float32
            and t.device.type == "cpu"
            and t.is_contiguous()
            and not t.is_neg()
            and not t.is_inference()
            for t in tensors
        )
    )


def encode(
    bits: int,
    block: int,
    x: Tensor,
    less: Tensor | None,
    plus: Tensor | None,
    payload: Tensor,
    left: Tensor | None,
    most_scale: float,
) -> bool:
    """``payload`` <- the code of ``v = x - less + plus``, ``left <- v - Q(v)``, which may be x.
    Returns whether all of v is finite; if not, what is not is in ``left``."""
    at = (_address(x), _address(less), _address(plus), _address(payload), _address(left))
    return bool(_library().laconic_encode(bits, block, x.numel(), *at, most_scale))


def decode(bits: int, block: int, payload: Tensor, out: Tensor, add: bool) -> None:
    """``out`` <- what ``payload`` is the code of, or with ``add`` that much more."""
    _library().laconic_decode(bits, block, out.numel(), _address(payload), _address(out), add)


def decode_mean(bits: int, block: int, rows: Tensor, out: Tensor) -> None:
    """``out`` <- the mean of what the ``rows`` are the codes of, added in their order."""
    n, stride = len(rows), rows.stride(0)
    at = _address(rows), _address(out)
    _library().laconic_decode_mean(bits, block, out.numel(), n, stride, *at)


def _library() -> ctypes.CDLL:
    found = library()
    assert found is not None, "asked for by take()"
    return found


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
