"""Integers: evenly spaced, symmetric levels with one scale per block, and several codes per byte.

Dettmers et al., ICLR 2022, arXiv 2110.02861. For a block of m elements x, with codes of b bits:

    L = 2^(b-1) - 1
    s = max|x| / L, rounded to bfloat16
    y = x / s, rounded to float32           in -L..L, except for the rounding of s
    q = round(y), ties to even
    Q(x) = s * q

The scale takes two bytes, in front of the block's codes. A bfloat16 has the exponent range of a
float32, so every block has a scale. A float16 takes the same two bytes, but has no scale for blocks
below 6e-8 or above 65504. A bfloat16 has 8 significant bits, so ``s * q`` is exact in float32, and
so is ``x - Q(x)``, the residual of error feedback. s is off by at most 2^-8, so ``y`` is within 1/2
of L. Nothing is therefore clipped, and ``Q(Q(x)) == Q(x)``. A float32 scale would cost two more
bytes per block (0.06 bits per element for blocks of 256), have none of these properties, and reduce
the steps by at most 0.4 %.

s is at least 2^-126, the smallest normal number. Q(x) is therefore never subnormal, and ``x / s``
never overflows. Blocks with smaller elements use this scale. s is at most the largest value for
which ``s * L`` is finite.

A code is ``q + 2^(b-1)``; code 0 is not used. A block of m codes takes w = ceil(m * b / 8) bytes.
The code of element j is in byte j mod w, at bit b * floor(j / w). Unused bits hold codes of level
0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from laconic.codecs.codec import Codec
from laconic.codecs.kernels import MAX_BLOCK, kernels_for
from laconic.errors import check_int

SCALE_BYTES = 2
NOT_FINITE = 255
"""The high byte of a scale that is no number."""
MIN_SCALE = 2.0**-126


@dataclass(frozen=True)
class Integers(Codec):
    """Levels q in -L..L, with one scale s for every ``block`` elements.

    The error ``|x - Q(x)|`` is at most ``s * (1/2 + L * 2^-23)``: half a step, plus the rounding of
    y to float32. Symbols are those of `laconic.codecs.integers`.
    """

    bits: ClassVar[int]
    levels: ClassVar[float]
    """L."""
    block: int = 256

    def __post_init__(self) -> None:
        check_int("block", self.block, 1)

    @property
    def unit(self) -> int:
        return self.block

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def nbytes(self, length: int) -> int:
        whole, rest = divmod(check_int("length", length, 0), self.block)
        size = whole * (SCALE_BYTES + self._width(self.block))
        return size + (SCALE_BYTES + self._width(rest) if rest else 0)

    def _width(self, m: int) -> int:
        return -(-m * self.bits // 8)

    def encode_units(self, x: Tensor, payload: Tensor) -> Tensor:
        q, _, in_range = self._quantize(x.to(torch.float32), payload)
        self._write(q, payload[:, SCALE_BYTES:])
        return in_range

    def encode_and_subtract(self, x: Tensor, payload: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return super().encode_and_subtract(x, payload)
        q, scale, in_range = self._quantize(x, payload)
        if bool(in_range):
            x.addcmul_(q, scale, value=-1)  # the bits of the kernels: zeros of both signs leave +0
        self._write(q, payload[:, SCALE_BYTES:])
        return in_range

    def _quantize(self, x: Tensor, payload: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Write the blocks' scales into ``payload``. Return q of x, float32, the scales, and
        whether all elements are in range."""
        peak = x.abs().amax(1, keepdim=True)  # NaN if any element is NaN
        scale = self.scales(peak)
        payload[:, :SCALE_BYTES] = scale.view(torch.uint8)
        scale = scale.to(torch.float32)
        in_range = peak.amax() <= torch.finfo(torch.float32).max
        return (x / scale).round_(), scale, in_range

    def scales(self, peak: Tensor) -> Tensor:
        """Return s, in bfloat16, for blocks with the largest magnitudes ``peak``, in float32."""
        # Divide by a tensor: accelerators multiply by the rounded inverse of a Python number.
        step = peak / torch.full((), self.levels, device=peak.device)
        return step.to(torch.bfloat16).clamp_(MIN_SCALE, largest_scale(self.levels))

    def _write(self, q: Tensor, payload: Tensor) -> None:
        """Write the codes of ``q``, (n, m), into the bytes ``payload``, (n, w). Each byte is a sum
        of shifted elements of contiguous slices."""
        width = payload.shape[1]
        total = q[:, :width]
        for k, part in enumerate(torch.split(q, width, dim=1)):
            if k:
                total[:, : part.shape[1]].add_(part, alpha=2 ** (self.bits * k))
        # A sum of q * 2^(bits*k) fits int8. Floats convert to int8 6 times as fast as to uint8.
        offset = sum(2 ** (k + self.bits - 1) for k in range(0, 8, self.bits))
        torch.add(total.to(torch.int8).view(torch.uint8), offset, out=payload)

    def decode_units(self, payload: Tensor, out: Tensor) -> None:
        scale = payload[:, :SCALE_BYTES].clone(memory_format=torch.contiguous_format)
        codes = payload[:, SCALE_BYTES:]
        for k, part in enumerate(torch.split(out, codes.shape[1], dim=1)):
            code = (codes[:, : part.shape[1]] >> (self.bits * k)) & (2**self.bits - 1)
            part.copy_((code - 2 ** (self.bits - 1)).view(torch.int8))
        out *= scale.view(torch.bfloat16).to(torch.float32)

    def kernels(self, *tensors: Tensor) -> ModuleType | None:
        """Return the kernels for ``tensors``, None if there are none."""
        known = self.levels == 2 ** (self.bits - 1) - 1 and self.block <= MAX_BLOCK
        return kernels_for(*tensors) if known else None

    def encode_flat(
        self,
        x: Tensor,
        payload: Tensor,
        less: Tensor | None,
        plus: Tensor | None,
        subtract: bool,
        left: Tensor,
    ) -> Tensor | bool:
        others = [t for t in (less, plus) if t is not None]
        found = self.kernels(x, left, *others)
        if found is None or (others and not subtract):
            return super().encode_flat(x, payload, less, plus, subtract, left)
        at = x, less, plus, payload, left if subtract else None, largest_scale(self.levels)
        in_range: bool | None = found.encode(self.bits, self.block, *at)
        if in_range is not None:
            return in_range
        high_bytes = payload[SCALE_BYTES - 1 :: SCALE_BYTES + self._width(self.block)]
        return (high_bytes != NOT_FINITE).all()

    def decode_flat(self, payload: Tensor, out: Tensor, add: bool) -> None:
        found = self.kernels(out)
        if found is None:
            super().decode_flat(payload, out, add)
        else:
            found.decode(self.bits, self.block, payload, out, add)

    def mean_of_rows(self, rows: Tensor, out: Tensor, plus: Sequence[Tensor]) -> None:
        found = self.kernels(out, *plus)
        if found is None:
            super().mean_of_rows(rows, out, plus)
        else:
            found.decode_mean(self.bits, self.block, rows, out, *plus)


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

    For most elements of a normal distribution the nearest level is 0. Use it with error feedback.
    """

    bits: ClassVar[int] = 2
    levels: ClassVar[float] = 1.0


@cache
def largest_scale(levels: float) -> float:
    """Return the largest bfloat16 s for which ``s * levels`` is a finite float32."""
    mantissa, exponent = math.frexp(torch.finfo(torch.float32).max / levels)
    return math.ldexp(math.floor(mantissa * 256), exponent - 8)
