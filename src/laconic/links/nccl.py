"""The link between processes on NVIDIA GPUs: NCCL's collectives, over torch's process groups.

NCCL sums in an order of its own, and reports lost ranks by its own watchdog. It would sum bfloat16
in bfloat16: numbers of less than 32 bits are exchanged and summed here, in float32. Its messages
carry no call: the ranks compare their calls by a gather before each of them, over the process
group's back end for CPU tensors where there is one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.buckets import Scratch
from laconic.links.call_guard import CallGuard
from laconic.links.calls import Call
from laconic.links.link import Link, Quiet
from laconic.links.tcp import takes_cpu, texts_over
from laconic.tensors import mean_in_rank_order, state_dtype


class NcclLink(Quiet):
    """Collectives on CUDA tensors over a process ``group``, and on CPU tensors where it takes them,
    as that of `laconic.init` does. Made by `over`; ``owned``: `close` destroys the group."""

    threaded = True
    queues = True

    def __init__(
        self,
        guard: CallGuard,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout: timedelta,
        owned: bool,
    ) -> None:
        self._guard, self._device, self._timeout = guard, device, timeout
        self._group, self._owned = group, owned
        self.rank, self.size = guard.rank, guard.size
        self._takes_cpu = takes_cpu(group)
        self._scratch = Scratch()
        self.joined = time.perf_counter()

    @classmethod
    def over(
        cls,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout: timedelta,
        *,
        owned: bool = False,
    ) -> NcclLink:
        """A link over the ranks of ``group``. Every rank must call it."""
        seconds = timeout.total_seconds()
        guard = CallGuard(group.rank(), range(group.size()), None, timeout=seconds)
        guard.meet(texts_over(group, device), "")
        return cls(guard, group, device, timeout, owned)

    def split(self, sets: Sequence[Sequence[int]]) -> Link:
        mine: tuple[dist.ProcessGroup, Sequence[int]] | None = None
        for ranks in sets:  # torch has every rank make every group, its own or not
            everywhere = [dist.get_global_rank(self._group, r) for r in ranks]
            group = dist.new_group(everywhere, timeout=self._timeout)
            if self.rank in ranks:
                mine = group, ranks
        assert mine is not None, "every rank belongs to one of the sets"
        guard = self._guard.split(mine[1], None)
        return NcclLink(guard, mine[0], self._device, self._timeout, owned=True)

    # -- calls ----

    def begin_call(self, call: Call, *, wait: bool) -> bool:
        self._guard.begin(call)
        self._guard.compare(call, self.gather)
        return True

    def check(self) -> None:
        self._guard.check(self.joined)

    def check_peers(self) -> None:
        self._guard.check_peers(self.joined)

    def leave(self, broken: bool) -> None:
        self._guard.leave(broken)

    def status(self, text: str) -> None:
        self._guard.status(text)

    def close(self) -> None:
        if self._owned:
            self._owned = False
            dist.destroy_process_group(self._group)
            del self._group  # torch closes its connections once nobody holds it

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        """A context for collectives: an error of torch's inside names the ranks to blame."""
        try:
            yield
        except RuntimeError as error:
            self._guard.lost(error)
        self.joined = time.perf_counter()

    def _run(
        self, collective: Callable[..., dist.Work | None], *tensors: Any, **options: Any
    ) -> None:
        """Run a collective of torch's over the group, and wait for it: on CUDA, the current stream
        does."""
        with self._blaming():
            work = collective(*tensors, group=self._group, async_op=True, **options)
            assert work is not None, "this process is a member of its own process group"
            work.wait()

    # -- collectives ----

    def mean(self, x: Tensor) -> None:
        if self.size == 1:
            return
        if self._only_on_device(x, self.mean):
            return
        if state_dtype(x.dtype) != x.dtype:
            if x.numel() % self.size:
                whole = x.to(state_dtype(x.dtype))
                self.mean(whole)
                x.copy_(whole)
            else:
                self.all_gather(self._sliced_mean(x.view(self.size, -1)), x)
        elif x.is_cuda:
            self._run(dist.all_reduce, x, op=dist.ReduceOp.AVG)
        else:  # a buffer on the CPU, by gloo, whose older versions have no AVG
            self._run(dist.all_reduce, x)
            x.div_(self.size)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        if state_dtype(x.dtype) != x.dtype:
            return self._sliced_mean(x.view(self.size, -1))
        own = x.new_empty(x.numel() // self.size)
        reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        self._run(reduce_scatter, own, x, op=dist.ReduceOp.AVG)
        return own

    def _only_on_device(self, x: Tensor, run: Callable[[Tensor], None]) -> bool:
        """Whether ``x`` is on the CPU and the group takes no CPU tensors: then ``run`` was called
        on a copy on the device, and x has its result."""
        if x.device.type != "cpu" or self._takes_cpu:
            return False
        copy = x.to(self._device)
        run(copy)
        x.copy_(copy)
        return True

    def _sliced_mean(self, x: Tensor) -> Tensor:
        """The mean over the ranks of their rows of ``x`` for this rank, in at least float32."""
        rows = self._scratch.take(x.numel(), x.dtype, x.device).view(x.shape)
        self._run(dist.all_to_all_single, rows, x)
        return mean_in_rank_order(rows.unbind())

    def all_gather(self, mine: Tensor, out: Tensor) -> None:
        all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        self._run(all_gather, out, mine.to(out.dtype))

    def all_to_all(self, x: Tensor, out: Tensor) -> None:
        self._run(dist.all_to_all_single, out, x)

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        if self._only_on_device(x, partial(self.broadcast, root=root)):
            return
        self._run(dist.broadcast, x, dist.get_global_rank(self._group, root))

    def swap(self, x: Tensor, to: Sequence[int], source: Sequence[int]) -> list[Tensor]:
        room = self._scratch.take(x.numel() * len(source), x.dtype, x.device)
        pieces = list(room.view(-1, x.numel()).unbind())
        assert len({*to}) == len(to) and len({*source}) == len(source), "one message each"
        self._run_batch(dict(zip(source, pieces, strict=True)), dict.fromkeys(to, x))
        return pieces

    def _run_batch(self, receives: Mapping[int, Tensor], sends: Mapping[int, Tensor]) -> None:
        """All messages at once, by rank: NCCL ends a receive before it begins a send that was not
        grouped with it, and two ranks that exchange would each wait for the other."""
        ops = [
            dist.P2POp(op, x, dist.get_global_rank(self._group, r), self._group)
            for op, messages in ((dist.irecv, receives), (dist.isend, sends))
            for r, x in messages.items()
        ]
        with self._blaming():
            for work in dist.batch_isend_irecv(ops) if ops else []:
                work.wait()

    def gather(self, x: Tensor) -> Tensor:
        if not self._takes_cpu:
            x = x.to(self._device)
        rows = [torch.empty_like(x) for _ in range(self.size)]
        self._run(dist.all_gather, rows, x)
        return torch.stack(rows)
