"""Powers of two: a sign and a three-bit exponent per element, with one scale per block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.codecs.blocks import Blockwise


@dataclass(frozen=True)
class E3M0(Blockwise):
    """Levels 0 and +-2^(e-1), e = 1..7, so that L = 64.

    A code is ``8 * [x < 0] + e``, where e = 0 is level 0. Two codes share a byte, so a block takes
    2 + ceil(block / 2) bytes. This is the 4-bit code of Streaming DiLoCo (Douillard et al., 2025,
    arXiv 2501.18512). Symbols, the scale s, and y are those of `laconic.codecs.blocks`.

    The level is the one nearest in value, which gives the smallest error for each element: at most
    |x|/3. The nearest level in logarithm is off by up to 0.41 |x|, and no level is
    nearest to 0 in logarithm. Ties go to the larger level. ``z = max(|y|, |y|/2 + 1/2)`` maps 0..1
    to the octave 1/2..1. After half of its octave is added to the bits of z, e is its binary
    exponent. The error is at most ``(1 + 2^-20) * max(|x|/3, s/2)``.
    """

    bits: ClassVar[int] = 4
    levels: ClassVar[float] = 64.0

    def quantize(self, y: Tensor) -> Tensor:
        sign = y.view(torch.int32) >> 31  # 0 or -1
        y = y.abs_()
        z = torch.maximum(y, (y * 0.5).add_(0.5)).view(torch.int32)
        z += 2**22
        z -= 126 << 23  # the exponent field of numbers from 1/2 to 1
        z >>= 23
        return z.sub_(sign, alpha=8).to(torch.uint8)

    def store(self, total: Tensor, payload: Tensor) -> None:
        payload.copy_(total)

    def level(self, code: Tensor) -> Tensor:
        size = (1 << (code & 7)) >> 1
        sign = 1 - ((code & 8) >> 2)  # 1, or -1 as a byte
        return (size * sign).view(torch.int8)
