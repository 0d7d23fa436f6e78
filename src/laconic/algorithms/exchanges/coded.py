"""The mean over all workers of messages that travel coded, and of which nothing gets lost.

With b the feedback, r what all workers agreed on last (0 for gradients, whose mean does not depend
on the one before), Q the codec, and slice j of every bucket being worker j's to combine:

    worker i:          v = m_i - r + b*e_i ;  q_i = Q(v) ;  e_i <- v - q_i
    owner, its slice:  mean = r + b*o + (1/n) sum_i q_i ;  c = combine(mean)
                       w = c - r ;  p = Q(w) ;  o <- w - p
    everyone:          r <- r + p , which is what the round brings

Error feedback: Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019, arXiv 1901.09847; on
both ways: Tang et al., ICML 2019, arXiv 1905.05957 (DoubleSqueeze). What a round leaves out is sent
with the next: for b = 1 all that was sent, and what is left in e and o, add up to all that went in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from laconic.algorithms.round import Arrival, Clock, Combine, Exchange, Slot, State
from laconic.buckets import mean_in_rank_order, state_dtype
from laconic.codecs import Codec, codec_of
from laconic.codecs.codec import check_told
from laconic.errors import NotFiniteError, check_bool, check_float
from laconic.links import cost
from laconic.links.cost import Cost
from laconic.links.link import Link, Parts, hops

REFUSED = 255
"""Of a message that its codec refuses the last part of every row goes out as bytes of this value,
which no code consists of: so all ranks learn of it from the message itself, and raise the same
error."""
ENDS = (1, 4, 7, 8)
"""Where the parts of a row end, in eighths: little is to be done before the first is sent, and
after the last has come."""
LEAST, HIDDEN = 2**16, 4
"""Bytes of a row that is worth it in a round that is waited for, and how many times as long it must
be in one that goes on beside the training: each part has its price, which is processor time, and
nobody waits for its row but at the end of a backward pass (``python -m benchmarks processor``)."""


@dataclass(frozen=True)
class _Coded(Exchange):
    """``codec``: what messages travel in. ``relative``: to what was agreed on last, as parameters
    must, which change little from one round to the next; else as they are, as gradients do.
    ``feedback``: b, in [0, 1]; 0 keeps no residual."""

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
            raise ValueError(f"codec must be a laconic.codecs.Codec, not {self.codec!r}")
        check_told(self.codec)
        check_bool("relative", self.relative)
        check_float("feedback", self.feedback, 0.0, most=1.0)

    @property
    def averages(self) -> bool:
        return not self.relative

    def init(self, x: Tensor, owned: slice) -> State:
        if not x.is_floating_point():
            raise ValueError(f"{self.codec} codes real numbers, not parameters of {x.dtype}")
        state = {"reference": x} if self.relative else {}
        if self.feedback:
            state["residual"] = torch.zeros_like(x)
        return state

    def rest(self, x: Tensor, state: State) -> None:
        if self.relative:
            state["reference"].copy_(x)

    def _residual(self, state: State, at: slice) -> Tensor | None:
        """b*e, of these elements."""
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
        """The code of x - less + plus into ``out``; with a feedback x is left with what the code
        leaves out. Returns why it was refused, which ``out`` says then, or nothing."""
        subtract = bool(self.feedback)
        try:
            self.codec.encode(x, generator, less=less, plus=plus, subtract=subtract, out=out)
        except NotFiniteError as error:
            out.fill_(REFUSED)
            return str(error) or f"{self.codec} refused it"
        return ""


@dataclass(frozen=True)
class CodedMean(_Coded):
    """Both ways coded: all-to-all of coded slices, decoded and summed by their owners in float32
    (float64 for such tensors), in rank order; combined there; the result coded again by its owner,
    with a residual of the owner's, and gathered. All workers hold the same bits afterwards.

    Sends 2(n-1)/n of the coded message. State: the residual, and if ``relative`` the reference, as
    long as the message, on every worker; the owner's residual, 1/n of it.
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

    def rest(self, x: Tensor, state: State) -> None:
        super().rest(x, state)
        if self.relative and self.feedback:
            state["lag"].zero_()

    def give_back(self, state: State, owned: slice, n: int) -> None:
        if self.feedback:
            state["residual"][owned].add_(state["lag"], alpha=n)  # which counts 1/n in the mean
            state["lag"].zero_()

    def cost(self, length: int, itemsize: int, n: int) -> Cost:
        size = self.codec.nbytes(length)
        return cost.all_to_all(size, n) + cost.all_gather(size, n)

    def run(
        self, link: Link, message: Tensor, combine: Combine, clock: Clock, state: State
    ) -> Arrival:
        left, mean = self._deal(link, message, clock, state)
        n, rank, each = link.size, link.rank, mean.numel()
        own = slice(rank * each, (rank + 1) * each)
        if self.feedback:
            mean.add_(state["lag"], alpha=self.feedback)
        if self.relative:
            mean.add_(state["reference"][own])
        result = combine(mean)
        w = result if result is mean else result.clone()  # which may be state of the update's
        cut = self._cut(each, clock, w.device)
        rows = torch.empty(n, self.codec.nbytes(each), dtype=torch.uint8, device=w.device)
        generator, refusal = _generator(clock, w.device, 1), ""

        def fill(_: int, part: slice, which: slice) -> None:
            nonlocal refusal
            less = state["reference"][own][which] if self.relative else None
            if refusal:
                rows[rank, part].fill_(REFUSED)
            else:
                refusal = self._code(w[which], generator, less, None, rows[rank, part])
                refusal += _counted(which.start) if refusal else ""

        def keep() -> None:
            if self.feedback:
                state["residual"].copy_(left)  # e <- v - q
                state["lag"].copy_(w)  # o <- w - p

        if not (self.relative and w.device.type == "cpu"):
            link.all_gather(rows[rank], rows.view(-1), parts=cut.parts(fill))
            _raise_if_refused(rows[:, cut.end], refusal)
            keep()
            if self.relative:
                _add_decoded(self.codec, rows.view(-1), state["reference"])
                return Arrival(state["reference"], lent=True)
            fits = left.dtype == torch.float32
            received = self.codec.decode(rows.view(-1), len(left), left if fits else None)
            return Arrival(received.to(left.dtype))

        odd: list[tuple[int, slice, slice]] = []

        def use(r: int, part: slice, which: slice) -> None:
            if r == rank and part.start == 0:
                keep()
            if _refused(rows[r : r + 1, part]):
                odd.append((r, part, which))  # there is no code of it, if its row was refused
            else:
                add(r, part, which)

        def add(r: int, part: slice, which: slice) -> None:
            at = slice(r * each + which.start, r * each + which.stop)
            _add_decoded(self.codec, rows[r, part], state["reference"][at])

        try:
            link.all_gather(rows[rank], rows.view(-1), parts=cut.parts(fill, use))
            _raise_if_refused(rows[:, cut.end], refusal)
            for r, part, which in odd:
                add(r, part, which)
        except BaseException:  # others may have ended it: no state can be loaded with NaN
            state["reference"].fill_(math.nan)
            raise
        return Arrival(state["reference"], lent=True)

    def _cut(self, length: int, clock: Clock, device: torch.device) -> _Cut:
        """How rows of so many elements are cut; on a card they are not."""
        hidden = clock.delay or not self.relative
        least = LEAST * (HIDDEN if hidden else 1) if device.type == "cpu" else math.inf
        grain = self.codec.grain
        return _Cut.of(grain, self.codec.nbytes(grain), length // grain, least)

    def _deal(
        self, link: Link, message: Tensor, clock: Clock, state: State
    ) -> tuple[Tensor, Tensor]:
        """v - q, and the mean of what came for this rank."""
        n, order = link.size, hops(link.rank, link.size)
        left = message.to(state_dtype(message.dtype)).contiguous()
        each = left.numel() // n
        payload = torch.empty(n, self.codec.nbytes(each), dtype=torch.uint8, device=left.device)
        rows, mean = torch.empty_like(payload), left.new_empty(each)
        cut = self._cut(each, clock, left.device)
        generator, refusal = _generator(clock, left.device, 0), ""

        def code(start: int, stop: int, out: Tensor) -> None:
            nonlocal refusal
            at = slice(start, stop)
            less = state["reference"][at] if self.relative else None
            if refusal:
                out.fill_(REFUSED)
            else:
                refusal = self._code(left[at], generator, less, self._residual(state, at), out)
                refusal += _counted(start) if refusal else ""

        def fill(r: int, part: slice, which: slice) -> None:
            if part != cut.last:
                code(r * each + which.start, r * each + which.stop, payload[r, part])
            elif r == order[0]:  # none of these is sent before it is known whether all have a code
                if part.start == 0:
                    code(0, len(left), payload.view(-1))
                else:
                    for row in order:
                        code(row * each + which.start, row * each + which.stop, payload[row, part])
                if refusal:
                    payload[:, part].fill_(REFUSED)

        odd: list[tuple[slice, slice]] = []

        def use(r: int, part: slice, which: slice) -> None:
            if r == order[0]:  # the last one to be there
                if _refused(rows[:, part]):
                    odd.append((part, which))  # there is no code of it, if its row was refused
                else:
                    self.codec.decode_mean(rows[:, part], mean[which])

        link.all_to_all(payload, rows, cut.parts(fill, use))
        _raise_if_refused(rows[:, cut.end], refusal)
        for part, which in odd:
            self.codec.decode_mean(rows[:, part], mean[which])
        return left, mean


@dataclass(frozen=True)
class GatheredMean(_Coded):
    """Coded once: every worker's message to every other, decoded and summed by all, in rank order.
    For codes so short that n of them are little, and whose sum would lose by being coded again, as
    that of `TopK`.

    Sends (n-1) times the coded message. Every worker combines, and keeps, everything.
    """

    def multiple(self, n: int) -> int:
        return 1

    def cost(self, length: int, itemsize: int, n: int) -> Cost:
        return cost.gather(self.codec.nbytes(length), n)

    def run(
        self, link: Link, message: Tensor, combine: Combine, clock: Clock, state: State
    ) -> Arrival:
        length = len(message)
        left = message.to(state_dtype(message.dtype)).contiguous()
        payload = torch.empty(self.codec.nbytes(length), dtype=torch.uint8, device=left.device)
        less, plus = state.get("reference"), self._residual(state, slice(None))
        refusal = self._code(left, _generator(clock, left.device), less, plus, payload)
        rows = link.gather(payload)
        _raise_if_refused(rows, refusal)
        mean = mean_in_rank_order(
            (self.codec.decode(row, length).to(left.dtype) for row in rows), reuse=True
        )
        if self.feedback:
            state["residual"].copy_(left)  # e <- v - q
        if self.relative:
            mean.add_(state["reference"])
        received = combine(mean)
        if not self.relative:
            return Arrival(received.clone())
        state["reference"].copy_(received)
        return Arrival(state["reference"], lent=True)


def coded(codec: Codec | str, *, relative: bool, feedback: float = 1.0) -> Exchange:
    """The mean that suits ``codec``."""
    codec = codec_of(codec)
    kind = GatheredMean if codec.gathered else CodedMean
    return kind(codec, relative, feedback)


def _generator(clock: Clock, device: torch.device, way: int = 0) -> torch.Generator:
    """For stochastic rounding: other numbers on every worker, in every step, bucket and way, and
    the same ones after a resume."""
    seed = hash((clock.seed, clock.step, clock.bucket, clock.worker, way))
    return torch.Generator(device).manual_seed(seed % 2**63)


def _add_decoded(codec: Codec, payload: Tensor, x: Tensor) -> None:
    """``x <- x + Q``, of which ``payload`` is the code."""
    if x.dtype == torch.float32:
        codec.decode(payload, len(x), x, add=True)
    else:
        x += codec.decode(payload, len(x))


@dataclass(frozen=True)
class _Cut:
    """How rows of codes are cut: the first parts end at ``ends``, in grains of so many elements
    (``grain``) and bytes (``size``)."""

    grain: int
    size: int
    ends: tuple[int, ...]

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, grain: int, size: int, grains: int, least: float) -> _Cut:
        """For rows of so many ``grains``; those below ``least`` bytes in one piece."""
        eighths = ENDS if grains * size >= least else ENDS[-1:]
        ends = {grains * k // ENDS[-1] for k in eighths} - {0}
        return cls(grain, size, tuple(sorted(ends)))

    @property
    def last(self) -> slice:
        """The bytes of the last part."""
        start, stop = (0, *self.ends)[-2:]
        return slice(start * self.size, stop * self.size)

    @property
    def end(self) -> slice:
        """The last grain's bytes, which are in the last part however a row is cut."""
        return slice(-self.size, None)

    def parts(self, fill: _OnPart, use: _OnPart | None = None) -> Parts:
        """``fill`` and ``use`` are told which bytes of the row of which rank it is about, and which
        of its elements they code."""

        def told(call: _OnPart) -> Callable[[int, slice], None]:
            return lambda r, part: call(r, part, self._elements(part))

        ends = [end * self.size for end in self.ends]
        return Parts(ends, told(fill), None if use is None else told(use))

    def _elements(self, part: slice) -> slice:
        return slice(part.start // self.size * self.grain, part.stop // self.size * self.grain)


_OnPart = Callable[[int, slice, slice], None]


def _counted(start: int) -> str:
    return f", counted from {start}" if start else ""


def _refused(rows: Tensor) -> list[int]:
    """Those of the ``rows`` that are nothing but `REFUSED`."""
    suspects = (rows[:, 0] == REFUSED).tolist()
    return [r for r, odd in enumerate(suspects) if odd and bool((rows[r] == REFUSED).all())]


def _raise_if_refused(rows: Tensor, own: str) -> None:
    """Raise, on every rank alike, where one of them sends nothing but `REFUSED`."""
    if refused := _refused(rows):
        mine = f"; here: {own}" if own else ""
        raise NotFiniteError(f"ranks {refused} of its link had NaN or an infinity to send{mine}")
