"""The link between processes with accelerators: collectives by way of host memory.

A collective copies what it sends to pinned host memory, makes the collective there, and copies what
has come back to the accelerator. So messages between accelerators take the path of those between
CPUs: its order of sums, checksums, TLS, and detection of lost ranks.

All work on the accelerator goes to the current stream, that of the communication thread, beside
which training goes on. Each direction takes one copy: PCI Express copies a bucket of 25 MB in 1 ms,
while each call from Python takes 0.01 ms, during which training cannot make calls of its own.

- This thread waits for the copy to the host before it sends.
- Nothing waits here for the copy to the accelerator: whoever uses the result does so on this
  stream, or after it.
- Host memory that such a copy reads is used again only after it (`HostMemory`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laconic.device import Accelerator, Event, accelerator
from laconic.links.link import AsyncLink, Blocking, Job, Link, awaiting, one_by_one
from laconic.links.wrapped import Around


class HostMemory:
    """Pinned memory for collectives on ``device``, used again for later ones."""

    def __init__(self, kind: Accelerator, device: torch.device) -> None:
        self._kind, self._device = kind, device
        self._free: list[tuple[Tensor, Event]] = []
        """Each with the point after all copies from it."""

    @contextmanager
    def borrow(self, length: int, dtype: torch.dtype) -> Iterator[Tensor]:
        """Memory for ``length`` elements. Copies from it on the current stream may still be under
        way when it is returned."""
        size = length * dtype.itemsize
        memory = self._take(size)
        try:
            yield memory[:size].view(dtype)
        finally:
            copied = self._kind.current_stream(self._device).record_event()
            self._free.append((memory, copied))

    def _take(self, size: int) -> Tensor:
        self._free.sort(key=lambda entry: entry[0].numel())
        if not self._free:
            return self._kind.pinned(size)
        fitting = (i for i, (memory, _) in enumerate(self._free) if memory.numel() >= size)
        memory, copied = self._free.pop(next(fitting, -1))
        copied.synchronize()
        return memory if memory.numel() >= size else self._kind.pinned(size)


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

        return awaiting(self.rank, self.size, lambda name: partial(collective, name))


class StagedLink(OnDevice):
    """Collectives on tensors of ``device`` over ``link``, by way of host memory."""

    def __init__(self, link: Link, device: torch.device) -> None:
        super().__init__(link, device)
        kind = accelerator(device)
        assert kind is not None, "CPU tensors need no staging"
        self._kind = kind
        self.memory = HostMemory(kind, device)

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

    def copy(self, source: Tensor, to: Tensor) -> None:
        """Queue a copy between the device and the host."""
        to.copy_(source, non_blocking=True)

    @contextmanager
    def copied(self, x: Tensor) -> Iterator[Tensor]:
        """A copy of ``x`` in host memory, made before this returns."""
        with self.memory.borrow(x.numel(), x.dtype) as host:
            self.copy(x.reshape(-1), host)
            self._kind.current_stream(self.device).record_event().synchronize()
            yield host.view(x.shape)


class _AsyncStaged:
    """The collectives of ``link`` on its device's tensors, by those of ``inner`` on host memory."""

    def __init__(self, link: StagedLink, inner: AsyncLink) -> None:
        self._link, self._inner = link, inner
        self.rank, self.size = link.rank, link.size

    async def mean(self, x: Tensor) -> None:
        with self._link.copied(x) as host:
            await self._inner.mean(host)
            self._link.copy(host, x)

    async def reduce_scatter(self, x: Tensor) -> Tensor:
        with self._link.copied(x) as host:
            mean = await self._inner.reduce_scatter(host)
            if mean.dtype != x.dtype:
                return mean.to(x.device)  # it waits: this memory is not pinned
            own = x.view(self.size, -1)[self.rank]
            self._link.copy(mean, own)
            return own

    async def all_gather(self, mine: Tensor, out: Tensor) -> None:
        with (
            self._link.copied(mine) as own,
            self._link.memory.borrow(out.numel(), out.dtype) as host,
        ):
            await self._inner.all_gather(own, host)
            self._link.copy(host, out)

    async def all_to_all(self, x: Tensor, out: Tensor) -> None:
        with (
            self._link.copied(x) as sent,
            self._link.memory.borrow(x.numel(), x.dtype) as came,
        ):
            await self._inner.all_to_all(sent, came.view(x.shape))
            self._link.copy(came.view(x.shape), out)

    async def broadcast(self, x: Tensor, root: int = 0) -> None:
        if self.rank == root:
            with self._link.copied(x) as host:
                await self._inner.broadcast(host, root)
        else:
            with self._link.memory.borrow(x.numel(), x.dtype) as host:
                await self._inner.broadcast(host, root)
                self._link.copy(host, x.view(-1))

    async def swap(
        self, x: Tensor, to: Sequence[int], source: Sequence[int]
    ) -> Sequence[Tensor | None]:
        with self._link.copied(x) as host:
            pieces = await self._inner.swap(host, to, source)
            return [None if piece is None else piece.to(x.device) for piece in pieces]

    async def gather(self, x: Tensor) -> Tensor:
        with self._link.copied(x) as host:
            return (await self._inner.gather(host)).to(x.device)
