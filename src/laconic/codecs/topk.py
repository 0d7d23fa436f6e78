"""The largest elements of each chunk, coded as indices and values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from laconic.codecs.cast import Cast
from laconic.codecs.codec import Codec, check_repr
from laconic.errors import check_int

INDEX_BITS = 12


@dataclass(frozen=True)
class TopK(Codec):
    """The ``k`` elements of largest magnitude of each ``chunk`` elements; the others become 0.

    SparseLoCo (Sarfi et al., 2025, arXiv 2508.15706) uses k 64, chunk 4096, and 2-bit values.

    A chunk of m elements keeps k' = min(k, m) of them, and the lower index of equal magnitudes.
    Its code holds the ascending indices, 12 bits each, and then the values, coded by ``values``:
    ceil(12 k' / 8) + values.nbytes(k') bytes. The indices are the 12-bit digits of one
    little-endian number, so two of them, a and b, are the three bytes
    ``a mod 256, floor(a / 256) + 16 (b mod 16), floor(b / 16)``.

    The error is that of ``values`` for elements that are kept, and |x| for the others. By default
    values are float32, so elements that are sent have no error. This takes 0.69 bits per element;
    ``values=Int2(block=64)`` takes 0.22.
    """

    gathered: ClassVar[bool] = True

    k: int = 64
    chunk: int = 4096
    values: Codec = field(default_factory=lambda: Cast("float32"))

    def __post_init__(self) -> None:
        check_int("k", self.k, 1)
        check_int("chunk", self.chunk, 1)
        if self.chunk > 2**INDEX_BITS:
            raise ValueError(f"chunk must be at most {2**INDEX_BITS}, not {self.chunk}")
        if self.k > self.chunk:
            raise ValueError(f"k must be at most the chunk, {self.chunk}, not {self.k}")
        if not isinstance(self.values, Codec) or isinstance(self.values, TopK):
            raise ValueError(
                f"values must be one of Cast, Int8, Int4, Int2, E3M0, not {self.values!r}"
            )
        check_repr(self.values)

    @property
    def unit(self) -> int:
        return self.chunk

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def nbytes(self, length: int) -> int:
        whole, rest = divmod(check_int("length", length, 0), self.chunk)
        return whole * self._chunk_bytes(self.chunk) + (self._chunk_bytes(rest) if rest else 0)

    def encode_units(self, x: Tensor, payload: Tensor) -> Tensor:
        x = x.to(torch.float32)
        kept = self._largest(x)
        n, k = kept.shape
        size = index_bytes(k)
        values = payload.new_empty(n, self.values.nbytes(k))
        in_range = self.values.encode_rows(x.gather(1, kept), values)
        payload[:, :size] = pack_indices(kept)
        payload[:, size:] = values
        return in_range

    def decode_units(self, payload: Tensor, out: Tensor) -> None:
        n, m = out.shape
        k = min(self.k, m)
        size = index_bytes(k)
        values = out.new_empty(n, k)
        codes = payload[:, size:].clone(memory_format=torch.contiguous_format)
        self.values.decode_rows(codes, values)
        out.zero_().scatter_(1, unpack_indices(payload[:, :size], k), values)

    def _chunk_bytes(self, m: int) -> int:
        k = min(self.k, m)
        return index_bytes(k) + self.values.nbytes(k)

    def _largest(self, x: Tensor) -> Tensor:
        """Return the indices of the k' largest per row, ascending. NaN counts as the largest."""
        m = x.shape[1]
        # Magnitudes order like their bits. With the index appended no two keys are equal, so all
        # machines choose the same elements.
        keys = x.abs().view(torch.int32).to(torch.int64) << INDEX_BITS
        keys += torch.arange(m - 1, -1, -1, device=x.device)
        chosen = torch.topk(keys, min(self.k, m), dim=1, sorted=False).indices
        return chosen.sort(dim=1).values


def index_bytes(k: int) -> int:
    """Return the number of bytes of ``k`` indices."""
    return -(-k * INDEX_BITS // 8)


def pack_indices(indices: Tensor) -> Tensor:
    """Pack indices, (n, k) integers, into (n, index_bytes(k)) bytes."""
    n, k = indices.shape
    if k % 2:
        indices = torch.cat([indices, indices.new_zeros(n, 1)], dim=1)
    a, b = indices[:, ::2], indices[:, 1::2]
    packed = torch.stack([a & 255, (a >> 8) | ((b & 15) << 4), b >> 4], dim=2)
    return packed.to(torch.uint8).view(n, -1)[:, : index_bytes(k)]


def unpack_indices(packed: Tensor, k: int) -> Tensor:
    """Return ``k`` indices per row, int64, from the result of ``pack_indices``."""
    n = packed.shape[0]
    if k % 2:
        packed = torch.cat([packed, packed.new_zeros(n, 1)], dim=1)
    first, second, third = packed.to(torch.int64).view(n, -1, 3).unbind(2)
    a = first | ((second & 15) << 8)
    b = (second >> 4) | (third << 4)
    return torch.stack([a, b], dim=2).view(n, -1)[:, :k]
