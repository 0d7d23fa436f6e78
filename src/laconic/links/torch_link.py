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
from laconic.tensors import Scratch, mean_in_rank_order

ADVICE = (
    "Look at that rank's own output, then start all ranks again from the last checkpoint; "
    "where a rank is only slow, pass a longer timeout= to laconic.attach"
)
ADDRESS_BYTES = 64


class TorchLink:
    """Collectives over a process group of laconic's own.

    ``group``: the process group; ``device``: where the tensors are. On the CPU a reduction by
    slices is a direct all-to-all and a sum in rank order: exactly the simulator's arithmetic, and
    faster than gloo's own reduce-scatter and all-gather.
    """

    threaded = True

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> None:
        self._group = group
        self._native = device.type == "cuda"
        self._device = device
        self._timeout = timeout
        self._scratch = Scratch()
        self._announced: tuple[dist.Work, Tensor, int] | None = None
        self._doing = "attach()"
        self._names: Sequence[str] = ()
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._beacon = health.Beacon()
        self._addresses = self._share(self._beacon.address)

    @classmethod
    def world(cls, device: torch.device, timeout: timedelta) -> TorchLink:
        """The link over all ranks of the initialised default process group."""
        return cls(dist.new_group(timeout=timeout), device, timeout)

    def _share(self, address: str) -> list[str]:
        text = address.encode().ljust(ADDRESS_BYTES)
        everyone = self.gather(torch.tensor(list(text), dtype=torch.uint8, device=self._device))
        return [bytes(row).decode().strip() for row in everyone.tolist()]

    # -- the round announced, and errors ------------------------------------------------------

    def agree(self, step: int, code: int, names: Sequence[str]) -> None:
        self._names = names
        words = torch.zeros(self.size, dtype=torch.int64, device=self._device)
        words[self.rank] = mine = step * 256 + code
        work = self._start(dist.all_reduce(words, group=self._group, async_op=True))
        self._announced = (work, words, mine)

    def _start(self, work: dist.Work | None) -> dist.Work:
        assert work is not None, "this process is not a member of its own process group"
        return work

    def _wait(self, work: dist.Work | None) -> None:
        """Wait for ``work`` and, first, for the announcement that it belongs to."""
        try:
            if self._announced is not None:
                announcement, words, mine = self._announced
                self._announced = None
                announcement.wait()
                everyone = words.tolist()
                if any(word != mine for word in everyone):
                    self._disagree(everyone)
            self._start(work).wait()
        except LinkError:
            raise
        except RuntimeError as error:
            self._lost(error)

    def _disagree(self, words: list[int]) -> NoReturn:
        where = "; ".join(
            f"rank {r}: {self._names[word % 256]} after {word // 256} steps"
            for r, word in enumerate(words)
        )
        raise LinkError(
            f"the ranks are at different places ({where}). Every rank must take the same optimiser "
            "steps and make the same laconic calls; a GradScaler that skips steps is passed as "
            "attach(..., scaler=)"
        )

    def _lost(self, error: RuntimeError) -> NoReturn:
        others = [r for r in range(self.size) if r != self.rank]
        answers = {r: health.ask(self._addresses[r]) for r in others}
        missing = {r: a for r, a in answers.items() if a.startswith(("is ", "does "))}
        told = missing or {r: f"is {a}" for r, a in answers.items()}
        who = "; ".join(f"rank {r} {answer}" for r, answer in told.items())
        self.status(f"stopped in {self._doing}: lost {', '.join(f'rank {r}' for r in missing)}")
        raise LinkError(f"{who}. {ADVICE}. ({str(error).splitlines()[0]})") from error

    def status(self, text: str) -> None:
        self._doing = text
        self._beacon.set(text)

    # -- collectives ---------------------------------------------------------------------------

    def mean(self, x: Tensor) -> None:
        if self.size == 1:
            return
        if self._native:
            self._wait(dist.all_reduce(x, dist.ReduceOp.AVG, group=self._group, async_op=True))
        elif x.dtype == torch.float16:
            x.div_(self.size)  # the sum of n could overflow where the mean does not
            self._wait(dist.all_reduce(x, group=self._group, async_op=True))
        else:
            self._wait(dist.all_reduce(x, group=self._group, async_op=True))
            x.div_(self.size)

    def _exchange(self, out: Tensor, slices: Tensor) -> None:
        self._wait(dist.all_to_all_single(out, slices, group=self._group, async_op=True))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        if self._native:
            own = x.new_empty(x.numel() // self.size)
            reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
            op = dist.ReduceOp.AVG
            self._wait(reduce_scatter(own, x, op, group=self._group, async_op=True))
            return own
        room = self._scratch.take(x.numel(), x.dtype, x.device)
        self._exchange(room, x)
        return mean_in_rank_order(room.view(self.size, -1).unbind(), reuse=True)

    def all_gather(self, mine: Tensor, out: Tensor) -> None:
        if self._native:
            all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
            self._wait(all_gather(out, mine.to(out.dtype), group=self._group, async_op=True))
            return
        room = self._scratch.take(out.numel(), out.dtype, out.device)
        for copy in room.view(self.size, -1):
            copy.copy_(mine)
        self._exchange(out, room)

    def broadcast(self, x: Tensor) -> None:
        source = dist.get_global_rank(self._group, 0)
        self._wait(dist.broadcast(x, source, group=self._group, async_op=True))

    def gather(self, x: Tensor) -> Tensor:
        everyone = [torch.empty_like(x) for _ in range(self.size)]
        self._wait(dist.all_gather(everyone, x, group=self._group, async_op=True))
        return torch.stack(everyone)

    def split(self, sets: Sequence[Sequence[int]]) -> Link:
        mine: dist.ProcessGroup | None = None
        for ranks in sets:  # torch has every rank make every group, its own or not
            everywhere = [dist.get_global_rank(self._group, r) for r in ranks]
            group = dist.new_group(everywhere, timeout=self._timeout)
            mine = group if self.rank in ranks else mine
        assert mine is not None, "every rank belongs to one of the sets"
        return TorchLink(mine, self._device, self._timeout)

    def close(self) -> None:
        self._beacon.close()
