"""The seam to the network. Every method blocks until its result is there: what runs beside the
training does so because the synchroniser's lane calls it from a thread of its own, which also
gives every rank one order of collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


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

    def agree(self, step: int, code: int, names: Sequence[str]) -> None:
        """Announce the call about to be made after ``step`` steps, ``names[code]``; if the ranks
        announce different ones, the next collective raises `LinkError` on all of them instead of
        averaging what does not belong together. At most 256 names, alike on every rank."""
        ...

    def mean(self, x: Tensor) -> None:
        """``x <- mean over ranks of x``, in place. The length is a multiple of n."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """The mean of slice ``rank`` of ``x`` (length/n elements), summed in rank order, in
        float32 at least. Overwrites ``x``; the result is valid until the next call."""
        ...

    def all_gather(self, mine: Tensor, out: Tensor) -> None:
        """``out`` <- the ranks' ``mine`` one after the other, cast to ``out``'s dtype."""
        ...

    def broadcast(self, x: Tensor) -> None:
        """``x`` <- rank 0's, in place."""
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
        """Give back what the link holds; no communication."""
        ...
