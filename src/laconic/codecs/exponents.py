"""Powers of two: a sign and three bits of exponent, with one scale per block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.codecs.blocks import Blockwise


@dataclass(frozen=True)
class E3M0(Blockwise):
    """Levels 0 and +-2^(e-7), e = 1..7: a code is ``8 * [x < 0] + e``, e = 0 for level 0; two codes
    in a byte, 2 + ceil(block / 2) bytes for each block. The 4-bit code of Streaming DiLoCo
    (Douillard et al., 2025, arXiv 2501.18512, section 2.3); symbols, scale s and y as in
    `laconic.codecs.blocks`, with L = 1.

    Nearest means nearest in value, not in logarithm: it is the least error for each element, at
    most x/3 where the nearest in logarithm is off by up to 0.41 x, and it alone has a nearest to
    zero. Half-way goes to the larger level: with ``z = max(|y|, |y|/2 + 2^-7)``, which lays 0 to
    2^-6 over the octave below, e + 120 is the exponent field of z after half of its octave is
    added to its bits. The error is at most ``(1 + 2^-20) * max(|x|/3, s/128)``.

    Stochastic: a uniform number of 23 bits is added instead of the half, so that z goes up with
    the probability of its place in the octave, and E[Q(x)] = x; the error is at most
    ``(1 + 2^-20) * max(|x|, s/64)``. Blocks that reach within 1 % of the largest float32 are
    clipped.
    """

    bits: ClassVar[int] = 4
    levels: ClassVar[float] = 1.0
    least: ClassVar[float] = 2.0**-120

    def quantise(self, y: Tensor, generator: torch.Generator | None) -> Tensor:
        sign = (y.view(torch.int32) >> 28) & 8
        y = y.abs_().clamp_(max=1)
        z = torch.maximum(y, y * 0.5 + 2.0**-7).view(torch.int32)
        if self.stochastic:
            z += torch.empty_like(z).random_(0, 2**23, generator=generator)
        else:
            z += 2**22
        return (z >> 23).sub_(120).add_(sign)

    def store(self, total: Tensor, payload: Tensor) -> None:
        payload.copy_(total)

    def level(self, code: Tensor) -> Tensor:
        bits = code.to(torch.int32)
        z = (((bits & 7) + 120) << 23).view(torch.float32)
        z = torch.minimum(z, z * 2 - 2.0**-6)  # the inverse of quantise's z
        return (z.view(torch.int32) | ((bits << 28) & -(2**31))).view(torch.float32)

    def error(self, x: Tensor, scale: Tensor) -> Tensor:
        share, least = (1.0, 2.0**-6) if self.stochastic else (1 / 3, 2.0**-7)
        return torch.maximum(x.abs() * share, scale * least) * (1 + 2.0**-20)
