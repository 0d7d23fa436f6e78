"""What all coded means share: the codec, the residual, and rows that are coded while they travel.

The symbols and the mathematics are in `laconic.algorithms.exchanges.coded`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from laconic.algorithms.exchange import Exchange
from laconic.algorithms.update import Clock, Sends, Slot, State
from laconic.codecs import Codec
from laconic.codecs.codec import check_repr
from laconic.errors import NotFiniteError, check_bool, check_float
from laconic.links import cost
from laconic.links.cost import Cost
from laconic.links.link import AsyncLink, Parts, hops
from laconic.tensors import state_dtype

NOT_FINITE = 255
"""Marks a message that its codec could not encode. The sender fills the last part of every row with
bytes of this value. No code consists of such bytes alone, so all ranks learn of the failure from
the message itself and raise the same error."""
SPLITS = (1, 4, 7, 8)
"""Where the parts of a row end, in eighths. The first and last parts are short, so little work
precedes the first send and follows the last arrival."""
MIN_ROW_BYTES, OVERLAP_FACTOR = 2**16, 4
"""Rows of at least this many bytes are split into parts. Each part costs processor time, so rounds
that overlap with training split only rows that are ``OVERLAP_FACTOR`` times longer: nothing waits
for those rows except the end of a backward pass (``python -m benchmarks processor``)."""


@dataclass(frozen=True)
class Coded(Exchange):
    """``codec``: how messages are coded. ``relative``: code the difference from the last result.
    Parameters need this, because they change little between rounds. Gradients are coded as they
    are. ``feedback``: b, in [0, 1]. With 0 there is no residual."""

    codec: Codec
    relative: bool
    feedback: float = 1.0

    agrees = True
    slots: ClassVar[dict[str, Slot]] = {
        "reference": "everywhere",
        "residual": "private",
        "lag": "owner",
    }

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            raise ValueError(
                f"codec must be a laconic.codecs.Codec, such as laconic.codecs.Int4(), not "
                f"{self.codec!r}"
            )
        check_repr(self.codec)
        check_bool("relative", self.relative)
        check_float("feedback", self.feedback, 0.0, most=1.0)

    @property
    def accepts(self) -> Sends:
        # unless they are relative, whole parameters would lose their low bits in every round
        return "model" if self.relative else "change"

    def init(self, x: Tensor, owned: slice) -> State:
        check_codable(self.codec, x)
        state = {"reference": x} if self.relative else {}
        if self.feedback:
            state["residual"] = torch.zeros_like(x)
        return state

    def rebase(self, x: Tensor, state: State) -> None:
        if self.relative:
            state["reference"].copy_(x)


class Encoder:
    """Codes x - less + b*plus part after part; with feedback, leaves the coding errors in x."""

    def __init__(
        self,
        exchange: Coded,
        x: Tensor,
        less: Tensor | None,
        plus: Tensor | None = None,
    ) -> None:
        self.exchange, self.x, self.less, self.plus = exchange, x, less, plus
        self.failure = ""
        """Why a part could not be coded. It and all later ones are then `NOT_FINITE`."""

    def code(self, at: slice, out: Tensor) -> None:
        """Code the elements ``at`` into ``out``."""
        codec, feedback, plus = self.exchange.codec, self.exchange.feedback, self.plus
        if self.failure:
            out.fill_(NOT_FINITE)
            return
        less = None if self.less is None else self.less[at]
        if plus is not None:
            plus = plus[at] if feedback == 1 else feedback * plus[at]
        x, subtract = self.x[at], bool(feedback)
        try:
            codec.encode(x, less=less, plus=plus, subtract=subtract, out=out)
        except NotFiniteError as error:
            out.fill_(NOT_FINITE)
            note = f", counting from element {at.start}" if at.start else ""
            self.failure = (str(error) or f"{codec} could not encode it") + note


@dataclass(frozen=True)
class SlicedMean(Coded):
    """A mean whose messages are coded by slices, one for each worker. With ``lag``, o."""

    def multiple(self, n: int) -> int:
        return n * self.codec.grain

    def init(self, x: Tensor, owned: slice) -> State:
        state = super().init(x, owned)
        if self.feedback:
            state["lag"] = torch.zeros_like(x[owned])
        return state

    def rebase(self, x: Tensor, state: State) -> None:
        super().rebase(x, state)
        if self.relative and self.feedback:
            state["lag"].zero_()

    def cost(self, length: int, itemsize: int, n: int) -> Cost:
        each = -(-length // self.multiple(n)) * self.codec.grain
        size = n * self.codec.nbytes(each)
        return cost.all_to_all(size, n) + cost.all_gather(size, n)

    def split(self, length: int, clock: Clock, device: torch.device) -> _Split:
        """Return how to split rows of ``length`` elements. Rows on an accelerator are not split."""
        overlaps = clock.delay or not self.relative
        row_bytes = MIN_ROW_BYTES * (OVERLAP_FACTOR if overlaps else 1)
        least = row_bytes if device.type == "cpu" else math.inf
        grain = self.codec.grain
        return _Split.of(grain, self.codec.nbytes(grain), length // grain, least)

    async def reduce_scatter(
        self, link: AsyncLink, message: Tensor, clock: Clock, state: State
    ) -> tuple[Tensor, Tensor]:
        """Return v - q, and the mean of the codes received for this rank's slice."""
        n, order = link.size, hops(link.rank, link.size)
        residual = message.to(state_dtype(message.dtype)).contiguous()
        each = residual.numel() // n
        payload = self.rows(n, each, residual.device)
        rows, mean = torch.empty_like(payload), residual.new_empty(each)
        split = self.split(each, clock, residual.device)
        encoder = Encoder(self, residual, state.get("reference"), state.get("residual"))

        def fill(r: int, part: slice, elements: slice) -> None:
            if part != split.last:
                encoder.code(shifted(elements, r * each), payload[r, part])
            elif r == order[0]:  # encode all last parts before any is sent: a failure marks all
                if part.start == 0:
                    encoder.code(slice(0, len(residual)), payload.view(-1))
                else:
                    for row in order:
                        encoder.code(shifted(elements, row * each), payload[row, part])
                if encoder.failure:
                    payload[:, part].fill_(NOT_FINITE)

        suspects: list[tuple[slice, slice]] = []

        def use(r: int, part: slice, elements: slice) -> None:
            if r == order[0]:  # the last row to arrive
                if nonfinite_rows(rows[:, part]):
                    suspects.append((part, elements))  # not a code if a whole row is marked
                else:
                    self.codec.decode_mean(rows[:, part], mean[elements])

        await link.all_to_all(payload, rows, split.parts(fill, use))
        raise_if_nonfinite(rows[:, split.end], encoder.failure)
        for part, elements in suspects:
            self.codec.decode_mean(rows[:, part], mean[elements])
        return residual, mean

    async def all_gather(
        self,
        link: AsyncLink,
        w: Tensor,
        rows: Tensor,
        clock: Clock,
        less: Tensor | None = None,
        use: OnPart | None = None,
    ) -> None:
        """Code w - less as this rank's row of ``rows``, and gather all rows. Leaves w - less - p in
        w. ``use``: what to do with parts that arrive."""
        split = self.split(len(w), clock, w.device)
        encoder = Encoder(self, w, less)

        def fill(_: int, part: slice, elements: slice) -> None:
            encoder.code(elements, rows[link.rank, part])

        await link.all_gather(rows[link.rank], rows.view(-1), parts=split.parts(fill, use))
        raise_if_nonfinite(rows[:, split.end], encoder.failure)

    def rows(self, n: int, each: int, device: torch.device) -> Tensor:
        """Return memory for the codes of n slices of ``each`` elements."""
        return torch.empty(n, self.codec.nbytes(each), dtype=torch.uint8, device=device)


def shifted(elements: slice, by: int) -> slice:
    return slice(elements.start + by, elements.stop + by)


def check_codable(codec: object, x: Tensor) -> None:
    """Raise ``ValueError`` if ``codec`` cannot code parameters like ``x``."""
    if not x.is_floating_point():
        raise ValueError(
            f"{codec} codes floating-point parameters only, not {x.dtype}: choose a recipe that "
            "does not code them, without codec="
        )


def add_decoded(codec: Codec, payload: Tensor, x: Tensor) -> None:
    """Compute ``x <- x + Q``, where ``payload`` is the code of Q."""
    if x.dtype == torch.float32:
        codec.decode(payload, len(x), x, add=True)
    else:
        x += codec.decode(payload, len(x))


@dataclass(frozen=True)
class _Split:
    """How rows of codes are split into parts.

    ``ends``: where the parts end, in grains. ``grain``: elements in a grain. ``size``: bytes in a
    grain.
    """

    grain: int
    size: int
    ends: tuple[int, ...]

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, grain: int, size: int, grains: int, least: float) -> _Split:
        """Split rows of ``grains`` grains. Rows of fewer than ``least`` bytes have one part."""
        eighths = SPLITS if grains * size >= least else SPLITS[-1:]
        ends = {grains * k // SPLITS[-1] for k in eighths} - {0}
        return cls(grain, size, tuple(sorted(ends)))

    @property
    def last(self) -> slice:
        """Return the bytes of the last part."""
        start, stop = (0, *self.ends)[-2:]
        return slice(start * self.size, stop * self.size)

    @property
    def end(self) -> slice:
        """Return the bytes of the last grain, which belongs to the last part of any split."""
        return slice(-self.size, None)

    def parts(self, fill: OnPart, use: OnPart | None = None) -> Parts:
        """Return `Parts` that call ``fill`` and ``use`` with a rank, the bytes of a part of its
        row, and the elements that those bytes code."""

        def with_elements(call: OnPart) -> Callable[[int, slice], None]:
            return lambda r, part: call(r, part, self._elements(part))

        ends = [end * self.size for end in self.ends]
        return Parts(ends, with_elements(fill), None if use is None else with_elements(use))

    def _elements(self, part: slice) -> slice:
        return slice(part.start // self.size * self.grain, part.stop // self.size * self.grain)


OnPart = Callable[[int, slice, slice], None]


def nonfinite_rows(rows: Tensor) -> list[int]:
    """Return the indices of the ``rows`` that hold nothing but `NOT_FINITE`."""
    first = rows[:, 0].tolist()
    return [
        r for r, byte in enumerate(first) if byte == NOT_FINITE and bool((rows[r] == byte).all())
    ]


def raise_if_nonfinite(rows: Tensor, own: str) -> None:
    """Raise the same error on every rank if any row holds nothing but `NOT_FINITE`."""
    if ranks := nonfinite_rows(rows):
        here = f"; on this rank: {own}" if own else ""
        raise NotFiniteError(f"ranks {ranks} of its link had NaN or infinite values to send{here}")
