"""Gradient rounds: averaging while the backward pass still runs.

Buckets in reverse order of the parameters, about the order in which gradients appear; the same
on every rank. A bucket is sent as soon as its gradients and all buckets before it are there.
What is left is sent when the backward pass ends, and ``backward()`` returns when all is averaged,
so that clipping and unscaling see the mean.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from laconic.lane import Lane, Pending
from laconic.links.link import Link
from laconic.tensors import Bucket, Segment, bucketize, local, parameters

FIRST_BYTES = 2**20
"""The first bucket is small, so that sending starts early in the backward pass."""


class GradientRound:
    """Averages the gradients of the optimiser's parameters over ``link`` in every backward pass
    for which ``active()``."""

    def __init__(
        self, link: Link, lane: Lane, optimizer: Optimizer, active: Callable[[], bool]
    ) -> None:
        self._link = link
        self._lane = lane
        self._optimizer = optimizer
        self._active = active
        self._params: list[nn.Parameter] = []
        self._hooks: list[RemovableHandle] = []
        self._buckets: list[Bucket] = []
        self._flats: list[Tensor] = []
        self._pending: list[Pending[None]] = []
        self._missing: list[int] = []
        self._seen: set[int] = set()
        self._running = False
        self.averaged = False
        self.before_first: Callable[[], None] | None = None
        self.refresh()

    def refresh(self) -> None:
        """Follow the optimiser's parameters: groups added, parameters frozen or thawed."""
        groups = parameters(nn.Module(), self._optimizer)
        params = [p for group in groups for p in group if p.requires_grad]
        if [id(p) for p in params] == [id(p) for p in self._params]:
            return
        self.detach()
        self._params = params  # type: ignore[assignment]
        self._buckets = bucketize([params[::-1]], self._link.size, first_bytes=FIRST_BYTES)
        self._flats = [bucket.empty() for bucket in self._buckets]
        members = [[id(s.tensor) for s in bucket.segments] for bucket in self._buckets]
        self._counts = [len(set(m)) for m in members]
        self._homes: dict[int, list[int]] = {}
        for index, member in enumerate(members):
            for key in dict.fromkeys(member):
                self._homes.setdefault(key, []).append(index)
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]
            for p in params
        ]

    def detach(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # -- during backward ----

    def _begin(self) -> None:
        self._running = True
        self._missing = list(self._counts)
        self._seen = set()
        self._pending = []

    def _arrived(self, p: Tensor) -> None:
        """A parameter's gradient is complete."""
        if not self._active():
            return
        if not self._running:
            self._begin()
            Variable._execution_engine.queue_callback(self._end)
        if id(p) in self._seen:
            raise RuntimeError(
                "a parameter's gradient arrived twice in one backward pass, after it may have been "
                "sent: use non-reentrant checkpointing (use_reentrant=False)"
            )
        self._seen.add(id(p))
        for index in self._homes[id(p)]:
            self._missing[index] -= 1
        while len(self._pending) < len(self._buckets) and not self._missing[len(self._pending)]:
            self._send()

    @torch.no_grad()
    def _send(self) -> None:
        """The next bucket, in order."""
        if not self._pending and self.before_first is not None:
            self.before_first()
        bucket, flat = self._buckets[len(self._pending)], self._flats[len(self._pending)]
        for segment, values in zip(bucket.segments, bucket.split(flat), strict=True):
            gradient = segment.tensor.grad
            if gradient is None:
                values.zero_()
            else:
                values.copy_(local(gradient).reshape(-1)[segment.start : segment.stop])
        flat[bucket.numel :].zero_()
        self._pending.append(self._lane.submit(partial(self._link.mean, flat)))

    def _end(self) -> None:
        """The backward pass is over: send what is left, wait, and write the means back."""
        try:
            while len(self._pending) < len(self._buckets):
                self._send()
            for pending in self._pending:
                pending.wait()
        finally:
            self._running = False
        self._write()
        self.averaged = True

    def flush(self) -> None:
        """Average now, where no backward pass did: this rank had no gradient at all, or all its
        backward passes were under ``no_sync()``."""
        self._running = False  # a backward pass that raised half-way never came to its end
        if not self.averaged and self._active():
            self._begin()
            self._end()

    @torch.no_grad()
    def _write(self) -> None:
        """The means into ``.grad``; a parameter that no rank had a gradient for keeps None, so
        that the optimiser leaves it alone, as it would in one process."""
        unused = self._unused()
        for bucket, flat in zip(self._buckets, self._flats, strict=True):
            for segment, values in zip(bucket.segments, bucket.split(flat), strict=True):
                p = segment.tensor
                if id(p) in unused:
                    continue
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                elif not local(p.grad).is_contiguous():
                    p.grad = p.grad.contiguous()
                Segment(p.grad, segment.start, segment.stop).write(values)

    def _unused(self) -> set[int]:
        """Parameters without a gradient on any rank. All ranks see the same means, so all see
        the same parameters with a mean of nothing but zeros; only for those do they ask each
        other, which is seldom."""
        alive: set[int] = set()
        for bucket, flat in zip(self._buckets, self._flats, strict=True):
            pieces = bucket.split(flat)
            firsts = torch.stack([piece[0] for piece in pieces]).tolist()
            for segment, piece, first in zip(bucket.segments, pieces, firsts, strict=True):
                if first != 0 or bool(piece.any()):
                    alive.add(id(segment.tensor))
        doubtful = [p for p in self._params if id(p) not in alive]
        if not doubtful:
            return set()
        had = torch.tensor([float(p.grad is not None) for p in doubtful])
        had = had.to(self._flats[0].device)
        self._lane.call(partial(self._link.mean, had))
        return {id(p) for p, share in zip(doubtful, had.tolist(), strict=True) if share == 0}
