"""Buckets whose messages are under way together, where round trips are long.

A bucket's exchange is a coroutine, which pauses when it has sent messages. All ranks resume the
same ones in the same order, whatever arrives first, so messages need no tags.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Generic

from laconic.errors import NotFiniteError
from laconic.links.comm_thread import CommThread, Pending
from laconic.links.link import Job, Link, T, complete

SMALL_BYTES = 2**18
"""A message of so many bytes takes about as long to send as it is on its way: 0.02 s at 100 Mbit/s,
0.04 s at 50 Mbit/s."""

AHEAD = 2
"""How many buckets of a round without a delay are under way while the next one is sent, where they
overlap: the first message of one, and the second of the one before it."""


def turns_at_once(largest: float) -> int:
    """How often buckets that overlap are resumed when one begins, if their largest message has so
    many bytes.

    Once: a bucket's first message is sent before the second message of the bucket before it, so
    small ones wait little. Twice: it is sent after that message, which a long backward pass can
    then hide, but before it has arrived.
    """
    return 1 if largest <= SMALL_BYTES else 2


def alone(job: Callable[[], Job[T]]) -> T:
    """Run ``job()`` to the end, with nothing else under way."""
    return complete(job())


class Overlap:
    """Jobs that are under way together. Used in the communication thread."""

    def __init__(self) -> None:
        self._going: list[Job[None]] = []
        """The newest first."""
        self._failed: NotFiniteError | None = None

    def begin(self, job: Callable[[], Job[None]], turns: int = 1) -> None:
        """Begin ``job()``, and then resume those before it; all of that ``turns`` times. Raises
        `NotFiniteError` when nothing is under way any more, if a job did."""
        self._going.insert(0, job())
        for _ in range(turns):
            self._resume()
        if not self._going:
            self.complete()

    def complete(self, done: Callable[[], bool] = lambda: False) -> None:
        """Run all jobs to the end, or until it is ``done()``. Raises as `begin`."""
        while self._going and not done():
            self._resume()
        if self._going:
            return
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def _resume(self) -> None:
        going, self._going, left = self._going, [], []
        for job in going:
            try:
                job.send(None)
                left.append(job)
            except StopIteration:
                pass
            except NotFiniteError as error:  # on all ranks; the other buckets are still awaited
                self._failed = self._failed or error
        self._going = left


class UnderWay(Generic[T]):
    """The result of ``job()``, which runs among others in ``overlap``."""

    def __init__(
        self, job: Callable[[], Job[T]], overlap: Overlap, comm: CommThread, label: str
    ) -> None:
        self._job, self._overlap = job, overlap
        self._comm, self._label = comm, label
        self._results: list[T] = []

    async def run(self) -> None:
        """Run the job, and keep its result."""
        self._results.append(await self._job())

    def wait(self) -> T:
        """Wait for the result and return it; raises what the job raised."""
        return self._comm.call(self._end, self._label)

    def _end(self) -> T:
        self._overlap.complete(lambda: bool(self._results))
        return self._results[0]


Result = Pending[T] | UnderWay[T]


class Overlapping:
    """The messages of a round's buckets over ``link``: one after the other, or, where round trips
    are long, under way together."""

    def __init__(self, link: Link, comm: CommThread) -> None:
        self._comm = comm
        self._overlap = Overlap() if link.overlapping is not None else None
        self.used = self._overlap is not None

    def begin(self, job: Callable[[], Job[T]], label: str, *, now: bool) -> Result[T]:
        """Run ``job()``; if ``now``, its result is waited for next. Where messages overlap, it goes
        on when others begin, are waited for, or when `complete` is called; all of that in the same
        order on all ranks."""
        overlap = self._overlap
        if overlap is None and now:
            return Pending.of(self._comm.call(partial(alone, job), label))
        if overlap is None:
            return self._comm.submit(partial(alone, job), label)
        under_way = UnderWay(job, overlap, self._comm, label)
        self._comm.submit(partial(overlap.begin, under_way.run), label)
        return under_way

    def complete(self, label: str) -> None:
        """Have all that has begun go on to its end."""
        if self._overlap is not None:
            self._comm.submit(self._overlap.complete, label)
