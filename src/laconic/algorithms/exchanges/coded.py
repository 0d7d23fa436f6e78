"""The mean over all workers of coded messages, with error feedback in both directions.

Symbols: r is the last result, which all workers have in common (0 for gradients, whose mean does
not depend on earlier means); Q is the codec. Worker j owns slice j of every bucket:

    worker i:          v = m_i - r + e_i ;  q_i = Q(v) ;  e_i <- v - q_i
    owner, its slice:  mean = r + o + (1/n) sum_i q_i ;  c = combine(mean)
                       w = c - r ;  p = Q(w) ;  o <- w - p
    everyone:          r <- r + p , the result of the round

`ReplicatedMean`, for workers that come and go, codes the mean, and every worker combines it:

    owner, its slice:  w = o + (1/n) sum_i q_i ;  p = Q(w) ;  o <- w - p
    everyone:          c = combine(r + p) ;  r <- c , the result of the round

Error feedback: Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019, arXiv 1901.09847. In
both directions: Tang et al., ICML 2019, arXiv 1905.05957 (DoubleSqueeze). The next round sends what
this one leaves out: what was sent plus the residuals e and o equals the sum of all messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.algorithms.exchange import Arrival, Combine, Exchange
from laconic.algorithms.exchanges.mean import Mean
from laconic.algorithms.update import Clock, Sends, Slot, State
from laconic.codecs import Codec
from laconic.codecs.codec import check_repr
from laconic.errors import NotFiniteError, check_bool
from laconic.links import cost
from laconic.links.cost import Cost
from laconic.links.link import AsyncLink, memory_for
from laconic.tensors import state_dtype

NOT_FINITE = 255
"""Marks a message that its codec could not encode: all of its bytes have this value. No code
consists of such bytes alone, so all ranks learn of the failure from the message itself and raise
the same error."""


@dataclass(frozen=True)
class Coded(Exchange):
    """A mean whose messages are coded by slices, one for each worker. ``codec``: how.
    ``relative``: code the difference from the last result. Parameters need this, because they
    change little between rounds. Gradients are coded as they are."""

    codec: Codec
    relative: bool

    agrees = True
    slots: ClassVar[dict[str, Slot]] = {
        "reference": "everywhere",
        "residual": "private",
        "lag": "private",
    }

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            raise ValueError(
                f"codec must be a laconic.codecs.Codec, such as laconic.codecs.Int4(), not "
                f"{self.codec!r}"
            )
        check_repr(self.codec)
        check_bool("relative", self.relative)

    @property
    def accepts(self) -> Sends:
        # unless they are relative, whole parameters would lose their low bits in every round
        return "model" if self.relative else "change"

    def multiple(self, n: int) -> int:
        return n * self.codec.grain

    def init(self, x: Tensor, owned: slice) -> State:
        if not x.is_floating_point():
            raise ValueError(
                f"{self.codec} codes floating-point parameters only, not {x.dtype}: choose a "
                "recipe that does not code them, without codec="
            )
        state = {"reference": x} if self.relative else {}
        return {**state, "residual": torch.zeros_like(x), "lag": torch.zeros_like(x[owned])}

    def rebase(self, x: Tensor, state: State) -> None:
        if self.relative:
            state["reference"].copy_(x)
            state["lag"].zero_()

    def cost(self, length: int, itemsize: int, n: int) -> Cost:
        each = -(-length // self.multiple(n)) * self.codec.grain
        size = n * self.codec.nbytes(each)
        return cost.all_to_all(size, n) + cost.all_gather(size, n)

    async def reduce_scatter(
        self, link: AsyncLink, message: Tensor, state: State, offsets: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Tensor]:
        """Return v - q, and the mean of the codes received for this rank's slice, plus
        ``offsets``."""
        residual = message.to(state_dtype(message.dtype)).contiguous()
        each = residual.numel() // link.size
        payload, rows = (self._rows(link, each, residual.device) for _ in range(2))
        less, plus = state.get("reference"), state["residual"]
        failure = _encode(self.codec, residual, less, plus, payload.view(-1), residual)
        await link.all_to_all(payload, rows)
        codes = _received(rows, failure, residual.device)
        return residual, self.codec.decode_mean(codes, residual.new_empty(each), plus=offsets)

    async def all_gather(
        self, link: AsyncLink, c: Tensor, w: Tensor, less: Tensor | None = None
    ) -> Tensor:
        """Return the codes of all ranks' c - less, one after the other. Leaves c - less - p in w,
        which may be c."""
        rows = self._rows(link, len(w), w.device)
        failure = _encode(self.codec, c, less, None, rows[link.rank], w)
        await link.all_gather(rows[link.rank], rows.view(-1))
        return _received(rows, failure, w.device).view(-1)

    def _rows(self, link: AsyncLink, each: int, device: torch.device) -> Tensor:
        """Return memory for the codes of a slice of ``each`` elements per rank."""
        return memory_for(link, (link.size, self.codec.nbytes(each)), device)


@dataclass(frozen=True)
class CodedMean(Coded):
    """The mean with codes in both directions. All workers hold the same bits afterward.

    1. Slices are coded and exchanged by an all-to-all.
    2. Each owner decodes and sums its slices in rank order, in float32 (float64 for float64
       tensors), and combines the mean.
    3. The owner codes the result, with a residual of its own, and all ranks gather it.

    Sends 2(n-1)/n of the coded message. State: on every worker the residual and, if ``relative``,
    the reference, each as long as the message; and the owner's residual, 1/n of that length.
    """

    slots: ClassVar[dict[str, Slot]] = {**Coded.slots, "lag": "owner"}

    def owners(self, n: int) -> int | None:
        return n

    def replicated(self) -> Exchange:
        return ReplicatedMean(self.codec, self.relative)

    def collect(self, state: State, owned: slice, n: int) -> None:
        state["residual"][owned].add_(state["lag"], alpha=n)  # the mean divides it by n
        state["lag"].zero_()

    async def run(
        self, link: AsyncLink, message: Tensor, combine: Combine, clock: Clock, state: State
    ) -> Arrival:
        own = self.region(link, message.numel())
        less = state["reference"][own] if self.relative else None
        offsets = [t for t in (state["lag"], less) if t is not None]
        residual, w = await self.reduce_scatter(link, message, state, offsets)
        codes = await self.all_gather(link, combine(w), w, less)
        # e <- v - q ; o <- w - p
        torch._foreach_copy_([state["residual"], state["lag"]], [residual, w])
        fits = residual.dtype == torch.float32  # as what is decoded
        r = state["reference"] if self.relative else residual
        decoded = self.codec.decode(codes, len(r), r if fits else None, add=self.relative and fits)
        if not self.relative:
            return Arrival(decoded.to(r.dtype))
        if not fits:
            r += decoded
        return Arrival(r, lent=True)


@dataclass(frozen=True)
class ReplicatedMean(Coded):
    """The mean with codes in both directions, for any number of workers.

    Messages of any length are padded for the number of workers of the round. ``lag`` is o, as long
    as the message: zero except in the slice that this worker owned last. When the slices change,
    what is elsewhere moves to e, times n, since the mean divides it by n. State changes only after
    everything has arrived. Sends 2(n-1)/n of the coded message.
    """

    def replicated(self) -> Exchange:
        return self

    async def run(
        self, link: AsyncLink, message: Tensor, combine: Combine, clock: Clock, state: State
    ) -> Arrival:
        n, rank, length = link.size, link.rank, message.numel()
        padding = -length % self.multiple(n)
        padded = {name: _padded(t, padding) for name, t in state.items() if name != "lag"}
        residual, w = await self.reduce_scatter(link, _padded(message, padding), padded)
        each = w.numel()
        own = slice(rank * each, (rank + 1) * each)
        mine = slice(own.start, max(min(own.stop, length), own.start))
        lag = state["lag"][mine]
        w[: len(lag)].add_(lag)
        codes = await self.all_gather(link, w, w)
        mean = self.codec.decode(codes, n * each)[:length].to(residual.dtype)
        state["residual"].copy_(residual[:length])  # e <- v - q
        for at in (slice(0, mine.start), slice(mine.stop, length)):
            elsewhere = state["lag"][at]
            if elsewhere.any():  # the slices have changed
                state["residual"][at].add_(elsewhere, alpha=n)
                elsewhere.zero_()
        lag.copy_(w[: len(lag)])  # o <- w - p
        if not self.relative:
            return Arrival(combine(mean).clone())
        state["reference"].copy_(combine(mean.add_(state["reference"])))
        return Arrival(state["reference"], lent=True)


@dataclass(frozen=True)
class LastMean(Mean):
    """The uncoded mean of messages and of all that the rounds of ``coded`` before have not sent: of
    the residuals e and the owner's o, which counts n times, since the mean divides it by n.
    ``owned``: the owner's slice."""

    coded: Exchange
    owned: slice

    async def run(
        self, link: AsyncLink, message: Tensor, combine: Combine, clock: Clock, state: State
    ) -> Arrival:
        self.coded.collect(state, self.owned, link.size)
        total = message + state["residual"]
        if "lag" in state and len(state["lag"]) == len(total):
            total.add_(state["lag"], alpha=link.size)
        arrival = await super().run(link, total, combine, clock, {})
        for name in state.keys() & {"residual", "lag"}:
            state[name].zero_()
        return arrival


def _padded(t: Tensor, padding: int) -> Tensor:
    return torch.nn.functional.pad(t, (0, padding)) if padding else t


def _encode(
    codec: Codec, x: Tensor, less: Tensor | None, plus: Tensor | None, out: Tensor, left: Tensor
) -> str:
    """Code x - less + plus into ``out``, and leave the coding errors in ``left``, which may be x.
    Return why that cannot be done; ``out`` is then `NOT_FINITE`."""
    try:
        codec.encode(x, less=less, plus=plus, subtract=True, left=left, out=out)
    except NotFiniteError as error:
        out.fill_(NOT_FINITE)
        return str(error) or f"{codec} could not encode it"
    return ""


def _received(rows: Tensor, own: str, device: torch.device) -> Tensor:
    """Return ``rows``, or a copy on ``device``, which is queued there. Raise the same error on
    every rank if any row holds nothing but `NOT_FINITE`."""
    marked = [r for r, byte in enumerate(rows[:, 0].tolist()) if byte == NOT_FINITE]
    if ranks := [r for r in marked if bool((rows[r] == NOT_FINITE).all())]:
        here = f"; on this rank: {own}" if own else ""
        raise NotFiniteError(f"ranks {ranks} of its link had NaN or infinite values to send{here}")
    if rows.device == device:
        return rows
    return torch.empty_like(rows, device=device).copy_(rows, non_blocking=True)
