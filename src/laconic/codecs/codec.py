"""The base class of codecs: checks lengths and inputs, and codes long messages in pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from laconic.errors import NotFiniteError
from laconic.tensors import mean_in_rank_order

PIECE = 2**18
"""Elements that tensor operations code at a time on a CPU.

These are 1 MiB of float32, which stays in the caches together with its temporaries. Measured for
encoding: Int4 is 1.7 times as fast as with pieces of 256 KiB, where call overhead dominates, and
1.7 times as fast as with a whole message of 16 MiB."""


P = ParamSpec("P")
T = TypeVar("T")


def _without_grad(call: Callable[P, T]) -> Callable[P, T]:
    """Like torch.no_grad, but skipped if gradients are off: it costs more than a short message."""

    @wraps(call)
    def made(*args: P.args, **options: P.kwargs) -> T:
        if not torch.is_grad_enabled():
            return call(*args, **options)
        with torch.no_grad():
            return call(*args, **options)

    return made


class Codec(ABC):
    """A lossy code for flat tensors.

    Elements are coded in units of ``unit`` elements. Each unit is coded on its own, one after the
    other, and the last may be shorter. For a and b multiples of ``unit``,
    ``encode(x[a:b]) == encode(x)[nbytes(a):nbytes(b)]``.

    No code may consist of bytes of 255 alone: these mark a message that could not be coded. Ranks
    and checkpoints compare codecs by their ``repr``, which must show all settings, as that of a
    dataclass does.

    Codes are computed on the device of x, and may be written to host memory. Every ``encode``
    reads back whether x is finite, and so waits for an accelerator. ``decode`` never waits.
    """

    @property
    @abstractmethod
    def unit(self) -> int:
        """Number of elements that are coded together."""

    @property
    def grain(self) -> int:
        """Number of elements at whose multiples a code can be split.

        If a is a multiple, the codes of a and of b elements, one after the other, are the code of
        a + b elements.
        """
        return self.unit

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype whose finite range must contain all elements."""

    @abstractmethod
    def nbytes(self, length: int) -> int:
        """Return the length in bytes of the code of ``length`` elements."""

    @abstractmethod
    def encode_units(self, x: Tensor, payload: Tensor) -> Tensor:
        """Encode each row of x, (n, m) with m at most ``unit``, taken as float32.

        Writes into ``payload``, uint8 (n, nbytes(m)). Returns whether all elements are in range, as
        a tensor of one bool.
        """

    def encode_and_subtract(self, x: Tensor, payload: Tensor) -> Tensor:
        """Encode as ``encode_units`` does, then x <- x - Q(x) if all elements are in range."""
        in_range = self.encode_units(x, payload)
        if bool(in_range):
            decoded = torch.empty_like(x, dtype=torch.float32)
            self.decode_units(payload, decoded)
            x -= decoded
        return in_range

    @abstractmethod
    def decode_units(self, payload: Tensor, out: Tensor) -> None:
        """Decode what ``encode_units`` wrote into ``out``, float32 (n, m)."""

    @_without_grad
    def encode(
        self,
        x: Tensor,
        *,
        less: Tensor | None = None,
        plus: Tensor | None = None,
        subtract: bool = False,
        left: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the code of x: ``nbytes(x.numel())`` uint8 values on the device of x.

        Args:
            x: a flat tensor, float32 or another floating-point dtype, which is cast to float32.
            less, plus: tensors of x's shape and dtype. First, ``x <- x - less + plus``.
            subtract: at the end, ``x <- x - Q(x)``.
            left: a tensor of x's shape and dtype that is changed in place of x.
            out: where to write the code: on the device of x, or in host memory.

        What is changed must be contiguous. Raises ``ValueError`` if an element is NaN, infinite, or
        beyond the range of ``dtype``. What is changed may then hold any values.
        """
        if x.dim() != 1 or not x.is_floating_point():
            raise ValueError(
                f"{self} encodes a flat floating-point tensor, not a tensor of {x.dtype} and shape "
                f"{tuple(x.shape)}"
            )
        for name, other in (("less", less), ("plus", plus), ("left", left)):
            if other is not None and (other.shape != x.shape or other.dtype != x.dtype):
                raise ValueError(
                    f"argument {name!r} must match x (dtype {x.dtype}, shape {tuple(x.shape)}), "
                    f"and has dtype {other.dtype}, shape {tuple(other.shape)}"
                )
        changed = subtract or less is not None or plus is not None
        left = x if left is None else left
        if changed and not left.is_contiguous():
            raise ValueError("x is changed in place and must be contiguous: call x.contiguous()")
        size = self.nbytes(x.numel())
        payload = torch.empty(size, dtype=torch.uint8, device=x.device) if out is None else out
        self._check_code(payload, x.numel())
        in_range = self.encode_flat(x.contiguous(), payload, less, plus, subtract, left)
        if not bool(in_range):
            raise NotFiniteError(self._nonfinite_message(left if changed else x))
        return payload

    @_without_grad
    def decode(
        self, payload: Tensor, length: int, out: Tensor | None = None, *, add: bool = False
    ) -> Tensor:
        """Return the ``length`` elements coded in ``payload``: float32, on its device.

        Writes them to ``out`` if given, or adds them to ``out`` with ``add``. Raises ``ValueError``
        if the lengths do not fit.
        """
        self._check_code(payload, length)
        if out is None:
            if add:
                raise ValueError("add=True needs out, the tensor to add to")
            out = torch.empty(length, dtype=torch.float32, device=payload.device)
        if out.dtype != torch.float32:
            raise ValueError(f"out must be {length} contiguous float32 values, not {out.dtype}")
        _check_out(out, payload, length)
        self.decode_flat(payload, out, add)
        return out

    @_without_grad
    def decode_mean(self, rows: Tensor, out: Tensor, *, plus: Sequence[Tensor] = ()) -> Tensor:
        """Compute the mean over the codes ``rows``, uint8 (n, nbytes(len(out))), into ``out``.

        The decoded rows are added in order, in the dtype of ``out``. Each row is contiguous, but
        the rows may be columns of longer ones. ``out`` is flat and contiguous, and its length is a
        multiple of ``grain``. Adds ``plus``, at most two tensors of the shape and dtype of ``out``,
        one after the other. Raises ``ValueError`` if the lengths do not fit.
        """
        length = out.numel()
        for each in (out, *plus):
            _check_out(each, rows, length)
        if length % self.grain:
            raise ValueError(
                f"{self} computes means of a multiple of {self.grain} elements, not of {length}"
            )
        self._check_code(rows, length, dim=2)
        self.mean_of_rows(rows, out, plus)
        return out

    def mean_of_rows(self, rows: Tensor, out: Tensor, plus: Sequence[Tensor]) -> None:
        """Implement ``decode_mean``, after its checks."""
        decoded = self.decode(rows.reshape(-1), len(rows) * len(out)).to(out.dtype)
        out.copy_(mean_in_rank_order(decoded.view(len(rows), -1).unbind(), reuse=True, out=out))
        for each in plus:
            out.add_(each)

    def encode_flat(
        self,
        x: Tensor,
        payload: Tensor,
        less: Tensor | None,
        plus: Tensor | None,
        subtract: bool,
        left: Tensor,
    ) -> Tensor | bool:
        """Implement ``encode`` for a contiguous x. Returns whether all elements are in range."""
        if left is not x and (subtract or less is not None or plus is not None):
            x = left.copy_(x)
        if less is not None:
            x.sub_(less)
        if plus is not None:
            x.add_(plus)
        code = self.encode_and_subtract if subtract else self.encode_units
        made = payload if payload.device == x.device else torch.empty_like(payload, device=x.device)
        in_range = [code(rows, codes) for rows, codes in self._pieces(x, made)]
        if made is not payload:
            payload.copy_(made)
        return not in_range or torch.stack(in_range).all()

    def decode_flat(self, payload: Tensor, out: Tensor, add: bool) -> None:
        """Implement ``decode`` for a contiguous ``payload``."""
        if payload.storage_offset() % 4:  # unaligned bytes cannot be viewed as floats
            payload = payload.clone()
        decoded = torch.empty_like(out) if add else out
        for rows, codes in self._pieces(decoded, payload):
            self.decode_units(codes, rows)
        if add:
            out += decoded

    def _pieces(self, x: Tensor, payload: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the units of x, one per row, and their codes, and then what is left of them. On a
        CPU, pieces fit into a cache."""
        unit, width = self.unit, self.nbytes(self.unit)
        count = len(x) // unit
        most = max(PIECE // unit, 1) if x.device.type == "cpu" else max(count, 1)
        whole, codes = count * unit, count * width
        if count:
            yield from zip(
                torch.split(x[:whole].view(count, unit), most),
                torch.split(payload[:codes].view(count, width), most),
                strict=True,
            )
        if whole < len(x):
            yield x[None, whole:], payload[None, codes:]

    def _check_code(self, code: Tensor, length: int, dim: int = 1) -> None:
        """Raise ``ValueError`` unless ``code`` can hold that of ``length`` elements; with ``dim`` 2
        one in each row."""
        size, shape = self.nbytes(length), code.shape
        fits = code.dtype == torch.uint8 and len(shape) == dim and shape[-1] == size
        if not fits or (dim == 2 and not len(code)) or (size > 1 and code.stride(-1) != 1):
            raise ValueError(
                f"{self} codes {length} elements as {size} uint8 values, not as {code.dtype} of "
                f"shape {tuple(shape)} and strides {code.stride()}"
            )

    def _nonfinite_message(self, x: Tensor) -> str:
        """Describe the first element that is out of range, in one line."""
        largest = torch.finfo(self.dtype).max
        good = x.to(torch.float32).abs() <= largest
        index = int(good.logical_not().nonzero()[0])
        value = float(x[index])
        line = f"{self}: element {index} is {value:g}"
        if value - value == 0:
            name = str(self.dtype).removeprefix("torch.")
            line += f", beyond the largest {name}, {largest:g}"
        return line


def _check_out(out: Tensor, code: Tensor, length: int) -> None:
    """Raise ``ValueError`` unless ``out`` has room for what ``code`` decodes to."""
    if out.shape != (length,) or not out.is_contiguous() or out.device != code.device:
        raise ValueError(
            f"out must be {length} contiguous float32 values on {code.device}, not of shape "
            f"{tuple(out.shape)} on {out.device}"
        )


def check_repr(codec: Codec) -> None:
    """Raise ``ValueError`` if a user's codec has no ``repr`` that shows its settings."""
    if type(codec).__repr__ is object.__repr__:
        raise ValueError(
            f"codec {type(codec).__name__} needs a repr that shows all its settings, because ranks "
            "and checkpoints compare it: make it a dataclass"
        )
