"""Codecs with a compiled kernel. Tensor operations serve tensors that the kernel does not."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

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


class Compiled(Codec):
    """A codec with a kernel for contiguous float32 on a CPU."""

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
        kernel = self._fitting(x, *others)
        if kernel is None or not kernel.encodes or (others and not subtract):
            return super().encode_flat(x, payload, generator, less, plus, subtract)
        residual = x if subtract else None
        at = (x, less, plus, payload, residual)
        return kernels.encode(kernel.bits, kernel.block, *at, kernel.max_scale)

    def decode_flat(self, payload: Tensor, out: Tensor, add: bool) -> None:
        kernel = self._fitting(out)
        if kernel is None:
            super().decode_flat(payload, out, add)
        else:
            kernels.decode(kernel.bits, kernel.block, payload, out, add)

    def mean_of_rows(self, rows: Tensor, out: Tensor) -> None:
        kernel = self._fitting(out)
        if kernel is None:
            super().mean_of_rows(rows, out)
        else:
            kernels.decode_mean(kernel.bits, kernel.block, rows, out)

    def _fitting(self, *tensors: Tensor) -> Kernel | None:
        kernel = self.kernel
        return kernel if kernel and kernels.supports(kernel.block, *tensors) else None
