"""Buckets whose messages are under way together, where round trips are long.

A bucket's exchange is a coroutine, which pauses when it has sent messages. All ranks resume the
same ones in the same order, whatever arrives first, so messages need no tags.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Generic

from laconic.errors import NotFiniteError
from laconic.links.comm_thread import CommThread, Pending, coroutine
from laconic.links.link import AsyncLink, Job, Link, T, one_by_one

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


class Overlap:
    """Jobs that are under way together. Used in the communication thread."""

    def __init__(self) -> None:
        self._going: list[Job[None]] = []
        """The newest first."""
        self._failed: NotFiniteError | None = None

    def begin(self, job: Job[None], turns: int) -> None:
        """Begin ``job``, and then resume those before it; all of that ``turns`` times. Raises
        `NotFiniteError` when nothing is under way any more, if a job did."""
        self._going.insert(0, job)
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
    """The result of a job that runs among others in ``overlap``."""

    def __init__(self, overlap: Overlap, comm: CommThread, label: str) -> None:
        self._overlap, self._comm, self._label = overlap, comm, label
        self._results: list[T] = []

    async def run(self, job: Job[T]) -> None:
        """Run ``job``, and keep its result."""
        self._results.append(await job)

    def wait(self) -> T:
        """Wait for the result and return it; raises what the job raised."""
        return self._comm.call(self._end, self._label)

    def wait_quietly(self) -> None:
        """As `Pending.wait_quietly`."""
        with contextlib.suppress(Exception):
            self.wait()

    def _end(self) -> T:
        self._overlap.complete(lambda: bool(self._results))
        return self._results[0]


Result = Pending[T] | UnderWay[T]


class Overlapping:
    """The messages of a round's buckets over ``link``: one after the other, or, where round trips
    are long, under way together."""

    def __init__(self, link: Link, comm: CommThread) -> None:
        self._link, self._comm = link, comm
        self._overlap: Overlap | None = None

    def use(self, buckets: int) -> bool:
        """Return whether so many ``buckets`` overlap, which begin now. One by itself is faster
        alone: its parts are then sent on as they arrive."""
        self._overlap = Overlap() if buckets > 1 and self._link.overlapping is not None else None
        return self._overlap is not None

    def begin(
        self, work: Callable[[AsyncLink], Job[T]], label: str, *, now: bool = False, turns: int = 1
    ) -> Result[T]:
        """Run ``work`` with the link's collectives; if ``now``, its result is waited for next.
        Where buckets overlap, it goes on when others begin, each time ``turns`` times, when they
        are waited for, and when `complete` is called; all of that in the same order on all ranks.
        """
        overlap, comm, far = self._overlap, self._comm, self._link.overlapping
        if overlap is None or far is None:
            alone = coroutine(lambda: work(one_by_one(self._link)))
            return Pending.of(comm.call(alone, label)) if now else comm.submit(alone, label)
        under_way: UnderWay[T] = UnderWay(overlap, comm, label)
        comm.submit(lambda: overlap.begin(under_way.run(work(far)), turns), label)
        return under_way

    def complete(self, label: str) -> Pending[None]:
        """Have all that has begun go on to its end."""
        overlap = self._overlap
        return Pending.of(None) if overlap is None else self._comm.submit(overlap.complete, label)
