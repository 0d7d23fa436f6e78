"""The link between processes with accelerators: collectives by way of host memory.

A collective copies what it sends to pinned host memory, makes the collective there, and copies what
has come back to the accelerator. So messages between accelerators take the path of those between
CPUs: its order of sums, checksums, TLS, and detection of lost ranks.

All work on the accelerator goes to the current stream, that of the communication thread, beside
which training goes on:

- Copies to the host are queued together, a piece each. This thread waits for a piece right before
  it is sent, so that one piece is copied while others travel.
- Copies to the accelerator are queued as pieces arrive, and nothing waits for them here: whoever
  uses the result does so on this stream, or after it.
- Host memory that such a copy reads is used again only after it (`HostMemory`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from laconic.device import Accelerator, Event, accelerator
from laconic.links.link import AsyncLink, Blocking, Link, Parts, arrivals, hops, one_by_one
from laconic.links.wrapped import Around

PIECE_BYTES = 2**20
"""The length of a piece. PCI Express copies it in about 0.05 ms; queuing it takes 0.01 ms."""


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


class StagedLink(Blocking, Around):
    """Collectives on tensors of ``device`` over ``link``. Those on CPU tensors are made on ``link``
    itself."""

    def __init__(self, link: Link, device: torch.device) -> None:
        super().__init__(link)
        kind = accelerator(device)
        assert kind is not None, "CPU tensors need no staging"
        self.device = device
        self._kind = kind
        self.memory = HostMemory(kind, device)

    @property
    def overlapping(self) -> AsyncLink | None:
        inner = self.link.overlapping
        return None if inner is None else _AsyncStaged(self, inner)

    @property
    def awaited(self) -> AsyncLink:
        return _AsyncStaged(self, one_by_one(self.link))

    def split(self, sets: Sequence[Sequence[int]]) -> Link:
        return StagedLink(self.link.split(sets), self.device)

    # -- copies ----

    def staged(self, x: Tensor) -> bool:
        """Whether ``x`` travels by way of host memory."""
        return x.device.type == self.device.type

    def parts(
        self,
        row: int,
        dtype: torch.dtype,
        sends: tuple[Tensor, Tensor, Sequence[int]] | None,
        brings: tuple[Tensor, Tensor, Sequence[int]] | None = None,
    ) -> Parts:
        """Pieces of rows of ``row`` elements.

        ``sends``: rows on the device, those of the host that they are copied to, and the numbers of
        these rows in the order in which they will be sent. Their copies are queued now. ``brings``:
        rows of the host, and those on the device that they are copied to when they have come, and
        which of them.
        """
        step = max(PIECE_BYTES // dtype.itemsize, 1)
        parts = Parts([*range(step, row, step), row])
        copied: dict[tuple[int, int], Event] = {}
        if sends is not None:
            source, host, order = sends
            for part in parts:
                for r in order:
                    copied[r, part.start] = self.copy(source[r, part], host[r, part])

        def fill(r: int, part: slice) -> None:
            if (r, part.start) in copied:
                copied.pop((r, part.start)).synchronize()

        def use(r: int, part: slice) -> None:
            if brings is not None and r in brings[2]:
                self.copy(brings[0][r, part], brings[1][r, part])

        return Parts(parts.ends, fill, use)

    def copy(self, source: Tensor, to: Tensor) -> Event:
        """Queue a copy between the device and the host, and return the point after it."""
        to.copy_(source, non_blocking=True)
        return self._kind.current_stream(self.device).record_event()

    @contextmanager
    def copied(self, x: Tensor) -> Iterator[Tensor]:
        """A copy of ``x`` in host memory."""
        with self.memory.borrow(x.numel(), x.dtype) as host:
            self.copy(x.reshape(-1), host).synchronize()
            yield host.view(x.shape)


class _AsyncStaged:
    """The collectives of ``link``, by those of ``inner`` on host memory."""

    def __init__(self, link: StagedLink, inner: AsyncLink) -> None:
        self._link, self._inner = link, inner
        self.rank, self.size = link.rank, link.size

    async def mean(self, x: Tensor, parts: Parts | None = None) -> None:
        if not self._link.staged(x):
            await self._inner.mean(x, parts)
            return
        assert parts is None, "only links of the host get them"
        cut = x.numel() % self.size == 0
        order = hops(self.rank, self.size) if cut else [0]
        with self._link.memory.borrow(x.numel(), x.dtype) as host:
            rows, copies = x.view(len(order), -1), host.view(len(order), -1)
            there, back = (rows, copies, order), (copies, rows, order)
            await self._inner.mean(host, self._link.parts(rows.shape[1], x.dtype, there, back))

    async def reduce_scatter(
        self, x: Tensor, owners: int | None = None, parts: Parts | None = None
    ) -> Tensor:
        link = self._link
        if not link.staged(x):
            return await self._inner.reduce_scatter(x, owners, parts)
        assert parts is None, "only links of the host get them"
        rows = x.view(owners or self.size, -1)
        with link.memory.borrow(x.numel(), x.dtype) as host:
            order = [r for r in hops(self.rank, self.size) if r < len(rows)]
            there = rows, host.view(rows.shape), order
            pieces = link.parts(rows.shape[1], x.dtype, there)
            mean = await self._inner.reduce_scatter(host, owners, pieces)
            if not mean.numel():
                return x[:0]
            if mean.dtype != x.dtype:
                return mean.to(link.device)  # it waits: this memory is not pinned
            own = rows[self.rank]
            link.copy(mean, own)
            return own

    async def all_gather(
        self,
        mine: Tensor,
        out: Tensor,
        owners: int | None = None,
        parts: Parts | None = None,
    ) -> None:
        if not self._link.staged(out):
            await self._inner.all_gather(mine, out, owners, parts)
            return
        rows = out.view(owners or self.size, -1)
        order = [r for r in arrivals(self.rank, self.size) if r < len(rows)]
        own = [self.rank] if self.rank in order else []
        if parts is not None:
            parts.fill_all(own)
        if own and mine.data_ptr() != rows[self.rank].data_ptr():
            rows[self.rank].copy_(mine)
        with self._link.memory.borrow(out.numel(), out.dtype) as host:
            copies = host.view(rows.shape)
            # this rank's own row comes back, too: what counts is what a link brings
            there, back = (rows, copies, own), (copies, rows, order)
            pieces = self._link.parts(rows.shape[1], out.dtype, there, back)
            first = copies[self.rank] if own else host[:0]
            await self._inner.all_gather(first, host, owners, pieces)
        if parts is not None:
            parts.use_all(order)

    async def all_to_all(self, x: Tensor, out: Tensor, parts: Parts | None = None) -> None:
        link = self._link
        if not link.staged(x):
            await self._inner.all_to_all(x, out, parts)
            return
        if parts is not None:
            parts.fill_all(hops(self.rank, self.size))
        out[self.rank].copy_(x[self.rank])
        others = hops(self.rank, self.size)[:-1]
        with (
            link.memory.borrow(x.numel(), x.dtype) as sent,
            link.memory.borrow(x.numel(), x.dtype) as came,
        ):
            there = x, sent.view(x.shape), others
            back = came.view(x.shape), out, others
            pieces = link.parts(x.shape[1], x.dtype, there, back)
            await self._inner.all_to_all(there[1], back[0], pieces)
        if parts is not None:
            parts.use_all(arrivals(self.rank, self.size))

    async def broadcast(self, x: Tensor, root: int = 0) -> None:
        link = self._link
        if not link.staged(x):
            await self._inner.broadcast(x, root)
        elif self.rank == root:
            with link.copied(x) as host:
                await self._inner.broadcast(host, root)
        else:
            with link.memory.borrow(x.numel(), x.dtype) as host:
                await self._inner.broadcast(host, root)
                link.copy(host, x.view(-1))

    async def swap(
        self, x: Tensor, to: Sequence[int], source: Sequence[int]
    ) -> Sequence[Tensor | None]:
        if not self._link.staged(x):
            return await self._inner.swap(x, to, source)
        with self._link.copied(x) as host:
            pieces = await self._inner.swap(host, to, source)
            return [None if piece is None else piece.to(self._link.device) for piece in pieces]

    async def gather(self, x: Tensor) -> Tensor:
        if not self._link.staged(x):
            return await self._inner.gather(x)
        with self._link.copied(x) as host:
            return (await self._inner.gather(host)).to(self._link.device)
