"""The kernels of ``kernels.c`` for GPUs, in Triton, which ships with PyTorch for CUDA.

They give the same bits, for any shape and alignment. All arithmetic is IEEE float32: divisions are
rounded to the nearest (`div_rn`), and each product that is added or subtracted is exact, so a
fused multiply-add changes nothing.

A program codes ``ROWS`` blocks. Of a block of m elements, the code of element j is in byte j mod w,
so elements are read as K rows of w, with K = 8 / bits codes per byte.

Triton launches on the current device, which need not be that of the tensors: hence `device_of`.
``TRITON_INTERPRET=1`` runs them on CPU tensors, in NumPy; the tests do so.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 2048
"""About how many elements a program codes: 16 for each of 128 threads."""

NUMBERS = ["length", "block", "n", "stride"]
"""Arguments that are numbers in compiled kernels: else 1 would be a constant, without a type."""

SHIFT = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, ties to even
LEAST_SCALE = tl.constexpr(2.0**-126)


@triton.jit
def _round_to_bfloat16(x):
    """Round float32 x to the nearest bfloat16, ties to even, as bits. x must not be NaN."""
    u = x.to(tl.int32, bitcast=True)
    return (u + 0x7FFF + ((u >> 16) & 1)) & -65536


@triton.jit
def _blocks(
    length,
    block,
    BITS: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The blocks of this program: where each starts, as elements and as bytes; the bytes of its
    codes; the offsets of elements in it; and which bytes and elements there are. ``WHOLE``: all
    blocks have ``8 * WIDTH / BITS`` elements, so that memory is read in long words."""
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, WIDTH)[None, None, :]
    k = tl.arange(0, 8 // BITS)[None, :, None]
    if WHOLE:
        start = number * (8 * WIDTH // BITS)
        code = number * (WIDTH + 2)
        w = tl.where(start < length, WIDTH, 0)
        element = k * WIDTH + j
        is_byte = (start < length)[:, None, None]
        there = is_byte
    else:
        start = number * block
        m = tl.maximum(tl.minimum(length - start, block), 0)
        code = number * ((block * BITS + 7) // 8 + 2)
        w = (m * BITS + 7) // 8
        element = k * w[:, None, None] + j
        is_byte = j < w[:, None, None]
        there = is_byte & (element < m[:, None, None])
    return start, code, w, j, element, is_byte, there


@triton.jit(do_not_specialize=NUMBERS)
def _encode(
    x,
    less,
    plus,
    code,
    left,
    length,
    block,
    levels,
    most_scale,
    BITS: tl.constexpr,
    LESS: tl.constexpr,
    PLUS: tl.constexpr,
    LEFT: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    start, at, w, j, element, _, there = _blocks(length, block, BITS, WHOLE, ROWS, WIDTH)
    offset = start[:, None, None] + element
    v = tl.load(x + offset, mask=there, other=0.0)
    if LESS:
        v = v - tl.load(less + offset, mask=there, other=0.0)
    if PLUS:
        v = v + tl.load(plus + offset, mask=there, other=0.0)
    # compare magnitudes as integers: NaN is the largest
    magnitude = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    peak = tl.max(tl.max(magnitude, axis=2), axis=1)
    outside = peak > 0x7F7FFFFF
    peak = tl.where(outside, 0, peak)
    s = tl.div_rn(peak.to(tl.float32, bitcast=True), levels)
    s = _round_to_bfloat16(s).to(tl.float32, bitcast=True)
    s = tl.minimum(tl.maximum(s, LEAST_SCALE), most_scale)
    bits = tl.where(outside, -1, s.to(tl.int32, bitcast=True))
    tl.store(code + at, ((bits >> 16) & 255).to(tl.uint8), mask=w > 0)
    tl.store(code + at + 1, ((bits >> 24) & 255).to(tl.uint8), mask=w > 0)
    s = s[:, None, None]
    kept = outside[:, None, None]
    q = tl.div_rn(tl.where(kept, 0.0, v), s) + SHIFT - SHIFT
    if LEFT:
        # zero of either sign leaves +0: -0 - (-0)
        rest = tl.where(kept, v, tl.where(v == 0.0, 0.0, v - s * q))
        tl.store(left + offset, rest, mask=there)
    HALF: tl.constexpr = 1 << (BITS - 1)
    field = (q.to(tl.int32) + HALF) & (2 * HALF - 1)
    shift = tl.arange(0, 8 // BITS)[None, :, None] * BITS
    byte = tl.sum(field << shift, axis=1)
    j = tl.arange(0, WIDTH)[None, :]
    there = (w > 0)[:, None] if WHOLE else j < w[:, None]
    tl.store(code + at[:, None] + 2 + j, byte.to(tl.uint8), mask=there)


@triton.jit
def _values(code, at, j, is_byte, w, BITS: tl.constexpr):
    """The elements that blocks at the bytes ``at`` of ``code`` hold."""
    low = tl.load(code + at, mask=w > 0, other=0).to(tl.int32)
    high = tl.load(code + at + 1, mask=w > 0, other=0).to(tl.int32)
    s = ((low << 16) | (high << 24)).to(tl.float32, bitcast=True)
    # `j` has one row: each byte is read once, for all codes in it
    byte = tl.load(code + at[:, None, None] + 2 + j, mask=is_byte, other=0).to(tl.int32)
    HALF: tl.constexpr = 1 << (BITS - 1)
    shift = tl.arange(0, 8 // BITS)[None, :, None] * BITS
    level = ((byte >> shift) & (2 * HALF - 1)) - HALF
    return s[:, None, None] * level.to(tl.float32)


@triton.jit(do_not_specialize=NUMBERS)
def _decode(
    code,
    out,
    length,
    block,
    BITS: tl.constexpr,
    ADD: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    start, at, w, j, element, is_byte, there = _blocks(length, block, BITS, WHOLE, ROWS, WIDTH)
    value = _values(code, at, j, is_byte, w, BITS)
    to = out + start[:, None, None] + element
    if ADD:
        value = tl.load(to, mask=there, other=0.0) + value
    tl.store(to, value, mask=there)


@triton.jit(do_not_specialize=NUMBERS)
def _decode_mean(
    code,
    first,
    second,
    out,
    length,
    block,
    n,
    stride,
    BITS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    start, at, w, j, element, is_byte, there = _blocks(length, block, BITS, WHOLE, ROWS, WIDTH)
    total = _values(code, at, j, is_byte, w, BITS)
    for k in range(1, n):
        total = total + _values(code + k * stride.to(tl.int64), at, j, is_byte, w, BITS)
    mean = tl.div_rn(total, tl.zeros_like(total) + n.to(tl.float32))
    offset = start[:, None, None] + element
    if FIRST:
        mean = mean + tl.load(first + offset, mask=there, other=0.0)
    if SECOND:
        mean = mean + tl.load(second + offset, mask=there, other=0.0)
    tl.store(out + offset, mean, mask=there)


def encode(
    bits: int,
    block: int,
    x: Tensor,
    less: Tensor | None,
    plus: Tensor | None,
    payload: Tensor,
    residual: Tensor | None,
    max_scale: float,
) -> None:
    """As `laconic.codecs.kernels.encode`, but it is the scale of a block that says that it is not
    finite: it is no number. Waits for the GPU if ``payload`` is in host memory, and only then."""
    code = payload if payload.device == x.device else torch.empty_like(payload, device=x.device)
    given = (less is not None, plus is not None, residual is not None)
    first, second, rest = (x if t is None else t for t in (less, plus, residual))
    tensors, length = (x, first, second, code, rest), x.numel()
    if length:
        shape, grid = _shape(bits, block, length)
        levels = float(2 ** (bits - 1) - 1)
        at = (length, block, levels, max_scale)
        with torch.cuda.device_of(x):
            _encode[grid](*tensors, *at, bits, *given, *shape)
    if code is not payload:
        payload.copy_(code)


def decode(bits: int, block: int, payload: Tensor, out: Tensor, add: bool) -> None:
    """As `laconic.codecs.kernels.decode`."""
    length = out.numel()
    if length:
        shape, grid = _shape(bits, block, length)
        with torch.cuda.device_of(out):
            _decode[grid](payload, out, length, block, bits, add, *shape)


def decode_mean(
    bits: int,
    block: int,
    rows: Tensor,
    out: Tensor,
    first: Tensor | None = None,
    second: Tensor | None = None,
) -> None:
    """As `laconic.codecs.kernels.decode_mean`."""
    length = out.numel()
    if length:
        shape, grid = _shape(bits, block, length)
        at = (length, block, len(rows), rows.stride(0))
        given = (first is not None, second is not None)
        tensors = (rows, *(out if t is None else t for t in (first, second)), out)
        with torch.cuda.device_of(out):
            _decode_mean[grid](*tensors, *at, bits, *given, *shape)


def _shape(bits: int, block: int, length: int) -> tuple[tuple[bool, int, int], tuple[int]]:
    """Whether all blocks are whole, the blocks that one program codes, and the bytes of a block's
    codes rounded up to a power of two; and the grid of programs."""
    width = triton.next_power_of_2(-(-block * bits // 8))
    whole = block * bits == 8 * width and length % block == 0
    rows = max(ELEMENTS // (width * 8 // bits), 1)
    return (whole, rows, width), (triton.cdiv(triton.cdiv(length, block), rows),)
