"""The port of rank 0 over a link that sends nothing, to time what it does in a round."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from laconic.links.quorum.port import Closing, Delivery, Outcome
from laconic.links.quorum.syncer import Syncer
from laconic.links.quorum.tcp import Clock


class NullPort(Clock):
    """All workers arrive together and deliver what this one does."""

    def __init__(self, core: Syncer) -> None:
        self._core = core

    @property
    def closings(self) -> list[Closing]:
        return self._core.closings

    @property
    def served(self) -> tuple[int, int]:
        return self._core.served

    def quiet(self) -> AbstractContextManager[object]:
        return nullcontext()

    def deliver(self, delivery: Delivery) -> Outcome:
        core, now = self._core, self.seconds(delivery.announcement.step)
        for rank in range(core.workers):
            core.arrive(rank, delivery, now)
        core.close(delivery.announcement.kind, now)
        outcomes = [core.outcomes.pop(rank) for rank in range(core.workers)]
        return outcomes[0]

    def meet(self, step: int) -> None:
        """Does nothing: nobody waits."""

    def close(self) -> None:
        """Does nothing."""

    def abandon(self) -> None:
        """Does nothing."""
