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
from typing import ClassVar

import torch
from torch import Tensor

from laconic.codecs import Codec, TopK, codec_of
from laconic.errors import NotFiniteError, check_bool, check_float
from laconic.links import cost
from laconic.links.cost import Cost
from laconic.links.link import Link
from laconic.round import Arrival, Clock, Combine, Exchange, Slot, State
from laconic.tensors import mean_in_rank_order, state_dtype

REFUSED = 255
"""A message that its codec refuses goes out as bytes of this value, which no code consists of: so
all ranks learn of it from the message itself, and raise the same error."""
CALM = 1e34
"""Far below the largest float32, 3.4e38: what parameters within it have changed by is finite."""


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

    def _encode(self, message: Tensor, clock: Clock, state: State) -> tuple[Tensor, Tensor, str]:
        """The code of v, and why it was refused, if it was; first v - q, in the room of the
        message where dtypes allow."""
        v = message.to(state_dtype(message.dtype)).contiguous()
        less, plus = state.get("reference"), self._residual(state)
        return (v, *self._code(v, _generator(clock, v.device, 0), less, plus))

    def _residual(self, state: State) -> Tensor | None:
        """b*e."""
        residual = state.get("residual")
        return residual if residual is None or self.feedback == 1 else self.feedback * residual

    def _code(
        self,
        x: Tensor,
        generator: torch.Generator,
        less: Tensor | None = None,
        plus: Tensor | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, str]:
        """The code of x - less + plus, and why it was refused; with a feedback x is left with what
        the code leaves out."""
        subtract = bool(self.feedback)
        try:
            code = self.codec.encode(x, generator, less=less, plus=plus, subtract=subtract, out=out)
            return code, ""
        except NotFiniteError as error:
            code = torch.empty(self.codec.nbytes(len(x)), dtype=torch.uint8, device=x.device)
            return code.fill_(REFUSED), str(error)


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
        left, rows = self._deal(link, message, clock, state)
        length, each = len(left), len(left) // link.size
        own = slice(link.rank * each, (link.rank + 1) * each)
        mean = self.codec.decode_mean(rows, each, left.dtype)  # slices of whole blocks
        if self.feedback:
            mean.add_(state["lag"], alpha=self.feedback)
        if self.relative:
            mean.add_(state["reference"][own])
        result = combine(mean)
        w = result if result is mean else result.clone()  # which may be state of the update's
        reference = state["reference"][own] if self.relative else None
        back, refusal = self._code(w, _generator(clock, w.device, 1), reference)
        everyone = back.new_empty(link.size, len(back))

        def keep() -> None:
            if self.feedback:
                state["residual"].copy_(left)  # e <- v - q
                state["lag"].copy_(w)  # o <- w - p

        if self.relative and back.device.type == "cpu":
            self._gather(link, back, everyone, state["reference"], keep, refusal)
            return Arrival(state["reference"], lent=True)
        link.all_gather(back, everyone.view(-1))
        _raise_if_refused(everyone, refusal)
        keep()
        if self.relative:
            _add_decoded(self.codec, everyone.view(-1), state["reference"])
            return Arrival(state["reference"], lent=True)
        fits = left.dtype == torch.float32
        received = self.codec.decode(everyone.view(-1), length, left if fits else None)
        return Arrival(received.to(left.dtype))

    def _deal(
        self, link: Link, message: Tensor, clock: Clock, state: State
    ) -> tuple[Tensor, Tensor]:
        """v - q, and the rows of codes that came for this rank. Parameters are coded slice by
        slice, each while those before it are on their way, where it is known that none will be
        refused; else all before the first is sent."""
        n = link.size
        if not (self.relative and _is_calm(message, self.codec)):
            left, payload, refusal = self._encode(message, clock, state)
            rows = link.all_to_all(payload.view(n, -1))
            _raise_if_refused(rows, refusal)
            return left, rows
        v, less, plus = message.contiguous(), state["reference"], self._residual(state)
        size, each = self.codec.nbytes(len(v)) // n, len(v) // n
        payload = torch.empty(n, size, dtype=torch.uint8)
        generator = _generator(clock, v.device, 0)

        def fill(r: int) -> None:
            at = slice(r * each, (r + 1) * each)
            more = None if plus is None else plus[at]
            _, refusal = self._code(v[at], generator, less[at], more, payload[r])
            assert not refusal, refusal

        rows = link.all_to_all(payload, fill)
        _raise_if_refused(rows, "")
        return v, rows

    def _gather(
        self,
        link: Link,
        back: Tensor,
        everyone: Tensor,
        reference: Tensor,
        keep: Callable[[], None],
        refusal: str,
    ) -> None:
        """Every owner's ``back`` into ``everyone``, and r <- r + p, each slice while those behind
        it are on their way. Where this fails on one rank others may have ended it: r is NaN then,
        which no state can be loaded with."""
        each = len(reference) // link.size

        def use(r: int) -> None:
            if r == link.rank:
                keep()
            if not _is_refused(everyone[r]):
                _add_decoded(self.codec, everyone[r], reference[r * each : (r + 1) * each])

        try:
            link.all_gather(back, everyone.view(-1), use=use)
            _raise_if_refused(everyone, refusal)
        except BaseException:
            reference.fill_(math.nan)
            raise


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
        left, payload, refusal = self._encode(message, clock, state)
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
    kind = GatheredMean if isinstance(codec, TopK) else CodedMean
    return kind(codec, relative, feedback)


def _generator(clock: Clock, device: torch.device, way: int = 0) -> torch.Generator:
    """For stochastic rounding: other numbers on every worker, in every step, bucket and way, and
    the same ones after a resume."""
    seed = hash((clock.seed, clock.step, clock.bucket, clock.worker, way))
    return torch.Generator(device).manual_seed(seed % 2**63)


def _is_calm(x: Tensor, codec: Codec) -> bool:
    """Whether all of x is so far from infinity that ``codec`` cannot refuse what x has changed by;
    said of float32 on a CPU alone: a card sends nothing before all is coded."""
    if x.device.type != "cpu" or not x.dtype == codec.dtype == torch.float32:
        return False
    least, most = (float(end) for end in torch.aminmax(x))
    return least >= -CALM and most <= CALM


def _add_decoded(codec: Codec, payload: Tensor, x: Tensor) -> None:
    """``x <- x + Q``, of which ``payload`` is the code."""
    if x.dtype == torch.float32:
        codec.decode(payload, len(x), x, add=True)
    else:
        x += codec.decode(payload, len(x))


def _is_refused(payload: Tensor) -> bool:
    return int(payload[0]) == REFUSED and bool((payload == REFUSED).all())


def _raise_if_refused(rows: Tensor, own: str) -> None:
    """Raise, on every rank alike, where one of them sends nothing but `REFUSED`."""
    suspects = (rows[:, 0] == REFUSED).tolist()
    refused = [r for r, odd in enumerate(suspects) if odd and _is_refused(rows[r])]
    if refused:
        mine = f"; here: {own}" if own else ""
        raise NotFiniteError(f"ranks {refused} of its link had NaN or an infinity to send{mine}")
