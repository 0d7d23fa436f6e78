"""Opens a worker's port, depending on the type of its link."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from laconic.links.cost import Cost
from laconic.links.link import Link
from laconic.links.metered import Ledger, Metered
from laconic.links.null import NullLink
from laconic.links.quorum.null import NullPort
from laconic.links.quorum.port import Closing, Port, no_quorum
from laconic.links.quorum.simulated import open_simulated
from laconic.links.quorum.syncer import Syncer
from laconic.links.quorum.tcp import MORE_SECONDS, NEVER, GuestPort, Host, HostPort, Line
from laconic.links.quorum.wrapped import WrappedPort
from laconic.links.simulated import SimulatedLink
from laconic.links.tcp import TcpLink
from laconic.links.wrapped import Wrapped

Make = Callable[[Sequence[Closing] | None], Syncer]
"""Makes rank 0's syncer, which repeats the given rounds, if any are given."""


class MeteredPort(WrappedPort):
    """A ``port`` whose traffic is recorded in ``ledger``."""

    def __init__(self, port: Port, ledger: Ledger, rank: int) -> None:
        super().__init__(port, rank)
        self._ledger = ledger

    def watched(self) -> AbstractContextManager[None]:
        return self._ledger.watched()

    def book(self, step: int, sent: Cost, received: int, seconds: float) -> None:
        self._ledger.add("quorum", "workers", sent, received, seconds)


def open_port(link: Link, like: Sequence[Sequence[Tensor]], step: int, make: Make) -> Port:
    """Open this worker's port to rounds over ``link``; all its ranks must call it. ``like``:
    tensors like those that it will deliver, by kind. ``step``: steps taken so far. Raises
    ``ValueError`` for a link that does not support rounds with a quorum."""
    if isinstance(link, Metered):
        port = open_port(link.link, like, step, make)
        return MeteredPort(port, link.ledger, link.rank)
    if isinstance(link, SimulatedLink):
        return open_simulated(link, step, lambda: make(link.stage.recorded))
    if isinstance(link, NullLink):
        return NullPort(make(None))
    if isinstance(link, TcpLink):
        return _over_tcp(link, like, make)
    if isinstance(link, Wrapped):
        return link.around_port(open_port(link.link, like, step, make))
    raise no_quorum(link)


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
        return GuestPort(lines[0], link.calls.report)
    return HostPort(Host(make(None), lines, like, timeout, link.calls.report))
