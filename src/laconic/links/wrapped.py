"""The base of links around other links: passes all calls on, with a context of its own around each
collective, which receives the collective's cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar

from torch import Tensor

from laconic.links import cost
from laconic.links.calls import Call
from laconic.links.cost import Cost
from laconic.links.link import Link, Parts, Sent, Staged, Stages
from laconic.links.quorum.port import Port, no_quorum


def size_of(x: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return x.numel() * x.element_size()


class Around:
    """Passes everything but collectives, and what belongs to them, on to ``link``."""

    def __init__(self, link: Link) -> None:
        self.link = link

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
    def queues(self) -> bool:
        return self.link.queues

    @property
    def joined(self) -> float:
        return self.link.joined

    def begin_call(self, call: Call, *, wait: bool) -> bool:
        return self.link.begin_call(call, wait=wait)

    def digests(self) -> Sequence[int]:
        return self.link.digests()

    def sent(self) -> Mapping[int, Sent]:
        return self.link.sent()

    def check(self) -> None:
        self.link.check()

    def check_peers(self) -> None:
        self.link.check_peers()

    def leave(self, broken: bool) -> None:
        self.link.leave(broken)

    def status(self, text: str) -> None:
        self.link.status(text)

    def close(self) -> None:
        self.link.close()


class Wrapped(Around):
    """``link``, with `around` around every collective."""

    overlaps: ClassVar[bool] = False
    """Whether `around` may also be entered around each stage of a collective: the first one has all
    of its bytes, the others none."""

    def around(self, collective: str, amount: Cost, received: int) -> AbstractContextManager[None]:
        """The context for a collective for which this rank sends ``amount`` and receives
        ``received`` bytes."""
        raise NotImplementedError

    def like(self, link: Link) -> Link:
        """``link``, wrapped as this one is."""
        raise NotImplementedError

    def around_port(self, port: Port) -> Port:
        """``port``, wrapped as this link is. Raises ``ValueError`` if this link cannot do so."""
        raise no_quorum(self)

    def _around(self, collective: str, amount: Cost) -> AbstractContextManager[None]:
        """For a collective that brings a rank as much as it sends, as most do."""
        return self.around(collective, amount, amount.bytes)

    @property
    def overlapping(self) -> Staged | None:
        stages = self.link.overlapping if self.overlaps else None
        return None if stages is None else _WrappedStages(stages, self)

    def begin_call(self, call: Call, *, wait: bool) -> bool:
        sent = super().begin_call(call, wait=wait)
        if sent:
            with self._around("agree", cost.gather(8, self.size)):  # the call's id
                pass
        return sent

    def mean(self, x: Tensor) -> None:
        amount = cost.mean(size_of(x), self.size, x.numel() % self.size == 0)
        with self._around("mean", amount):
            self.link.mean(x)

    def reduce_scatter(self, x: Tensor, owners: int | None = None) -> Tensor:
        sends, brings = self._to_and_from(size_of(x), owners)
        with self.around("reduce_scatter", sends, brings.bytes):
            return self.link.reduce_scatter(x, owners)

    def all_gather(
        self,
        mine: Tensor,
        out: Tensor,
        owners: int | None = None,
        parts: Parts | None = None,
    ) -> None:
        brings, sends = self._to_and_from(size_of(out), owners)
        with self.around("all_gather", sends, brings.bytes):
            self.link.all_gather(mine, out, owners, parts)

    def all_to_all(self, x: Tensor, out: Tensor, parts: Parts | None = None) -> None:
        with self._around("all_to_all", cost.all_to_all(size_of(x), self.size)):
            self.link.all_to_all(x, out, parts)

    def _to_and_from(self, size: int, owners: int | None) -> tuple[Cost, Cost]:
        """What this rank sends to the owners of slices, and what it sends as an owner. A rank
        sends in a reduce-scatter what it receives in an all-gather, and the reverse."""
        at = size, self.size, owners, self.rank
        return cost.reduce_scatter(*at), cost.all_gather(*at)

    def swap(self, x: Tensor, to: Sequence[int], source: Sequence[int]) -> Sequence[Tensor | None]:
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


class _WrappedStages:
    """``stages``, with the `around` of ``wrapped`` around each of them."""

    def __init__(self, stages: Staged, wrapped: Wrapped) -> None:
        self._stages, self._wrapped = stages, wrapped
        self.rank, self.size = stages.rank, stages.size

    def mean(self, x: Tensor) -> Stages[None]:
        amount = cost.mean(size_of(x), self.size, x.numel() % self.size == 0)
        return self._around("mean", amount, self._stages.mean(x))

    def all_gather(self, mine: Tensor, out: Tensor, *, parts: Parts | None = None) -> Stages[None]:
        amount = cost.all_gather(size_of(out), self.size)
        return self._around("all_gather", amount, self._stages.all_gather(mine, out, parts=parts))

    def all_to_all(self, x: Tensor, out: Tensor, parts: Parts | None = None) -> Stages[None]:
        amount = cost.all_to_all(size_of(x), self.size)
        return self._around("all_to_all", amount, self._stages.all_to_all(x, out, parts))

    def _around(self, collective: str, amount: Cost, stages: Stages[None]) -> Stages[None]:
        while True:
            with self._wrapped.around(collective, amount, amount.bytes):
                ended = next(stages, stages) is stages
            if ended:
                return
            amount = Cost(0, 0)
            yield
