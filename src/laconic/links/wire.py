"""Messages between the ranks of a link: one TCP connection for each pair of ranks, and no thread.

The thread that makes a link's calls copies the bytes itself, between tensors and the kernel's
buffers, and sleeps while there is nothing to copy. gloo has a thread for this, which wakes up
several times for each message and then wakes the caller. With 4 ranks on 2 cores that was half of
the processor time of a round.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import secrets
import select
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from laconic.errors import LinkError
from laconic.links import congestion, forks, frames, handshake
from laconic.links.addresses import Address, listen
from laconic.links.connect import Connecting
from laconic.links.link import Sent
from laconic.links.sockets import borrowed, tcp_info, unacknowledged, watch
from laconic.links.stalls import Stalls

log = logging.getLogger("laconic")

_HANG_UP = getattr(select, "POLLRDHUP", 0)  # only Linux reports it before everything was read
_INFO = struct.Struct("=52x2I")  # struct tcp_info up to tcpi_last_data_recv, tcpi_last_ack_recv
_LEAST, NO_SAMPLE = struct.Struct("=148xI"), 2**32 - 1  # tcpi_min_rtt
_SENT = struct.Struct("=100xI16xQ28xI8xQ")  # total_retrans, bytes_acked, data_segs_out, busy_time
_POSITION = struct.Struct(">Q")
SPARE = 2**19
"""How many more bytes are kept than the other host has not acknowledged: TLS takes in whole records
only, and a proxy acknowledges what it may lose."""
STALLED = -1
FORGOTTEN = "a firewall or NAT between them has forgotten it"


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


class Kept:
    """The last bytes that were sent, up to byte ``end``."""

    def __init__(self) -> None:
        self.end = self._size = 0
        self._pieces: deque[bytes | bytearray] = deque()

    def add(self, end: int, data: bytes | bytearray, most: int) -> None:
        """The next bytes up to ``end``, of which ``data`` are the last. ``most``: how many are
        enough."""
        if end - self.end > len(data):
            self._pieces.clear()
            self._size = 0
        self._pieces.append(data)
        self._size += len(data)
        while self._size - len(self._pieces[0]) >= most:
            self._size -= len(self._pieces.popleft())
        self.end = end

    def since(self, position: int) -> bytes | None:
        """All from byte ``position`` on; None if it was not kept."""
        if position < self.end - self._size:
            return None
        return b"".join(self._pieces)[max(self._size - (self.end - position), 0) :]


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
        self.stalls: Stalls | None = None
        self.totals: dict[tuple[int, bool], int] = {}
        """How many bytes have moved before the messages under way, by rank, and by whether they
        have come from there."""
        self.early: dict[int, bytearray] = {}
        """What was read from an earlier connection before its messages were due, by rank."""
        self._kept: dict[int, Kept] = {}
        """What may have to be sent again of messages whose memory may change, by the rank that they
        are for."""
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

    # -- what has moved, over one connection after another ----

    def moved(self, rank: int, comes: bool) -> int:
        """How many bytes were sent to ``rank``, or have come from it (``comes``). For any
        thread."""
        traffic, total = self.traffic, self.totals.get((rank, comes), 0)
        if traffic is not None:
            at = zip(traffic.ranks, traffic.messages, strict=False)
            total += sum(m.moved for r, m in at if r == rank and bool(m.comes) == comes)
        return total + (len(self.early.get(rank, b"")) if comes else 0)

    def feed(self) -> tuple[int, int, int]:
        """Take in what was read early. Returns what `frames.move` does."""
        traffic = self.traffic
        for rank, data in self.early.items():
            for i, r in enumerate(traffic.ranks if traffic is not None and data else ()):
                assert traffic is not None
                if r == rank and traffic.messages[i].comes:
                    outcome = frames.feed(traffic.messages[i], data)
                    if outcome != frames.FINE:
                        return outcome, i, 0
        return frames.FINE, 0, 0

    def release(self, traffic: Traffic, messages: Mapping[int, int]) -> None:
        """The memory of these ``messages``, which were sent, may change, by rank: keep what may
        have to be sent again."""
        for rank, index in messages.items():
            message, most = traffic.messages[index], SPARE + unacknowledged(self[rank])
            data = frames.sent_bytes(message, max(message.moved - most, 0))
            if rank not in self._kept:
                self._kept[rank] = Kept()
            self._kept[rank].add(traffic.starts[index] + message.moved, data, most)

    def drain(self, rank: int) -> int:
        """Read what the system has received over the connection to ``rank``, which is used no more.
        Returns how many bytes have come from there in all."""
        fd, early = self[rank], self.early.setdefault(rank, bytearray())
        with borrowed(fd) as plain, contextlib.suppress(OSError):  # there is nothing, or no more
            while piece := self.secured.get(fd, plain).recv(2**16):
                early += piece
        return self.moved(rank, True)

    def kept(self, rank: int, position: int) -> bytes | None:
        """What was sent to ``rank`` from byte ``position`` on and is no message under way; None if
        it was not kept."""
        kept = self._kept.get(rank, Kept())
        return kept.since(position)

    def go_on(self, rank: int, connection: socket.socket, position: int) -> None:
        """Messages go on over another connection to ``rank``, where all up to ``position`` has
        come, or was sent again."""
        self.keep(rank, connection)
        traffic, fd = self.traffic, self[rank]
        assert traffic is not None, "a message waits"
        end = self._kept[rank].end if rank in self._kept else 0
        for r, message, start in zip(traffic.ranks, traffic.messages, traffic.starts, strict=True):
            if r != rank:
                continue
            message.fd = fd
            if not message.comes and start >= end:
                message.bbr = fd in self.bbr
                message.moved = min(message.moved, max(position - start, 0))

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
        if self.stalls is not None:
            self.stalls.ended = True
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
        self.starts: list[int] = []
        """How many bytes were sent to that rank, or came from it, before each message."""
        self.ends: dict[tuple[int, bool], int] = {}
        """How many will have been after all of these messages, as in `Connections.totals`."""
        self.latest: dict[tuple[int, bool], int] = {}
        """The last message by rank, and by whether it comes from there."""
        self.transfers = 0
        """How many `Transfer` are not complete."""
        self.tensors: list[Tensor] = []
        """Bytes of all messages move in any of the transfers, so all of their memory is kept."""
        self.failure: tuple[int, int, int] | None = None
        """What `frames.move` has returned, or `STALLED`; not the error, which would hold the
        connections."""
        self.stalled = ""
        """Why, where it is `STALLED`."""

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
        room = torch.empty(
            sum(frames.check_bytes(x.nbytes) for _, x, _ in messages), dtype=torch.uint8
        )
        checks = room.data_ptr()
        idle = [r for r in sends if traffic.is_complete(traffic.latest.get((r, False), -1))]
        first = len(traffic.ranks)
        traffic.grow(len(messages))
        for index, (r, x, comes) in enumerate(messages, first):
            size, after = x.nbytes, traffic.latest.get((r, comes), -1)
            fd = connections[r]
            where = checks, x.data_ptr(), size, size if ready else -1, fd, comes, after
            bbr = fd in connections.bbr and not comes
            frames.begin(traffic.messages, index, header, digest, *where, bbr=bbr)
            checks += frames.check_bytes(size)
            start = traffic.ends.get((r, comes), connections.totals.get((r, comes), 0))
            traffic.starts.append(start)
            traffic.ends[r, comes] = start + frames.on_wire(size)
            traffic.latest[r, comes] = index
            traffic.ranks.append(r)
            traffic.tensors.append(x)
        traffic.tensors.append(room)
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
        connections = self.connections
        if connections.stalls is not None and connections.stalls.resumes:
            connections.release(traffic, self._outgoing)
        traffic.transfers -= 1
        if not traffic.transfers:
            connections.traffic = None
            connections.totals.update(traffic.ends)

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
        connections, now = self.connections, time.monotonic()
        quiet_since = now
        while True:
            left = quiet_since + self._timeout - now
            seconds = max(left, 0.001)
            if connections.stalls is not None:
                seconds = min(seconds, connections.stalls.look_seconds)
            milliseconds = min(max(round(1000 * seconds), 1), 2**31 - 1)
            outcome, index, error = connections.feed()
            if outcome == frames.FINE:
                at = traffic.messages, connections.secured, until, enough, milliseconds
                outcome, index, error = frames.move(*at)
            if outcome == frames.FINE:
                return
            now = time.monotonic()
            if outcome in (frames.SILENT, frames.INTERRUPTED):
                if index:  # whether any byte moved
                    quiet_since = now if outcome == frames.INTERRUPTED else now - seconds
                if self._look(quiet_since, now):
                    quiet_since = now = time.monotonic()
                elif now - quiet_since >= self._timeout:  # Python's handlers run in between
                    break
            elif outcome in (frames.CLOSED, frames.FAILED) and self._ended(index):
                quiet_since = now = time.monotonic()
            else:
                break
        traffic.failure = outcome, index, error
        traffic.tensors.clear()  # nothing moves any more
        if connections.stalls is not None:
            connections.stalls.ended = True
        raise self._error(*traffic.failure)

    # -- connections that are made again ----

    def _look(self, quiet_since: float, now: float) -> bool:
        """Nothing has moved since then. Returns whether a connection was made again."""
        stalls, traffic = self.connections.stalls, self._traffic
        if stalls is None:
            return False
        for rank in list(stalls.offered):
            if self._go_on(stalls, rank, stalls.offered.pop(rank)):
                return True
        each = zip(traffic.ranks, traffic.messages, strict=True)
        waited_for = sorted({r for r, m in each if m.comes and not frames.is_complete(m)})
        found = stalls.ask(waited_for, now - quiet_since)
        made = []
        for rank, answer in found.items():
            if answer.connection is None:
                continue
            if not stalls.resumes:
                answer.connection.close()
                why = f"the connection to rank {self.names[rank]} lets no byte pass: {FORGOTTEN}"
                log.warning("%s. It is made again", why)
                self._fail(why)
            made.append(self._go_on(stalls, rank, answer.connection, calls=True))
        return any(made)

    def _ended(self, index: int) -> bool:
        """The connection of message ``index`` has ended. Returns whether it was made again."""
        stalls, rank = self.connections.stalls, self._traffic.ranks[index]
        if stalls is None or not stalls.resumes:
            return False
        until = time.monotonic() + self._timeout
        while not stalls.ended and time.monotonic() < until:
            offered = stalls.offered.pop(rank, None)
            if offered is not None and self._go_on(stalls, rank, offered):
                return True
            answer = stalls.call([rank], failed=True).get(rank)
            if answer is None or answer.connection is None:
                return False
            if self._go_on(stalls, rank, answer.connection, calls=True):
                return True
            stalls.wait()
        return False

    def _go_on(
        self, stalls: Stalls, rank: int, connection: socket.socket, *, calls: bool = False
    ) -> bool:
        """Go on over a new ``connection`` to ``rank``, which this rank has made (``calls``) or the
        other one. Both say how much they have received, and send the rest again. Returns whether
        that worked: the other one may be busy."""
        connections, came = self.connections, bytearray()

        def give_up() -> bool:
            """While this rank waits, others may wait for it. Of two connections between two ranks,
            the one that the higher rank has made is used."""
            for r in [r for r in stalls.offered if r != rank]:
                self._go_on(stalls, r, stalls.offered.pop(r))
            return calls and stalls.rank < rank and rank in stalls.offered

        with contextlib.ExitStack() as on_failure:
            on_failure.callback(connection.close)
            try:
                configure(connection)
                received = connections.drain(rank)
                own = _POSITION.pack(received)
                # the caller may have given up: only its answer says that it goes on
                first, second = (b"", own) if calls else (own, b"")
                if not stalls.exchange(connection, first, len(own), came, give_up):
                    return False
                (position,) = _POSITION.unpack_from(came)
                again = connections.kept(rank, position)
                if again is None or stalls.in_vain(rank, (received, position)):
                    self._fail(self._why(rank, again is None))
                if not stalls.exchange(connection, second + again, 0, came, lambda: False):
                    return False
            except OSError:
                return False
            on_failure.pop_all()
        stalls.offered.pop(rank, None)
        connections.go_on(rank, connection, position)
        connections.early[rank] += came[len(own) :]
        log.warning(
            "the connection to rank %d was lost while both processes live, and was made again: %s",
            *(self.names[rank], FORGOTTEN),
        )
        return True

    def _fail(self, why: str) -> NoReturn:
        self._traffic.stalled = why
        self._traffic.failure = STALLED, 0, 0
        if self.connections.stalls is not None:
            self.connections.stalls.ended = True
        raise self._error(*self._traffic.failure)

    def _why(self, rank: int, lost: bool) -> str:
        pair = f"the connection to rank {self.names[rank]}"
        if lost:
            return (
                f"{pair} was lost though both processes live, with bytes that it had acknowledged"
            )
        return (
            f"{pair} was made again, and again lets nothing pass, though both processes live. If "
            "small messages pass and large ones do not, lower the MTU of the path (`ip link set "
            "mtu 1400`); see `laconic doctor`"
        )

    def _error(self, outcome: int, index: int, number: int) -> LostError | LinkError:
        """Of `Traffic.failure`."""
        if outcome == STALLED:
            return LostError(self._traffic.stalled)
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
    watch(connection, reads_at_once=False)


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
