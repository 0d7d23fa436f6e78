"""The byte ledger: a link that counts what the link inside sends, by the cost model's law."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from laconic.links import cost
from laconic.links.cost import Cost
from laconic.links.link import Link


@dataclass
class Ledger:
    """Payload bytes that this rank sent and received, in all and by collective.

    Collectives but `swap` are symmetric: a rank receives what it sends. Not counted: packet headers
    and acknowledgements of the network (below 5% for large messages).
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    by_collective: dict[str, int] = field(default_factory=dict)

    def add(self, collective: str, amount: Cost, received: int | None = None) -> None:
        """Book one collective; ``received``: bytes, if other than those sent."""
        self.bytes_sent += amount.bytes
        self.bytes_received += amount.bytes if received is None else received
        self.by_collective[collective] = self.by_collective.get(collective, 0) + amount.bytes


def size_of(x: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return x.numel() * x.element_size()


class Metered:
    """``link``, with every collective booked in ``ledger``."""

    def __init__(self, link: Link, ledger: Ledger | None = None) -> None:
        self.link = link
        self.ledger = Ledger() if ledger is None else ledger

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
            self.ledger.add("agree", cost.gather(8, self.size))  # one 64-bit word
        return spoke

    def check(self) -> None:
        self.link.check()

    def leave(self) -> None:
        self.link.leave()

    def mean(self, x: Tensor) -> None:
        self.link.mean(x)
        self.ledger.add("mean", cost.mean(size_of(x), self.size))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        own = self.link.reduce_scatter(x)
        self.ledger.add("reduce_scatter", cost.reduce_scatter(size_of(x), self.size))
        return own

    def all_gather(self, mine: Tensor, out: Tensor) -> None:
        self.link.all_gather(mine, out)
        self.ledger.add("all_gather", cost.all_gather(size_of(out), self.size))

    def swap(self, x: Tensor, to: Sequence[int], source: Sequence[int]) -> list[Tensor]:
        received = self.link.swap(x, to, source)
        self.ledger.add("swap", cost.swap(size_of(x), len(to)), size_of(x) * len(source))
        return received

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        self.link.broadcast(x, root)
        self.ledger.add("broadcast", cost.broadcast(size_of(x), self.size))

    def gather(self, x: Tensor) -> Tensor:
        everyone = self.link.gather(x)
        self.ledger.add("gather", cost.gather(size_of(x), self.size))
        return everyone

    def split(self, sets: Sequence[Sequence[int]]) -> Link:
        return Metered(self.link.split(sets), self.ledger)

    def status(self, text: str) -> None:
        self.link.status(text)
