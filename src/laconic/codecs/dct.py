"""The discrete cosine transform of the tiles of a matrix: C_h X C_w^T, with C_n orthonormal.

    C_n[f, j] = sqrt((2 - [f = 0]) / n) * cos(pi * f * (2*j + 1) / (2*n)),   f, j = 0..n-1

Type II (Ahmed, Natarajan, Rao, IEEE Transactions on Computers, 1974). Because C_n is orthonormal,
the inverse is C_h^T Y C_w, and the transform preserves sums of squares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from laconic.errors import check_int


@dataclass(frozen=True)
class Tiling:
    """A matrix of ``rows`` by ``columns`` elements, cut into tiles of ``height`` by ``width``.

    The sides of the tiles divide the matrix. Tiles are counted row by row.
    """

    rows: int
    columns: int
    height: int
    width: int

    @classmethod
    def of(cls, shape: Sequence[int], chunk: int) -> Tiling:
        """Return the tiling of a tensor of this ``shape``.

        A vector is one row. All dimensions of a tensor except the first are joined into columns.
        The sides of tiles are the largest divisors that are at most ``chunk`` (at least 1). With a
        chunk of 64, a side of 64 stays whole, 100 is cut into 50s, and a prime number into 1s.
        """
        rows = shape[0] if len(shape) > 1 else 1
        columns = math.prod(shape) // rows
        return cls(rows, columns, divisor(rows, chunk), divisor(columns, chunk))

    @property
    def size(self) -> int:
        """Number of elements in a tile."""
        return self.height * self.width

    @property
    def count(self) -> int:
        """Number of tiles."""
        return self.rows * self.columns // self.size

    @property
    def numel(self) -> int:
        """Number of elements in the matrix."""
        return self.rows * self.columns

    def forward(self, x: Tensor) -> Tensor:
        """Return the coefficients, (count, size), of the matrix ``x``, given flat row by row."""
        down, across = self._bases(x)
        tiles = x.view(-1, self.height, self.columns // self.width, self.width).transpose(1, 2)
        with torch.autocast(x.device.type, enabled=False):
            return (down @ tiles @ across.mT).reshape(self.count, self.size)

    def inverse(self, c: Tensor) -> Tensor:
        """Return the matrix, flat, whose coefficients are ``c``."""
        down, across = self._bases(c)
        tiles = c.view(-1, self.columns // self.width, self.height, self.width)
        with torch.autocast(c.device.type, enabled=False):
            return (down.mT @ tiles @ across).transpose(1, 2).reshape(self.numel)

    def _bases(self, x: Tensor) -> tuple[Tensor, Tensor]:
        down, across = (cosines(n, x.dtype, x.device) for n in (self.height, self.width))
        return down, across


@lru_cache(maxsize=256)
def cosines(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return C_n."""
    quarters = torch.arange(n)[:, None] * (2 * torch.arange(n) + 1)  # f * (2*j + 1), of pi/(2*n)
    c = torch.cos(torch.pi / (2 * n) * quarters.double()) * (2 / n) ** 0.5
    c[0] /= 2**0.5
    c[quarters % (2 * n) == n] = 0.0  # exactly, because the sign of a rounding error would count
    basis: Tensor = c.to(device, dtype)
    return basis


@lru_cache(maxsize=4096)
def divisor(n: int, most: int) -> int:
    """Return the largest divisor of ``n`` that is at most ``most``."""
    check_int("most", most, 1)
    return next(d for d in range(min(n, most), 0, -1) if n % d == 0)
