"""The mean over all workers of coded messages, with error feedback in both directions.

Symbols: b is the feedback; r is the last result, which all workers have in common (0 for gradients,
whose mean does not depend on earlier means); Q is the codec. Worker j owns slice j of every bucket:

    worker i:          v = m_i - r + b*e_i ;  q_i = Q(v) ;  e_i <- v - q_i
    owner, its slice:  mean = r + b*o + (1/n) sum_i q_i ;  c = combine(mean)
                       w = c - r ;  p = Q(w) ;  o <- w - p
    everyone:          r <- r + p , the result of the round

Error feedback: Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019, arXiv 1901.09847. In
both directions: Tang et al., ICML 2019, arXiv 1905.05957 (DoubleSqueeze). The next round sends what
this one leaves out. With b = 1, what was sent plus the residuals e and o equals the sum of all
messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from laconic.algorithms.exchange import Arrival, Combine, Exchange
from laconic.algorithms.update import Clock, Slot, State
from laconic.buckets import mean_in_rank_order, state_dtype
from laconic.codecs import Codec, codec_of
from laconic.codecs.codec import check_repr
from laconic.errors import NotFiniteError, check_bool, check_float
from laconic.links import cost
from laconic.links.cost import Cost
from laconic.links.link import Link, Parts, hops

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
class _Coded(Exchange):
    """``codec``: how messages are coded. ``relative``: code the difference from the last result.
    Parameters need this, because they change little between rounds. Gradients are coded as they
    are. ``feedback``: b, in [0, 1]. With 0 there is no residual."""

    codec: Codec
    relative: bool
    feedback: float = 1.0

    agrees = True
    slots: ClassVar[dict[str, Slot]] = {
        "reference": "everywhere",
        "residual": "pooled",
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
    def averages(self) -> bool:
        return not self.relative

    def init(self, x: Tensor, owned: slice) -> State:
        if not x.is_floating_point():
            raise ValueError(
                f"{self.codec} codes floating-point parameters only, not {x.dtype}: choose a "
                "recipe without codec="
            )
        state = {"reference": x} if self.relative else {}
        if self.feedback:
            state["residual"] = torch.zeros_like(x)
        return state

    def rebase(self, x: Tensor, state: State) -> None:
        if self.relative:
            state["reference"].copy_(x)

    def _residual(self, state: State, at: slice) -> Tensor | None:
        """Return b*e for the elements ``at``."""
        if "residual" not in state:
            return None
        residual = state["residual"][at]
        return residual if self.feedback == 1 else self.feedback * residual

    def _code(
        self,
        x: Tensor,
        generator: torch.Generator,
        less: Tensor | None,
        plus: Tensor | None,
        out: Tensor,
    ) -> str:
        """Encode x - less + plus into ``out``. With feedback, leave the coding error in x.

        If the codec cannot encode x, fill ``out`` with `NOT_FINITE` and return the reason.
        Otherwise return the empty string.
        """
        subtract = bool(self.feedback)
        try:
            self.codec.encode(x, generator, less=less, plus=plus, subtract=subtract, out=out)
        except NotFiniteError as error:
            out.fill_(NOT_FINITE)
            return str(error) or f"{self.codec} could not encode it"
        return ""


@dataclass(frozen=True)
class CodedMean(_Coded):
    """The mean with codes in both directions. All workers hold the same bits afterward.

    1. Slices are coded and exchanged by an all-to-all.
    2. Each owner decodes and sums its slices in rank order, in float32 (float64 for float64
       tensors), and combines the mean.
    3. The owner codes the result, with a residual of its own, and all ranks gather it.

    Sends 2(n-1)/n of the coded message. State: on every worker the residual and, if ``relative``,
    the reference, each as long as the message; and the owner's residual, 1/n of that length.
    """

    def owners(self, n: int) -> int | None:
        return n

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

    def collect(self, state: State, owned: slice, n: int) -> None:
        if self.feedback:
            state["residual"][owned].add_(state["lag"], alpha=n)  # the mean divides it by n
            state["lag"].zero_()

    def cost(self, length: int, itemsize: int, n: int) -> Cost:
        size = self.codec.nbytes(length)
        return cost.all_to_all(size, n) + cost.all_gather(size, n)

    def run(
        self, link: Link, message: Tensor, combine: Combine, clock: Clock, state: State
    ) -> Arrival:
        residual, mean = self._reduce_scatter(link, message, clock, state)
        n, rank, each = link.size, link.rank, mean.numel()
        own = slice(rank * each, (rank + 1) * each)
        if self.feedback:
            mean.add_(state["lag"], alpha=self.feedback)
        if self.relative:
            mean.add_(state["reference"][own])
        result = combine(mean)
        w = result if result is mean else result.clone()  # result may be the update's state
        split = self._split(each, clock, w.device)
        rows = torch.empty(n, self.codec.nbytes(each), dtype=torch.uint8, device=w.device)
        generator, failure = _generator(clock, w.device, 1), ""

        def fill(_: int, part: slice, elements: slice) -> None:
            nonlocal failure
            less = state["reference"][own][elements] if self.relative else None
            if failure:
                rows[rank, part].fill_(NOT_FINITE)
            else:
                failure = self._code(w[elements], generator, less, None, rows[rank, part])
                failure += _offset_note(elements.start) if failure else ""

        def save_residuals() -> None:
            if self.feedback:
                state["residual"].copy_(residual)  # e <- v - q
                state["lag"].copy_(w)  # o <- w - p

        if not (self.relative and w.device.type == "cpu"):
            link.all_gather(rows[rank], rows.view(-1), parts=split.parts(fill))
            _raise_if_nonfinite(rows[:, split.end], failure)
            save_residuals()
            if self.relative:
                _add_decoded(self.codec, rows.view(-1), state["reference"])
                return Arrival(state["reference"], lent=True)
            fits = residual.dtype == torch.float32
            received = self.codec.decode(rows.view(-1), len(residual), residual if fits else None)
            return Arrival(received.to(residual.dtype))

        suspects: list[tuple[int, slice, slice]] = []

        def use(r: int, part: slice, elements: slice) -> None:
            if r == rank and part.start == 0:
                save_residuals()
            if _nonfinite_rows(rows[r : r + 1, part]):
                suspects.append((r, part, elements))  # not a code if the whole row is marked
            else:
                add(r, part, elements)

        def add(r: int, part: slice, elements: slice) -> None:
            at = slice(r * each + elements.start, r * each + elements.stop)
            _add_decoded(self.codec, rows[r, part], state["reference"][at])

        try:
            link.all_gather(rows[rank], rows.view(-1), parts=split.parts(fill, use))
            _raise_if_nonfinite(rows[:, split.end], failure)
            for r, part, elements in suspects:
                add(r, part, elements)
        except BaseException:  # other ranks may have completed it: NaN makes this state unloadable
            state["reference"].fill_(math.nan)
            raise
        return Arrival(state["reference"], lent=True)

    def _split(self, length: int, clock: Clock, device: torch.device) -> _Split:
        """Return how to split rows of ``length`` elements. Rows on an accelerator are not split."""
        overlaps = clock.delay or not self.relative
        row_bytes = MIN_ROW_BYTES * (OVERLAP_FACTOR if overlaps else 1)
        least = row_bytes if device.type == "cpu" else math.inf
        grain = self.codec.grain
        return _Split.of(grain, self.codec.nbytes(grain), length // grain, least)

    def _reduce_scatter(
        self, link: Link, message: Tensor, clock: Clock, state: State
    ) -> tuple[Tensor, Tensor]:
        """Return v - q, and the mean of the codes received for this rank's slice."""
        n, order = link.size, hops(link.rank, link.size)
        residual = message.to(state_dtype(message.dtype)).contiguous()
        each = residual.numel() // n
        payload = torch.empty(n, self.codec.nbytes(each), dtype=torch.uint8, device=residual.device)
        rows, mean = torch.empty_like(payload), residual.new_empty(each)
        split = self._split(each, clock, residual.device)
        generator, failure = _generator(clock, residual.device, 0), ""

        def code(start: int, stop: int, out: Tensor) -> None:
            nonlocal failure
            at = slice(start, stop)
            less = state["reference"][at] if self.relative else None
            if failure:
                out.fill_(NOT_FINITE)
            else:
                failure = self._code(residual[at], generator, less, self._residual(state, at), out)
                failure += _offset_note(start) if failure else ""

        def fill(r: int, part: slice, elements: slice) -> None:
            if part != split.last:
                code(r * each + elements.start, r * each + elements.stop, payload[r, part])
            elif r == order[0]:  # encode all last parts before any is sent: a failure marks all
                if part.start == 0:
                    code(0, len(residual), payload.view(-1))
                else:
                    for row in order:
                        code(
                            row * each + elements.start,
                            row * each + elements.stop,
                            payload[row, part],
                        )
                if failure:
                    payload[:, part].fill_(NOT_FINITE)

        suspects: list[tuple[slice, slice]] = []

        def use(r: int, part: slice, elements: slice) -> None:
            if r == order[0]:  # the last row to arrive
                if _nonfinite_rows(rows[:, part]):
                    suspects.append((part, elements))  # not a code if a whole row is marked
                else:
                    self.codec.decode_mean(rows[:, part], mean[elements])

        link.all_to_all(payload, rows, split.parts(fill, use))
        _raise_if_nonfinite(rows[:, split.end], failure)
        for part, elements in suspects:
            self.codec.decode_mean(rows[:, part], mean[elements])
        return residual, mean


@dataclass(frozen=True)
class GatheredMean(_Coded):
    """The mean with one code: every worker sends its coded message to every other.

    All workers decode and sum the messages in rank order. This suits codes so short that n of them
    are still small, and whose sum would lose too much by being coded again, such as `TopK`.

    Sends (n-1) times the coded message. Every worker combines everything and stores all state.
    """

    def multiple(self, n: int) -> int:
        return 1

    def cost(self, length: int, itemsize: int, n: int) -> Cost:
        return cost.gather(self.codec.nbytes(length), n)

    def run(
        self, link: Link, message: Tensor, combine: Combine, clock: Clock, state: State
    ) -> Arrival:
        length = len(message)
        residual = message.to(state_dtype(message.dtype)).contiguous()
        payload = torch.empty(self.codec.nbytes(length), dtype=torch.uint8, device=residual.device)
        less, plus = state.get("reference"), self._residual(state, slice(None))
        failure = self._code(residual, _generator(clock, residual.device), less, plus, payload)
        rows = link.gather(payload)
        _raise_if_nonfinite(rows, failure)
        mean = mean_in_rank_order(
            (self.codec.decode(row, length).to(residual.dtype) for row in rows), reuse=True
        )
        if self.feedback:
            state["residual"].copy_(residual)  # e <- v - q
        if self.relative:
            mean.add_(state["reference"])
        received = combine(mean)
        if not self.relative:
            return Arrival(received.clone())
        state["reference"].copy_(received)
        return Arrival(state["reference"], lent=True)


def coded(codec: Codec | str, *, relative: bool, feedback: float = 1.0) -> Exchange:
    """Return the exchange for the mean of messages coded with ``codec``."""
    codec = codec_of(codec)
    kind = GatheredMean if codec.gathered else CodedMean
    return kind(codec, relative, feedback)


def _generator(clock: Clock, device: torch.device, direction: int = 0) -> torch.Generator:
    """Return a generator for stochastic rounding.

    Its numbers differ by worker, step, bucket, and direction, and are the same after a resume.
    """
    seed = hash((clock.seed, clock.step, clock.bucket, clock.worker, direction))
    return torch.Generator(device).manual_seed(seed % 2**63)


def _add_decoded(codec: Codec, payload: Tensor, x: Tensor) -> None:
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

    def parts(self, fill: _OnPart, use: _OnPart | None = None) -> Parts:
        """Return `Parts` that call ``fill`` and ``use`` with a rank, the bytes of a part of its
        row, and the elements that those bytes code."""

        def with_elements(call: _OnPart) -> Callable[[int, slice], None]:
            return lambda r, part: call(r, part, self._elements(part))

        ends = [end * self.size for end in self.ends]
        return Parts(ends, with_elements(fill), None if use is None else with_elements(use))

    def _elements(self, part: slice) -> slice:
        return slice(part.start // self.size * self.grain, part.stop // self.size * self.grain)


_OnPart = Callable[[int, slice, slice], None]


def _offset_note(start: int) -> str:
    return f", counting from element {start}" if start else ""


def _nonfinite_rows(rows: Tensor) -> list[int]:
    """Return the indices of the ``rows`` that hold nothing but `NOT_FINITE`."""
    suspects = (rows[:, 0] == NOT_FINITE).tolist()
    return [r for r, odd in enumerate(suspects) if odd and bool((rows[r] == NOT_FINITE).all())]


def _raise_if_nonfinite(rows: Tensor, own: str) -> None:
    """Raise the same error on every rank if any row holds nothing but `NOT_FINITE`."""
    if ranks := _nonfinite_rows(rows):
        here = f"; on this rank: {own}" if own else ""
        raise NotFiniteError(f"ranks {ranks} of its link had NaN or infinite values to send{here}")
