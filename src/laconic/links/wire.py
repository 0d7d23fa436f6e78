"""Messages between the ranks of a link: one TCP connection for each pair of ranks, and no thread.

The thread that makes a link's calls copies the bytes itself, between tensors and the kernel's
buffers, and sleeps while there is nothing to copy. gloo has a thread for this, which wakes up
several times for each message and then wakes the caller. With 4 ranks on 2 cores that was half of
the processor time of a round.
"""

from __future__ import annotations

import os
import secrets
import select
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NoReturn

from torch import Tensor

from laconic.errors import LinkError
from laconic.links import frames, handshake
from laconic.links.addresses import listen
from laconic.links.connect import connect
from laconic.links.connections import Connections, Traffic
from laconic.links.sockets import tcp_info

_HANG_UP = getattr(select, "POLLRDHUP", 0)  # only Linux reports it before everything was read
_LEAST, NO_SAMPLE = struct.Struct("=148xI"), 2**32 - 1  # tcpi_min_rtt
LOOK_SECONDS, ASK_SECONDS = 1.0, 5.0
"""How often a rank that waits looks whether a byte has moved, and whether a connection is
stalled."""


class OtherCallError(LinkError):
    """A message from ``rank``, named ``name`` in errors, belongs to a different call than the one
    that this rank is in, according to its ``header``, or has a different length."""

    def __init__(
        self, rank: int, name: int, header: tuple[int, int], size: int, expected: int
    ) -> None:
        super().__init__(f"rank {name} has sent {size} bytes where {expected} are due")
        self.rank = rank
        self.header = header


class LostError(RuntimeError):
    """A connection is closed, or nothing arrived over it for too long. Not an ``OSError``, because
    a signal handler that runs during the wait may raise an unrelated one."""


class StalledError(LostError):
    """Nothing passes over the connection to the rank that is named ``name`` in errors."""

    def __init__(self, name: int) -> None:
        super().__init__(
            f"nothing passes over the connection to rank {name}, though its process answers over "
            "new ones: a firewall or NAT between them has forgotten it, or drops full packets, "
            "which `laconic doctor` tests (a smaller MTU of the network interfaces avoids it)"
        )


class ChangedError(LinkError):
    """A message from the rank that is named ``name`` in errors was changed in transit."""

    def __init__(self, name: int) -> None:
        super().__init__(
            f"a message from rank {name} was changed in transit: its checksum is wrong. A network "
            "interface, a router or memory is faulty, or somebody alters packets"
        )


class Transfer:
    """Messages in flight: ``sends[r]`` to rank r, and from rank r into ``receives[r]``. The tensors
    must be contiguous and on the CPU, and must not be used meanwhile. ``digest``: a 64-bit integer
    that each header carries.

    Bytes move inside `wait`, except those that the kernel accepts immediately. The last `wait` must
    be for all messages. Raises `LinkError` if an earlier message was not completed, unless this one
    ``joins`` those under way: then its messages follow theirs, and what one transfer waits for
    moves the bytes of all. The transfers must be completed in the order in which they began. After
    a failure, every call of any of them raises the same error again.
    """

    def __init__(
        self,
        connections: Connections,
        sends: Mapping[int, Tensor],
        receives: Mapping[int, Tensor],
        header: tuple[int, int],
        *,
        joins: bool = False,
        digest: int = 0,
    ) -> None:
        connections.check_fork()
        traffic = connections.traffic
        if traffic is not None and not (joins and traffic.failure is None):
            raise LinkError("an earlier message on the link was not completed: it is unusable")
        self.connections = connections  # held while messages are under way
        self._traffic = traffic = traffic or Traffic()
        self.mutual = len(receives) if receives.keys() == sends.keys() else 0
        """The number of ranks that both send to and receive from this one; 0 if some do only
        one."""
        messages = [(r, x, True) for r, x in receives.items()]
        messages += [(r, x, False) for r, x in sends.items()]
        for _, x, _ in messages:
            if not x.is_contiguous() or x.device.type != "cpu":
                raise ValueError(
                    f"a message is contiguous and on the CPU, not {x.device} {x.stride()}"
                )
        idle = [r for r in sends if traffic.is_complete(traffic.latest.get((r, False), -1))]
        first = len(traffic.ranks)
        traffic.grow(len(messages))
        for index, (r, x, comes) in enumerate(messages, first):
            after = traffic.latest.get((r, comes), -1)
            where = x.data_ptr(), x.nbytes, connections[r].fileno(), comes, after
            frames.begin(traffic.messages, index, header, digest, *where)
            traffic.latest[r, comes] = index
            traffic.ranks.append(r)
            traffic.tensors.append(x)
        self._end = len(traffic.ranks)
        self._incoming = dict(zip(receives, range(first, self._end), strict=False))
        connections.before_messages(idle)
        traffic.transfers += 1
        connections.traffic = traffic
        self._move(frames.WITHOUT_WAITING)

    def wait(self, rank: int | None = None) -> None:
        """Wait until the message from ``rank`` has arrived. Without a rank, wait until all messages
        are sent and received. Raises `LostError` if a connection is lost or no byte moves for its
        ``timeout``, `OtherCallError` and `ChangedError`."""
        traffic = self._traffic
        if rank is not None:
            self._move(self._incoming[rank])
            return
        self._move(frames.ALL)
        traffic.transfers -= 1
        if not traffic.transfers:
            self.connections.traffic = None

    def wait_sent(self) -> None:
        """Wait until all messages are sent, as far as the kernel accepts them. Raises the same
        errors as `wait`."""
        self._move(frames.ALL_SENT)

    def digests(self) -> dict[int, int]:
        """The digests in the messages that have come, by rank."""
        each = ((r, self._traffic.messages[index].got) for r, index in self._incoming.items())
        return {r: frames.FIELDS.unpack_from(got)[3] for r, got in each}

    def _move(self, until: int) -> None:
        traffic = self._traffic
        if traffic.failure is not None:  # what has moved since was not checked
            raise traffic.failure()
        connections, now = self.connections, time.monotonic()
        quiet_since, ask_at = now, now + ASK_SECONDS
        while True:
            left = quiet_since + connections.timeout - now
            seconds = min(max(left, 0.001), LOOK_SECONDS)
            milliseconds = max(round(1000 * seconds), 1)
            at = traffic.messages, connections.secured, until, self._end, milliseconds
            outcome, index, error = frames.move(*at)
            if outcome == frames.FINE:
                return
            now = time.monotonic()
            if outcome not in (frames.SILENT, frames.INTERRUPTED):
                break
            if index:  # whether any byte moved
                quiet_since = now if outcome == frames.INTERRUPTED else now - seconds
            if now - quiet_since >= connections.timeout:  # Python's handlers run in between
                break
            if now >= ask_at:
                ask_at = now + ASK_SECONDS
                if ranks := connections.forgotten():
                    self._fail(partial(StalledError, connections.names[ranks[0]]))
        self._fail(self._cause(outcome, index, error))

    def _fail(self, failure: Callable[[], Exception]) -> NoReturn:
        """Raise ``failure()``, now and in later calls: the error itself would hold the
        connections."""
        self._traffic.failure = failure
        self._traffic.tensors.clear()  # nothing moves any more
        raise failure()

    def _cause(self, outcome: int, index: int, number: int) -> Callable[[], Exception]:
        """Makes the error for what `frames.move` has returned."""
        if outcome in (frames.SILENT, frames.INTERRUPTED):
            seconds = self.connections.timeout
            return partial(LostError, f"nothing was sent or received for {seconds:g} s")
        rank, message = self._traffic.ranks[index], self._traffic.messages[index]
        name = self.connections.names[rank]
        if outcome == frames.CHANGED:
            return partial(ChangedError, name)
        if outcome == frames.OTHER:
            serial, call_id, size, _ = frames.FIELDS.unpack_from(message.got)
            return partial(OtherCallError, rank, name, (serial, call_id), size, message.size)
        why = "closed by it" if outcome == frames.CLOSED else os.strerror(number)
        return partial(LostError, f"connection to rank {name}: {why}")


class Wire:
    """The connections of rank ``rank`` of a link to all other ranks. ``host``: where it listens,
    see `listen`. ``names``, ``timeout``: see `Connections`. Every rank must send its `address` to
    the others before it calls `connect`."""

    def __init__(self, rank: int, host: str | None, timeout: float, names: Sequence[int]) -> None:
        self._server, address = listen(host)
        self.rank = rank
        self._key = secrets.token_bytes(handshake.KEY_BYTES)
        self.connections = Connections(names, timeout)
        self.address = str(address._replace(key=self._key.hex()))

    def connect(self, addresses: Sequence[str], secret: bytes, check: Callable[[], None]) -> None:
        """Connect to all ranks, at their ``addresses``. All of them prove to each other that they
        know the ``secret``. ``check()`` is called every second, and raises if a rank can no longer
        connect."""
        at = self.rank, self.connections, self._key, secret
        try:
            with self._server:
                connect(*at, self._server, addresses, check)
        except BaseException:
            self.connections.close()  # else other ranks wait as long as the error lives
            raise

    def closed(self) -> dict[int, bool]:
        """The ranks whose connections have ended, and whether by an error. Does not wait, and does
        not read, so messages under way are not disturbed."""
        poll, ranks = select.poll(), {}
        for rank, connection in self.connections.items():
            poll.register(connection, _HANG_UP)
            ranks[connection.fileno()] = rank
        ended = select.POLLHUP | select.POLLERR | _HANG_UP
        return {
            ranks[fd]: bool(events & select.POLLERR)
            for fd, events in poll.poll(0)
            if events & ended
        }

    def round_trip(self) -> float:
        """Seconds of a round trip to the farthest rank, the shortest one so far; 0 where the system
        does not report it."""
        infos = [tcp_info(each, _LEAST) for each in self.connections.values()]
        found = [info[0] for info in infos if info and info[0] != NO_SAMPLE]
        return max(found, default=0) / 1e6

    def close(self) -> None:
        """Close the connections once no message is under way on them."""
        self.connections = Connections(self.connections.names, self.connections.timeout)
        self._server.close()
