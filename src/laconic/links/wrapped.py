"""What every link around another one has in common: it hands all calls on, and does something of
its own around each collective, whose cost it is told."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from laconic.links import cost
from laconic.links.cost import Cost
from laconic.links.link import Link


def size_of(x: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return x.numel() * x.element_size()


class Wrapped:
    """``link``, with `around` around every collective."""

    def __init__(self, link: Link) -> None:
        self.link = link

    def around(self, collective: str, amount: Cost, received: int) -> AbstractContextManager[None]:
        """The context in which a collective is made that costs ``amount`` and brings ``received``
        bytes to this rank."""
        raise NotImplementedError

    def like(self, link: Link) -> Link:
        """``link``, wrapped as this one is."""
        raise NotImplementedError

    def _around(self, collective: str, amount: Cost) -> AbstractContextManager[None]:
        """All collectives but `swap` bring a rank as much as it sends."""
        return self.around(collective, amount, amount.bytes)

    @property
    def rank(self) -> int:
        return self.link.rank

    @property
    def size(self) -> int:
        return self.link.size

    @property
    def threaded(self) -> bool:
        return self.link.threaded

    @property
    def joined(self) -> float:
        return self.link.joined

    def agree(self, step: int, code: int, names: Sequence[str], *, wait: bool) -> bool:
        spoke = self.link.agree(step, code, names, wait=wait)
        if spoke:
            with self._around("agree", cost.gather(8, self.size)):  # one 64-bit word
                pass
        return spoke

    def check(self) -> None:
        self.link.check()

    def leave(self, broken: bool) -> None:
        self.link.leave(broken)

    def mean(self, x: Tensor) -> None:
        amount = cost.mean(size_of(x), self.size, x.numel() % self.size == 0)
        with self._around("mean", amount):
            self.link.mean(x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        with self._around("reduce_scatter", cost.reduce_scatter(size_of(x), self.size)):
            return self.link.reduce_scatter(x)

    def all_gather(self, mine: Tensor, out: Tensor) -> None:
        with self._around("all_gather", cost.all_gather(size_of(out), self.size)):
            self.link.all_gather(mine, out)

    def swap(self, x: Tensor, to: Sequence[int], source: Sequence[int]) -> list[Tensor]:
        amount = cost.swap(size_of(x), len(to))
        with self.around("swap", amount, size_of(x) * len(source)):
            return self.link.swap(x, to, source)

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        with self._around("broadcast", cost.broadcast(size_of(x), self.size)):
            self.link.broadcast(x, root)

    def gather(self, x: Tensor) -> Tensor:
        with self._around("gather", cost.gather(size_of(x), self.size)):
            return self.link.gather(x)

    def split(self, sets: Sequence[Sequence[int]]) -> Link:
        return self.like(self.link.split(sets))

    def status(self, text: str) -> None:
        self.link.status(text)
