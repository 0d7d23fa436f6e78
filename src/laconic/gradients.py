"""Gradient rounds: averaging while the backward pass still runs.

Buckets in reverse order of the parameters, about the order in which gradients appear; the same
on every rank. A bucket is sent as soon as its gradients and all buckets before it are there.
What is left is sent when the backward pass ends, and ``backward()`` returns when all is averaged,
so that clipping and unscaling see the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from laconic.errors import LinkError
from laconic.lane import Lane, Pending
from laconic.links.link import Link
from laconic.tensors import Bucket, Segment, bucketize, local

FIRST_BYTES = 2**20
"""The first bucket is small, so that sending starts early in the backward pass."""


class GradientRound:
    """Averages the gradients of ``params()`` over ``link`` in every backward pass for which
    ``active()``. ``announce()`` tells the other ranks of the pass, and returns what to call it."""

    def __init__(
        self,
        link: Link,
        lane: Lane,
        params: Callable[[], Iterable[Tensor]],
        active: Callable[[], bool],
        announce: Callable[[], str],
    ) -> None:
        self._link = link
        self._lane = lane
        self._all_params = params
        self._active = active
        self._announce = announce
        self._params: list[Tensor] = []
        self._hooks: list[RemovableHandle] = []
        self._buckets: list[Bucket] = []
        self._flats: list[Tensor] = []
        self._pending: list[Pending[None]] = []
        self._missing: list[int] = []
        self._seen: set[int] = set()
        self._task: int | None = None
        self._averaged = False
        self._label = ""
        self.refresh()

    def refresh(self) -> bool:
        """Follow the parameters: groups added, parameters frozen or thawed. Returns whether any
        joined."""
        params = [p for p in self._all_params() if p.requires_grad and p.numel()]
        before = {id(p) for p in self._params}
        if [id(p) for p in params] == [id(p) for p in self._params]:
            return False
        self.detach()
        self._params = params
        self._buckets = bucketize([params[::-1]], self._link.size, first_bytes=FIRST_BYTES)
        self._flats = []
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
        return any(id(p) not in before for p in params)

    def detach(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @property
    def broken(self) -> bool:
        """Whether a backward pass ended with some of its buckets sent and others not."""
        return 0 < len(self._pending) < len(self._buckets)

    # -- during backward ----

    def _begin(self, task: int) -> None:
        if self.broken:
            raise LinkError(
                f"{self._label}: a backward pass raised after a part of its gradients was sent, so "
                "this rank cannot join the others any more: start again from the last checkpoint"
            )
        self._task = task
        self._missing = list(self._counts)
        self._seen = set()
        self._pending = []
        if not self._flats:
            self._flats = [bucket.empty() for bucket in self._buckets]

    def _arrived(self, p: Tensor) -> None:
        """A parameter's gradient is complete."""
        if not self._active():
            self._averaged = False  # what no_sync() adds is averaged with the next pass, or step
            return
        task = torch._C._current_graph_task_id()
        if self._task != task:
            self._begin(task)
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
        bucket, flat = self._buckets[len(self._pending)], self._flats[len(self._pending)]
        for segment, values in zip(bucket.segments, bucket.split(flat), strict=True):
            gradient = segment.tensor.grad
            if gradient is None:
                values.zero_()
            elif gradient.is_sparse:
                raise ValueError("sparse gradients cannot be averaged: use sparse=False")
            else:
                values.copy_(local(gradient).reshape(-1)[segment.start : segment.stop])
        flat[bucket.numel :].zero_()
        if not self._pending:
            self._label = self._announce()
        self._pending.append(self._lane.submit(partial(self._link.mean, flat), self._label))

    def _end(self) -> None:
        """The backward pass is over: send what is left, wait, and write the means back."""
        try:
            while len(self._pending) < len(self._buckets):
                self._send()
            for pending in self._pending:
                pending.wait()
        finally:
            self._task, self._pending = None, []
        self._write()
        self._averaged = True

    def before_step(self) -> None:
        """Average now, where no backward pass did: this rank had no gradient at all, all its
        backward passes were under ``no_sync()``, or parameters have joined since."""
        joined = self.refresh()
        if self._active() and self._buckets and (joined or not self._averaged):
            self._begin(-1)
            self._end()

    def after_step(self, next_due: bool) -> None:
        """Forget the step's averaging; give back the room if the next step averages nothing."""
        self._averaged = False
        if not next_due:
            self._flats = []

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
                elif local(p).is_contiguous() and not local(p.grad).is_contiguous():
                    # p may be cut, and its gradient must be too; any other layout is kept, as
                    # fused optimisers walk p and its gradient side by side
                    p.grad = p.grad.contiguous()
                Segment(p.grad, segment.start, segment.stop).write(values)

    def _unused(self) -> set[int]:
        """Parameters without a gradient on any rank. All ranks see the same means, so all see
        the same parameters with a mean of nothing but zeros; only for those do they ask each
        other, which is seldom."""
        pieces = [
            (segment.tensor, piece)
            for bucket, flat in zip(self._buckets, self._flats, strict=True)
            for segment, piece in zip(bucket.segments, bucket.split(flat), strict=True)
        ]
        firsts = torch.stack([piece[0].float() for _, piece in pieces]).tolist()
        alive = {
            id(p)
            for (p, piece), first in zip(pieces, firsts, strict=True)
            if first != 0 or bool(piece.any())
        }
        doubtful = [p for p in self._params if id(p) not in alive]
        if not doubtful:
            return set()
        had = torch.tensor([float(p.grad is not None) for p in doubtful])
        had = had.to(self._flats[0].device)
        self._lane.call(partial(self._link.mean, had), self._label)
        return {id(p) for p, share in zip(doubtful, had.tolist(), strict=True) if share == 0}
