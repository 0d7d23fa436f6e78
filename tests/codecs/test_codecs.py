"""The codecs against plain loops over elements in float64, and their properties."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from benchmarks import codecs as benchmark
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laconic.algorithms.exchanges import CodedMean, GatheredMean
from laconic.algorithms.exchanges.coded import coded as mean_of
from laconic.codecs import E3M0, Cast, Codec, Int2, Int4, Int8, TopK
from laconic.codecs.codec import PIECE

MAX = float(np.finfo(np.float32).max)
MAX_BFLOAT16 = float(torch.finfo(torch.bfloat16).max)

BLOCKS = [kind(block) for kind in (Int8, Int4, Int2, E3M0) for block in (1, 3, 256)]
CASTS = [Cast("float32"), Cast("float16"), Cast("bfloat16")]
TOPS: list[Codec] = [
    TopK(),
    TopK(3, 8),
    TopK(5, 7, Cast("float16")),
    TopK(1, 1, Int8()),
    TopK(4, 16, Int2(block=4)),
    TopK(7, 10, Int4(block=3)),
    TopK(6, 9, E3M0(block=6)),
]
CODECS: list[Codec] = [*CASTS, *BLOCKS, *TOPS]
STOCHASTIC = [kind(16, stochastic=True) for kind in (Int8, Int4, Int2, E3M0)]

codecs = pytest.mark.parametrize("codec", CODECS, ids=str)
blocks = pytest.mark.parametrize("codec", BLOCKS, ids=str)


# Plain loops, from the definitions.


def to_float32(value: float) -> float:
    return float(np.float32(value))


def to_bfloat16(value: float) -> float:
    if value == 0:
        return 0.0
    step = 2.0 ** max(math.frexp(value)[1] - 8, -133)
    return round(value / step) * step


def plain_scale(block: list[float], largest: int) -> float:
    scale = to_bfloat16(to_float32(max(map(abs, block)) / largest))
    scale = max(scale, 2.0**-126)
    if scale * largest > MAX:  # then the largest bfloat16 for which it is not
        step = 2.0 ** (math.frexp(MAX / largest)[1] - 8)
        scale = math.floor(MAX / largest / step) * step
    return scale


def plain_exponent(y: float) -> int:
    """The code of the level nearest to y >= 0, among 0, 1, 2, 4, ..., 64; half-way the larger."""
    if y < 1:
        return int(to_float32(y / 2 + 0.5) >= 0.75)
    code = 1
    for e in range(2, 8):
        if abs(y - 2 ** (e - 1)) <= abs(y - 2 ** (code - 1)):
            code = e
    return code


def plain_block(codec: Codec, block: list[float]) -> tuple[bytes, list[float]]:
    if isinstance(codec, E3M0):
        bits, largest = 4, 64
    else:
        bits = {Int8: 8, Int4: 4, Int2: 2}[type(codec)]
        largest = 2 ** (bits - 1) - 1
    scale = plain_scale(block, largest)
    width = math.ceil(len(block) * bits / 8)
    zero = 0 if isinstance(codec, E3M0) else 2 ** (bits - 1)
    codes, values = [zero] * (width * 8 // bits), []
    for j, x in enumerate(block):
        y = to_float32(x / scale)
        if isinstance(codec, E3M0):
            e = plain_exponent(abs(y))
            codes[j] = e + (8 if math.copysign(1, y) < 0 else 0)
            values.append(math.copysign(2 ** (e - 1) if e else 0, y) * scale)
        else:
            codes[j] = round(y) + 2 ** (bits - 1)
            values.append(round(y) * scale)
    body = [0] * width
    for j, code in enumerate(codes):
        body[j % width] += code << (bits * (j // width))
    return struct.pack("<f", scale)[2:] + bytes(body), values


def plain_cast(codec: Cast, x: list[float]) -> tuple[bytes, list[float]]:
    if codec.format == "bfloat16":
        values = [math.copysign(to_bfloat16(v), v) for v in x]
        return b"".join(struct.pack("<f", v)[2:] for v in values), values
    letter = {"float16": "e", "float32": "f"}[codec.format]
    payload = struct.pack(f"<{len(x)}{letter}", *x)
    return payload, list(struct.unpack(f"<{len(x)}{letter}", payload))


def plain_topk(codec: TopK, chunk: list[float]) -> tuple[bytes, list[float]]:
    order = sorted(range(len(chunk)), key=lambda j: (-abs(chunk[j]), j))
    kept = sorted(order[: codec.k])
    number = sum(j << (12 * place) for place, j in enumerate(kept))
    payload, sent = plain(codec.values, [chunk[j] for j in kept])
    values = [0.0] * len(chunk)
    for j, value in zip(kept, sent, strict=True):
        values[j] = value
    return number.to_bytes(math.ceil(len(kept) * 12 / 8), "little") + payload, values


def plain(codec: Codec, x: list[float]) -> tuple[bytes, list[float]]:
    """The code of x, and what it decodes to."""
    if isinstance(codec, Cast):
        return plain_cast(codec, x)
    payload, values = b"", []
    for start in range(0, len(x), codec.unit):
        part = x[start : start + codec.unit]
        one, out = plain_topk(codec, part) if isinstance(codec, TopK) else plain_block(codec, part)
        payload += one
        values += out
    return payload, values


# Inputs.


def largest(codec: Codec) -> float:
    return float(torch.finfo(codec.dtype).max)


def vectors(limit: float) -> st.SearchStrategy[Tensor]:
    """Of all lengths about the blocks, of all sizes, and of few values, so that some are alike."""
    anything = st.floats(-limit, limit, width=32, allow_nan=False)
    few = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 3.0, 1e-45, -1e-39, 2.0**-126, limit, -limit])
    small = st.integers(-260, 260).map(lambda n: n / 2)
    return st.one_of(
        *(st.lists(kind, max_size=40) for kind in (anything, few, small, few | anything))
    ).map(lambda values: torch.tensor(values, dtype=torch.float32))


IN_ALL = vectors(65504.0)
WIDE = vectors(to_float32(MAX_BFLOAT16))
WIDEST = vectors(MAX)


def inputs(codec: Codec) -> st.SearchStrategy[Tensor]:
    return {65504.0: IN_ALL, MAX_BFLOAT16: WIDE, MAX: WIDEST}[largest(codec)]


def normal(length: int, seed: int = 0) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed))


def coded(codec: Codec, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x), x.numel())


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


# Definitions.


@codecs
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_is_what_the_plain_loops_give(codec: Codec, data: st.DataObject) -> None:
    x = data.draw(inputs(codec))
    payload, values = plain(codec, x.tolist())
    encoded = codec.encode(x)
    assert bytes(encoded.tolist()) == payload
    assert codec.decode(encoded, x.numel()).tolist() == values


@codecs
@pytest.mark.parametrize("length", [0, 1, 255, 256, 257, 4095, 4096, 4097, 9000])
def test_long_inputs_are_what_the_plain_loops_give(codec: Codec, length: int) -> None:
    x = normal(length) * torch.exp(3 * normal(length, 1)).clamp(max=1e3)
    payload, values = plain(codec, x.tolist())
    encoded = codec.encode(x)
    assert encoded.dtype == torch.uint8 and encoded.shape == (codec.nbytes(length),)
    assert bytes(encoded.tolist()) == payload
    assert codec.decode(encoded, length).tolist() == values


@pytest.mark.parametrize(
    ("codec", "sizes"),
    [
        (Cast("float32"), {0: 0, 1: 4, 257: 1028}),
        (Cast("float16"), {0: 0, 1: 2, 257: 514}),
        (Cast("bfloat16"), {0: 0, 1: 2, 257: 514}),
        (Int8(), {0: 0, 1: 3, 255: 257, 256: 258, 257: 261, 512: 516}),
        (Int4(), {0: 0, 1: 3, 255: 130, 256: 130, 257: 133, 512: 260}),
        (Int2(), {0: 0, 1: 3, 255: 66, 256: 66, 257: 69, 512: 132}),
        (E3M0(), {0: 0, 1: 3, 255: 130, 256: 130, 257: 133, 512: 260}),
        (Int4(block=3), {3: 4, 4: 7, 6: 8}),
        (TopK(), {0: 0, 1: 6, 2: 11, 64: 352, 4096: 352, 4097: 358, 8192: 704}),
        (TopK(values=Int2(block=64)), {4096: 96 + 18}),
    ],
    ids=str,
)
def test_the_law_of_bytes(codec: Codec, sizes: dict[int, int]) -> None:
    assert {length: codec.nbytes(length) for length in sizes} == sizes


# Properties.


@codecs
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_errors_are_within_the_bound(codec: Codec, data: st.DataObject) -> None:
    x = data.draw(inputs(codec))
    bound = codec.bound(x)
    assert bound.dtype == torch.float32 and bound.shape == x.shape
    error = (x.double() - coded(codec, x).double()).abs()
    assert (error <= bound.double()).all()


@pytest.mark.parametrize("codec", [c for c in CODECS if c.unit > 1], ids=str)
def test_bounds_are_not_idle(codec: Codec) -> None:
    """A bound of infinity would also be one: somewhere an error comes near it."""
    x = normal(40_000)
    error, bound = (x - coded(codec, x)).abs(), codec.bound(x)
    assert (error >= 0.9 * bound).any()
    assert bound.max() <= 3 * error.max()


@codecs
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_what_was_coded_codes_to_itself(codec: Codec, data: st.DataObject) -> None:
    once = coded(codec, data.draw(inputs(codec)))
    # a kept element that decodes to 0 is kept no more, which moves others between blocks of values
    if not isinstance(codec, TopK) or codec.values.unit >= codec.k:
        assert torch.equal(coded(codec, once), once)


@codecs
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_the_residual_is_exact(codec: Codec, data: st.DataObject) -> None:
    x = data.draw(inputs(codec))
    once = coded(codec, x)
    assert torch.equal((x - once).double(), x.double() - once.double())


@codecs
@pytest.mark.parametrize("power", [-90, -3, 1, 80])
def test_powers_of_two_pass_through(codec: Codec, power: int) -> None:
    x = normal(1000).clamp(-4, 4)
    if largest(codec) == 65504.0:
        power = max(min(power, 10), 0)
    assert torch.equal(coded(codec, x * 2.0**power), coded(codec, x) * 2.0**power)


@codecs
def test_signs_pass_through(codec: Codec) -> None:
    x = normal(1000)
    assert torch.equal(coded(codec, -x), -coded(codec, x))


@codecs
def test_a_slice_of_units_is_a_slice_of_the_code(codec: Codec) -> None:
    length = 5 * codec.unit + max(codec.unit // 3, 1)
    x = normal(length)
    whole = codec.encode(x)
    for a, b in [(0, 1), (1, 3), (2, 5), (4, 6)]:
        start, stop = a * codec.unit, min(b * codec.unit, length)
        part = whole[codec.nbytes(start) : codec.nbytes(stop)]
        assert torch.equal(codec.encode(x[start:stop]), part)
        # a slice lies at any byte, and can be decoded where it is
        assert torch.equal(
            codec.decode(part, stop - start), codec.decode(whole, length)[start:stop]
        )


@pytest.mark.parametrize("codec", [Cast("float16"), Int8(), Int4(), Int2(), E3M0(), TopK()])
def test_pieces_leave_no_seams(codec: Codec) -> None:
    length = 2 * PIECE + 4096 + 1234
    x = normal(length)
    middle = PIECE + 2048 // codec.unit * codec.unit if codec.unit < PIECE else PIECE
    halves = torch.cat([codec.encode(x[:middle]), codec.encode(x[middle:])])
    whole = codec.encode(x)
    assert torch.equal(whole, halves)
    assert torch.equal(
        codec.decode(whole, length), torch.cat([coded(codec, x[:middle]), coded(codec, x[middle:])])
    )


@codecs
def test_the_same_bits_every_time(codec: Codec) -> None:
    x = normal(5000)
    before = x.clone()
    assert torch.equal(codec.encode(x), codec.encode(x))
    assert same_bits(coded(codec, x), coded(codec, x))
    assert same_bits(x, before)


# Stochastic rounding.


@pytest.mark.parametrize("codec", STOCHASTIC, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_stochastic_rounding_is_unbiased(codec: Int8 | E3M0, seed: int) -> None:
    repeats = 40_000
    x = normal(16, seed)
    x[0], x[1], x[2] = 0.0, x.abs().max() / 300, -x.abs().max()
    rounded = codec.encode(x.repeat(repeats), torch.Generator().manual_seed(seed))
    values = codec.decode(rounded, 16 * repeats).double().view(repeats, 16)
    # the two levels about x are at most ``bound`` apart: the deviation is at most half of that
    sigma = codec.bound(x).double() / 2 / repeats**0.5
    assert ((values.mean(0) - x).abs() <= 5 * sigma).all()
    for column in values.T:
        assert len(column.unique()) <= 2


@pytest.mark.parametrize("codec", STOCHASTIC, ids=str)
@settings(deadline=None, max_examples=50)
@given(x=WIDEST, seed=st.integers(0, 99))
def test_stochastic_errors_are_within_the_bound(codec: Codec, x: Tensor, seed: int) -> None:
    payload = codec.encode(x, torch.Generator().manual_seed(seed))
    error = (x.double() - codec.decode(payload, x.numel()).double()).abs()
    assert (error <= codec.bound(x).double()).all()


@pytest.mark.parametrize("codec", STOCHASTIC, ids=str)
def test_levels_stay_where_they_are(codec: Int8 | E3M0) -> None:
    x = coded(replace(codec, stochastic=False), normal(10_000))
    assert torch.equal(coded(codec, x), x)


@pytest.mark.parametrize("codec", [*STOCHASTIC, TopK(values=Int4(block=64, stochastic=True))])
def test_the_generator_decides(codec: Codec) -> None:
    x = normal(5000)
    one, other, again = (codec.encode(x, torch.Generator().manual_seed(s)) for s in (1, 2, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    torch.manual_seed(3)
    mine = codec.encode(x)
    torch.manual_seed(3)
    assert torch.equal(mine, codec.encode(x))


# Edges.


@pytest.mark.parametrize("codec", [*CODECS, *STOCHASTIC], ids=str)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_are_zeros(codec: Codec, zero: float) -> None:
    assert not coded(codec, torch.full((300,), zero)).any()


@blocks
def test_zeros_among_others_are_zeros(codec: Codec) -> None:
    x = normal(1000)
    x[::3] = 0
    assert not coded(codec, x)[::3].any()


@pytest.mark.parametrize("codec", [*BLOCKS, *STOCHASTIC], ids=str)
def test_the_largest_and_the_smallest(codec: Codec) -> None:
    for size in (MAX, MAX_BFLOAT16, 2.0**127, 1e-30, 2.0**-126, 1e-40, 1e-45):
        x = torch.tensor([size, -size, 0, size / 3] * 70)
        out = coded(codec, x)
        assert out.isfinite().all()
        assert ((x.double() - out.double()).abs() <= codec.bound(x).double()).all()
        if size > 1e-36 and codec in BLOCKS:
            assert (out[::4] > 0.99 * size).all() and (out[1::4] < -0.99 * size).all()
        assert (out.abs() >= 2.0**-126)[out != 0].all()


@pytest.mark.parametrize("codec", STOCHASTIC, ids=str)
def test_the_largest_stay_in_range_at_random(codec: Codec) -> None:
    x = torch.full((20_000,), MAX)
    payload = codec.encode(x, torch.Generator().manual_seed(0))
    assert (codec.decode(payload, 20_000) > 0.99 * MAX).all()


@codecs
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_decodes_from_any_byte_on(codec: Codec, offset: int) -> None:
    payload = codec.encode(normal(1000))
    room = torch.empty(offset + len(payload), dtype=torch.uint8)
    room[offset:] = payload
    assert torch.equal(codec.decode(room[offset:], 1000), codec.decode(payload, 1000))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@codecs
def test_other_dtypes_are_cast(codec: Codec, dtype: torch.dtype) -> None:
    x = normal(5000).to(dtype)
    assert torch.equal(codec.encode(x), codec.encode(x.float()))


@codecs
def test_strides_and_gradients_do_not_matter(codec: Codec) -> None:
    x = normal(3000)
    assert torch.equal(codec.encode(x[::3]), codec.encode(x[::3].clone()))
    assert torch.equal(codec.encode(x.requires_grad_()), codec.encode(x.detach()))


@codecs
def test_decodes_into_a_given_tensor(codec: Codec) -> None:
    x = normal(1000)
    payload = codec.encode(x)
    room = torch.full((1002,), math.nan)
    assert codec.decode(payload, 1000, out=room[1:-1]).data_ptr() == room[1:].data_ptr()
    assert torch.equal(room[1:-1], codec.decode(payload, 1000))
    assert room[[0, -1]].isnan().all()


@pytest.mark.parametrize("codec", [*CODECS, *STOCHASTIC], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@settings(deadline=None, max_examples=20)
@given(length=st.integers(1, 600), data=st.data())
def test_what_is_not_finite_is_refused(
    codec: Codec, value: float, length: int, data: st.DataObject
) -> None:
    x = torch.ones(length)
    index = data.draw(st.integers(0, length - 1))
    x[index:] = value
    with pytest.raises(ValueError, match=rf"element {index} is {value}$"):
        codec.encode(x.clone(), subtract=True)
    with pytest.raises(ValueError, match=rf"element {index} is {value}$") as raised:
        codec.encode(x)
    assert str(raised.value).startswith(str(codec))


@pytest.mark.parametrize(
    ("codec", "value", "message"),
    [
        (Cast("float16"), 65505.0, "element 17 is 65505, beyond the largest float16, 65504"),
        (Cast("bfloat16"), -MAX, r"element 17 is -3.40282e\+38, beyond the largest bfloat16"),
        (Int8(), 1e300, r"element 17 is 1e\+300, beyond the largest float32, 3.40282e\+38"),
        (Cast("float32"), -1e39, r"element 17 is -1e\+39, beyond the largest float32"),
        (TopK(values=Cast("float16")), 7e4, "element 17 is 70000, beyond the largest float16"),
    ],
    ids=str,
)
def test_what_is_out_of_range_is_refused(codec: Codec, value: float, message: str) -> None:
    x = normal(40).double()
    x[17] = value
    with pytest.raises(ValueError, match=message):
        codec.encode(x)


def test_the_ends_of_the_range_are_taken() -> None:
    for codec in CODECS:
        x = torch.tensor([largest(codec), -largest(codec)])
        assert coded(codec, x).isfinite().all()


@codecs
def test_what_does_not_fit_is_refused(codec: Codec) -> None:
    with pytest.raises(ValueError, match="flat floating-point"):
        codec.encode(torch.ones(2, 2))
    with pytest.raises(ValueError, match="flat floating-point"):
        codec.encode(torch.ones(2, dtype=torch.int32))
    payload = codec.encode(torch.ones(10))
    for wrong in (payload[:-1], payload[None], payload.view(torch.int8)):
        with pytest.raises(ValueError, match=f"10 elements as {len(payload)} uint8 values, not as"):
            codec.decode(wrong, 10)
    with pytest.raises(ValueError, match="length must be"):
        codec.decode(payload, -1)
    for room in (torch.empty(9), torch.empty(10).double(), torch.empty(20)[::2]):
        with pytest.raises(ValueError, match="out must be 10 contiguous float32 values on cpu"):
            codec.decode(payload, 10, out=room)


@codecs
def test_no_code_is_bytes_of_255_alone(codec: Codec) -> None:
    """Which is what a worker sends of what cannot be coded."""
    top = largest(codec)
    for x in (0.0, 1.0, -1.0, top, -top, 2.0**-126, -(2.0**-126)):
        for length in (1, 2, 3, 600):
            assert not bool((codec.encode(torch.full((length,), x)) == 255).all())


@codecs
def test_what_is_not_as_x_is_refused(codec: Codec) -> None:
    x = torch.ones(10)
    for name in ("less", "plus"):
        for wrong in (torch.ones(1), torch.ones(10).double(), torch.ones(11)):
            with pytest.raises(
                ValueError, match=f"argument {name!r} must match x .dtype torch.float32"
            ):
                codec.encode(x, subtract=True, **{name: wrong})
    with pytest.raises(ValueError, match="changed in place and must be contiguous"):
        codec.encode(torch.ones(20)[::2], subtract=True)


@codecs
def test_rows_that_do_not_fit_have_no_mean(codec: Codec) -> None:
    length = 3 * codec.grain
    row = codec.encode(torch.ones(length))
    rows = torch.stack([row, row])
    decoded = codec.decode(row, length)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        mean = codec.decode_mean(rows, torch.empty(length, dtype=dtype))
        assert torch.equal(mean, decoded.to(dtype))
    strided = torch.stack([row, row], dim=1).t()
    for wrong in (rows[:, 1:], rows[:0], rows[0], rows.view(torch.int8), strided):
        with pytest.raises(ValueError, match=f"as a contiguous row of {len(row)} uint8 values"):
            codec.decode_mean(wrong, torch.empty(length))
    if codec.grain > 1:
        with pytest.raises(ValueError, match=f"multiple of {codec.grain} elements, not of 1"):
            codec.decode_mean(rows, torch.empty(1))


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="'float16', 'bfloat16', 'float32', not 'int8'"):
        Cast("int8")
    for kind in (Int8, Int4, Int2, E3M0):
        with pytest.raises(ValueError, match="block must be an integer of at least 1, not 0"):
            kind(0)
        with pytest.raises(ValueError, match="stochastic must be True or False, not 1"):
            kind(stochastic=1)
    with pytest.raises(ValueError, match="k must be at most the chunk, 32, not 64"):
        TopK(chunk=32)
    with pytest.raises(ValueError, match="chunk must be at most 4096, not 8192"):
        TopK(chunk=8192)
    with pytest.raises(ValueError, match="values must be one of Cast, Int8"):
        TopK(values=TopK())


def test_codecs_are_values() -> None:
    assert Int8() == Int8(256) and hash(TopK()) == hash(TopK()) and Int8() != Int4()


# Error feedback (1-bit SGD: Seide et al., Interspeech 2014).


@pytest.mark.parametrize("codec", [*CODECS, *STOCHASTIC], ids=str)
def test_error_feedback_sends_all_in_the_end(codec: Codec) -> None:
    """e' = e + d - Q(e + d): what was sent and what is left are what came in."""
    length, rounds = 600, 30
    residual = torch.zeros(length, dtype=torch.float64)
    sent, came = residual.clone(), residual.clone()
    generator = torch.Generator().manual_seed(0)
    for k in range(rounds):
        d = normal(length, k).double()
        total = residual + d
        message = codec.decode(codec.encode(total, generator), length).double()
        residual = total - message
        sent += message
        came += d
    assert torch.allclose(sent + residual, came, rtol=0, atol=1e-12)
    assert (sent - came).abs().max() < (60 if isinstance(codec, TopK) else 10)
    assert sent.any()


def test_the_benchmark_has_a_line_for_every_codec(capsys: pytest.CaptureFixture[str]) -> None:
    benchmark.main(5000, 1)
    lines = capsys.readouterr().out.splitlines()
    assert [line[:64].strip() for line in lines[3:]] == [str(codec) for codec in benchmark.CODECS]
    for codec, line in zip(benchmark.CODECS, lines[3:], strict=True):
        encode, decode, bits = map(float, line[64:].split())
        assert min(encode, decode) >= 0
        assert bits == pytest.approx(8 * codec.nbytes(5000) / 5000, abs=0.005)


@dataclass(frozen=True)
class Five(Int4):
    """Of fewer levels than its bits would do for."""

    levels: ClassVar[float] = 5.0


def test_a_codec_of_ones_own_has_its_own_levels() -> None:
    """The compiled kernels know those of laconic's codecs alone."""
    x = torch.linspace(-1, 1, 2048)
    decoded = Five(block=2048).decode(Five(block=2048).encode(x), len(x))
    assert len(decoded.unique()) == 11
    assert bool(((x - decoded).abs() <= Five(block=2048).bound(x)).all())


@dataclass(frozen=True)
class Gathered(Int4):
    """Whose sums are not coded again."""

    gathered: ClassVar[bool] = True


def test_a_codec_says_how_its_codes_are_averaged() -> None:
    for codec in (Gathered(), TopK()):
        assert isinstance(mean_of(codec, relative=False), GatheredMean)
    for other in (Int4(), Int8(), E3M0()):
        assert isinstance(mean_of(other, relative=False), CodedMean)
