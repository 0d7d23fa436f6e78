"""Buckets whose messages are under way together, where round trips are long.

A bucket's exchange is a coroutine, which pauses when it has sent messages. All ranks resume the
same ones in the same order, whatever arrives first, so messages need no tags.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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


class UnderWay(Pending[T]):
    """The result of a job that runs among others. ``complete()`` runs them until it is there."""

    def __init__(self, complete: Callable[[], T]) -> None:
        super().__init__(None)
        self._complete = complete

    def wait(self) -> T:
        return self._complete()


class Overlapping:
    """The messages of a round's buckets over ``link``: one after the other, or, where round trips
    are long, under way together."""

    def __init__(self, link: Link, comm: CommThread) -> None:
        self._link, self._comm = link, comm
        self._far: AsyncLink | None = None
        """The collectives of the present buckets, where these overlap."""
        # in the communication thread:
        self._going: list[Job[None]] = []
        """The newest first."""
        self._failed: NotFiniteError | None = None

    def use(self, buckets: int) -> bool:
        """Return whether so many ``buckets`` overlap, which begin now. One by itself is faster
        alone: what comes is then used while the rest is being sent."""
        self._far = self._link.overlapping if buckets > 1 else None
        return self._far is not None

    def begin(
        self, work: Callable[[AsyncLink], Job[T]], label: str, *, now: bool = False, turns: int = 1
    ) -> Pending[T]:
        """Run ``work`` with the link's collectives; if ``now``, its result is waited for next.
        Where buckets overlap, it goes on when others begin, each time ``turns`` times, when they
        are waited for, and when `complete` is called; all of that in the same order on all ranks.
        """
        comm, far, results = self._comm, self._far, list[T]()
        if far is None:
            alone = coroutine(lambda: work(one_by_one(self._link)))
            return Pending.of(comm.call(alone, label)) if now else comm.submit(alone, label)

        async def run() -> None:
            results.append(await work(far))

        def result() -> T:
            self._go_on(lambda: bool(results))
            return results[0]

        comm.submit(lambda: self._begin(run(), turns), label)
        return UnderWay(partial(comm.call, result, label))

    def complete(self, label: str) -> Pending[None]:
        """Have all that has begun go on to its end."""
        return Pending.of(None) if self._far is None else self._comm.submit(self._go_on, label)

    def _begin(self, job: Job[None], turns: int) -> None:
        """Begin ``job``, and then resume those before it; all of that ``turns`` times."""
        self._going.insert(0, job)
        for _ in range(turns):
            self._resume()
        if not self._going:
            self._go_on()

    def _go_on(self, done: Callable[[], bool] = lambda: False) -> None:
        """Run all jobs to the end, or until it is ``done()``. Raises `NotFiniteError` when nothing
        is under way any more, if a job did."""
        while self._going and not done():
            self._resume()
        failed = self._failed
        if failed is not None and not self._going:
            self._failed = None
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
