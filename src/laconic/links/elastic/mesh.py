"""The connections between the members of one view."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b

from torch import Tensor

from laconic.errors import LinkError
from laconic.links.addresses import Address
from laconic.links.collectives import Collectives
from laconic.links.connect import connect
from laconic.links.connections import Connections
from laconic.links.elastic.view import Member, View
from laconic.links.handshake import KEY_BYTES
from laconic.links.health import answering
from laconic.links.wire import ChangedError, LostError

log = logging.getLogger("laconic")

CHECK_SECONDS = 0.05
"""How often a worker that connects looks whether another view was decided."""


class Interrupted(Exception):  # noqa: N818  not an error: the unit runs again
    """The connections have ended."""


class Mesh:
    """The connections of the member ``me`` of ``view`` to all others. Ranks are places in the
    view."""

    def __init__(self, view: View, me: Member, timeout: float) -> None:
        self.view = view
        self.place = view.ids.index(me.id)
        self.connections = Connections(range(len(view.members)), timeout)

    @property
    def missing(self) -> list[str]:
        """The ids of the members to which no connection was made."""
        connected = {self.place, *self.connections}
        return [id for place, id in enumerate(self.view.ids) if place not in connected]

    def connect(
        self,
        server: socket.socket,
        secret: bytes,
        check: Callable[[], None],
    ) -> None:
        """Connect to all members, which must do so too. ``server`` accepts those that call;
        ``check()`` raises where waiting is in vain."""
        key = blake2b(self.view.pack().encode(), key=secret, digest_size=KEY_BYTES).digest()
        addresses = [str(Address.parse(m.mesh)._replace(key=key.hex())) for m in self.view.members]
        try:
            at = self.place, self.connections, key, secret
            connect(*at, server, addresses, check, CHECK_SECONDS)
        except LinkError as error:
            raise Interrupted(str(error)) from error
        self.connections.answers = answering([m.beacon for m in self.view.members], secret)


@contextmanager
def interrupting() -> Iterator[None]:
    """A context for messages: raises `Interrupted` where a connection has ended."""
    try:
        yield
    except (LostError, ChangedError) as error:
        if isinstance(error, ChangedError):
            log.warning("%s; it is sent again", error)
        raise Interrupted(str(error)) from error


class Everyone(Collectives):
    """Collectives of the first ``size`` members of ``mesh``, in which every worker hears from every
    other, so that none is two units ahead of another. Only `swap` is no such collective."""

    def __init__(self, mesh: Mesh, size: int, header: Callable[[], tuple[int, int]]) -> None:
        super().__init__(mesh.place, size, mesh.connections, header, interrupting)

    async def _broadcast(self, x: Tensor, root: int = 0, overlaps: bool = False) -> None:
        nothing, others = x.reshape(-1)[:0], [r for r in range(self.size) if r != self.rank]
        sends = dict.fromkeys(others, x if self.rank == root else nothing)
        self.exchange(sends, {r: x if r == root else nothing for r in others})
