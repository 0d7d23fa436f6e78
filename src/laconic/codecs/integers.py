"""Integers: evenly spaced, symmetric levels with one scale per block."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from laconic.codecs.blocks import SCALE_BYTES, Blockwise, largest_scale
from laconic.codecs.compiled import kernels_for
from laconic.codecs.kernels import MAX_BLOCK

COMPILED = ((8, 127.0), (4, 7.0), (2, 1.0))
"""Bits and levels that have a kernel."""


@dataclass(frozen=True)
class Integers(Blockwise):
    """Levels q in -L..L with L = 2^(bits-1) - 1.

    A code is ``q + 2^(bits-1)``; code 0 is not used. Symbols, the scale s, and y are those of
    `laconic.codecs.blocks`.

    ``q = round(y)``, ties to even. The error ``|x - Q(x)|`` is at most
    ``s * (1/2 + L * 2^-23)``: half a step, plus the rounding of y to float32.
    """

    def quantize(self, y: Tensor) -> Tensor:
        return y.round_()

    def encode_and_subtract(self, x: Tensor, payload: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return super().encode_and_subtract(x, payload)
        q, scale, in_range = self.quantized(x, payload)
        if bool(in_range):
            x.addcmul_(q, scale, value=-1)  # the bits of the kernels: zeros of both signs leave +0
        self.write(q, payload[:, SCALE_BYTES:])
        return in_range

    def kernels(self, *tensors: Tensor) -> ModuleType | None:
        """Return the kernels for ``tensors``, None if there are none."""
        known = (self.bits, self.levels) in COMPILED and self.block <= MAX_BLOCK
        return kernels_for(*tensors) if known else None

    def encode_flat(
        self,
        x: Tensor,
        payload: Tensor,
        less: Tensor | None,
        plus: Tensor | None,
        subtract: bool,
    ) -> Tensor | bool:
        others = [t for t in (less, plus) if t is not None]
        found = self.kernels(x, *others)
        if found is None or (others and not subtract):
            return super().encode_flat(x, payload, less, plus, subtract)
        at = x, less, plus, payload, x if subtract else None, largest_scale(self.levels)
        in_range: Tensor | bool = found.encode(self.bits, self.block, *at)
        return in_range

    def decode_flat(self, payload: Tensor, out: Tensor, add: bool) -> None:
        found = self.kernels(out)
        if found is None:
            super().decode_flat(payload, out, add)
        else:
            found.decode(self.bits, self.block, payload, out, add)

    def mean_of_rows(self, rows: Tensor, out: Tensor) -> None:
        found = self.kernels(out)
        if found is None:
            super().mean_of_rows(rows, out)
        else:
            found.decode_mean(self.bits, self.block, rows, out)

    def store(self, total: Tensor, payload: Tensor) -> None:
        # A sum of q * 2^(bits*k) fits int8. Floats convert to int8 6 times as fast as to uint8.
        offset = sum(2 ** (k + self.bits - 1) for k in range(0, 8, self.bits))
        torch.add(total.to(torch.int8).view(torch.uint8), offset, out=payload)

    def level(self, code: Tensor) -> Tensor:
        return (code - (1 << (self.bits - 1))).view(torch.int8)


@dataclass(frozen=True)
class Int8(Integers):
    """Levels -127..127, one per byte: 2 + block bytes per block. See `Integers`."""

    bits: ClassVar[int] = 8
    levels: ClassVar[float] = 127.0


@dataclass(frozen=True)
class Int4(Integers):
    """Levels -7..7, two per byte: 2 + ceil(block / 2) bytes per block. See `Integers`."""

    bits: ClassVar[int] = 4
    levels: ClassVar[float] = 7.0


@dataclass(frozen=True)
class Int2(Integers):
    """Levels -1, 0, 1, four per byte: 2 + ceil(block / 4) bytes per block. See `Integers`.

    For most elements of a normal distribution the nearest level is 0. Use it with error feedback,
    or for values of similar magnitude, such as those of `TopK`.
    """

    bits: ClassVar[int] = 2
    levels: ClassVar[float] = 1.0
