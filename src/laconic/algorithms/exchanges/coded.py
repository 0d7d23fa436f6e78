"""The mean over all workers of coded messages, with error feedback in both directions.

Symbols: b is the feedback; r is the last result, which all workers have in common (0 for gradients,
whose mean does not depend on earlier means); Q is the codec. Worker j owns slice j of every bucket:

    worker i:          v = m_i - r + b*e_i ;  q_i = Q(v) ;  e_i <- v - q_i
    owner, its slice:  mean = r + b*o + (1/n) sum_i q_i ;  c = combine(mean)
                       w = c - r ;  p = Q(w) ;  o <- w - p
    everyone:          r <- r + p , the result of the round

`ReplicatedMean`, for workers that come and go, codes the mean, and every worker combines it:

    owner, its slice:  w = b*o + (1/n) sum_i q_i ;  p = Q(w) ;  o <- w - p
    everyone:          c = combine(r + p) ;  r <- c , the result of the round

Error feedback: Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019, arXiv 1901.09847. In
both directions: Tang et al., ICML 2019, arXiv 1905.05957 (DoubleSqueeze). The next round sends what
this one leaves out. With b = 1, what was sent plus the residuals e and o equals the sum of all
messages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.algorithms.exchange import Arrival, Combine, Exchange
from laconic.algorithms.exchanges.coding import (
    Coded,
    Encoder,
    SlicedMean,
    add_decoded,
    nonfinite_rows,
    raise_if_nonfinite,
    shifted,
)
from laconic.algorithms.exchanges.mean import Mean
from laconic.algorithms.update import Clock, Slot, State
from laconic.codecs import Codec, codec_of
from laconic.links import cost
from laconic.links.cost import Cost
from laconic.links.link import AsyncLink
from laconic.tensors import mean_in_rank_order, state_dtype


@dataclass(frozen=True)
class CodedMean(SlicedMean):
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

    def replicated(self) -> Exchange:
        return ReplicatedMean(self.codec, self.relative, self.feedback)

    def collect(self, state: State, owned: slice, n: int) -> None:
        if self.feedback:
            state["residual"][owned].add_(state["lag"], alpha=n)  # the mean divides it by n
            state["lag"].zero_()

    async def run(
        self, link: AsyncLink, message: Tensor, combine: Combine, clock: Clock, state: State
    ) -> Arrival:
        residual, mean = await self.reduce_scatter(link, message, clock, state)
        n, rank, each = link.size, link.rank, mean.numel()
        own = slice(rank * each, (rank + 1) * each)
        if self.feedback:
            mean.add_(state["lag"], alpha=self.feedback)
        if self.relative:
            mean.add_(state["reference"][own])
        result = combine(mean)
        w = result if result is mean else result.clone()  # result may be the update's state
        less = state["reference"][own] if self.relative else None
        rows = self.rows(n, each, w.device)

        def save_residuals() -> None:
            if self.feedback:
                state["residual"].copy_(residual)  # e <- v - q
                state["lag"].copy_(w)  # o <- w - p

        if not self.relative or len(self.split(each, clock, w.device).ends) == 1:
            await self.all_gather(link, w, rows, clock, less)
            save_residuals()
            if self.relative:
                add_decoded(self.codec, rows.view(-1), state["reference"])
                return Arrival(state["reference"], lent=True)
            fits = residual.dtype == torch.float32
            received = self.codec.decode(rows.view(-1), len(residual), residual if fits else None)
            return Arrival(received.to(residual.dtype))

        suspects: list[tuple[int, slice, slice]] = []

        def use(r: int, part: slice, elements: slice) -> None:
            if r == rank and part.start == 0:
                save_residuals()
            if nonfinite_rows(rows[r : r + 1, part]):
                suspects.append((r, part, elements))  # not a code if the whole row is marked
            else:
                add(r, part, elements)

        def add(r: int, part: slice, elements: slice) -> None:
            at = shifted(elements, r * each)
            add_decoded(self.codec, rows[r, part], state["reference"][at])

        try:
            await self.all_gather(link, w, rows, clock, less, use)
            for r, part, elements in suspects:
                add(r, part, elements)
        except BaseException:  # other ranks may have completed it: NaN makes this state unloadable
            state["reference"].fill_(math.nan)
            raise
        return Arrival(state["reference"], lent=True)


@dataclass(frozen=True)
class GatheredMean(Coded):
    """The mean with one code: every worker sends its coded message to every other.

    All workers decode and sum the messages in rank order. This suits codes so short that n of them
    are still small, and whose sum would lose too much by being coded again, such as `TopK`.

    Sends (n-1) times the coded message. Every worker combines everything and stores all state.
    """

    def multiple(self, n: int) -> int:
        return 1

    def replicated(self) -> Exchange:
        return self

    def cost(self, length: int, itemsize: int, n: int) -> Cost:
        return cost.gather(self.codec.nbytes(length), n)

    async def run(
        self, link: AsyncLink, message: Tensor, combine: Combine, clock: Clock, state: State
    ) -> Arrival:
        length = len(message)
        residual = message.to(state_dtype(message.dtype)).contiguous()
        payload = torch.empty(self.codec.nbytes(length), dtype=torch.uint8, device=residual.device)
        encoder = Encoder(self, residual, state.get("reference"), state.get("residual"))
        encoder.code(slice(0, length), payload)
        rows = await link.gather(payload)
        raise_if_nonfinite(rows, encoder.failure)
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


@dataclass(frozen=True)
class ReplicatedMean(SlicedMean):
    """The mean with codes in both directions, for any number of workers.

    Messages of any length are padded for the number of workers of the round. ``lag`` is o, as long
    as the message: zero except in the slice that this worker owned last. When the slices change,
    what is elsewhere moves to e, times n, since the mean divides it by n. State changes only after
    everything has arrived. Sends 2(n-1)/n of the coded message.
    """

    slots: ClassVar[dict[str, Slot]] = {
        "reference": "everywhere",
        "residual": "private",
        "lag": "private",
    }

    def replicated(self) -> Exchange:
        return self

    async def run(
        self, link: AsyncLink, message: Tensor, combine: Combine, clock: Clock, state: State
    ) -> Arrival:
        n, rank, length = link.size, link.rank, message.numel()
        padding = -length % self.multiple(n)
        padded = {name: _padded(t, padding) for name, t in state.items() if name != "lag"}
        residual, w = await self.reduce_scatter(link, _padded(message, padding), clock, padded)
        each = w.numel()
        own = slice(rank * each, (rank + 1) * each)
        mine = slice(own.start, max(min(own.stop, length), own.start))
        if self.feedback:
            lag = state["lag"][mine]
            w[: len(lag)].add_(lag, alpha=self.feedback)
        rows = self.rows(n, each, w.device)
        await self.all_gather(link, w, rows, clock)
        mean = self.codec.decode(rows.view(-1), n * each)[:length].to(residual.dtype)
        if self.feedback:
            state["residual"].copy_(residual[:length])  # e <- v - q
            for at in (slice(0, mine.start), slice(mine.stop, length)):
                elsewhere = state["lag"][at]
                if elsewhere.any():  # the slices have changed
                    state["residual"][at].add_(elsewhere, alpha=n)
                    elsewhere.zero_()
            state["lag"][mine] = w[: len(state["lag"][mine])]  # o <- w - p
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
        if self.coded.collect is not None:
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


def coded(codec: Codec | str, *, relative: bool, feedback: float = 1.0) -> Exchange:
    """Return the exchange for the mean of messages coded with ``codec``."""
    codec = codec_of(codec)
    kind = GatheredMean if codec.gathered else CodedMean
    return kind(codec, relative, feedback)
