"""The link between processes on NVIDIA GPUs: NCCL's collectives, over torch's process groups.

NCCL sums in an order of its own, and its watchdog reports ranks lost inside a collective. It would
sum bfloat16 in bfloat16: numbers of less than 32 bits are exchanged and summed here, in float32.
Its messages carry no call, so the ranks compare their calls before each of them, over laconic's own
connections. These also carry all tensors on CPUs, and show which ranks are lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.buckets import Scratch
from laconic.links.calls import Call
from laconic.links.link import AsyncLink, Link, Sent, one_by_one
from laconic.links.staged import OnDevice
from laconic.links.tcp import TcpLink
from laconic.tensors import mean_in_rank_order, state_dtype


class NcclLink(OnDevice):
    """Collectives on CUDA tensors over a process ``group``, and on CPU tensors over ``link``, of
    the same ranks. Made by `over`; `close` destroys the group."""

    queues = True
    overlapping = None

    def __init__(self, link: TcpLink, device: torch.device, group: dist.ProcessGroup) -> None:
        super().__init__(link, device)
        self.group, self.scratch = group, Scratch()
        self._tcp, self._closed = link, False

    @classmethod
    def over(cls, group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> NcclLink:
        """A link over the ranks of ``group``. Every rank must call it."""
        try:
            return cls(TcpLink.over(group, timeout), device, group)
        except BaseException:
            dist.destroy_process_group(group)
            raise

    @property
    def awaited(self) -> AsyncLink:
        return self.either(_AsyncNccl(self), one_by_one(self.link))

    def split(self, sets: Sequence[Sequence[int]]) -> Link:
        everywhere = [[dist.get_global_rank(self.group, r) for r in ranks] for ranks in sets]
        link = self._tcp.split(sets)
        group = own_group(everywhere, timedelta(seconds=link.connections.timeout))
        return NcclLink(link, self.device, group)

    def begin_call(self, call: Call, *, wait: bool) -> bool:
        return self._tcp.begin_call(call, wait=True)

    def sent(self) -> Mapping[int, Sent]:
        return {}

    def close(self) -> None:
        self.link.close()
        if not self._closed:
            self._closed = True
            dist.destroy_process_group(self.group)
            del self.group  # torch closes its connections once nobody holds it

    @contextmanager
    def blaming(self) -> Iterator[None]:
        """A context for collectives: an error of torch's inside names the ranks to blame."""
        try:
            yield
        except RuntimeError as error:
            self._tcp.calls.lost(error)
        self.joined = time.perf_counter()


def own_group(sets: Sequence[Sequence[int]], timeout: timedelta) -> dist.ProcessGroup:
    """The process group of the one of the ``sets`` of ranks that this rank belongs to."""
    # torch has every rank make every group, its own or not
    groups = [(ranks, dist.new_group(list(ranks), timeout=timeout)) for ranks in sets]
    own: dist.ProcessGroup = next(group for ranks, group in groups if dist.get_rank() in ranks)
    return own


class _AsyncNccl:
    """The collectives of ``link`` on its device's tensors, by torch's. They never pause."""

    def __init__(self, link: NcclLink) -> None:
        self._link = link
        self.rank, self.size, self.queues = link.rank, link.size, link.queues

    def _run(
        self, collective: Callable[..., dist.Work | None], *tensors: Any, **options: Any
    ) -> None:
        """Run a collective of torch's over the group, and wait for it: on CUDA, the current stream
        does."""
        with self._link.blaming():
            work = collective(*tensors, group=self._link.group, async_op=True, **options)
            assert work is not None, "this process is a member of its own process group"
            work.wait()

    async def mean(self, x: Tensor) -> None:
        if self.size == 1:
            return
        if state_dtype(x.dtype) == x.dtype:
            self._run(dist.all_reduce, x, op=dist.ReduceOp.AVG)
        elif x.numel() % self.size:
            whole = x.to(state_dtype(x.dtype))
            await self.mean(whole)
            x.copy_(whole)
        else:
            await self.all_gather(self._sliced_mean(x.view(self.size, -1)), x)

    async def reduce_scatter(self, x: Tensor) -> Tensor:
        if state_dtype(x.dtype) != x.dtype:
            return self._sliced_mean(x.view(self.size, -1))
        own = x.new_empty(x.numel() // self.size)
        reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        self._run(reduce_scatter, own, x, op=dist.ReduceOp.AVG)
        return own

    def _sliced_mean(self, x: Tensor) -> Tensor:
        """The mean over the ranks of their rows of ``x`` for this rank, in at least float32."""
        rows = self._link.scratch.take(x.numel(), x.dtype, x.device).view(x.shape)
        self._run(dist.all_to_all_single, rows, x)
        return mean_in_rank_order(rows.unbind())

    async def all_gather(self, mine: Tensor, out: Tensor) -> None:
        all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        self._run(all_gather, out, mine.to(out.dtype))

    async def all_to_all(self, x: Tensor, out: Tensor) -> None:
        self._run(dist.all_to_all_single, out, x)

    async def broadcast(self, x: Tensor, root: int = 0) -> None:
        self._run(dist.broadcast, x, dist.get_global_rank(self._link.group, root))

    async def swap(self, x: Tensor, to: Sequence[int], source: Sequence[int]) -> list[Tensor]:
        room = self._link.scratch.take(x.numel() * len(source), x.dtype, x.device)
        pieces = list(room.view(-1, x.numel()).unbind())
        assert len({*to}) == len(to) and len({*source}) == len(source), "one message each"
        group = self._link.group
        ops = [
            dist.P2POp(dist.irecv, piece, dist.get_global_rank(group, r), group)
            for r, piece in zip(source, pieces, strict=True)
        ]
        ops += [dist.P2POp(dist.isend, x, dist.get_global_rank(group, r), group) for r in to]
        # all at once: NCCL ends a receive before it begins a send that was not grouped with it, and
        # two ranks that exchange would each wait for the other
        with self._link.blaming():
            for work in dist.batch_isend_irecv(ops) if ops else []:
                work.wait()
        return pieces

    async def gather(self, x: Tensor) -> Tensor:
        rows = [torch.empty_like(x) for _ in range(self.size)]
        self._run(dist.all_gather, rows, x)
        return torch.stack(rows)
