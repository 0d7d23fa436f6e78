"""How the ranks of a link connect to each other: every rank calls the ranks before it.

Both sides of a connection prove that they know the link's secret (`laconic.links.handshake`). All
conversations run at once in one thread, so strangers that connect do not delay any rank.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from functools import partial

from laconic.errors import LinkError
from laconic.links import congestion, handshake, secured
from laconic.links.addresses import Address
from laconic.links.connections import Connections
from laconic.links.sockets import watch
from laconic.links.talks import Talk, Talks, UnreachableError

PURPOSE = b"wire"
HELLO_SECONDS = 5.0
"""How long a caller may take in all to prove who it is."""
CHECK_SECONDS = 1.0


class Connecting:
    """Makes the ``connections`` of rank ``rank`` to the other ranks of its link.

    ``key``: identifies this rank's end of the link; callers must send it. ``secret``: the link's
    secret. ``check_seconds``: seconds between two calls of ``check``.
    """

    def __init__(
        self,
        rank: int,
        connections: Connections,
        key: bytes,
        secret: bytes,
        check_seconds: float = CHECK_SECONDS,
    ) -> None:
        self._rank, self._connections = rank, connections
        self._key, self._secret = key, secret
        self._deadline = time.monotonic() + connections.timeout
        self._check_seconds = check_seconds
        self._addresses: dict[int, Address] = {}
        """Of the ranks to call."""
        self._callers: set[int] = set()
        """The ranks that call this one."""

    def run(
        self, server: socket.socket, addresses: Sequence[str], check: Callable[[], None]
    ) -> None:
        """Connect to all ranks. ``addresses``: where each of them listens, by rank. ``check()`` is
        called periodically, and raises if a rank can no longer connect."""
        self._addresses = {r: Address.parse(a) for r, a in enumerate(addresses[: self._rank])}
        self._callers = set(range(self._rank + 1, len(addresses)))
        check_at = time.monotonic() + self._check_seconds
        talks = Talks()
        talks.serve([server], self._answer, HELLO_SECONDS, self._answered)
        try:
            for rank in self._addresses:
                self._call(talks, rank)
            while missing := {*self._addresses, *self._callers} - self._connections.keys():
                now = time.monotonic()
                if now >= self._deadline:
                    who = sorted(self._connections.names[r] for r in missing)
                    seconds = f"{self._connections.timeout:g} s"
                    raise LinkError(f"ranks {who} have not connected within {seconds}", ranks=who)
                if now >= check_at:
                    check()
                    check_at = now + self._check_seconds
                talks.turn(max(min(self._deadline, check_at) - now, 0))
        finally:
            talks.close()

    def _keep(self, rank: int, talk: Talk) -> None:
        talk.kept = True
        watch(talk.connection, reads_at_once=False)
        self._connections.keep(rank, talk.connection, congestion.choose(talk.connection))

    # -- the ranks behind this one call it ----

    def _answer(self) -> handshake.Exchange:
        return handshake.answer(
            [PURPOSE],
            lambda key: self._secret if key == self._key else None,
            lambda hello, _: self._welcome(hello.number),
            most=0,
        )

    def _welcome(self, rank: int) -> bytes:
        if rank not in self._callers:
            raise handshake.RefusedError(f"rank {rank} does not call this one")
        return b""

    def _answered(self, talk: Talk, error: Exception | None) -> None:
        if error is None:  # else it was no rank of this link
            rank = handshake.Hello.unpack(talk.result[: handshake.HELLO_BYTES]).number
            self._keep(rank, talk)

    # -- this rank calls those before it ----

    def _call(self, talks: Talks, rank: int) -> None:
        host, port, key = self._addresses[rank]
        say = self._secret, PURPOSE, bytes.fromhex(key), self._rank, b"", 0
        ends = partial(self._keep, rank), partial(self._failed, rank)
        talks.call(host, port, partial(handshake.call, *say), self._deadline, *ends, again=True)

    def _failed(self, rank: int, error: Exception) -> None:
        host, port, _ = self._addresses[rank]
        name = self._connections.names[rank]
        if secured.about_certificates(error):
            text = (
                f"no TLS connection to rank {name}: {secured.reason(error)}. All ranks need "
                "certificates that were signed by the same authority (`laconic keys`)"
            )
        elif isinstance(error, UnreachableError):
            text = (
                f"rank {name} can't be reached at {host}, port {port}: {error}; if a host has "
                "several networks, set GLOO_SOCKET_IFNAME to the interface to use"
            )
        else:
            return  # there is no time for another call
        raise LinkError(text, ranks=[name]) from error
