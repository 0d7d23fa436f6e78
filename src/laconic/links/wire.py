"""Messages between the ranks of a link: one TCP connection for each pair of ranks, and no thread.

The thread that makes a link's calls copies the bytes itself, between tensors and the kernel's
buffers, and sleeps while there is nothing to copy. gloo has a thread for this, which wakes up
several times for each message and then wakes the caller. With 4 ranks on 2 cores that was half of
the processor time of a round.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from laconic.errors import LinkError
from laconic.links import congestion, frames, handshake
from laconic.links.addresses import Address, listen
from laconic.links.connect import Connecting
from laconic.links.connections import Connections, Traffic
from laconic.links.sockets import tcp_info, watch
from laconic.links.stalls import Stalls

log = logging.getLogger("laconic")

_HANG_UP = getattr(select, "POLLRDHUP", 0)  # only Linux reports it before everything was read
_INFO = struct.Struct("=52x2I")  # struct tcp_info up to tcpi_last_data_recv, tcpi_last_ack_recv
_LEAST, NO_SAMPLE = struct.Struct("=148xI"), 2**32 - 1  # tcpi_min_rtt
_POSITION = struct.Struct(">Q")
FORGOTTEN = "a firewall or NAT between them has forgotten it"
FORGOTTEN_BYTES = "was lost though both processes live, with bytes that it had acknowledged"
NOTHING_PASSES = (
    "was made again, and again lets nothing pass, though both processes live. If small messages "
    "pass and large ones do not, lower the MTU of the path (`ip link set mtu 1400`); see `laconic "
    "doctor`"
)


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
            where = checks, x.data_ptr(), size, size if ready else -1, connections[r], comes, after
            frames.begin(traffic.messages, index, header, digest, *where)
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

    def send(self, size: int, rank: int | None = None) -> None:
        """Allow the first ``size`` bytes of the message for ``rank``, or for every rank, to be
        sent."""
        for index in self._outgoing.values() if rank is None else [self._outgoing[rank]]:
            self._traffic.messages[index].ready = size
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
        if connections.stalls is not None:
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
            raise traffic.failure()
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
        traffic.tensors.clear()  # nothing moves any more
        self._fail(self._cause(outcome, index, error))

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
        connections = {r: a.connection for r, a in found.items() if a.connection is not None}
        return any([self._go_on(stalls, r, c, calls=True) for r, c in connections.items()])

    def _ended(self, index: int) -> bool:
        """The connection of message ``index`` has ended. Returns whether it was made again."""
        stalls, rank = self.connections.stalls, self._traffic.ranks[index]
        if stalls is None:
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
                    why = FORGOTTEN_BYTES if again is None else NOTHING_PASSES
                    self._fail(
                        partial(LostError, f"the connection to rank {self.names[rank]} {why}")
                    )
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

    def _fail(self, failure: Callable[[], Exception]) -> NoReturn:
        """Raise ``failure()``, now and in later calls: the error itself would hold the
        connections."""
        self._traffic.failure = failure
        if self.connections.stalls is not None:
            self.connections.stalls.ended = True
        raise failure()

    def _cause(self, outcome: int, index: int, number: int) -> Callable[[], Exception]:
        """Makes the error for what `frames.move` has returned."""
        if outcome in (frames.SILENT, frames.INTERRUPTED):
            return partial(LostError, f"nothing was sent or received for {self._timeout:g} s")
        rank, message = self._traffic.ranks[index], self._traffic.messages[index]
        name = self.names[rank]
        if outcome == frames.CHANGED:
            return partial(ChangedError, rank, name)
        if outcome == frames.OTHER:
            serial, call_id, size, _ = frames.FIELDS.unpack_from(message.got)
            return partial(OtherCallError, rank, name, (serial, call_id), size, message.size)
        why = "closed by it" if outcome == frames.CLOSED else os.strerror(number)
        return partial(LostError, f"connection to rank {name}: {why}")


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

    def close(self) -> None:
        """Close the connections once no message is under way on them."""
        self.connections = Connections()
        self._server.close()
