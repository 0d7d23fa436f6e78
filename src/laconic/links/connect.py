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


def connect(
    rank: int,
    connections: Connections,
    key: bytes,
    secret: bytes,
    server: socket.socket,
    addresses: Sequence[str],
    check: Callable[[], None],
    check_seconds: float = CHECK_SECONDS,
) -> None:
    """Make the ``connections`` of rank ``rank`` to the other ranks of its link: call those before
    it, at their ``addresses``, and accept those after it, at ``server``.

    ``key``: identifies this rank's end of the link; callers must send it. ``secret``: the link's
    secret. ``check()`` is called every ``check_seconds``, and raises if a rank can no longer
    connect."""
    callers = range(rank + 1, len(addresses))

    def keep(other: int, talk: Talk) -> None:
        talk.kept = True
        watch(talk.connection, reads_at_once=False)
        connections.keep(other, talk.connection, congestion.choose(talk.connection))

    def welcome(hello: handshake.Hello, _: bytes) -> bytes:
        if hello.number not in callers:
            raise handshake.RefusedError(f"rank {hello.number} does not call this one")
        return b""

    def answered(talk: Talk, error: Exception | None) -> None:
        if error is None:  # else it was no rank of this link
            hello = handshake.Hello.unpack(talk.result[: handshake.HELLO_BYTES])
            keep(hello.number, talk)

    def called(other: int, host: str, port: int, end: Talk | Exception) -> None:
        if isinstance(end, Talk):
            keep(other, end)
        else:
            _failed(connections.names[other], host, port, end)

    answer = partial(handshake.answer, [PURPOSE], {key: secret}.get, welcome, most=0)
    deadline = time.monotonic() + connections.timeout
    check_at = time.monotonic() + check_seconds
    talks = Talks()
    talks.serve([server], answer, HELLO_SECONDS, answered)
    try:
        for other, (host, port, its_key) in enumerate(map(Address.parse, addresses[:rank])):
            say = secret, PURPOSE, bytes.fromhex(its_key), rank, b"", 0
            exchange, end = partial(handshake.call, *say), partial(called, other, host, port)
            talks.call(host, port, exchange, deadline, end, again=True)
        while missing := {*range(len(addresses))} - {rank, *connections}:
            now = time.monotonic()
            if now >= deadline:
                who = sorted(connections.names[r] for r in missing)
                seconds = f"{connections.timeout:g} s"
                raise LinkError(f"ranks {who} have not connected within {seconds}", ranks=who)
            if now >= check_at:
                check()
                check_at = now + check_seconds
            talks.turn(max(min(deadline, check_at) - now, 0))
    finally:
        talks.close()


def _failed(name: int, host: str, port: int, error: Exception) -> None:
    """The rank that is named ``name`` in errors, and called at ``host`` and ``port``, cannot be
    connected to: raise `LinkError`, if the error is not that there is no time for another call."""
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
        return
    raise LinkError(text, ranks=[name]) from error
