"""Blockwise quantization with one scale per block, and several codes per byte.

Dettmers et al., ICLR 2022, arXiv 2110.02861. For a block of m elements x, with L the largest level
of the grid:

    s = max|x| / L, rounded to bfloat16
    y = x / s, rounded to float32           in -L..L, except for the rounding of s
    q = the level next to y                 defined by each codec
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

A block of m codes of b bits takes w = ceil(m * b / 8) bytes. The code of element j is in byte
j mod w, at bit b * floor(j / w). Unused bits hold codes of level 0.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from laconic.codecs.codec import Codec
from laconic.errors import check_int

SCALE_BYTES = 2
MIN_SCALE = 2.0**-126


@dataclass(frozen=True)
class Blockwise(Codec):
    """A codec with one scale for every ``block`` elements."""

    bits: ClassVar[int]
    levels: ClassVar[float]
    """L, the largest level."""
    block: int = 256

    def __post_init__(self) -> None:
        check_int("block", self.block, 1)

    @abstractmethod
    def quantize(self, y: Tensor) -> Tensor:
        """Return codes of y, (n, m), as numbers that ``write`` can add. May overwrite y."""

    @abstractmethod
    def level(self, code: Tensor) -> Tensor:
        """Return the levels of uint8 codes, as int8."""

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

    def encode_units(self, x: Tensor, payload: Tensor) -> Tensor:
        codes, _, in_range = self.quantized(x.to(torch.float32), payload)
        self.write(codes, payload[:, SCALE_BYTES:])
        return in_range

    def quantized(self, x: Tensor, payload: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Write the blocks' scales into ``payload``, and return the codes of x, float32.

        Also returns the scales, and whether all elements are in range. The codes themselves are not
        written.
        """
        peak = x.abs().amax(1, keepdim=True)  # NaN if any element is NaN
        scale = self.scales(peak)
        payload[:, :SCALE_BYTES] = scale.view(torch.uint8)
        scale = scale.to(torch.float32)
        in_range = peak.amax() <= torch.finfo(torch.float32).max
        return self.quantize(x / scale), scale, in_range

    def decode_units(self, payload: Tensor, out: Tensor) -> None:
        scale = payload[:, :SCALE_BYTES].clone(memory_format=torch.contiguous_format)
        for part, code in self._parts(out, payload[:, SCALE_BYTES:]):
            part.copy_(self.level(code))
        out *= scale.view(torch.bfloat16).to(torch.float32)

    def scales(self, peak: Tensor) -> Tensor:
        """Return s, in bfloat16, for blocks with the largest magnitudes ``peak``, in float32."""
        # Divide by a tensor: accelerators multiply by the rounded inverse of a Python number.
        step = peak / torch.full((), self.levels, device=peak.device)
        return step.to(torch.bfloat16).clamp_(MIN_SCALE, largest_scale(self.levels))

    def write(self, codes: Tensor, payload: Tensor) -> None:
        """Write ``codes``, (n, m) numbers, into the bytes ``payload``, (n, w).

        Code j is shifted by b * floor(j / w) bits, so each byte is a sum of contiguous slices.
        """
        width = payload.shape[1]
        total = codes[:, :width]
        for k, part in enumerate(torch.split(codes, width, dim=1)):
            if k:
                total[:, : part.shape[1]].add_(part, alpha=2 ** (self.bits * k))
        self.store(total, payload)

    @abstractmethod
    def store(self, total: Tensor, payload: Tensor) -> None:
        """Write the sums ``total`` of shifted codes into bytes."""

    def _width(self, m: int) -> int:
        return -(-m * self.bits // 8)

    def _parts(self, out: Tensor, codes: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield slices of ``out`` and their codes, one code per byte."""
        for k, part in enumerate(torch.split(out, codes.shape[1], dim=1)):
            code = codes[:, : part.shape[1]]
            if k:
                code = code >> (self.bits * k)
            if self.bits * (k + 1) < 8:
                code = code & (2**self.bits - 1)
            yield part, code


@cache
def largest_scale(levels: float) -> float:
    """Return the largest bfloat16 s for which ``s * levels`` is a finite float32."""
    mantissa, exponent = math.frexp(torch.finfo(torch.float32).max / levels)
    return math.ldexp(math.floor(mantissa * 256), exponent - 8)
