"""Casts: each element is coded as a shorter float."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.codecs.codec import PIECE, Codec
from laconic.errors import check_choice, check_int

FORMATS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Cast(Codec):
    """x rounded to the nearest ``format``, ties to even. float32 leaves x unchanged.

    | format   | bytes      | abs(x - Q(x)) at most    | largest abs(x) |
    |----------|------------|--------------------------|----------------|
    | float16  | 2 * length | max(2^-11 abs(x), 2^-25) | 65504          |
    | bfloat16 | 2 * length | max(2^-8 abs(x), 2^-134) | 3.39e38        |
    | float32  | 4 * length | 0                        | 3.40e38        |

    Raises ``ValueError`` for larger elements, which would decode to infinity. ``x - Q(x)`` is exact
    in float32.
    """

    format: str = "bfloat16"

    def __post_init__(self) -> None:
        check_choice("format", self.format, FORMATS)

    @property
    def unit(self) -> int:
        return PIECE

    @property
    def grain(self) -> int:
        return 1

    @property
    def dtype(self) -> torch.dtype:
        return FORMATS[self.format]

    def nbytes(self, length: int) -> int:
        return check_int("length", length, 0) * self.dtype.itemsize

    def encode_units(self, x: Tensor, payload: Tensor) -> Tensor:
        x = x.to(torch.float32)
        payload.view(self.dtype).copy_(x)
        return x.abs().amax() <= torch.finfo(self.dtype).max

    def decode_units(self, payload: Tensor, out: Tensor) -> None:
        out.copy_(payload.view(self.dtype))
