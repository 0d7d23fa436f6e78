"""The byte ledger: a link that counts what the link inside sends, by the cost model's law."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from laconic.errors import LinkError
from laconic.links import cost
from laconic.links.cost import Cost
from laconic.links.link import Link


@dataclass
class Call:
    """What went over the link under one announced name, such as that of a round: how often, after
    which step last, the payload bytes sent, and the seconds in collectives, the wait for slower
    ranks included (on CUDA: until they were queued)."""

    count: int = 0
    step: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass
class Ledger:
    """Payload bytes that this rank sent and received, in all, by collective and by announced call.

    Collectives but `swap` are symmetric: a rank receives what it sends. Not counted: packet headers
    and acknowledgements of the network (below 5% for large messages). ``failed`` is told of a
    link's error, by the thread that meets it.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    by_collective: dict[str, int] = field(default_factory=dict)
    by_call: dict[str, Call] = field(default_factory=dict)
    failed: Callable[[LinkError], None] | None = None
    call: str = "setting up"

    def begin(self, name: str, step: int) -> None:
        """Book what comes under ``name`` until the next call is announced."""
        self.call = name
        call = self.by_call.setdefault(name, Call())
        call.count += 1
        call.step = step

    def add(
        self, collective: str, amount: Cost, received: int | None = None, seconds: float = 0.0
    ) -> None:
        """Book one collective; ``received``: bytes, if other than those sent."""
        call = self.by_call.setdefault(self.call, Call())
        call.seconds += seconds
        call.bytes += amount.bytes
        self.bytes_sent += amount.bytes
        self.bytes_received += amount.bytes if received is None else received
        self.by_collective[collective] = self.by_collective.get(collective, 0) + amount.bytes

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Tell ``failed`` of a link's error in this context."""
        try:
            yield
        except LinkError as error:
            if self.failed is not None:
                self.failed(error)
            raise

    @contextmanager
    def book(self, collective: str, amount: Cost, received: int | None = None) -> Iterator[None]:
        """Book the collective that is made in this context, once it is complete."""
        start = time.perf_counter()
        with self.watched():
            yield
        self.add(collective, amount, received, time.perf_counter() - start)


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
        self.ledger.begin(names[code], step)
        with self.ledger.watched():
            spoke = self.link.agree(step, code, names, wait=wait)
        if spoke:
            self.ledger.add("agree", cost.gather(8, self.size))  # one 64-bit word
        return spoke

    def check(self) -> None:
        with self.ledger.watched():
            self.link.check()

    def leave(self, broken: bool) -> None:
        self.link.leave(broken)

    def mean(self, x: Tensor) -> None:
        with self.ledger.book("mean", cost.mean(size_of(x), self.size, x.numel() % self.size == 0)):
            self.link.mean(x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        with self.ledger.book("reduce_scatter", cost.reduce_scatter(size_of(x), self.size)):
            return self.link.reduce_scatter(x)

    def all_gather(self, mine: Tensor, out: Tensor) -> None:
        with self.ledger.book("all_gather", cost.all_gather(size_of(out), self.size)):
            self.link.all_gather(mine, out)

    def swap(self, x: Tensor, to: Sequence[int], source: Sequence[int]) -> list[Tensor]:
        amount = cost.swap(size_of(x), len(to))
        with self.ledger.book("swap", amount, size_of(x) * len(source)):
            return self.link.swap(x, to, source)

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        with self.ledger.book("broadcast", cost.broadcast(size_of(x), self.size)):
            self.link.broadcast(x, root)

    def gather(self, x: Tensor) -> Tensor:
        with self.ledger.book("gather", cost.gather(size_of(x), self.size)):
            return self.link.gather(x)

    def split(self, sets: Sequence[Sequence[int]]) -> Link:
        return Metered(self.link.split(sets), self.ledger)

    def status(self, text: str) -> None:
        self.link.status(text)
