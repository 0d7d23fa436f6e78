"""Opens a worker's port, depending on the type of its link."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from laconic.links.link import Link
from laconic.links.metered import Metered
from laconic.links.null import NullLink
from laconic.links.quorum.null import NullPort
from laconic.links.quorum.port import Closing, Port, no_quorum
from laconic.links.quorum.simulated import open_simulated
from laconic.links.quorum.syncer import Syncer
from laconic.links.quorum.tcp import MORE_SECONDS, NEVER, Guest, Host, Line
from laconic.links.simulated import SimulatedLink
from laconic.links.tcp import TcpLink

Make = Callable[[Sequence[Closing] | None], Syncer]
"""Makes rank 0's syncer, which repeats the given rounds, if any are given."""


def open_port(link: Link, like: Sequence[Sequence[Tensor]], step: int, make: Make) -> Port:
    """Open this worker's port to rounds over ``link``; all its ranks must call it. ``like``:
    tensors like those that it will deliver, by kind. ``step``: steps taken so far. Raises
    ``ValueError`` for a link that does not support rounds with a quorum."""
    if isinstance(link, Metered):  # whoever delivers books
        return open_port(link.link, like, step, make)
    if isinstance(link, SimulatedLink):
        return open_simulated(link, step, lambda: make(link.stage.recorded))
    if isinstance(link, NullLink):
        return NullPort(make(None))
    if isinstance(link, TcpLink):
        return _over_tcp(link, like, make)
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
        return Guest(lines[0], link.calls.conclude)
    return Host(make(None), lines, like, timeout, link.calls.conclude)
