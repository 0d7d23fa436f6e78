"""The mean of directions, as long as the messages are on average.

For each tensor by itself, with r the last result, which all workers have in common:

    worker i:   d_i = r - m_i ;  l_i = ||d_i|| ;  u_i = d_i / l_i
    everyone:   D = mean(l_i) * u / ||u||  with  u = mean(u_i)
                r <- combine(r - D) , the result of the round

Where messages are pseudo-gradients already, they are the d_i, and the result is combine(D).

Radial-directional averaging: Douillard et al. 2026, arXiv 2604.21428 (Decoupled DiLoCo).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NoReturn

import torch
from torch import Tensor

from laconic.algorithms.exchange import Arrival, Combine, Exchange
from laconic.algorithms.exchanges.coded import ReplicatedMean
from laconic.algorithms.exchanges.coding import check_codable
from laconic.algorithms.exchanges.mean import Mean
from laconic.algorithms.update import Clock, Slot, State
from laconic.codecs import CODECS, Codec
from laconic.errors import NotFiniteError
from laconic.links import cost
from laconic.links.cost import Cost
from laconic.links.link import AsyncLink
from laconic.tensors import state_dtype

LENGTH_BYTES = 4
"""Lengths are sent in float32 or wider."""
ROUNDING = 1e-6
"""A mean of directions that is shorter than this fraction of a direction is rounding error, and
counts as zero."""
LEAST_BITS = 4
"""Of a code of directions, per element. A code that has nothing but zeros for a tensor would lose
its length, which no later round sends."""


@dataclass(frozen=True)
class RadialMean(Exchange):
    """The radial-directional average of changes since the last result (Douillard et al. 2026).

    Where workers move in different directions, their mean change is shorter than each of them. This
    average has the mean of their lengths: ``||D|| = mean(||d_i||)`` for each tensor, unless the
    directions cancel out, which makes D zero. ``d_i`` is worker i's change of one whole tensor.
    Equal changes give their mean.

    ``relative``: messages are parameters; False: they are pseudo-gradients. ``codec``: how the
    directions u_i, and their mean, are coded, in at least 4 bits per element; the next round sends
    what a code leaves out of a direction (`ReplicatedMean`). Lengths are sent as they are: one
    number for each tensor, in an all-reduce of their own. All workers combine everything, and keep
    all outer state. They hold the same bits if their processors compute alike. For workers of one
    rank.

    Raises `NotFiniteError` on every rank if some length is not finite; nothing changes then.
    """

    codec: Codec | None = None
    relative: bool = True
    shapes: tuple[torch.Size, ...] = ()
    """Shapes of the tensors in a message."""

    agrees = True
    whole = True
    keeps_message = True
    slots: ClassVar[dict[str, Slot]] = {
        "reference": "everywhere",
        "residual": "pooled",
        "lag": "pooled",
    }

    def __post_init__(self) -> None:
        if self.codec is not None and not fine(self.codec):
            names = ", ".join(repr(name) for name, codec in CODECS.items() if fine(codec))
            raise ValueError(
                f"directions are coded in {LEAST_BITS} bits or more per element, and not by "
                f"{self.codec!r}: use {names}, or None"
            )

    @property
    def takes(self) -> Literal["parameters", "changes"]:
        return "parameters" if self.relative else "changes"

    @property
    def _mean(self) -> Exchange:
        return Mean() if self.codec is None else ReplicatedMean(self.codec, relative=False)

    @property
    def direct(self) -> bool:
        return self.codec is not None

    def multiple(self, n: int) -> int:
        return self._mean.multiple(n)

    def shaped(self, shapes: Sequence[torch.Size]) -> Exchange:
        return replace(self, shapes=tuple(shapes))

    def replicated(self) -> Exchange:
        return self

    def init(self, x: Tensor, owned: slice) -> State:
        state: State = {"reference": x} if self.relative else {}
        if self.codec is not None:
            check_codable(self.codec, x)
            state.update(self._mean.init(x, owned))
        return state

    def rebase(self, x: Tensor, state: State) -> None:
        """See `Rebase`."""
        if self.relative:
            state["reference"].copy_(x)
            if self.codec is not None:
                state["lag"].zero_()

    def cost(self, length: int, itemsize: int, n: int) -> Cost:
        count = len(self.shapes)
        lengths = cost.mean(count * max(itemsize, LENGTH_BYTES), n, count % n == 0)
        return self._mean.cost(length, itemsize, n) + lengths

    async def run(
        self, link: AsyncLink, message: Tensor, combine: Combine, clock: Clock, state: State
    ) -> Arrival:
        directions = message.to(state_dtype(message.dtype), copy=True)
        if self.relative:
            torch.sub(state["reference"], directions, out=directions)  # d_i
        lengths = normalize(directions, self.shapes)  # u_i remains
        own = bool(lengths.isfinite().all())
        if len(lengths):
            await link.mean(lengths)
        if not bool(lengths.isfinite().all()):  # on all ranks
            await raise_not_finite(link, own)
        inner = {name: t for name, t in state.items() if name != "reference"}
        u = directions.to(message.dtype) if self.codec is None else directions
        arrival = await self._mean.run(link, u, lambda x: x, clock, inner)
        mean = arrival.flat.to(directions.dtype)
        stretch(mean, self.shapes, lengths)  # D
        if not self.relative:
            return Arrival(combine(mean).clone())
        reference = state["reference"]
        reference.copy_(combine(torch.sub(reference, mean, out=mean)))
        return Arrival(reference, lent=True)


def fine(codec: Codec) -> bool:
    """Whether ``codec`` suits directions."""
    return not codec.gathered and 8 * codec.nbytes(codec.grain) >= LEAST_BITS * codec.grain


async def raise_not_finite(link: AsyncLink, finite: bool) -> NoReturn:
    """Raise the same error on every rank. ``finite``: whether the values of this one are."""
    failed = await link.gather(torch.tensor([float(not finite)]))
    ranks = [rank for rank, one in enumerate(failed.flatten().tolist()) if one]
    whose = f"ranks {ranks} had" if ranks else "the mean has"
    raise NotFiniteError(f"{whose} NaN, infinite, or too large values to send")


def normalize(flat: Tensor, shapes: Iterable[torch.Size]) -> Tensor:
    """Turn every tensor in ``flat`` into its direction, and return the lengths of the tensors. A
    tensor of zeros remains. The mean square of a direction's elements is 1, so that codes, whose
    scales are shared by elements of several tensors, suit all of them."""
    pieces = _pieces(flat, shapes)
    if not pieces:
        return flat.new_zeros(0)
    lengths = torch.stack([torch.linalg.vector_norm(piece) for piece in pieces])
    for piece, length in zip(pieces, lengths, strict=True):
        piece.div_(torch.where(length > 0, length, 1)).mul_(math.sqrt(len(piece)))
    return lengths


def stretch(flat: Tensor, shapes: Iterable[torch.Size], lengths: Tensor) -> None:
    """Give every tensor in ``flat``, a mean of directions, its length of ``lengths``. Directions
    that cancel out give zeros."""
    for piece, length in zip(_pieces(flat, shapes), lengths, strict=True):
        now = torch.linalg.vector_norm(piece)
        cancel = now <= ROUNDING * math.sqrt(len(piece))
        piece.mul_(torch.where(cancel, 0, length / now))


def _pieces(flat: Tensor, shapes: Iterable[torch.Size]) -> Sequence[Tensor]:
    """The tensors of these shapes, one after the other, without the padding."""
    sizes = [shape.numel() for shape in shapes]
    return torch.split(flat[: sum(sizes)], sizes) if sizes else ()
