"""The link between processes on CPUs: a TCP connection between every two ranks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from laconic.errors import LinkError
from laconic.links.call_guard import CallGuard
from laconic.links.calls import Call
from laconic.links.collectives import Collectives
from laconic.links.link import FAR_SECONDS, AsyncLink
from laconic.links.rendezvous import Rendezvous
from laconic.links.texts import exchange_texts
from laconic.links.wire import Wire


class TcpLink(Collectives):
    """Collectives on CPU tensors over connections of laconic's own. Made by `over`; ``guard`` is
    that of the link, and its wire is connected."""

    threaded = True

    def __init__(self, guard: CallGuard) -> None:
        self.calls, self.wire = guard, guard.wire
        at = guard.rank, guard.size, self.wire.connections
        super().__init__(*at, guard.header, guard.blaming)
        self.far = False
        """Whether a round trip takes at least `FAR_SECONDS`; the same on all ranks."""

    @classmethod
    def over(cls, group: dist.ProcessGroup, timeout: timedelta) -> TcpLink:
        """A link over the ranks of ``group``, which meet at its store. Every rank must call it."""
        ranks, seconds = dist.get_process_group_ranks(group), timeout.total_seconds()
        wire = Wire(group.rank(), None, seconds, ranks)
        try:
            guard = CallGuard(wire)
            return cls._connected(guard, guard.meet(Rendezvous.of(group)))
        except BaseException:
            wire.close()
            raise

    @classmethod
    def _connected(cls, guard: CallGuard, addresses: Sequence[str]) -> TcpLink:
        near = [address.startswith(("127.", "::1|")) for address in addresses]
        if any(near) and not all(near):
            name = guard.ranks[near.index(True)]
            raise LinkError(
                f"rank {name} knows no address of its host but 127.0.0.1: "
                "set MASTER_ADDR there, or GLOO_SOCKET_IFNAME to the interface to use",
                ranks=[name],
            )
        try:
            guard.wire.connect(addresses, guard.secret, guard.check_connecting)
        except LinkError as error:
            guard.conclude(str(error), error.ranks)  # tells the ranks that still wait
        except ValueError as error:  # this rank's settings
            guard.conclude(f"rank {guard.ranks[guard.rank]}: {error}", [guard.ranks[guard.rank]])
        guard.wire.connections.answers = guard.answering()
        link = cls(guard)
        seconds = link.gather(torch.tensor([link.wire.round_trip()], dtype=torch.float64))
        link.far = float(seconds.max()) >= FAR_SECONDS
        return link

    @property
    def overlapping(self) -> AsyncLink | None:
        return self._awaiting(overlaps=True) if self.far else None

    def split(self, sets: Sequence[Sequence[int]]) -> TcpLink:
        members = next(ranks for ranks in sets if self.rank in ranks)
        ranks = [self.calls.ranks[r] for r in members]
        wire = Wire(members.index(self.rank), None, self.connections.timeout, ranks)
        try:
            addresses = exchange_texts(self.gather, wire.address)
            return self._connected(self.calls.split(members, wire), [addresses[r] for r in members])
        except BaseException:
            wire.close()
            raise

    # -- calls ----

    def begin_call(self, call: Call, *, wait: bool) -> bool:
        self.calls.begin(call)
        self.begin_digest(call.digest)
        if wait:  # else the call's own first message shows whether all ranks are in it
            self.gather(torch.tensor([call.id]))
        return wait

    def check(self) -> None:
        self.calls.check(self.joined)

    def check_peers(self) -> None:
        self.calls.check_peers(self.joined)

    def leave(self, broken: bool) -> None:
        self.calls.leave(broken)

    def status(self, text: str) -> None:
        self.calls.status(text)

    def close(self) -> None:
        self.wire.close()
        self.connections = self.wire.connections
