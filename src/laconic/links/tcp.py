"""The link between processes on CPUs: a TCP connection between every two ranks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.errors import LinkError
from laconic.links.call_guard import CallGuard
from laconic.links.calls import Call
from laconic.links.collectives import Collectives
from laconic.links.link import FAR_SECONDS, AsyncLink
from laconic.links.texts import ExchangeTexts, exchange_texts
from laconic.links.wire import Wire


def takes_cpu(group: dist.ProcessGroup) -> bool:
    """Whether a process group of torch has a back end for CPU tensors."""
    return "cpu" in str(dist.get_backend_config(group))


def texts_over(group: dist.ProcessGroup, device: torch.device) -> ExchangeTexts:
    """Exchanges texts over a process group of torch: on ``device`` if the group takes no CPU
    tensors."""

    def gather(x: Tensor) -> Tensor:
        x = x if takes_cpu(group) else x.to(device)
        rows = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(rows, x, group=group)
        return torch.stack(rows)

    return partial(exchange_texts, gather)


class TcpLink(Collectives):
    """Collectives on CPU tensors over connections of laconic's own. Made by `over` and `met`;
    ``guard`` and ``wire`` are those of the link, and connected."""

    threaded = True
    queues = False

    def __init__(self, guard: CallGuard, wire: Wire) -> None:
        super().__init__(guard, wire)
        self.calls, self.wire = guard, wire
        self.far = False
        """Whether a round trip takes at least `FAR_SECONDS`; the same on all ranks."""

    @classmethod
    def over(cls, group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> TcpLink:
        """A link over the ranks of ``group``, which they need until this returns. Every rank must
        call it."""
        return cls.met(group.rank(), group.size(), texts_over(group, device), timeout)

    @classmethod
    def met(cls, rank: int, size: int, exchange: ExchangeTexts, timeout: timedelta) -> TcpLink:
        """A link of ``size`` ranks, which ``exchange`` their addresses and a secret. Every rank
        must call it."""
        wire = Wire(rank, None, timeout.total_seconds(), range(size))
        try:
            guard = CallGuard(rank, range(size), wire, timeout=wire.timeout)
            return cls._connected(guard, wire, guard.meet(exchange, wire.address))
        except BaseException:
            wire.close()
            raise

    @classmethod
    def _connected(cls, guard: CallGuard, wire: Wire, addresses: Sequence[str]) -> TcpLink:
        near = [address.startswith(("127.", "::1|")) for address in addresses]
        if any(near) and not all(near):
            name = guard.ranks[near.index(True)]
            raise LinkError(
                f"rank {name} knows no address of its host but 127.0.0.1: "
                "set MASTER_ADDR there, or GLOO_SOCKET_IFNAME to the interface to use",
                ranks=[name],
            )
        try:
            wire.connect(addresses, guard.secret, guard.check_connecting)
        except LinkError as error:
            guard.conclude(str(error), error.ranks)  # tells the ranks that still wait
        except ValueError as error:  # this rank's settings
            guard.conclude(f"rank {guard.ranks[guard.rank]}: {error}", [guard.ranks[guard.rank]])
        wire.connections.answers = guard.answering()
        link = cls(guard, wire)
        seconds = link.gather(torch.tensor([wire.round_trip()], dtype=torch.float64))
        link.far = float(seconds.max()) >= FAR_SECONDS
        return link

    @property
    def overlapping(self) -> AsyncLink | None:
        return self.overlapped if self.far else None

    def split(self, sets: Sequence[Sequence[int]]) -> TcpLink:
        members = next(ranks for ranks in sets if self.rank in ranks)
        ranks = [self.calls.ranks[r] for r in members]
        wire = Wire(members.index(self.rank), None, self.wire.timeout, ranks)
        try:
            addresses = exchange_texts(self.gather, wire.address)
            guard = self.calls.split(members, wire)
            return self._connected(guard, wire, [addresses[r] for r in members])
        except BaseException:
            wire.close()
            raise

    # -- calls ----

    def begin_call(self, call: Call, *, wait: bool) -> bool:
        self.calls.begin(call)
        self.begin_digest(call.digest)
        if wait:  # else the first message shows whether all ranks are in it
            self.calls.compare(call, self.gather)
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
