"""The base of links around other links: passes all calls on, with a context of its own around each
collective, which receives the collective's cost."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from copy import copy
from types import coroutine
from typing import Any, ClassVar

from torch import Tensor

from laconic.links import cost
from laconic.links.calls import Call
from laconic.links.cost import Cost
from laconic.links.link import AsyncLink, Blocking, Job, Link, T, awaiting, one_by_one


def inner(name: str) -> Any:
    """That attribute of the link inside."""

    def assign(around: Around, value: Any) -> None:
        setattr(around.link, name, value)

    return property(lambda around: getattr(around.link, name), assign)


class Around:
    """Passes everything but collectives, and what belongs to them, on to ``link``."""

    def __init__(self, link: Link) -> None:
        self.link = link

    rank: int = inner("rank")
    size: int = inner("size")
    threaded: bool = inner("threaded")
    queues: bool = inner("queues")
    joined = inner("joined")
    begin_call = inner("begin_call")
    digests = inner("digests")
    sent = inner("sent")
    check = inner("check")
    check_peers = inner("check_peers")
    leave = inner("leave")
    status = inner("status")
    close = inner("close")


class Wrapped(Blocking, Around):
    """``link``, with `around` around every collective."""

    overlaps: ClassVar[bool] = False
    """Whether `around` may also be entered around each stage of a collective: the first one has all
    of its bytes, the others none."""

    def around(self, collective: str, amount: Cost, received: int) -> AbstractContextManager[None]:
        """The context for a collective for which this rank sends ``amount`` and receives
        ``received`` bytes."""
        raise NotImplementedError

    @property
    def overlapping(self) -> AsyncLink | None:
        link = self.link.overlapping if self.overlaps else None
        return None if link is None else self._wrap(link)

    @property
    def awaited(self) -> AsyncLink:
        return self._wrap(one_by_one(self.link))

    def begin_call(self, call: Call, *, wait: bool) -> bool:
        sent: bool = self.link.begin_call(call, wait=wait)
        if sent:
            amount = cost.gather(8, self.size)  # the call's id
            with self.around("agree", amount, amount.bytes):
                pass
        return sent

    def split(self, sets: Sequence[Sequence[int]]) -> Link:
        wrapped = copy(self)
        wrapped.link = self.link.split(sets)
        return wrapped

    def _wrap(self, link: AsyncLink) -> AsyncLink:
        def wrap(name: str) -> Callable[..., Job[Any]]:
            def wrapped(*args: Any, **options: Any) -> Job[Any]:
                amount, received = self._sends(name, *args)
                job = getattr(link, name)(*args, **options)
                return self._by_stages(name, amount, received, job)

            return wrapped

        return awaiting(self, wrap)

    def _sends(self, collective: str, x: Tensor, *more: Any) -> tuple[Cost, int]:
        """What this rank sends for a ``collective``, and how many bytes it receives."""
        size, n = (more[0] if collective == "all_gather" else x).nbytes, self.size
        if collective == "swap":
            to, source = more
            return cost.swap(size, len(to)), size * len(source)
        even = [x.numel() % n == 0] if collective == "mean" else []
        amount: Cost = getattr(cost, collective)(size, n, *even)
        return amount, amount.bytes

    @coroutine
    def _by_stages(
        self, collective: str, amount: Cost, received: int, job: Job[T]
    ) -> Generator[None, None, T]:
        while True:
            with self.around(collective, amount, received):
                try:
                    job.send(None)
                except StopIteration as end:
                    return end.value  # type: ignore[no-any-return]
            amount, received = Cost(0, 0), 0
            yield
