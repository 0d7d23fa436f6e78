"""Plain-loop references of codecs and of the mean of coded messages.

A codec takes and returns float32: what it is given is rounded to float32 first, and all other
arithmetic is float64. A value within rounding of the border between two levels may fall on the
other side, and then that element is off by one whole level; at a few hundred elements that is rare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from tests.references.problem import Array, Params, add, copy, mean, minus, scale

Q: TypeAlias = Callable[[Array], Array]  # float32 vector -> what arrives of it, float32
LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Codec:
    """`q` is encode, then decode, of a vector. `unit` elements are coded together."""

    q: Q
    unit: int = 1

    def __call__(self, v: Array) -> Array:
        return self.q(v.astype(np.float32)).astype(v.dtype)


def blocks(q: Q, size: int) -> Q:
    """q on each stretch of `size` consecutive elements on its own; the last may be shorter."""

    def whole(x: Array) -> Array:
        parts = [q(x[start : start + size]) for start in range(0, x.size, size)]
        return np.concatenate([np.zeros(0, np.float32), *parts])

    return whole


def bfloat16_of(x: Array) -> Array:
    """The nearest bfloat16, ties to even: the upper 16 bits of a float32, rounded."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.int64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return np.asarray(rounded.astype(np.uint32).view(np.float32))


def largest_scale(top: int) -> np.float32:
    """The largest bfloat16 s for which top*s is finite in float32."""
    start = np.asarray(np.float32(LARGEST / top)).view(np.uint32) & 0xFFFF0000
    upwards = [np.uint32(start + step * 0x10000).view(np.float32) for step in range(2)]
    return np.float32(max(s for s in upwards if float(s) * top <= LARGEST))


def integers(top: int, block: int) -> Codec:
    """2*top + 1 levels. Per block:  s = bfloat16(max|x| / top), in 2^-126 .. largest_scale(top)
    level = round half to even(x / s) ;  q = s*level"""

    def q(x: Array) -> Array:
        wanted = bfloat16_of(np.abs(x).max() / np.float32(top))
        s = np.float32(min(max(float(wanted), 2.0**-126), float(largest_scale(top))))
        level = np.rint(x / s)
        assert np.abs(level).max() <= top
        return np.asarray(s * level, np.float32)

    return Codec(blocks(q, block), block)


def int8(block: int) -> Codec:
    return integers(127, block)


def int4(block: int) -> Codec:
    return integers(7, block)


def int2(block: int) -> Codec:
    return integers(1, block)


def cast(name: str) -> Codec:
    """float16, bfloat16 or float32, ties to even."""
    casts: dict[str, Q] = {
        "float16": lambda x: x.astype(np.float16).astype(np.float32),
        "bfloat16": bfloat16_of,
        "float32": lambda x: x.copy(),
    }
    return Codec(casts[name])


def together(p: Params, names: Sequence[str]) -> Array:
    return np.concatenate([p[name].reshape(-1) for name in names])


def apart(vector: Array, like: Params, names: Sequence[str]) -> Params:
    ends = np.cumsum([like[name].size for name in names])
    pieces = np.split(vector, ends[:-1])
    return {name: v.reshape(like[name].shape) for name, v in zip(names, pieces, strict=True)}


def unchanged(mean: Params) -> Params:
    return mean


class CodedMean:
    """m_i are the workers' messages, Q codes each of `vectors` (names of parameters) as one vector:

        v_i = (m_i - r) + e_i ;  q_i = Q(v_i) ;  e_i <- v_i - q_i
        mean = r + o + (1/n)*sum_i q_i ;  result = combine(mean)
        w = result - r ;  p = Q(w) ;  o <- w - p
        received = r + p ;  relative: r <- received

    e_i is what worker i still owes, o what the owners of the mean owe. r starts as `start` if
    relative; else it is 0 and stays so. No codec: received = combine(mean(m))."""

    def __init__(
        self,
        codec: Codec | None,
        vectors: Sequence[Sequence[str]],
        start: Params,
        n: int,
        *,
        relative: bool = True,
    ) -> None:
        self.codec, self.relative = codec, relative
        self.vectors = [names for names in vectors if names]
        self.r = copy(start) if relative else scale(0.0, start)
        self.e, self.o = [scale(0.0, start) for _ in range(n)], scale(0.0, start)

    def q(self, p: Params) -> Params:
        assert self.codec is not None
        found: Params = {}
        for names in self.vectors:
            found.update(apart(self.codec(together(p, names)), p, names))
        return {name: found[name] for name in p}

    def __call__(
        self, m: Sequence[Params], combine: Callable[[Params], Params] = unchanged
    ) -> Params:
        if self.codec is None:
            return copy(combine(mean(m)))
        sent = []
        for i, message in enumerate(m):
            v = add(minus(message, self.r), self.e[i])
            sent.append(self.q(v))
            self.e[i] = minus(v, sent[i])
        average = add(self.r, mean(sent))
        w = minus(combine(add(average, self.o)), self.r)
        p = self.q(w)
        self.o = minus(w, p)
        received = add(self.r, p)
        if self.relative:
            self.r = copy(received)
        return received
