"""The link over `torch.distributed`: gloo for CPU tensors, NCCL for CUDA tensors."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.errors import LinkError
from laconic.links import health
from laconic.links.link import Link
from laconic.tensors import mean_in_rank_order, state_dtype

ADVICE = (
    "Look at that rank's own output, then start all ranks again from the last checkpoint; "
    "where a rank is only slow, pass a longer timeout= to laconic.attach"
)
ADDRESS_BYTES = 64


class TorchLink:
    """Collectives over a process group of laconic's own.

    ``group``: the process group; ``device``: where the tensors are; ``ranks``: the members' ranks
    in the world, for messages. NCCL brings its own collectives. On the CPU they are rings of
    point-to-point messages, measured (4 ranks, 3.5 MB) at two thirds of the time of gloo's own
    all-reduce on one host and 1.01 times bytes over rate at 100 Mbit/s, where gloo's all-to-all
    takes 1.2 and its reduce-scatter 2.1; and the order of every sum is known, so that the
    simulator can repeat it.
    """

    threaded = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout: timedelta,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self._group = group
        self._native = device.type == "cuda"
        self._device = device
        self._timeout = timeout
        self.rank = group.rank()
        self.size = group.size()
        self._ranks = list(range(self.size)) if ranks is None else list(ranks)
        self._beacon = health.beacon()
        self._addresses = self._share(self._beacon.address)

    @classmethod
    def world(cls, device: torch.device, timeout: timedelta) -> TorchLink:
        """The link over all ranks of the initialised default process group."""
        return cls(dist.new_group(timeout=timeout), device, timeout)

    def _share(self, address: str) -> list[str]:
        text = address.encode().ljust(ADDRESS_BYTES)
        everyone = self.gather(torch.tensor(list(text), dtype=torch.uint8))
        return [bytes(row).decode().strip() for row in everyone.tolist()]

    # -- the call announced, and errors ----

    def agree(self, step: int, code: int, names: Sequence[str]) -> None:
        mine = step * 256 + code
        words = self.gather(torch.tensor([mine], dtype=torch.int64)).flatten().tolist()
        if any(word != mine for word in words):
            where = "; ".join(
                f"rank {self._ranks[r]}: {names[word % 256]} after {word // 256} steps"
                for r, word in enumerate(words)
            )
            raise LinkError(
                f"the ranks are at different places ({where}). Every rank must take the same "
                "optimiser steps and make the same laconic calls; a GradScaler that skips steps "
                "is passed as attach(..., scaler=)"
            )

    def _wait(self, *works: dist.Work | None) -> None:
        try:
            for work in works:
                assert work is not None, "this process is not a member of its own process group"
                work.wait()
        except RuntimeError as error:
            self._lost(error)

    def _lost(self, error: RuntimeError) -> NoReturn:
        others = [r for r in range(self.size) if r != self.rank]
        answers = {self._ranks[r]: health.ask(self._addresses[r]) for r in others}
        missing = {r: a for r, a in answers.items() if a.startswith(("is ", "does "))}
        told = missing or {r: f"is {a}" for r, a in answers.items()}
        who = "; ".join(f"rank {r} {answer}" for r, answer in told.items())
        doing = self._beacon.status
        lost = ", ".join(f"rank {r}" for r in missing) or "the connection"
        self.status(f"stopped in {doing}: lost {lost}")
        raise LinkError(f"{doing}: {who}. {ADVICE}. ({str(error).splitlines()[0]})") from error

    def status(self, text: str) -> None:
        self._beacon.set(text)

    # -- point to point ----

    def _send(self, x: Tensor, to: int) -> dist.Work:
        return self._group.send([x], to % self.size, 0)

    def _receive(self, x: Tensor, source: int) -> dist.Work:
        return self._group.recv([x], source % self.size, 0)

    def _pass_on(self, x: Tensor, room: Tensor) -> None:
        """``x`` to the next rank of the ring, the previous one's into ``room``."""
        self._wait(self._receive(room, self.rank - 1), self._send(x, self.rank + 1))

    # -- collectives ----

    def mean(self, x: Tensor) -> None:
        if self.size == 1:
            return
        if self._native:
            self._wait(dist.all_reduce(x, dist.ReduceOp.AVG, group=self._group, async_op=True))
        elif x.numel() % self.size:
            x.copy_(mean_in_rank_order(self.gather(x).unbind()))
        else:
            self.all_gather(self.reduce_scatter(x), x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        if self._native:
            own = x.new_empty(x.numel() // self.size)
            reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
            op = dist.ReduceOp.AVG
            self._wait(reduce_scatter(own, x, op, group=self._group, async_op=True))
            return own
        slices = x.view(self.size, -1)
        if x.dtype != state_dtype(x.dtype):
            return self._sum_at_owner(slices)
        # slice k starts at rank k+1, gains a summand at every rank, and ends at rank k
        room = torch.empty_like(slices[0])
        for hop in range(1, self.size):
            self._pass_on(slices[(self.rank - hop) % self.size], room)
            slices[(self.rank - hop - 1) % self.size] += room
        return slices[self.rank].div_(self.size)

    def _sum_at_owner(self, slices: Tensor) -> Tensor:
        """For half precision: every rank's slice travels as it is, and is summed in float32."""
        received = torch.empty_like(slices)
        received[self.rank] = slices[self.rank]
        for hop in range(1, self.size):
            to, source = (self.rank + hop) % self.size, (self.rank - hop) % self.size
            self._wait(self._receive(received[source], source), self._send(slices[to], to))
        return mean_in_rank_order(received.unbind())

    def all_gather(self, mine: Tensor, out: Tensor) -> None:
        if self._native:
            all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
            self._wait(all_gather(out, mine.to(out.dtype), group=self._group, async_op=True))
            return
        slices = out.view(self.size, -1)
        slices[self.rank].copy_(mine)
        for hop in range(self.size - 1):
            ours, theirs = (self.rank - hop) % self.size, (self.rank - hop - 1) % self.size
            self._pass_on(slices[ours], slices[theirs])

    def broadcast(self, x: Tensor) -> None:
        source = dist.get_global_rank(self._group, 0)
        self._wait(dist.broadcast(x, source, group=self._group, async_op=True))

    def gather(self, x: Tensor) -> Tensor:
        x = x.to(self._device)
        everyone = x.new_empty(self.size, *x.shape)
        everyone[self.rank] = x
        if self._native:
            rows = list(everyone.unbind())
            self._wait(dist.all_gather(rows, x, group=self._group, async_op=True))
            return torch.stack(rows)
        others = [r for r in range(self.size) if r != self.rank]
        receives = [self._receive(everyone[r], r) for r in others]
        self._wait(*receives, *[self._send(everyone[self.rank], r) for r in others])
        return everyone

    def split(self, sets: Sequence[Sequence[int]]) -> Link:
        mine: tuple[dist.ProcessGroup, list[int]] | None = None
        for ranks in sets:  # torch has every rank make every group, its own or not
            everywhere = [dist.get_global_rank(self._group, r) for r in ranks]
            group = dist.new_group(everywhere, timeout=self._timeout)
            if self.rank in ranks:
                mine = group, [self._ranks[r] for r in ranks]
        assert mine is not None, "every rank belongs to one of the sets"
        return TorchLink(mine[0], self._device, self._timeout, mine[1])
