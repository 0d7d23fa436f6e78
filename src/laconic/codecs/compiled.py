"""Codecs with compiled kernels. Tensor operations serve tensors that the kernels do not."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from laconic.codecs import kernels
from laconic.codecs.codec import Codec


class Kernel(NamedTuple):
    """A kernel for ``bits`` bits per element, blocks of ``block``, and scales up to ``max_scale``.

    ``encodes``: whether it can encode, and not only decode.
    """

    bits: int
    block: int
    max_scale: float
    encodes: bool


class Kernels(Protocol):
    """Kernels for one kind of device: `laconic.codecs.kernels`, `laconic.codecs.gpu_kernels`."""

    def encode(
        self,
        bits: int,
        block: int,
        x: Tensor,
        less: Tensor | None,
        plus: Tensor | None,
        payload: Tensor,
        residual: Tensor | None,
        max_scale: float,
    ) -> Tensor | bool:
        """See `laconic.codecs.kernels.encode`."""

    def decode(self, bits: int, block: int, payload: Tensor, out: Tensor, add: bool) -> None:
        """See `laconic.codecs.kernels.decode`."""

    def decode_mean(self, bits: int, block: int, rows: Tensor, out: Tensor) -> None:
        """See `laconic.codecs.kernels.decode_mean`."""


def kernels_for(kernel: Kernel, *tensors: Tensor) -> Kernels | None:
    """The kernels for ``tensors``, or None if there are none."""
    if kernel.block > kernels.MAX_BLOCK or not all(map(_is_plain, tensors)):
        return None
    device = tensors[0].device
    if any(t.device != device for t in tensors):
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
def gpu_kernels(device: torch.device) -> Kernels | None:
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


class Compiled(Codec):
    """A codec with a kernel for contiguous float32 on CPUs and GPUs."""

    @property
    @abstractmethod
    def kernel(self) -> Kernel | None:
        """Return the codec's kernel, or None."""

    def encode_flat(
        self,
        x: Tensor,
        payload: Tensor,
        generator: torch.Generator | None,
        less: Tensor | None,
        plus: Tensor | None,
        subtract: bool,
    ) -> Tensor | bool:
        others = [t for t in (less, plus) if t is not None]
        kernel = self.kernel
        found = kernels_for(kernel, x, *others) if kernel is not None and kernel.encodes else None
        if kernel is None or found is None or (others and not subtract):
            return super().encode_flat(x, payload, generator, less, plus, subtract)
        residual = x if subtract else None
        at = (x, less, plus, payload, residual)
        return found.encode(kernel.bits, kernel.block, *at, kernel.max_scale)

    def decode_flat(self, payload: Tensor, out: Tensor, add: bool) -> None:
        kernel = self.kernel
        found = kernels_for(kernel, out) if kernel is not None else None
        if kernel is None or found is None:
            super().decode_flat(payload, out, add)
        else:
            found.decode(kernel.bits, kernel.block, payload, out, add)

    def mean_of_rows(self, rows: Tensor, out: Tensor) -> None:
        kernel = self.kernel
        found = kernels_for(kernel, out) if kernel is not None else None
        if kernel is None or found is None:
            super().mean_of_rows(rows, out)
        else:
            found.decode_mean(kernel.bits, kernel.block, rows, out)
