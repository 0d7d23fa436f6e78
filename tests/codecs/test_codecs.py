"""Codecs against their references, what they promise of every input, and their kernels."""

from __future__ import annotations

import ctypes
import itertools
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from laconic import native
from laconic.codecs import CODECS, Cast, Codec, Int2, Int4, Int8, codec_of, kernels
from laconic.codecs.codec import PIECE
from laconic.errors import NotFiniteError

from tests.references import coded as ref

MAX = ref.LARGEST
MAX_BFLOAT16 = float(torch.finfo(torch.bfloat16).max)

few = settings(deadline=None, max_examples=12)


KINDS: dict[Any, Callable[[int], ref.Codec]] = dict(
    zip((Int8, Int4, Int2), (ref.int8, ref.int4, ref.int2), strict=True)
)
"""The codecs of blocks, with their references."""


def reference(codec: Any) -> ref.Codec:
    if isinstance(codec, Cast):
        return ref.cast(codec.format)
    return KINDS[type(codec)](codec.block)


CASTS: list[Codec] = [Cast("float32"), Cast("float16"), Cast("bfloat16")]
BLOCKS: list[Codec] = [kind(block) for kind in KINDS for block in (3, 256)]
EXACT = [*CASTS, *BLOCKS]
exact = pytest.mark.parametrize("codec", EXACT, ids=str)


def test_every_codec_with_a_name_is_tested_here() -> None:
    missing = {type(codec).__name__ for codec in CODECS.values() if type(codec) not in KINDS}
    assert missing == {"Cast"}, "KINDS lacks the reference of a codec"


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


INPUTS = {limit: vectors(limit) for limit in (65504.0, MAX_BFLOAT16, MAX)}


def normal(length: int, seed: int = 0) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed))


def coded(codec: Codec, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x), x.numel())


def bound(codec: Any, x: Tensor) -> Tensor:
    """The bound on ``|x - Q(x)|``, in float64, that the codec's docstring states."""
    x = x.double()
    if isinstance(codec, Cast):
        half = {"float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 2.0**-134)}
        share, least = half.get(codec.format, (0.0, 0.0))
        return (x.abs() * share).clamp(min=least)
    blocks = functional.pad(x, (0, -len(x) % codec.block)).view(-1, codec.block)
    scale: Tensor = codec.scales(blocks.abs().amax(1, keepdim=True).float()).double()
    bounds: Tensor = (scale * (0.5 + codec.levels * 2.0**-23)).expand_as(blocks)
    return bounds.reshape(-1)[: len(x)]


# What holds of every input.


@exact
@few
@given(data=st.data())
def test_short_inputs(codec: Codec, data: st.DataObject) -> None:
    """Values of the reference, errors within the bound, exact residuals; what was coded codes to
    itself; signs and powers of two pass through; the mark of a refusal is no code."""
    x = data.draw(INPUTS[largest(codec)])
    encoded, left = codec.encode(x), x.clone()
    once = codec.decode(encoded, len(x))
    assert len(encoded) == codec.nbytes(len(x))
    assert once.tolist() == reference(codec)(x.numpy()).tolist()
    assert torch.equal(codec.encode(left, subtract=True), encoded)
    assert torch.equal(left.double(), x.double() - once.double())
    assert (left.double().abs() <= bound(codec, x).double()).all()
    assert torch.equal(coded(codec, once), once)
    assert torch.equal(coded(codec, -x), -once)
    if largest(codec) == MAX and 1e-30 < float(x.abs().max() if len(x) else 0) < 1e30:
        part = x * ((x == 0) | (x.abs() > 1e-30))
        assert torch.equal(coded(codec, part * 2.0**5), coded(codec, part) * 2.0**5)
    assert not len(x) or not bool((encoded == 255).all())


@exact
def test_long_inputs(codec: Codec) -> None:
    """Across blocks and chunks; in any slices, dtypes and strides, at any byte."""
    length = max(5 * codec.unit + codec.unit // 3, 600)
    x = (normal(length) * torch.exp(3 * normal(length, 1)).clamp(max=1e3)).requires_grad_()
    with torch.no_grad():
        whole = codec.encode(x)
        decoded = codec.decode(whole, length)
        assert whole.dtype == torch.uint8
        for each in (x, x.round()):  # of which many are alike
            assert coded(codec, each).tolist() == reference(codec)(each.numpy()).tolist()
        for a, b in [(0, 1), (1, 3), (2, 5), (4, 6)]:
            start, stop = a * codec.unit, min(b * codec.unit, length)
            part = whole[codec.nbytes(start) : codec.nbytes(stop)]
            assert torch.equal(codec.encode(x[start:stop]), part)
            assert torch.equal(codec.decode(part, stop - start), decoded[start:stop])
        assert torch.equal(codec.encode(x[::3]), codec.encode(x[::3].clone()))
        for dtype in (torch.float16, torch.bfloat16, torch.float64):
            assert torch.equal(codec.encode(x.to(dtype)), codec.encode(x.to(dtype).float()))
        room = torch.full((length + 2,), math.nan)
        out = codec.decode(whole, length, out=room[1:-1])
        assert out.data_ptr() == room[1:].data_ptr() and torch.equal(room[1:-1], decoded)
        assert room[[0, -1]].isnan().all()
    if codec.unit > 1:  # a bound of infinity would also be one
        y = normal(max(4_000, 10 * codec.unit))
        error, most = (y - coded(codec, y)).abs(), bound(codec, y)
        assert (error >= 0.9 * most).any() and most.max() <= 3 * error.max()


@pytest.mark.parametrize("codec", [Cast("float16"), Int4()], ids=str)
def test_pieces_leave_no_seams(codec: Codec) -> None:
    length = PIECE + 4096 + 1234
    x = normal(length)
    middle = PIECE // 2 + 2048 // codec.unit * codec.unit if codec.unit < PIECE else PIECE
    whole = codec.encode(x)
    assert torch.equal(whole, torch.cat([codec.encode(x[:middle]), codec.encode(x[middle:])]))
    halves = torch.cat([coded(codec, x[:middle]), coded(codec, x[middle:])])
    assert torch.equal(codec.decode(whole, length), halves)


@exact
def test_the_mean_of_rows(codec: Codec) -> None:
    length = 3 * codec.grain
    rows = torch.stack([codec.encode(normal(length, seed)) for seed in range(3)])
    plainly = torch.stack([codec.decode(row, length) for row in rows]).sum(0) / 3
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        mean = codec.decode_mean(rows, torch.empty(length, dtype=dtype))
        assert mean.dtype == dtype
        close = 2e-2 if dtype == torch.bfloat16 else 1e-6
        assert torch.allclose(mean, plainly.to(dtype), rtol=close, atol=close)
    with pytest.raises(ValueError, match="out must be"):
        codec.decode_mean(rows, torch.empty(length), plus=[torch.ones(length - 1)])
    strided = torch.stack([rows[0], rows[0]], dim=1).t()
    for wrong in (rows[:, 1:], rows[:0], rows[0], rows.view(torch.int8), strided):
        with pytest.raises(ValueError, match="uint8 values, not as"):
            codec.decode_mean(wrong, torch.empty(length))
    if codec.grain > 1:
        with pytest.raises(ValueError, match=f"multiple of {codec.grain} elements"):
            codec.decode_mean(rows, torch.empty(1))


@pytest.mark.parametrize(
    ("codec", "sizes"),
    [
        (Cast("float32"), {0: 0, 1: 4, 257: 1028}),
        (Cast("bfloat16"), {0: 0, 1: 2, 257: 514}),
        (Int8(), {0: 0, 1: 3, 255: 257, 256: 258, 257: 261, 512: 516}),
        (Int4(), {0: 0, 1: 3, 255: 130, 256: 130, 257: 133, 512: 260}),
        (Int2(), {0: 0, 1: 3, 255: 66, 256: 66, 257: 69, 512: 132}),
    ],
    ids=str,
)
def test_bytes(codec: Codec, sizes: dict[int, int]) -> None:
    assert {length: codec.nbytes(length) for length in sizes} == sizes


@exact
def test_error_feedback_sends_all_in_the_end(codec: Codec) -> None:
    """e' = e + d - Q(e + d): what was sent and what is left are what came in."""
    residual, sent, came = torch.zeros(3, 600, dtype=torch.float64)
    for k in range(30):
        d = normal(600, k).double()
        message = codec.decode(codec.encode(residual + d), 600).double()
        residual, sent, came = residual + d - message, sent + message, came + d
    assert (sent - came).abs().max() < 10


# Edges, and what is refused.


@exact
def test_the_largest_and_the_smallest(codec: Codec) -> None:
    for zero in (0.0, -0.0):
        assert not coded(codec, torch.full((300,), zero)).any()
    sizes = (MAX, MAX_BFLOAT16, 2.0**127, 65504.0, 1e-30, 2.0**-126, 1e-40, 1e-45)
    for size in (s for s in sizes if s <= largest(codec)):
        x = torch.tensor([size, -size, 0, size / 3] * 70)
        out = coded(codec, x)
        assert out.isfinite().all() and not out[2::4].any()
        assert ((x.double() - out.double()).abs() <= bound(codec, x).double()).all()
        if size > 1e-36 and codec in BLOCKS:
            assert (out[::4] > 0.99 * size).all() and (out[1::4] < -0.99 * size).all()
        if codec in BLOCKS:  # what flushes subnormals decodes the same
            assert (out.abs() >= 2.0**-126)[out != 0].all()


@exact
@few
@given(length=st.integers(1, 600), value=st.sampled_from([math.nan, math.inf]), data=st.data())
def test_what_is_not_finite_is_refused(
    codec: Codec, length: int, value: float, data: st.DataObject
) -> None:
    x = torch.ones(length)
    index = data.draw(st.integers(0, length - 1))
    x[index:] = value
    for subtract in (False, True):
        with pytest.raises(NotFiniteError, match=rf"element {index} is {value}$"):
            codec.encode(x.clone(), subtract=subtract)


@pytest.mark.parametrize(
    ("codec", "value", "message"),
    [
        (Cast("float16"), 65505.0, "element 17 is 65505, beyond the largest float16, 65504"),
        (Cast("bfloat16"), -MAX, r"element 17 is -3.40282e\+38, beyond the largest bfloat16"),
        (Int8(), 1e300, r"element 17 is 1e\+300, beyond the largest float32"),
    ],
    ids=str,
)
def test_what_is_out_of_range_is_refused(codec: Codec, value: float, message: str) -> None:
    x = normal(40).double()
    x[17] = value
    with pytest.raises(ValueError, match=message):
        codec.encode(x)


@exact
def test_tensors_that_do_not_fit_are_refused(codec: Codec) -> None:
    for bad in (torch.ones(2, 2), torch.ones(2, dtype=torch.int32)):
        with pytest.raises(ValueError, match="flat floating-point"):
            codec.encode(bad)
    x = torch.ones(10)
    payload = codec.encode(x)
    for wrong in (payload[:-1], payload[None], payload.view(torch.int8)):
        with pytest.raises(ValueError, match=f"10 elements as {len(payload)} uint8 values, not as"):
            codec.decode(wrong, 10)
    with pytest.raises(ValueError, match="length must be"):
        codec.decode(payload, -1)
    for room in (torch.empty(9), x.double(), torch.empty(20)[::2]):
        with pytest.raises(ValueError, match="out must be 10 contiguous float32 values"):
            codec.decode(payload, 10, out=room)
    for other in (torch.ones(1), x.double(), torch.ones(11)):
        with pytest.raises(ValueError, match="argument 'less' must match x"):
            codec.encode(x, subtract=True, less=other)
        with pytest.raises(ValueError, match="argument 'plus' must match x"):
            codec.encode(x, subtract=True, plus=other)
    with pytest.raises(ValueError, match="must be contiguous"):
        codec.encode(torch.ones(20)[::2], subtract=True)


def test_wrong_arguments_are_refused() -> None:
    for make, match in (
        (lambda: Cast("int8"), "'float16', 'bfloat16', 'float32', not 'int8'"),
        (lambda: Int2(0), "block must be an integer of at least 1, not 0"),
        (lambda: codec_of("int5"), "codec must be one of 'float32', 'bfloat16'"),
    ):
        with pytest.raises(ValueError, match=match):
            make()
    assert codec_of("int8") == Int8(256) and hash(Int4()) == hash(Int4())


@dataclass(frozen=True)
class Five(Int4):
    """Of fewer levels than its bits would do for."""

    levels: ClassVar[float] = 5.0


def test_a_codec_of_ones_own_has_its_own_levels() -> None:
    """The compiled kernels know those of laconic's codecs alone."""
    x = torch.linspace(-1, 1, 2048)
    decoded = coded(Five(block=2048), x)
    assert len(decoded.unique()) == 11
    assert bool(((x - decoded).abs() <= bound(Five(block=2048), x)).all())


# The compiled kernels, and tensor operations where they do not serve.

COMPILED: list[Codec] = [
    kind(block) for kind in (Int8, Int4, Int2) for block in (1, 7, 256, kernels.MAX_BLOCK + 1)
]
compiled = pytest.mark.parametrize("codec", COMPILED, ids=str)


@contextmanager
def tensor_operations() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "library", lambda: None)
        yield


def numbers(length: int, seed: int) -> Tensor:
    """Normal, with stretches of zeros of both signs, of subnormals, and of the largest."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(length, generator=generator)
    for factor in (0.0, -0.0, 1e-42, 1e-38, 1e37):
        start = int(torch.randint(max(length, 1), (), generator=generator))
        x[start : start + 300] *= factor
    return x


def everything(codec: Codec, length: int, seed: int) -> list[Tensor]:
    """All that a codec does."""
    x, less, plus = (numbers(length, 3 * seed + k) for k in range(3))
    less, plus = less / 2, plus / 4
    found: list[Tensor] = []
    cases: list[dict[str, Any]] = [{}, {"less": less}, {"plus": plus}, {"less": less, "plus": plus}]
    for others in cases:
        for subtract in (False, True):
            left = x.clone()
            found += [codec.encode(left, subtract=subtract, **others), left]
            elsewhere, kept = torch.empty_like(x), x.clone()
            code = codec.encode(kept, subtract=subtract, left=elsewhere, **others)
            assert torch.equal(code, found[-2]) and torch.equal(kept, x)
            assert torch.equal(elsewhere, left) or not (subtract or others)
    payload = found[-2]
    room = torch.empty(len(payload) + 1, dtype=torch.uint8)
    room[1:] = payload  # where no float could be read
    found += [codec.decode(payload, length), codec.decode(room[1:], length)]
    found.append(codec.decode(payload, length, less.clone(), add=True))
    rows = torch.stack([found[0], *found[2:16:2]])
    if length % codec.grain == 0:
        longer = functional.pad(rows, (3, 5))  # of which they are columns
        for dtype in (torch.float32, torch.float64):
            offsets = [less.to(dtype), x.to(dtype)]
            for these in (rows, longer[:, 3:-5]):
                found.append(codec.decode_mean(these, torch.empty(length, dtype=dtype)))
                for count in (1, 2):
                    expected = found[-1] + offsets[count - 1]
                    out = torch.empty(length, dtype=dtype)
                    found.append(codec.decode_mean(these, out, plus=offsets[:count]))
                    assert torch.equal(found[-1], expected)
    return found


@compiled
@few
@given(length=st.integers(0, 1200) | st.sampled_from([4096, 5000]), seed=st.integers(0, 1000))
def test_kernels_give_the_bits_of_tensor_operations(codec: Codec, length: int, seed: int) -> None:
    fast = everything(codec, length, seed)
    with tensor_operations():
        slow = everything(codec, length, seed)
    for one, other in zip(fast, slow, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@compiled
def test_kernels_refuse_what_tensor_operations_refuse(codec: Codec) -> None:
    cases: list[dict[str, Any]] = [{}, {"less": numbers(5000, 1)}]
    for value, others in itertools.product((math.nan, math.inf, -math.inf), cases):
        x = numbers(5000, 0)
        x[[4711, 4720]] = value
        for how in (nullcontext, tensor_operations):
            with how(), pytest.raises(NotFiniteError, match=f"element 4711 is {value}"):
                codec.encode(x.clone(), subtract=True, **others)
    x = torch.full((600,), 3e38)
    with pytest.raises(NotFiniteError, match="element 0 is"):  # of the sum
        codec.encode(x.clone(), plus=x, subtract=True)


@pytest.mark.parametrize("what", ["cut short", "another version", "no such function"])
def test_a_library_that_cannot_be_used_is_left_alone(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensor operations do it then. There is one where there is a compiler."""
    found = kernels.library()
    assert (found is not None) == any(map(shutil.which, ("cc", "gcc", "clang")))
    if found is not None and what == "cut short":
        cut = tmp_path / "_kernels.so"
        cut.write_bytes(Path(found._name).read_bytes()[:100])
        monkeypatch.setattr(native, "find_spec", lambda name: SimpleNamespace(origin=str(cut)))
    elif what == "another version":
        monkeypatch.setattr(kernels, "VERSION", kernels.VERSION + 1)
    else:
        monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert kernels.library.__wrapped__() is None
