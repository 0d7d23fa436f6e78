"""Powers of two: a sign and three bits of exponent, with one scale per block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.codecs.blocks import Blockwise


@dataclass(frozen=True)
class E3M0(Blockwise):
    """Levels 0 and +-2^(e-1), e = 1..7, so that L = 64: a code is ``8 * [x < 0] + e``, e = 0 for
    level 0; two codes in a byte, 2 + ceil(block / 2) bytes for each block. The 4-bit code of
    Streaming DiLoCo (Douillard et al., 2025, arXiv 2501.18512); symbols, scale s and y
    as in `laconic.codecs.blocks`.

    Nearest means nearest in value, not in logarithm: it is the least error for each element, at
    most |x|/3 where the nearest in logarithm is off by up to 0.41 |x|, and in logarithm nothing is
    nearest to 0. Half-way goes to the larger level. With ``z = max(|y|, |y|/2 + 1/2)``, which lays
    0 to 1 over the octave 1/2 to 1, e is the binary exponent of z after half of its octave is
    added to its bits. The error is at most ``(1 + 2^-20) * max(|x|/3, s/2)``.

    Stochastic: a uniform number of 23 bits is added instead of the half, so that z goes up with
    the probability of its place in the octave, and E[Q(x)] = x; the error is at most
    ``(1 + 2^-20) * max(|x|, s)``. Blocks that reach within 0.4 % of the largest float32 are
    clipped.
    """

    bits: ClassVar[int] = 4
    levels: ClassVar[float] = 64.0

    def quantise(self, y: Tensor, generator: torch.Generator | None) -> Tensor:
        sign = y.view(torch.int32) >> 31  # 0 or -1
        y = y.abs_()
        if self.stochastic:
            y = y.clamp_(max=self.levels)
        z = torch.maximum(y, (y * 0.5).add_(0.5)).view(torch.int32)
        if self.stochastic:
            z += torch.empty_like(z).random_(0, 2**23, generator=generator)
        else:
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

    def error(self, x: Tensor, scale: Tensor) -> Tensor:
        share, steps = (1.0, 1.0) if self.stochastic else (1 / 3, 0.5)
        return torch.maximum(x.abs() * share, scale * steps) * (1 + 2.0**-20)
