"""One scale for each block of elements (block-wise quantisation: Dettmers et al., ICLR 2022,
arXiv 2110.02861), and several codes in one byte.

For a block of m elements x, with L the largest level of the grid:

    s = max|x| / L, rounded to bfloat16
    y = x / s, rounded to float32           in -L..L, but for the rounding of s
    q = the level next to y                 the codecs' own part
    Q(x) = s * q

The scale. It is two bytes, in front of the block's codes. A bfloat16 has the exponents of a
float32, so that any block has a scale; a float16 of the same two bytes would have none below 6e-8
or above 65504. Its 8 significant bits make ``s * q`` exact in float32, and with it
``x - Q(x)``, the residual of an error feedback; and as s is off by at most 2^-8, ``y`` is within
1/2 of L, so that nothing is clipped and ``Q(Q(x)) == Q(x)``. A float32 would cost two more bytes
per block (0.06 bits per element of a block of 256), keep none of these, and make the steps smaller
by at most 0.4 %.

With stochastic rounding s is rounded up, so that |y| <= L: clipping would be a bias.

s is at least 2^-126, the least normal number, so that Q(x) is never subnormal and ``x / s`` never
overflows: elements of a smaller block are taken as multiples of that. It is at most the largest for
which ``s * L`` is finite.

The codes. With b bits a code, the block's m elements take w = ceil(m * b / 8) bytes: the code of
element j is in byte j mod w, at bit b * floor(j / w); bits left over are codes of level 0.
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
from torch.nn import functional

from laconic.codecs.codec import Codec, check_length
from laconic.errors import check_bool, check_int

SCALE_BYTES = 2
LEAST_SCALE = 2.0**-126


@dataclass(frozen=True)
class Blockwise(Codec):
    """A codec with a scale for each ``block`` elements; ``stochastic``: rounds to a neighbouring
    level at random, such that E[Q(x)] = x."""

    bits: ClassVar[int]
    levels: ClassVar[float]
    """L, the largest level."""
    block: int = 256
    stochastic: bool = False

    def __post_init__(self) -> None:
        check_int("block", self.block, 1)
        check_bool("stochastic", self.stochastic)

    @abstractmethod
    def quantise(self, y: Tensor, generator: torch.Generator | None) -> Tensor:
        """Codes of y, (n, m), as numbers that ``write`` can add; y may be overwritten."""

    @abstractmethod
    def level(self, code: Tensor) -> Tensor:
        """The levels that uint8 codes stand for, int8."""

    @abstractmethod
    def error(self, x: Tensor, scale: Tensor) -> Tensor:
        """The bound on |x - Q(x)|, for x of any size and scales that broadcast to it."""

    @property
    def unit(self) -> int:
        return self.block

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def nbytes(self, length: int) -> int:
        whole, rest = divmod(check_length(length), self.block)
        size = whole * (SCALE_BYTES + self._width(self.block))
        return size + (SCALE_BYTES + self._width(rest) if rest else 0)

    def bound(self, x: Tensor) -> Tensor:
        length = x.numel()
        blocks = functional.pad(x.to(torch.float32), (0, -length % self.block))
        blocks = blocks.view(-1, self.block)
        scale = self.scales(blocks.abs().amax(1, keepdim=True)).to(torch.float32)
        return self.error(blocks, scale).reshape(-1)[:length]

    def encode_units(self, x: Tensor, payload: Tensor, generator: torch.Generator | None) -> Tensor:
        codes, _, fine = self.quantised(x.to(torch.float32), payload, generator)
        self.write(codes, payload[:, SCALE_BYTES:])
        return fine

    def quantised(
        self, x: Tensor, payload: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Codes of x, float32, that are still to be written, the blocks' scales, which are written
        into ``payload``, and whether all elements are in range."""
        peak = x.abs().amax(1, keepdim=True)  # NaN if any element is
        scale = self.scales(peak)
        payload[:, :SCALE_BYTES] = scale.view(torch.uint8)
        scale = scale.to(torch.float32)
        fine = peak.amax() <= torch.finfo(torch.float32).max
        return self.quantise(x / scale, generator), scale, fine

    def decode_units(self, payload: Tensor, out: Tensor) -> None:
        scale = payload[:, :SCALE_BYTES].clone(memory_format=torch.contiguous_format)
        for part, code in self._parts(out, payload[:, SCALE_BYTES:]):
            part.copy_(self.level(code))
        out *= scale.view(torch.bfloat16).to(torch.float32)

    def scales(self, peak: Tensor) -> Tensor:
        """s, bfloat16, of blocks with the largest magnitudes ``peak``, float32."""
        # by a tensor: an accelerator divides by a number by way of its rounded inverse
        step = peak / torch.full((), self.levels, device=peak.device)
        scale = step.to(torch.bfloat16)
        if self.stochastic:
            above = (scale.view(torch.int16) + 1).view(torch.bfloat16)
            scale = torch.where(scale.to(torch.float32) < step, above, scale)
        return scale.clamp_(LEAST_SCALE, largest_scale(self.levels))

    def write(self, codes: Tensor, payload: Tensor) -> None:
        """``codes``, (n, m) numbers, into the bytes ``payload``, (n, w): b * floor(j / w) is the
        place of code j, so that a byte is a sum of contiguous slices."""
        width = payload.shape[1]
        total = codes[:, :width]
        for k, part in enumerate(torch.split(codes, width, dim=1)):
            if k:
                total[:, : part.shape[1]].add_(part, alpha=2 ** (self.bits * k))
        self.store(total, payload)

    @abstractmethod
    def store(self, total: Tensor, payload: Tensor) -> None:
        """Sums of codes into bytes."""

    def _width(self, m: int) -> int:
        return -(-m * self.bits // 8)

    def _parts(self, out: Tensor, codes: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Slices of ``out`` and their codes, one a byte."""
        for k, part in enumerate(torch.split(out, codes.shape[1], dim=1)):
            code = codes[:, : part.shape[1]]
            if k:
                code = code >> (self.bits * k)
            if self.bits * (k + 1) < 8:
                code = code & (2**self.bits - 1)
            yield part, code


@cache
def largest_scale(levels: float) -> float:
    """The largest bfloat16 s for which ``s * levels`` is a finite float32."""
    mantissa, exponent = math.frexp(torch.finfo(torch.float32).max / levels)
    return math.ldexp(math.floor(mantissa * 256), exponent - 8)
