"""The collectives of a newcomer that catches up: they return what its donor has received."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from laconic.links.calls import Call
from laconic.links.elastic.relay import RelayError
from laconic.links.elastic.relay_frames import Record
from laconic.links.link import Parts, arrivals, at_once

T = TypeVar("T")


class Replay:
    """A link of one worker, until there is a donor. With a donor, ``feed(call)`` gives what its
    collectives have brought in the next unit of ``call``. Whoever waits for that calls `awake`
    after `wake` was called."""

    rank = 0

    def __init__(self, adopt: Callable[[], None]) -> None:
        self._adopt = adopt
        self.wake: Callable[[], None] = lambda: None
        self.feed: Callable[[Call], Record] | None = None
        self._call = Call(0, "setting up")
        self._outputs: list[Tensor] | None = None
        self.latest: Tensor | None = None
        """What the last collective of the latest unit has brought."""
        self.digests: Sequence[int] = []
        """See `Link.digests`: those of the donor's unit."""
        self._workers = 1
        self._thread: int | None = None

    def unit(self, job: Callable[[], T]) -> T:
        """Run ``job``."""
        self._outputs, self._thread = None, threading.get_ident()
        try:
            return job()
        finally:
            self._thread = None

    def awake(self) -> None:
        """A view was decided. Its members, who complete what this worker waits for, wait for this
        worker to connect. Where the communication thread is not the one that waits, it does so by
        itself."""
        if self._thread == threading.get_ident():
            self._adopt()

    def note(self, record: Record) -> None:
        """This was the latest unit."""
        self.latest = record.outputs[-1] if record.outputs else None

    def begin_call(self, call: Call) -> None:
        """The next units belong to ``call``."""
        self._call, self.digests = call, []

    @property
    def size(self) -> int:
        """How many workers took part in the donor's unit."""
        if self._thread == threading.get_ident():
            self._fetch()
        return self._workers

    def _fetch(self) -> list[Tensor] | None:
        if self._outputs is None and self.feed is not None:
            record = self.feed(self._call)
            self._workers, self._outputs = record.workers, list(record.outputs)
            self.digests = record.digests
            self.note(record)
        return self._outputs

    def _next(self) -> Tensor | None:
        """What the next collective has brought to the donor; None: there is no donor."""
        outputs = self._fetch()
        return None if outputs is None else outputs.pop(0)

    def next(self) -> Tensor:
        """What the next collective has brought to the donor, which there must be."""
        output = self._next()
        assert output is not None, "this worker catches up"
        return output

    def mean(self, x: Tensor) -> None:
        output = self._next()
        if output is not None:
            whole = output.numel() * output.element_size() // x.element_size()
            if not 0 <= whole - x.numel() < max(self._workers, 1):  # it is padded
                raise RelayError(
                    f"it exchanges {whole} elements in {self._call}, and this worker has "
                    f"{x.numel()}: the optimizer's groups and requires_grad must be as they are "
                    "there at that step"
                )
            x.copy_(like(output, x, x.numel()).view(x.shape))

    broadcast = mean

    def all_gather(self, mine: Tensor, out: Tensor, parts: Parts | None) -> None:
        output = self._next()
        if parts is not None:  # also where it does not count: `fill` may wait for a copy to ``out``
            parts.fill_all([self.rank])
        value = mine if output is None else like(output, out, out.numel())
        out.copy_(value.view(out.shape))

    def all_to_all(self, x: Tensor, out: Tensor, parts: Parts | None) -> None:
        # the result does not count: that of the unit is what its all_gather brings
        with at_once(parts, range(self.size), arrivals(0, self.size)):
            out.copy_(x)

    def gather(self, x: Tensor) -> Tensor:
        output = self._next()
        if output is None:
            return x.clone()[None]
        return like(output, x, self.size * x.numel()).view(self.size, *x.shape)

    def swap(self, x: Tensor, to: Sequence[int], source: Sequence[int]) -> list[Tensor | None]:
        return [None] * len(source)


def like(output: Tensor | None, x: Tensor, length: int) -> Tensor:
    """``output``, as bytes, as ``length`` elements of the dtype of ``x``."""
    assert output is not None, "the unit ends with this collective"
    return output.view(-1).view(torch.uint8).view(x.dtype)[:length]
