"""The mean over the workers that have arrived when a round closes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from laconic.algorithms.exchange import Arrival, Combine, Exchange
from laconic.algorithms.exchanges.coded import (
    NOT_FINITE,
    ReplicatedMean,
    add_decoded,
    check_codable,
    nonfinite_rows,
)
from laconic.algorithms.exchanges.mean import Mean
from laconic.algorithms.update import Clock, Slot, State
from laconic.codecs import CODECS, Codec, Int8
from laconic.codecs.codec import check_repr
from laconic.errors import NotFiniteError, check_choice, check_float, check_int
from laconic.links.cost import Cost
from laconic.links.link import AsyncLink
from laconic.links.quorum.port import Result
from laconic.tensors import mean_in_rank_order, state_dtype

Pace = Literal["equal", "own"]


class Contribution(NamedTuple):
    """What one worker delivers: its ``message``, which is its x or the code of its change, and the
    result from which x started, ``base``, or None if that is the result of the previous round."""

    message: Tensor
    base: Tensor | None


@dataclass(frozen=True)
class QuorumMean(Exchange):
    """The mean over the workers that have arrived when the round closes.

    A round closes ``grace`` seconds after ``workers`` of them (None: all) have arrived, or as soon
    as all expected workers have. A worker that arrives later takes part in a later round, with all
    steps since it last took part. Let ``a`` be the result of the previous round, ``b_i`` the result
    from which worker i started, and ``y_i = a - (b_i - x_i)``, so that ``y_i = x_i`` for a worker
    that is not late. The mean over the set M of workers that have arrived, out of n, is::

        a - sum over M of (a - y_i) / n

    A step has the same weight in whichever round it is delivered (Liu et al. 2024, arXiv
    2401.09135, Algorithm 3). If all workers have arrived, the result is the plain mean, bit for
    bit.

    ``pace="own"``: each worker takes as many steps as it can while the fastest worker takes those
    of the period (dynamic local updates). ``anchored=False``: for an update without an anchor, such
    as that of module buffers. The result is then the mean of ``x`` over M.

    Rank 0 keeps the outer state. Its process receives a message from every other worker of the
    round, averages them, and sends each of these workers the result.
    """

    workers: int | None = None
    grace: float = 0.0
    pace: Pace = "equal"
    anchored: bool = True

    slots: ClassVar[dict[str, Slot]] = {"base": "private"}
    needs_bases: ClassVar[bool] = True
    """Whether rank 0 needs the results from which late workers started."""
    agrees = True

    def __post_init__(self) -> None:
        if self.workers is not None:
            check_int("quorum", self.workers, 1)
        check_float("grace", self.grace, 0.0)
        check_choice("pace", self.pace, get_args(Pace))

    def owners(self, n: int) -> int | None:
        return 1

    def cost(self, length: int, itemsize: int, n: int) -> Cost:
        return Cost(2 * (n - 1) * length * itemsize // n, 2 * min(n - 1, 1))

    def busiest(self, length: int, itemsize: int, n: int) -> Cost:
        """Rank 0 receives the messages of all others, and then sends the result to each."""
        return Cost(2 * (n - 1) * length * itemsize, 2 * min(n - 1, 1))

    def init(self, x: Tensor, owned: slice) -> State:
        return {"base": x}

    def rebase(self, x: Tensor, state: State) -> None:
        """See `Exchange.rebase`."""
        state["base"].copy_(x)

    async def run(
        self, link: AsyncLink, message: Tensor, combine: Combine, clock: Clock, state: State
    ) -> Arrival:
        raise AssertionError("rounds with a quorum run by laconic.engine.quorum_rounds")

    def unanchored(self) -> QuorumMean:
        """The mean in the same rounds for an update without an anchor."""
        return QuorumMean(self.workers, self.grace, self.pace, anchored=False)

    def replicated(self) -> Exchange:
        return ReplicatedQuorumMean(self.workers, self.grace, self.pace, self.anchored)

    # -- on a worker ----

    def like(self, x: Tensor) -> Tensor:
        """A tensor like `message` of x."""
        return torch.empty_like(x)

    def room(self, message: Tensor, x: Tensor) -> Tensor:
        """A tensor for a whole result. ``message``, of x, is not needed anymore then."""
        return message

    def message(self, x: Tensor, state: State) -> Tensor:
        """What a worker delivers. x may be kept, and overwritten."""
        return x

    def withdraw(self, message: Tensor, x: Tensor, state: State) -> None:
        """No round has used the ``message`` of x: the next one contains it."""

    def receive(self, result: Result, state: State) -> Tensor:
        """The result of the round, from which x continues."""
        assert isinstance(result, Tensor), "nothing is coded"
        state["base"].copy_(result)
        return result

    # -- on rank 0 ----

    def start(self, state: State, dtype: torch.dtype) -> Tensor:
        """The common start, as `publish` would send it."""
        return state["base"].to(dtype, copy=True)

    def failed(self, message: Tensor) -> bool:
        """Whether the worker could not encode its change, because it is not finite."""
        return False

    def publish(self, result: Tensor, before: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the workers receive as ``result``, and the code of its change; None if whole results
        are sent. ``before``: what they received in the round before."""
        return result.to(before.dtype, copy=True), None

    def mean(self, arrived: Sequence[Contribution], anchor: Tensor | None, n: int) -> Tensor:
        """The mean of ``arrived``, in rank order, out of ``n`` workers; in at least float32.
        ``anchor`` is a, None if not `anchored`."""
        mean = mean_in_rank_order(_since(arrived, anchor))
        if anchor is not None and len(arrived) < n:
            mean = anchor - (anchor - mean) * (len(arrived) / n)
        return mean


def _since(arrived: Sequence[Contribution], anchor: Tensor | None) -> list[Tensor]:
    """y_i of every contribution: its x, as if it had started from the ``anchor``."""
    dtype, ys = state_dtype(arrived[0].message.dtype), []
    for message, base in arrived:
        y = message.to(dtype)
        if base is not None and anchor is not None:
            y = anchor - (base.to(dtype) - y)
        ys.append(y)
    return ys


@dataclass(frozen=True)
class CodedQuorumMean(QuorumMean):
    """`QuorumMean` with codes in both directions, and error feedback in both.

    Q is the codec, ``b_i`` the last result that worker i has received, ``e_i`` what its messages
    have left out, and P the last result that was sent::

        worker i:  v = x_i - b_i + e_i ;  q_i = Q(v) ;  e_i <- v - q_i
        rank 0:    y_i = a + q_i ;  a <- combine(mean of y_i, as in QuorumMean)
                   p = Q(a - P) ;  P <- P + p
        worker i:  b_i <- P, from the p of all rounds since its last one

    What P lacks of a is part of the next p. If the codes of the missed rounds are longer than P, or
    a worker does not hold an earlier P (after it was loaded), it receives P. Rank 0 needs no
    earlier results. If all workers arrive in every round, this is the mathematics of `CodedMean`.
    """

    codec: Codec = field(default_factory=Int8)

    slots: ClassVar[dict[str, Slot]] = {"base": "private", "residual": "private"}
    needs_bases: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.codec, Codec):
            raise ValueError(
                "rounds with a quorum code their results, too, which needs a codec such as "
                f"{', '.join(CODECS)}, not {self.codec!r}"
            )
        check_repr(self.codec)

    def replicated(self) -> Exchange:
        inner = ReplicatedMean(self.codec, relative=True)
        return ReplicatedQuorumMean(self.workers, self.grace, self.pace, inner=inner)

    def multiple(self, n: int) -> int:
        return math.lcm(super().multiple(n), self.codec.grain)

    def cost(self, length: int, itemsize: int, n: int) -> Cost:
        return super().cost(self.codec.nbytes(length), 1, n)

    def busiest(self, length: int, itemsize: int, n: int) -> Cost:
        return super().busiest(self.codec.nbytes(length), 1, n)

    def init(self, x: Tensor, owned: slice) -> State:
        check_codable(self.codec, x)
        return {"base": x, "residual": torch.zeros_like(x)}

    def like(self, x: Tensor) -> Tensor:
        return torch.empty(self.codec.nbytes(x.numel()), dtype=torch.uint8)

    def room(self, message: Tensor, x: Tensor) -> Tensor:
        return torch.empty_like(x, dtype=state_dtype(x.dtype))

    def message(self, x: Tensor, state: State) -> Tensor:
        base, residual, code = state["base"], state["residual"], self.like(x)
        v = x.to(base.dtype, copy=True)
        try:
            self.codec.encode(v, less=base, plus=residual, subtract=True, out=code)
        except NotFiniteError:
            return code.fill_(NOT_FINITE)
        residual.copy_(v)
        return code

    def withdraw(self, message: Tensor, x: Tensor, state: State) -> None:
        if not self.failed(message):  # e_i + q_i = v
            add_decoded(self.codec, message, state["residual"])
            state["residual"].sub_(x.to(state["base"].dtype) - state["base"])

    def receive(self, result: Result, state: State) -> Tensor:
        base = state["base"]
        if isinstance(result, Tensor):
            base.copy_(result)
        else:
            for code in result:
                add_decoded(self.codec, code, base)
        return base

    def start(self, state: State, dtype: torch.dtype) -> Tensor:
        return state["base"].clone()

    def failed(self, message: Tensor) -> bool:
        return len(message) > 0 and bool(nonfinite_rows(message.unsqueeze(0)))

    def publish(self, result: Tensor, before: Tensor) -> tuple[Tensor, Tensor | None]:
        w = result.to(before.dtype, copy=True)
        code = self.codec.encode(w, less=before)
        after = before.clone()
        add_decoded(self.codec, code, after)
        return after, code

    def mean(self, arrived: Sequence[Contribution], anchor: Tensor | None, n: int) -> Tensor:
        assert anchor is not None, "codes are of changes since the anchor"
        ys = []
        for code, _ in arrived:
            y = anchor.clone()
            add_decoded(self.codec, code, y)
            ys.append(Contribution(y, None))
        return super().mean(ys, anchor, n)


@dataclass(frozen=True)
class ReplicatedQuorumMean(QuorumMean):
    """`QuorumMean` where workers come and go: every worker takes the outer step.

    The plain mean over all n workers, by the ``inner`` exchange, of::

        y_i = a - (b_i - x_i)   from those that have arrived (x_i if b_i = a)
        y_i = a                 from the others, which are computing

    is ``a - sum over M of (a - y_i) / n``. With a codec, the others send what their codes have left
    out before. If not `anchored`, all send whether they have arrived, and the result is the mean
    over these.
    """

    inner: Exchange = field(default_factory=Mean)

    needs_bases: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "slots", self.inner.slots)

    def replicated(self) -> Exchange:
        return self

    def unanchored(self) -> QuorumMean:
        return ReplicatedQuorumMean(self.workers, self.grace, self.pace, anchored=False)

    def owners(self, n: int) -> int | None:
        return None

    def cost(self, length: int, itemsize: int, n: int) -> Cost:
        return self.inner.cost(length, itemsize, n)

    def init(self, x: Tensor, owned: slice) -> State:
        return self.inner.init(x, owned)

    def rebase(self, x: Tensor, state: State) -> None:
        if self.inner.rebase is not None:
            self.inner.rebase(x, state)

    def receive(self, result: Result, state: State) -> Tensor:
        assert isinstance(result, Tensor), "every worker has the whole result"
        return result

    def contribution(
        self,
        x: Tensor,
        arrived: bool,
        base: Tensor | None,
        anchor: Tensor | None,
        *,
        all_arrive: bool = False,
    ) -> Tensor:
        """The message of a worker that has ``arrived`` with x, or has not: x is then any tensor
        like it. ``base``: b_i, None if it is a. ``anchor``: a. Unless ``all_arrive``, messages are
        as wide as a: in x's dtype, those of the others would pull a back to it."""
        if anchor is None:
            wide = x.to(state_dtype(x.dtype))
            wide = torch.cat([wide, wide.new_ones(1)])
            return wide if arrived else torch.zeros_like(wide)
        dtype = x.dtype if all_arrive else anchor.dtype
        if not arrived:
            return anchor.to(dtype, copy=True)
        if base is None:
            return x.to(dtype, copy=True)
        return (anchor - (base - x.to(anchor.dtype))).to(dtype)

    async def run(
        self, link: AsyncLink, message: Tensor, combine: Combine, clock: Clock, state: State
    ) -> Arrival:
        if self.anchored:
            return await self.inner.run(link, message, combine, clock, state)
        await link.mean(message)
        return Arrival(combine(message[:-1] / message[-1]))
