"""Messages between the ranks of a link: one TCP connection for each pair of ranks, and no thread.

The thread that makes a link's calls copies the bytes itself, between tensors and the kernel's
buffers, and sleeps while there is nothing to copy. gloo has a thread for this, which wakes up
several times for each message and then wakes the caller. With 4 ranks on 2 cores that was half of
the processor time of a round.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from laconic.errors import LinkError
from laconic.links import congestion, forks, frames, handshake
from laconic.links.addresses import Address, listen
from laconic.links.connect import Connecting
from laconic.links.link import Sent
from laconic.links.sockets import borrowed, tcp_info

KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 5}
"""A connection ends after 30 s in which the other host acknowledged none of 5 probes. That is long
enough for a saturated network. The kernel of a stopped process still acknowledges them."""
_HANG_UP = getattr(select, "POLLRDHUP", 0)  # only Linux reports it before everything was read
_INFO = struct.Struct("=52x2I")  # struct tcp_info up to tcpi_last_data_recv, tcpi_last_ack_recv
_LEAST, NO_SAMPLE = struct.Struct("=148xI"), 2**32 - 1  # tcpi_min_rtt
_SENT = struct.Struct("=100xI16xQ28xI8xQ")  # total_retrans, bytes_acked, data_segs_out, busy_time


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


class ChangedError(LinkError):
    """A message from ``rank``, named ``name`` in errors, was changed in transit."""

    def __init__(self, rank: int, name: int) -> None:
        super().__init__(
            f"a message from rank {name} was changed in transit: its checksum is wrong. A network "
            "interface, a router or memory is faulty, or somebody alters packets"
        )
        self.rank = rank


class Connections(dict[int, int]):
    """The file descriptors of connected sockets, by rank. Closed when this object is freed."""

    traffic: Traffic | None = None
    """The messages that have begun, if not all of them are complete."""

    def __init__(self) -> None:
        super().__init__()
        self.secured: dict[int, ssl.SSLSocket] = {}
        """Those that use TLS, by file descriptor."""
        self.bbr: dict[int, congestion.Bbr] = {}
        """Those whose congestion control is BBR, by file descriptor."""
        self._process = os.getpid()
        forks.close_in_child(self)

    @property
    def forked(self) -> bool:
        """Whether this is a forked child's copy, which was closed."""
        return os.getpid() != self._process

    def keep(self, rank: int, connection: socket.socket) -> None:
        """Take over the connection to ``rank``, in place of an earlier one."""
        connection.setblocking(False)
        bbr = congestion.Bbr.of(connection)
        before = self.get(rank)
        with forks.guard:
            if isinstance(connection, ssl.SSLSocket):
                self[rank] = fd = connection.fileno()
                self.secured[fd] = connection
            else:
                self[rank] = connection.detach()
        if bbr is not None:
            self.bbr[self[rank]] = bbr
        if before is not None:
            self._close(before)

    def sent(self) -> dict[int, Sent]:
        """What was sent to each rank so far; empty where the system does not report it."""
        found = {}
        for rank, fd in self.items():
            info = tcp_info(fd, _SENT)
            if not info:
                return {}
            again, acknowledged, packets, busy = info
            found[rank] = Sent(packets, again, acknowledged, busy / 1e6)
        return found

    def before_messages(self, ranks: Iterable[int]) -> None:
        """To be called before messages for ``ranks`` are sent, for which none are under way."""
        if not self.bbr:
            return
        for fd in (self[rank] for rank in ranks):
            if fd in self.bbr:
                self.bbr[fd].before_message(fd)

    def close(self) -> None:
        """Close all connections."""
        while self:
            self._close(self.popitem()[1])

    def _close(self, fd: int) -> None:
        self.bbr.pop(fd, None)
        secured = self.secured.pop(fd, None)
        if secured is None:
            os.close(fd)
        else:
            secured.close()

    def shutdown(self) -> None:
        """End all connections, here and at the other ranks, so that waiting threads return."""
        for fd in self.values():
            with borrowed(fd) as connection, contextlib.suppress(OSError):  # it has ended already
                connection.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        self.close()


class Traffic:
    """Messages under way over some connections, in the order in which they began. Every message
    follows the one before it on the same connection in the same direction."""

    def __init__(self) -> None:
        self.messages = frames.array(0)()
        self.ranks: list[int] = []
        """The rank that each message is for, or comes from."""
        self.latest: dict[tuple[int, bool], int] = {}
        """The last message by rank, and by whether it comes from there."""
        self.transfers = 0
        """How many `Transfer` are not complete."""
        self.tensors: list[Tensor] = []
        """Bytes of all messages move in any of the transfers, so all of their memory is kept."""
        self.failure: tuple[int, int, int] | None = None
        """What `frames.move` has returned; not the error, which would hold the connections."""

    def is_complete(self, index: int) -> bool:
        """Whether a message has moved as a whole; -1: there is none."""
        return index < 0 or frames.is_complete(self.messages[index])

    def grow(self, count: int) -> None:
        """Make room for ``count`` more messages."""
        before = self.messages
        self.messages = frames.array(len(before) + count)()
        ctypes.memmove(self.messages, before, ctypes.sizeof(before))


class Transfer:
    """Messages in flight: ``sends[r]`` to rank r, and from rank r into ``receives[r]``. The tensors
    must be contiguous and on the CPU, and must not be used meanwhile. ``digest``: a 64-bit integer
    that each header carries.

    If not ``ready``, call `send` as each message becomes ready. Bytes move inside `wait`, except
    those that the kernel accepts immediately. The last `wait` must be for all messages. Raises
    `LinkError` if an earlier message was not completed, unless this one ``joins`` those under way:
    then its messages follow theirs, and what one transfer waits for moves the bytes of all. The
    transfers must be completed in the order in which they began. After a failure, every call of any
    of them raises the same error again.
    """

    def __init__(
        self,
        connections: Connections,
        sends: Mapping[int, Tensor],
        receives: Mapping[int, Tensor],
        header: tuple[int, int],
        timeout: float,
        names: Sequence[int],
        *,
        ready: bool = True,
        joins: bool = False,
        digest: int = 0,
    ) -> None:
        if connections.forked:
            raise LinkError("a forked process cannot use its parent's link: start it with spawn")
        traffic = connections.traffic
        if traffic is not None and not (joins and traffic.failure is None):
            raise LinkError("an earlier message on the link was not completed: it is unusable")
        self.connections = connections  # held while messages are under way
        self._traffic = traffic = traffic or Traffic()
        self._timeout = timeout
        self.names = names
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
            size, after = x.numel() * x.element_size(), traffic.latest.get((r, comes), -1)
            fd = connections[r]
            where = x.data_ptr(), size, size if ready else -1, fd, comes, after
            bbr = fd in connections.bbr and not comes
            frames.begin(traffic.messages, index, header, digest, *where, bbr=bbr)
            traffic.latest[r, comes] = index
            traffic.ranks.append(r)
            traffic.tensors.append(x)
        self._end = len(traffic.ranks)
        self._incoming = dict(zip(receives, range(first, self._end), strict=False))
        self._outgoing = dict(zip(sends, range(first + len(receives), self._end), strict=True))
        connections.before_messages(idle)
        traffic.transfers += 1
        connections.traffic = traffic
        self._move(frames.WITHOUT_WAITING)

    def send(self, rank: int, size: int) -> None:
        """Allow the first ``size`` bytes of the message for ``rank`` to be sent."""
        self._traffic.messages[self._outgoing[rank]].ready = size
        self._move(frames.WITHOUT_WAITING)

    def send_all(self) -> None:
        """Allow all messages to be sent."""
        for index in self._outgoing.values():
            message = self._traffic.messages[index]
            message.ready = message.size
        self._move(frames.WITHOUT_WAITING)

    def wait(self, rank: int | None = None, size: int | None = None) -> None:
        """Wait until the first ``size`` bytes (None: all) of the message from ``rank`` have
        arrived, up to the end of a frame. Without a rank, wait until all messages are sent and
        received. Raises `LostError` if a connection is lost or no byte moves for ``timeout``
        seconds, `OtherCallError` and `ChangedError`."""
        traffic = self._traffic
        if rank is not None:
            index = self._incoming[rank]
            self._move(index, traffic.messages[index].size if size is None else size)
            return
        self._wait_for_all(frames.ALL)
        traffic.transfers -= 1
        if not traffic.transfers:
            self.connections.traffic = None

    def wait_sent(self) -> None:
        """Wait until all messages are sent, as far as the kernel accepts them. Raises the same
        errors as `wait`."""
        self._wait_for_all(frames.ALL_SENT)

    def _wait_for_all(self, until: int) -> None:
        messages = (self._traffic.messages[index] for index in self._outgoing.values())
        assert all(m.ready == m.size for m in messages), "a message is not ready"
        self._move(until, self._end)

    def digests(self) -> dict[int, int]:
        """The digests in the messages that have come, by rank."""
        each = ((r, self._traffic.messages[index].got) for r, index in self._incoming.items())
        return {r: frames.FIELDS.unpack_from(got)[3] for r, got in each}

    def _move(self, until: int, enough: int = 0) -> None:
        traffic = self._traffic
        if traffic.failure is not None:  # what has moved since was not checked
            raise self._error(*traffic.failure)
        outcome, left = frames.INTERRUPTED, self._timeout
        while outcome == frames.INTERRUPTED and left > 0:  # Python's handlers run in between
            start = time.monotonic()
            milliseconds = min(max(round(1000 * left), 1), 2**31 - 1)
            at = traffic.messages, self.connections.secured
            outcome, index, error = frames.move(*at, until, enough, milliseconds)
            if outcome == frames.INTERRUPTED:
                moved = index  # whether any did
                left = self._timeout if moved else left - (time.monotonic() - start)
        if outcome == frames.FINE:
            return
        traffic.failure = outcome, index, error
        traffic.tensors.clear()  # nothing moves any more
        raise self._error(*traffic.failure)

    def _error(self, outcome: int, index: int, number: int) -> LostError | LinkError:
        """Of what `frames.move` has returned."""
        if outcome in (frames.SILENT, frames.INTERRUPTED):
            return LostError(f"nothing was sent or received for {self._timeout:g} s")
        rank, message = self._traffic.ranks[index], self._traffic.messages[index]
        if outcome == frames.CHANGED:
            return ChangedError(rank, self.names[rank])
        if outcome == frames.OTHER:
            serial, call_id, size, _ = frames.FIELDS.unpack_from(message.got)
            return OtherCallError(rank, self.names[rank], (serial, call_id), size, message.size)
        why = "closed by it" if outcome == frames.CLOSED else os.strerror(number)
        return LostError(f"connection to rank {self.names[rank]}: {why}")


def configure(connection: socket.socket) -> None:
    """Set the options of a connection for messages."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    congestion.choose(connection)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if name in vars(socket):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, vars(socket)[name], value)


class Wire:
    """The connections of rank ``rank`` of a link to all other ranks. ``host``: where it listens,
    see `listen`. ``names``: the numbers of the ranks in errors. Every rank must send its `address`
    to the others before it calls `connect`."""

    def __init__(self, rank: int, host: str | None, timeout: float, names: Sequence[int]) -> None:
        self._server, announced = listen(host)
        self._rank = rank
        self.timeout = timeout
        self.names = names
        self._key = secrets.token_bytes(handshake.KEY_BYTES)
        self.connections = Connections()
        self.address = str(Address(announced, self._server.getsockname()[1], self._key.hex()))

    def connect(self, addresses: Sequence[str], secret: bytes, check: Callable[[], None]) -> None:
        """Connect to all ranks, at their ``addresses``. All of them prove to each other that they
        know the ``secret``. ``check()`` is called every second, and raises if a rank can no longer
        connect."""
        at = self._rank, self.names, self._key, secret, self.timeout, self._keep
        try:
            with self._server:
                Connecting(*at).run(self._server, addresses, check)
        except BaseException:
            self.connections.close()  # else other ranks wait as long as the error lives
            raise

    def _keep(self, rank: int, connection: socket.socket) -> None:
        configure(connection)
        self.connections.keep(rank, connection)

    @property
    def forked(self) -> bool:
        """Whether this is a child's copy, whose connections were closed."""
        return self.connections.forked

    def closed(self) -> dict[int, bool]:
        """The ranks whose connections have ended, and whether by an error. Does not wait, and does
        not read, so messages under way are not disturbed."""
        poll, ranks = select.poll(), {}
        for rank, fd in self.connections.items():
            poll.register(fd, _HANG_UP)
            ranks[fd] = rank
        ended = select.POLLHUP | select.POLLERR | _HANG_UP
        return {
            ranks[fd]: bool(events & select.POLLERR)
            for fd, events in poll.poll(0)
            if events & ended
        }

    def round_trip(self) -> float:
        """Seconds of a round trip to the farthest rank, the shortest one so far; 0 where the system
        does not report it."""
        infos = [tcp_info(fd, _LEAST) for fd in self.connections.values()]
        found = [info[0] for info in infos if info and info[0] != NO_SAMPLE]
        return max(found, default=0) / 1e6

    def heard(self, rank: int) -> float:
        """Seconds since anything came from the host of ``rank``, acknowledgements included; 0 where
        the system does not report it."""
        fd = self.connections.get(rank)
        info = () if fd is None else tcp_info(fd, _INFO)
        return min(info) / 1000 if info else 0.0

    def shutdown(self) -> None:
        """End all connections, here and at the other ranks, so that waiting threads return."""
        self.connections.shutdown()

    def post(
        self,
        sends: Mapping[int, Tensor],
        receives: Mapping[int, Tensor],
        header: tuple[int, int],
        *,
        ready: bool = True,
    ) -> Transfer:
        """Begin to send ``sends[r]`` to rank r, and to receive from it into ``receives[r]``. Rank r
        must make the matching call, with the same ``header`` (the call's serial number and id) and
        the same sizes. If not ``ready``, `Transfer.send` releases the messages one by one."""
        at = self.timeout, self.names
        return Transfer(self.connections, sends, receives, header, *at, ready=ready)

    def close(self) -> None:
        """Close the connections once no message is under way on them."""
        self.connections = Connections()
        self._server.close()
