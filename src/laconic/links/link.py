"""The seam to the network. Every method blocks until its result is there: what runs beside the
training does so because the synchroniser's lane calls it from a thread of its own, which also
gives every rank one order of collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from laconic.links.calls import Call


@dataclass(frozen=True)
class Parts:
    """What is done to one part of a row while others are on their way; ``ends``: where the parts
    end, in elements of a row, ascending, the last of them its length.

    ``fill(r, part)`` writes that part of the row for rank r, right before it is sent: the first
    part of all rows, in the order of `hops`, then the second. ``use(r, part)`` is called when that
    part of rank r's row is there, again one part after the other, in the order of `arrivals`. It
    leaves what is sent as it is. Nothing is used before all is filled. Ranks may cut at different
    places: the messages are the same."""

    ends: Sequence[int]
    fill: Callable[[int, slice], None] | None = None
    use: Callable[[int, slice], None] | None = None

    def __iter__(self) -> Iterator[slice]:
        return (slice(a, b) for a, b in pairwise((0, *self.ends)))

    def fill_all(self, rows: Sequence[int]) -> None:
        """The ``rows`` for these ranks, before any is sent: for links that send all at once."""
        if self.fill is not None:
            for part in self:
                for r in rows:
                    self.fill(r, part)

    def use_all(self, rows: Sequence[int]) -> None:
        """After all has come."""
        if self.use is not None:
            for part in self:
                for r in rows:
                    self.use(r, part)


class Link(Protocol):
    """Collectives over one set of ranks, on flat contiguous tensors.

    Sizes are in elements; ``n`` is the link's ``size``. All ranks of the set must make the same
    calls in the same order. Raises `laconic.LinkError` where a rank fails to.
    """

    @property
    def rank(self) -> int:
        """This process's place in the set, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks in the set."""
        ...

    @property
    def threaded(self) -> bool:
        """Whether calls may come from a thread beside the training."""
        ...

    @property
    def joined(self) -> float:
        """When (`time.perf_counter`) the last collective was complete, as far as is known."""
        ...

    def begin_call(self, call: Call, *, wait: bool) -> bool:
        """Begin ``call``: the collectives from now on belong to it. Where ranks begin different
        calls, nothing is averaged that does not belong together, and all ranks raise `LinkError`:
        here if ``wait``, else in the call's collectives or in `check`. Returns whether messages
        were sent."""
        ...

    def check(self) -> None:
        """Raise `LinkError` if another rank is known to be in another call, or to have left; for
        whoever waits for a collective beside the thread that makes it."""
        ...

    def check_peers(self) -> None:
        """Raise `LinkError` if another rank is known to be lost; for whoever is between two calls,
        however often: cheap, and without a message where all is well. A rank that ended in order
        is not lost."""
        ...

    def leave(self, broken: bool) -> None:
        """This rank will make no more calls, and, if ``broken``, not end the one it is in."""
        ...

    def mean(self, x: Tensor) -> None:
        """``x <- mean over ranks of x``, in place; the same bits on every rank."""
        ...

    def reduce_scatter(self, x: Tensor, owners: int | None = None) -> Tensor:
        """The mean of slice ``rank`` of ``x``, cut into ``owners`` slices (None: n), in float32 at
        least but with NCCL, which sums in x's dtype; nothing on the ranks from ``owners`` on.
        Overwrites ``x``; the result is the link's or a view of x, valid until the next call. The
        length is a multiple of ``owners``, which are at most n."""
        ...

    def all_gather(
        self,
        mine: Tensor,
        out: Tensor,
        owners: int | None = None,
        parts: Parts | None = None,
    ) -> None:
        """``out`` <- the first ``owners`` ranks' ``mine`` one after the other (None: all ranks'),
        cast to ``out``'s dtype. ``mine`` may be its own place in ``out``, and is where ``parts``
        are filled, as the row for this rank. The rows that are used are the slices of ``out``."""
        ...

    def all_to_all(self, x: Tensor, out: Tensor, parts: Parts | None = None) -> None:
        """Row r of ``x``, shape (n, m), to rank r; ``out``, as long, gets the rows that all ranks
        have for this one, in the order of their ranks. Nothing is summed, so any dtype goes.
        ``parts`` of x are filled, and of ``out`` used."""
        ...

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        """``x`` <- that of rank ``root``, in place."""
        ...

    def swap(self, x: Tensor, to: Sequence[int], source: Sequence[int]) -> list[Tensor]:
        """``x`` to each of the ranks ``to``; returns those of the ranks ``source``, who send as
        much here, in that order. Valid until the next call."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """The ranks' small tensors, stacked: shape ``(n, *x.shape)``."""
        ...

    def split(self, sets: Sequence[Sequence[int]]) -> Link:
        """The link of the set, among disjoint ``sets`` of ranks, that this rank belongs to."""
        ...

    def status(self, text: str) -> None:
        """What this rank is doing, for other ranks' error messages."""
        ...

    def close(self) -> None:
        """Give back what was made for this link alone: the process group of one that `split`
        returned, say. To be called on all its ranks; a collective that is under way on another
        one fails."""
        ...


def hops(rank: int, size: int) -> list[int]:
    """The order in which rank ``rank`` of ``size`` sends to all: those behind it first, and to
    itself last; so that no two send to the same one at the same time."""
    return [(rank + hop) % size for hop in range(1, size + 1)]


def arrivals(rank: int, size: int) -> list[int]:
    """The order in which what all ranks send to rank ``rank`` is looked at, if they send in the
    order of `hops`: its own first."""
    return hops(rank, size)[::-1]


def held_by_all(link: Link, groups: Sequence[Mapping[str, Tensor]]) -> list[list[Tensor]]:
    """Of each group the tensors that all ranks of ``link`` have, by name, shape and dtype."""
    keys = [
        [f"{g} {name} {tuple(t.shape)} {t.dtype}" for name, t in group.items()]
        for g, group in enumerate(groups)
    ]
    everywhere = _common(link, [key for own in keys for key in own])
    return [
        [t for key, t in zip(own, group.values(), strict=True) if key in everywhere]
        for own, group in zip(keys, groups, strict=True)
    ]


def _common(link: Link, names: Sequence[str]) -> set[str]:
    digests = [int.from_bytes(blake2b(n.encode(), digest_size=7).digest(), "big") for n in names]
    counts = link.gather(torch.tensor([len(names)])).flatten().tolist()
    padded = torch.zeros(max(counts), dtype=torch.int64)
    padded[: len(names)] = torch.tensor(digests, dtype=torch.int64)
    held = [set(row.tolist()) for row in link.gather(padded)] if max(counts) else []
    return {n for n, d in zip(names, digests, strict=True) if all(d in own for own in held)}
