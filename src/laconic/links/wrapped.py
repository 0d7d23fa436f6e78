"""The base of links around other links: passes all calls on, with a context of its own around each
collective, which receives the collective's cost."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager
from types import coroutine
from typing import Any, ClassVar

from torch import Tensor

from laconic.links import cost
from laconic.links.calls import Call
from laconic.links.cost import Cost
from laconic.links.link import AsyncLink, Blocking, Job, Link, Parts, T, one_by_one


def size_of(x: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return x.numel() * x.element_size()


def _inner(name: str) -> Any:
    """That attribute of the link inside."""
    return property(lambda around: getattr(around.link, name))


class Around:
    """Passes everything but collectives, and what belongs to them, on to ``link``."""

    def __init__(self, link: Link) -> None:
        self.link = link

    rank: int = _inner("rank")
    size: int = _inner("size")
    threaded: bool = _inner("threaded")
    queues: bool = _inner("queues")
    joined = _inner("joined")
    begin_call = _inner("begin_call")
    digests = _inner("digests")
    sent = _inner("sent")
    check = _inner("check")
    check_peers = _inner("check_peers")
    leave = _inner("leave")
    status = _inner("status")
    close = _inner("close")


class Wrapped(Blocking, Around):
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

    @property
    def overlapping(self) -> AsyncLink | None:
        inner = self.link.overlapping if self.overlaps else None
        return None if inner is None else _WrappedAsync(inner, self)

    @property
    def awaited(self) -> AsyncLink:
        return _WrappedAsync(one_by_one(self.link), self)

    def begin_call(self, call: Call, *, wait: bool) -> bool:
        sent: bool = self.link.begin_call(call, wait=wait)
        if sent:
            amount = cost.gather(8, self.size)  # the call's id
            with self.around("agree", amount, amount.bytes):
                pass
        return sent

    def split(self, sets: Sequence[Sequence[int]]) -> Link:
        return self.like(self.link.split(sets))


class _WrappedAsync:
    """The collectives of ``inner``, with the `Wrapped.around` of ``wrapped`` around each of their
    stages."""

    def __init__(self, inner: AsyncLink, wrapped: Wrapped) -> None:
        self._inner, self._wrapped = inner, wrapped
        self.rank, self.size = inner.rank, inner.size

    async def mean(self, x: Tensor) -> None:
        amount = cost.mean(size_of(x), self.size, x.numel() % self.size == 0)
        await self._around("mean", amount, amount.bytes, self._inner.mean(x))

    async def reduce_scatter(self, x: Tensor) -> Tensor:
        amount, job = cost.reduce_scatter(size_of(x), self.size), self._inner.reduce_scatter(x)
        return await self._around("reduce_scatter", amount, amount.bytes, job)

    async def all_gather(self, mine: Tensor, out: Tensor, parts: Parts | None = None) -> None:
        amount = cost.all_gather(size_of(out), self.size)
        job = self._inner.all_gather(mine, out, parts)
        await self._around("all_gather", amount, amount.bytes, job)

    async def all_to_all(self, x: Tensor, out: Tensor, parts: Parts | None = None) -> None:
        amount = cost.all_to_all(size_of(x), self.size)
        job = self._inner.all_to_all(x, out, parts)
        await self._around("all_to_all", amount, amount.bytes, job)

    async def swap(
        self, x: Tensor, to: Sequence[int], source: Sequence[int]
    ) -> Sequence[Tensor | None]:
        received = size_of(x) * len(source)
        job = self._inner.swap(x, to, source)
        return await self._around("swap", cost.swap(size_of(x), len(to)), received, job)

    async def broadcast(self, x: Tensor, root: int = 0) -> None:
        amount = cost.broadcast(size_of(x), self.size)
        await self._around("broadcast", amount, amount.bytes, self._inner.broadcast(x, root))

    async def gather(self, x: Tensor) -> Tensor:
        amount = cost.gather(size_of(x), self.size)
        return await self._around("gather", amount, amount.bytes, self._inner.gather(x))

    @coroutine
    def _around(
        self, collective: str, amount: Cost, received: int, job: Job[T]
    ) -> Generator[None, None, T]:
        while True:
            with self._wrapped.around(collective, amount, received):
                try:
                    job.send(None)
                except StopIteration as end:
                    return end.value  # type: ignore[no-any-return]
            amount, received = Cost(0, 0), 0
            yield
