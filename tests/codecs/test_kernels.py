"""The compiled kernels of the integer codecs give the bits that tensor operations give."""

from __future__ import annotations

import ctypes
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from laconic import native
from laconic.codecs import Cast, Codec, Int2, Int4, Int8, kernels
from laconic.errors import NotFiniteError

CODECS: list[Codec] = [
    Cast("bfloat16"),
    *(
        kind(block)
        for kind in (Int8, Int4, Int2)
        for block in (1, 7, 100, 256, kernels.MAX_BLOCK, kernels.MAX_BLOCK + 1)
    ),
]
codecs = pytest.mark.parametrize("codec", CODECS, ids=str)
lengths = st.one_of(st.integers(0, 1200), st.sampled_from([4096, 5000, 8192]))


def test_they_are_compiled_where_there_is_a_compiler() -> None:
    assert (kernels.library() is not None) == any(map(shutil.which, ("cc", "gcc", "clang")))


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
    less, plus, found = less / 2, plus / 4, []
    for others in ({}, {"less": less}, {"plus": plus}, {"less": less, "plus": plus}):
        for subtract in (False, True):
            left = x.clone()
            found += [codec.encode(left, subtract=subtract, **others), left]
    payload = found[-2]
    room = torch.empty(len(payload) + 1, dtype=torch.uint8)
    room[1:] = payload  # where no float could be read
    found += [codec.decode(payload, length), codec.decode(room[1:], length)]
    found.append(codec.decode(payload, length, less.clone(), add=True))
    rows = torch.stack([found[0], *found[2:16:2]])
    if length % codec.grain == 0:
        longer = functional.pad(rows, (3, 5))  # of which they are columns
        for dtype in (torch.float32, torch.float64):
            for these in (rows, longer[:, 3:-5]):
                found.append(codec.decode_mean(these, torch.empty(length, dtype=dtype)))
    return found


@pytest.mark.parametrize("what", ["cut short", "another version", "no such function"])
def test_what_cannot_be_used_is_left_alone(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensor operations do it then."""
    found = kernels.library()
    assert found is not None
    if what == "cut short":
        cut = tmp_path / "_kernels.so"
        cut.write_bytes(Path(found._name).read_bytes()[:100])
        monkeypatch.setattr(native, "find_spec", lambda name: SimpleNamespace(origin=str(cut)))
    elif what == "another version":
        monkeypatch.setattr(kernels, "VERSION", kernels.VERSION + 1)
    else:
        monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert kernels.library.__wrapped__() is None


@codecs
@settings(deadline=None, max_examples=25)
@given(length=lengths, seed=st.integers(0, 1000))
def test_the_same_bits(codec: Codec, length: int, seed: int) -> None:
    fast = everything(codec, length, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "library", lambda: None)
        slow = everything(codec, length, seed)
    for one, other in zip(fast, slow, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@codecs
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_same_refusal(codec: Codec, value: float) -> None:
    said = []
    for library in (kernels.library(), None):
        for others in ({}, {"less": numbers(5000, 1)}):
            x = numbers(5000, 0)
            x[[4711, 4720]] = value
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(kernels, "library", lambda library=library: library)
                with pytest.raises(NotFiniteError) as raised:
                    codec.encode(x, subtract=True, **others)
            said.append(str(raised.value))
    assert len(set(said)) == 1 and f"element 4711 is {value}" in said[0]


def test_a_sum_that_is_too_large_is_refused() -> None:
    x = torch.full((600,), 3e38)
    for library in (kernels.library(), None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "library", lambda library=library: library)
            with pytest.raises(NotFiniteError, match="element 0 is inf"):
                Int4().encode(x.clone(), plus=x, subtract=True)


def test_other_tensors_are_left_to_tensor_operations() -> None:
    called = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "encode", lambda *arguments: called.append(arguments))
        for x in (torch.ones(10).double(), torch.ones(10).bfloat16()):
            Int4().encode(x)
        Int4(kernels.MAX_BLOCK + 1).encode(torch.ones(10))
        Int4(stochastic=True).encode(torch.ones(10))
    assert not called
