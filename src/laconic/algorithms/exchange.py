"""With whom a round's messages are exchanged, and how they are encoded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from laconic.algorithms.update import Clock, Scope, Slot, State
from laconic.links.cost import Cost
from laconic.links.link import AsyncLink, Link

Combine = Callable[[Tensor], Tensor]
"""The outer step on a mean, or on a slice of it: `Update.combine` with its state."""


class Arrival(NamedTuple):
    """What an exchange brings.

    Args:
        flat: a tensor as long as the message.
        weight: the sum of its weights.
        lent: whether the tensor is state of the exchange: it may be read until its next round, but
            not changed.
        present: how many workers took part, and the rank of this one among them, where that may
            differ from when it was sent.

    Examples:
        >>> laconic.Arrival(torch.zeros(2)).weight
        1.0
    """

    flat: Tensor
    weight: float = 1.0
    lent: bool = False
    present: tuple[int, int] | None = None


class Exchange:
    """With whom a message is exchanged, and how it is encoded.

    `out_degree` is a method that an exchange may have, and is None where it has not.

    Examples:
        >>> laconic.exchanges.Mean().cost(length=1000, itemsize=4, n=4).bytes  # 2(n-1)/n of 4 kB
        6000
    """

    slots: ClassVar[Mapping[str, Slot]] = {}
    """Every tensor of its own state, and where it lives. Empty: it keeps no state."""
    communicates: ClassVar[bool] = True
    """Whether it sends anything."""
    agrees: ClassVar[bool] = False
    """Whether all workers hold the same result afterward."""
    scope: ClassVar[Scope] = "elements"
    """``"tensors"``: a bucket must hold whole tensors, which `shaped` then describes. Such an
    exchange is for rounds on gradients."""

    out_degree: Callable[[Clock], int] | None = None
    """``out_degree(clock)``: how many peers a message goes to, if it goes to some peers only
    (gossip). Module buffers then travel the same way. Such an exchange sends `Update.weight` with
    each message, and brings the sum of those received."""

    @property
    def identical(self) -> bool:
        """Whether it sends nothing because the workers' messages are equal already."""
        return self.agrees and not self.communicates

    @property
    def direct(self) -> bool:
        """Whether every rank sends to every other rank, rather than partial sums traveling. Coded
        messages do, and those exchanges keep state."""
        return bool(self.slots)

    @property
    def score_window(self) -> int:
        """Over how many losses it wants the workers' scores, to choose a leader; 0: none."""
        return 0

    @property
    def accepts(self) -> Literal["any", "model", "change"]:
        """What messages must be (`Update.sends`): ``"model"`` where they are taken relative to the
        last result, ``"change"`` for changes alone, such as pseudo-gradients."""
        return "any"

    def owners(self, n: int) -> int | None:
        """How many of ``n`` ranks, the first ones, share the ``owner`` state, each combining one
        slice. None: every rank combines, and keeps, everything."""
        return None

    def region(self, link: Link | AsyncLink, length: int) -> slice:
        """The part of a bucket that this rank combines, and keeps ``owner`` state for."""
        owners = self.owners(link.size)
        if owners is None:
            return slice(0, length)
        each = length // owners
        return slice(min(link.rank, owners) * each, min(link.rank + 1, owners) * each)

    def multiple(self, n: int) -> int:
        """The number that a message's length must be a multiple of, between ``n`` ranks."""
        return math.lcm(n, self.owners(n) or n)

    def shaped(self, shapes: Sequence[torch.Size]) -> Exchange:
        """The exchange for a bucket that holds tensors of these shapes, one after the other, and
        then padding. A tensor may be cut, unless the scope is ``"tensors"``: it counts as several.
        """
        return self

    def init(self, x: Tensor, owned: slice) -> State:
        """Make the state for the common start ``x`` of what this rank carries (zeros for
        gradients), a copy that the state may keep. State tensors have x's size; ``owner`` state,
        that of the slice ``owned``. A tensor of two dimensions has a size of its own, and is the
        same on all workers."""
        return {}

    def rebase(self, x: Tensor, state: State) -> None:
        """All workers hold ``x`` now, received otherwise: messages are relative to it from now on,
        and nothing of what they agreed on before is still to be sent."""

    def collect(self, state: State, owned: slice, n: int) -> None:
        """Move what this rank keeps as the owner of the slice ``owned``, one of ``n`` ranks, into
        state as long as the message, which alone is copied into other buckets."""

    def replicated(self) -> Exchange:
        """The same exchange with all outer state on every worker, for messages of any length and
        any number of workers: so no lost worker takes state with it. Its state changes only after
        its last collective. Raises ``ValueError`` where there is none."""
        raise ValueError(f"{type(self).__name__} cannot be used where workers come and go")

    def cost(self, length: int, itemsize: int, n: int) -> Cost:
        """What one of ``n`` ranks sends for a message of ``length`` elements of ``itemsize`` bytes:
        what the link counts in `run`, as the mean over the ranks."""
        return Cost(0, 0)

    async def run(
        self, link: AsyncLink, message: Tensor, combine: Combine, clock: Clock, state: State
    ) -> Arrival:
        """Carry ``message`` (which may be overwritten) over ``link``, call ``combine`` where a mean
        arrives, and return the result. ``state`` is what `init` made for these tensors.

        Collectives are awaited. While one waits for other ranks, other buckets' messages can be
        under way, so every rank must await the same collectives, in the same order."""
        raise NotImplementedError
