"""Opens a worker's port, by the kind of its link."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor

from laconic.links.cost import Cost
from laconic.links.link import Link
from laconic.links.metered import Ledger, Metered
from laconic.links.null import NullLink
from laconic.links.quorum.null import NullPort
from laconic.links.quorum.port import Closing, Delivery, Port
from laconic.links.quorum.simulated import open_simulated
from laconic.links.quorum.syncer import Syncer
from laconic.links.quorum.tcp import MORE_SECONDS, NEVER, GuestPort, Host, HostPort, Line
from laconic.links.simulated import SimulatedLink
from laconic.links.tcp import TcpLink
from laconic.links.wrapped import Wrapped, size_of

Make = Callable[[Sequence[Closing] | None], Syncer]
"""Makes rank 0's syncer, which repeats these rounds, if there are any."""


class MeteredPort:
    """``port``, with what goes over it booked in ``ledger``. Rank 0's process sends a result to
    each other worker of the roster, and receives from it."""

    def __init__(self, port: Port, ledger: Ledger, rank: int) -> None:
        self._port, self._ledger, self._rank = port, ledger, rank
        self.closings = port.closings
        self._booked = 0

    def seconds(self, step: int) -> float:
        return self._port.seconds(step)

    def worked(self, step: int, waited: float) -> float:
        return self._port.worked(step, waited)

    def quiet(self) -> AbstractContextManager[object]:
        return self._port.quiet()

    def restart(self, step: int) -> None:
        self._port.restart(step)

    def deliver(self, delivery: Delivery) -> Closing:
        size = sum(map(size_of, delivery.tensors))
        sent = size * (1 if delivery.bases is None else 2)
        if self._rank:
            with self._book(sent, size):
                return self._port.deliver(delivery)
        with self._ledger.watched():
            closing = self._port.deliver(delivery)
        closed, self._booked = self.closings[self._booked :], len(self.closings)
        others = sum(len([r for r in each.roster if r]) for each in closed)
        with self._book(others * size, others * size):
            return closing

    @contextmanager
    def _book(self, sent: int, received: int) -> Iterator[None]:
        with self._ledger.book("quorum", "workers", Cost(sent, 1), received):
            yield

    def meet(self, step: int) -> None:
        self._port.meet(step)

    def close(self) -> None:
        self._port.close()

    def abandon(self) -> None:
        self._port.abandon()


def open_port(link: Link, like: Sequence[Sequence[Tensor]], step: int, make: Make) -> Port:
    """Open this worker's port to rounds over ``link``; all its ranks must call it. ``like``:
    tensors like those that it will deliver, by kind. ``step``: steps taken so far. Raises
    ``ValueError`` for a link that has none."""
    if isinstance(link, Metered):
        port = open_port(link.link, like, step, make)
        return MeteredPort(port, link.ledger, link.rank)
    if isinstance(link, SimulatedLink):
        return open_simulated(link, step, lambda: make(link.stage.recorded))
    if isinstance(link, NullLink):
        return NullPort(make(None))
    if isinstance(link, TcpLink):
        return _over_tcp(link, like, make)
    kind = type(link.link).__name__ if isinstance(link, Wrapped) else "none"
    raise ValueError(
        f"rounds with a quorum run between processes with models on the CPU, and in "
        f"laconic.simulate without link=, not over a {type(link).__name__} (around: {kind})"
    )


def _over_tcp(link: TcpLink, like: Sequence[Sequence[Tensor]], make: Make) -> Port:
    ranks, lines, timeout = range(link.size), dict[int, Line](), link.wire.timeout
    for other in ranks[1:]:
        pair = [[0, other], *([r] for r in ranks if r not in (0, other))]
        between = link.split(pair)
        assert isinstance(between, TcpLink), "as the link that was split"
        if link.rank == 0:
            lines[other] = Line(between.wire, 0, other, NEVER)
        elif link.rank == other:
            lines[0] = Line(between.wire, 1, 0, timeout + MORE_SECONDS)
        else:
            between.close()
    if link.rank:
        return GuestPort(lines[0])
    return HostPort(Host(make(None), lines, like, timeout, link.calls.conclude))
