"""The link between processes with accelerators: collectives by way of host memory.

A collective copies what it sends to pinned host memory, makes the collective there, and copies what
has come back to the accelerator. So messages between accelerators take the path of those between
CPUs: its order of sums, checksums, TLS, and detection of lost ranks.

All work on the accelerator goes to the current stream, that of the communication thread, beside
which training goes on. Each direction takes one call: PCI Express copies a bucket of 25 MB in 1 ms,
while each call from Python takes 0.01 ms, during which training cannot make calls of its own.

- The copy to the host returns when it is done.
- Nothing waits here for the copy to the accelerator: whoever uses the result does so on this
  stream, or after it. Nobody else gets the host memory before that (`Accelerator.pinned`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laconic.device import accelerator
from laconic.links.link import AsyncLink, Blocking, Job, Link, awaiting, one_by_one
from laconic.links.wrapped import Around


class OnDevice(Blocking, Around):
    """A way of its own for collectives on tensors of ``device``. Those on others, and all else, go
    over ``link``."""

    def __init__(self, link: Link, device: torch.device) -> None:
        super().__init__(link)
        self.device = device

    def either(self, own: AsyncLink, others: AsyncLink) -> AsyncLink:
        """The collectives of ``own`` for tensors on the device, and of ``others`` elsewhere."""

        def collective(name: str, x: Tensor, *args: Any, **options: Any) -> Job[Any]:
            on = own if x.device.type == self.device.type else others
            job: Job[Any] = getattr(on, name)(x, *args, **options)
            return job

        return awaiting(self, lambda name: partial(collective, name))


class StagedLink(OnDevice):
    """Collectives on tensors of ``device`` over ``link``, by way of host memory."""

    def __init__(self, link: Link, device: torch.device) -> None:
        super().__init__(link, device)
        kind = accelerator(device)
        assert kind is not None, "CPU tensors need no staging"
        self._kind = kind

    @property
    def overlapping(self) -> AsyncLink | None:
        inner = self.link.overlapping
        return None if inner is None else self.either(_AsyncStaged(self, inner), inner)

    @property
    def awaited(self) -> AsyncLink:
        inner = one_by_one(self.link)
        return self.either(_AsyncStaged(self, inner), inner)

    def split(self, sets: Sequence[Sequence[int]]) -> Link:
        return StagedLink(self.link.split(sets), self.device)

    # -- copies ----

    def room(self, like: Tensor) -> Tensor:
        """Host memory for a tensor like this one."""
        return self._kind.pinned(like.nbytes).view(like.dtype).view(like.shape)

    def copied(self, x: Tensor) -> Tensor:
        """A copy of ``x`` in host memory, made before this returns."""
        return self.room(x).copy_(x)


class _AsyncStaged:
    """The collectives of ``link`` on its device's tensors, by those of ``inner`` on host memory."""

    def __init__(self, link: StagedLink, inner: AsyncLink) -> None:
        self._link, self._inner = link, inner
        self.rank, self.size, self.queues = link.rank, link.size, link.queues

    async def mean(self, x: Tensor) -> None:
        host = self._link.copied(x)
        await self._inner.mean(host)
        x.copy_(host, non_blocking=True)

    async def reduce_scatter(self, x: Tensor) -> Tensor:
        mean = await self._inner.reduce_scatter(self._link.copied(x))
        if mean.dtype != x.dtype:
            return mean.to(x.device)  # it waits: this memory is not pinned
        return x.view(self.size, -1)[self.rank].copy_(mean, non_blocking=True)

    async def all_gather(self, mine: Tensor, out: Tensor) -> None:
        host = self._link.room(out)
        await self._inner.all_gather(self._link.copied(mine), host)
        out.copy_(host, non_blocking=True)

    async def all_to_all(self, x: Tensor, out: Tensor) -> None:
        host = self._link.room(out)
        await self._inner.all_to_all(self._link.copied(x), host)
        out.copy_(host, non_blocking=True)

    async def broadcast(self, x: Tensor, root: int = 0) -> None:
        host = self._link.copied(x) if self.rank == root else self._link.room(x)
        await self._inner.broadcast(host, root)
        if self.rank != root:
            x.copy_(host, non_blocking=True)

    async def swap(
        self, x: Tensor, to: Sequence[int], source: Sequence[int]
    ) -> Sequence[Tensor | None]:
        pieces = await self._inner.swap(self._link.copied(x), to, source)
        return [None if piece is None else piece.to(x.device) for piece in pieces]

    async def gather(self, x: Tensor) -> Tensor:
        return (await self._inner.gather(self._link.copied(x))).to(x.device)
