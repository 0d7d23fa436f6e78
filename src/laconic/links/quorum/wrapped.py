"""The base class of ports that wrap other ports. It forwards all calls, and reports what each
delivery sends and receives."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

from laconic.links.cost import Cost
from laconic.links.quorum.port import Closing, Delivery, Outcome, Port


class WrappedPort:
    """``port`` of worker ``rank``, with `watched` around every delivery, and `book` after it."""

    def __init__(self, port: Port, rank: int) -> None:
        self._port, self._rank = port, rank
        self._booked = port.served

    def watched(self) -> AbstractContextManager[None]:
        """The context for a delivery."""
        raise NotImplementedError

    def book(self, step: int, sent: Cost, received: int, seconds: float) -> None:
        """Record a delivery after ``step`` that took ``seconds``. ``sent`` and ``received``: what
        this worker's process has sent and received since the previous delivery. On rank 0, they
        include the results of all rounds that have closed meanwhile."""
        raise NotImplementedError

    def deliver(self, delivery: Delivery) -> Outcome:
        start = time.perf_counter()
        with self.watched():
            outcome = self._port.deliver(delivery)
        seconds = time.perf_counter() - start
        if self._rank:
            sent, received = delivery.nbytes, outcome.nbytes
        else:  # its process serves the other workers
            (sent, received), before = self.served, self._booked
            self._booked = sent, received
            sent, received = sent - before[0], received - before[1]
        self.book(delivery.announcement.step, Cost(sent, 1), received, seconds)
        return outcome

    @property
    def served(self) -> tuple[int, int]:
        return self._port.served

    @property
    def closings(self) -> list[Closing]:
        return self._port.closings

    def seconds(self, step: int) -> float:
        return self._port.seconds(step)

    def worked(self, step: int, waited: float) -> float:
        return self._port.worked(step, waited)

    def quiet(self) -> AbstractContextManager[object]:
        return self._port.quiet()

    def restart(self, step: int) -> None:
        self._port.restart(step)

    def meet(self, step: int) -> None:
        self._port.meet(step)

    def close(self) -> None:
        self._port.close()

    def abandon(self) -> None:
        self._port.abandon()
