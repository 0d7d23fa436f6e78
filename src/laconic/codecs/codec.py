"""What every codec does: lengths and inputs checked, long messages taken in pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import wraps
from typing import ClassVar, ParamSpec, TypeVar

import torch
from torch import Tensor

from laconic.buckets import mean_in_rank_order
from laconic.errors import NotFiniteError, check_int

PIECE = 2**18
"""Elements that tensor operations code at a time on a CPU: 1 MiB of float32 and temporaries stay
in the caches. Measured for Int4, encode: 1.7 times as fast as with 256 KiB, where the calls take
the time, and as with a whole message of 16 MiB; for E3M0 1.5 and 7 times."""


P = ParamSpec("P")
T = TypeVar("T")


def _without_grad(call: Callable[P, T]) -> Callable[P, T]:
    """As torch.no_grad, which takes longer than a short message does: nothing where it is off."""

    @wraps(call)
    def made(*args: P.args, **options: P.kwargs) -> T:
        if not torch.is_grad_enabled():
            return call(*args, **options)
        with torch.no_grad():
            return call(*args, **options)

    return made


class Codec(ABC):
    """A lossy code for flat tensors. Elements are coded in units of ``unit`` elements, each unit on
    its own, one after the other, the last one shorter: for a and b multiples of ``unit``,
    ``encode(x[a:b]) == encode(x)[nbytes(a):nbytes(b)]`` (without stochastic rounding). No code
    consists of bytes of 255 alone, which is what a worker sends of what cannot be coded. By its
    ``repr``, as a dataclass has, ranks and checkpoints are compared: it tells all settings.

    The code runs on the device of x. Whether x is finite is read back in every ``encode``,
    which on an accelerator waits for it; ``decode`` never waits.
    """

    gathered: ClassVar[bool] = False
    """Whether every worker's code goes to all others, as codes are short, and their sum would lose
    by being coded again; else the sum is coded by its owner, and goes to all."""

    @property
    @abstractmethod
    def unit(self) -> int:
        """Elements that are coded together."""

    @property
    def grain(self) -> int:
        """Elements at whose multiples a code can be cut: those of a and of b elements, one after
        the other, are that of a + b where a is such a multiple."""
        return self.unit

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype in whose finite range all elements must be."""

    @abstractmethod
    def nbytes(self, length: int) -> int:
        """Bytes of the code of ``length`` elements."""

    @abstractmethod
    def bound(self, x: Tensor) -> Tensor:
        """For each element of a flat x, taken as float32, the most that ``|x - Q(x)|`` can be."""

    @abstractmethod
    def encode_units(self, x: Tensor, payload: Tensor, generator: torch.Generator | None) -> Tensor:
        """The code of each row of x, (n, m) with m at most ``unit``, taken as float32, into
        ``payload``, uint8 (n, nbytes(m)). Returns whether all elements are in range, a tensor of
        one bool."""

    def encode_and_subtract(
        self, x: Tensor, payload: Tensor, generator: torch.Generator | None
    ) -> Tensor:
        """As ``encode_units``, and x <- x - Q(x) where all elements are in range."""
        fine = self.encode_units(x, payload, generator)
        if bool(fine):
            decoded = torch.empty_like(x, dtype=torch.float32)
            self.decode_units(payload, decoded)
            x -= decoded
        return fine

    @abstractmethod
    def decode_units(self, payload: Tensor, out: Tensor) -> None:
        """What ``encode_units`` wrote, into ``out``, float32 (n, m)."""

    @_without_grad
    def encode(
        self,
        x: Tensor,
        generator: torch.Generator | None = None,
        *,
        less: Tensor | None = None,
        plus: Tensor | None = None,
        subtract: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """The code of x: uint8, exactly ``nbytes(x.numel())`` of them, on the device of x; written
        to ``out`` if given.

        x is flat: float32, or another floating-point dtype, which is cast to float32 first.
        ``generator`` is for stochastic rounding (none: torch's own). ``less``, ``plus``: other
        tensors of x's shape and dtype, ``x <- x - less + plus`` before all else. ``subtract``: what
        the code stands for is taken off in the end, ``x <- x - Q(x)``. Where x is changed it must
        be contiguous. Raises ``ValueError`` where an element is NaN, infinite, or beyond the range
        of ``dtype``; x may be spoilt then.
        """
        if x.dim() != 1 or not x.is_floating_point():
            raise ValueError(
                f"{self} encodes a flat floating-point tensor, not {x.dtype} of shape "
                f"{tuple(x.shape)}"
            )
        for name, other in (("less", less), ("plus", plus)):
            if other is not None and (other.shape != x.shape or other.dtype != x.dtype):
                raise ValueError(
                    f"{name} must be as x, {x.dtype} of shape {tuple(x.shape)}, not {other.dtype} "
                    f"of shape {tuple(other.shape)}"
                )
        changed = subtract or less is not None or plus is not None
        if changed and not x.is_contiguous():
            raise ValueError("x is changed in place, so that it must be contiguous")
        size = self.nbytes(x.numel())
        payload = torch.empty(size, dtype=torch.uint8, device=x.device) if out is None else out
        if payload.dtype != torch.uint8 or payload.shape != (size,) or not payload.is_contiguous():
            raise ValueError(
                f"{self} codes {x.numel()} elements as {size} contiguous bytes, not as "
                f"{payload.dtype} of shape {tuple(payload.shape)}"
            )
        fine = self.encode_flat(x.contiguous(), payload, generator, less, plus, subtract)
        if not bool(fine):
            raise NotFiniteError(self._refusal(x))
        return payload

    @_without_grad
    def decode(
        self, payload: Tensor, length: int, out: Tensor | None = None, *, add: bool = False
    ) -> Tensor:
        """The ``length`` elements of which ``payload`` is the code, float32, on its device; written
        to ``out`` if given, or with ``add`` added to it. Raises ``ValueError`` where the lengths do
        not fit."""
        size = self.nbytes(length)
        if payload.dtype != torch.uint8 or payload.shape != (size,):
            raise ValueError(
                f"{self} codes {length} elements as {size} bytes, not as {payload.dtype} of shape "
                f"{tuple(payload.shape)}"
            )
        if out is None:
            if add:
                raise ValueError("add needs out, to which the elements are added")
            out = torch.empty(length, dtype=torch.float32, device=payload.device)
        elif (
            out.dtype != torch.float32
            or out.shape != (length,)
            or not out.is_contiguous()
            or out.device != payload.device
        ):
            raise ValueError(
                f"out must be {length} contiguous float32 on {payload.device}, not {out.dtype} of "
                f"shape {tuple(out.shape)} on {out.device}"
            )
        self.decode_flat(payload.contiguous(), out, add)
        return out

    @_without_grad
    def decode_mean(self, rows: Tensor, out: Tensor) -> Tensor:
        """``out`` <- the mean over the codes ``rows``, uint8 (n, nbytes(len(out))), whose rows are
        contiguous and may be columns of longer ones: added up in their order, as ``out``'s dtype.
        ``out`` is flat and contiguous, its length a multiple of ``grain``. Raises ``ValueError``
        where the lengths do not fit."""
        if out.dim() != 1 or not out.is_contiguous() or out.device != rows.device:
            raise ValueError(
                f"out must be flat, contiguous and on {rows.device}, not of shape "
                f"{tuple(out.shape)} on {out.device}"
            )
        length = out.numel()
        size = self.nbytes(length)
        if length % self.grain:
            raise ValueError(f"{self} has a mean of multiples of {self.grain}, not of {length}")
        if (
            rows.dtype != torch.uint8
            or rows.dim() != 2
            or not len(rows)
            or rows.shape[1] != size
            or rows.stride(1) != 1
        ):
            raise ValueError(
                f"{self} codes {length} elements as a contiguous row of {size} bytes, not as "
                f"{rows.dtype} of shape {tuple(rows.shape)}, strides {rows.stride()}"
            )
        self.mean_of_rows(rows, out)
        return out

    def mean_of_rows(self, rows: Tensor, out: Tensor) -> None:
        """What ``decode_mean`` does, of such rows."""
        decoded = self.decode(rows.reshape(-1), len(rows) * len(out)).to(out.dtype)
        out.copy_(mean_in_rank_order(decoded.view(len(rows), -1).unbind(), reuse=True, out=out))

    def encode_flat(
        self,
        x: Tensor,
        payload: Tensor,
        generator: torch.Generator | None,
        less: Tensor | None,
        plus: Tensor | None,
        subtract: bool,
    ) -> Tensor | bool:
        """What ``encode`` does, of a contiguous x, into ``payload``. Returns whether all elements
        are in range."""
        if less is not None:
            x.sub_(less)
        if plus is not None:
            x.add_(plus)
        return self.encode_rows(x[None], payload[None], generator, subtract)

    def decode_flat(self, payload: Tensor, out: Tensor, add: bool) -> None:
        """What ``decode`` does, of a contiguous ``payload``, into ``out``."""
        if payload.storage_offset() % 4:  # a slice: its bytes could not be viewed as floats
            payload = payload.clone()
        decoded = torch.empty_like(out) if add else out
        self.decode_rows(payload[None], decoded[None])
        if add:
            out += decoded

    def encode_rows(
        self,
        x: Tensor,
        payload: Tensor,
        generator: torch.Generator | None,
        subtract: bool = False,
    ) -> Tensor:
        """The code of each row of x, (n, m), as ``encode`` has it, into a row of ``payload``.
        Returns whether all elements are in range, a tensor of one bool."""
        fine = []
        for rows, codes in self._pieces(x, payload):
            code = self.encode_and_subtract if subtract else self.encode_units
            fine.append(code(rows, codes, generator))
        return torch.stack(fine).all() if fine else torch.ones((), dtype=torch.bool)

    def decode_rows(self, payload: Tensor, out: Tensor) -> None:
        """What ``encode_rows`` wrote, into ``out``, (n, m)."""
        for rows, codes in self._pieces(out, payload):
            self.decode_units(codes, rows)

    def _pieces(self, x: Tensor, payload: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows of units of x, and of their codes: all that are alike, or as many as fit a cache."""
        n, m = x.shape
        unit, width, start = self.unit, self.nbytes(self.unit), 0
        if n == 1 and m >= unit:  # the units of one long row are rows
            whole = m // unit
            start = whole * unit
            yield from _split(
                x[0, :start].view(whole, unit), payload[0, : whole * width].view(whole, width)
            )
        for a in range(start, m, unit):
            b = min(a + unit, m)
            yield from _split(x[:, a:b], payload[:, self.nbytes(a) : self.nbytes(b)])

    def _refusal(self, x: Tensor) -> str:
        """One line about the first element that is out of range."""
        largest = torch.finfo(self.dtype).max
        good = x.to(torch.float32).abs() <= largest
        index = int(good.logical_not().nonzero()[0])
        value = float(x[index])
        line = f"{self}: element {index} is {value:g}"
        if value - value == 0:
            name = str(self.dtype).removeprefix("torch.")
            line += f", beyond the largest {name}, {largest:g}"
        return line


def _split(x: Tensor, payload: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    rows = max(PIECE // x.shape[1], 1) if x.device.type == "cpu" else x.shape[0]
    return zip(torch.split(x, rows), torch.split(payload, rows), strict=True)


def check_repr(codec: Codec) -> None:
    """``ValueError`` where a codec of a user's own does not tell its settings."""
    if type(codec).__repr__ is object.__repr__:
        raise ValueError(
            f"codec {type(codec).__name__} must have a repr with all its settings, as a dataclass "
            "has: by that ranks and checkpoints are compared"
        )


def check_length(length: int) -> int:
    """``length`` if it is a number of elements, else ``ValueError``."""
    return check_int("length", length, 0)
