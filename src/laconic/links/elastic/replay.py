"""The collectives of a newcomer that catches up: they return what its donor has received."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from laconic.links.calls import Call
from laconic.links.elastic.relay import RelayError
from laconic.links.elastic.relay_frames import Record

T = TypeVar("T")


class Replay:
    """A link of one worker, until there is a donor. With a donor, ``feed(call)`` gives what its
    collectives have brought in the next unit of ``call``. Whoever waits for that calls `adopt`
    now and then."""

    rank = 0

    def __init__(self, adopt: Callable[[], None]) -> None:
        self._adopt = adopt
        self.feed: Callable[[Call], Record] | None = None
        self._call = Call(0, "setting up")
        self._outputs: list[Tensor] | None = None
        self.latest: Tensor | None = None
        """What the last collective of the latest unit has brought."""
        self.digests: Sequence[int] = []
        """See `Link.digests`: those of the donor's unit."""
        self._workers: Sequence[str] = [""]
        self._thread: int | None = None

    def unit(self, job: Callable[[], T]) -> T:
        """Run ``job``."""
        self._outputs, self._thread = None, threading.get_ident()
        try:
            return job()
        finally:
            self._thread = None

    def adopt(self) -> None:
        """Connect, if a view was decided. Its members, who complete what this worker waits for,
        wait for that. Where the communication thread is not the one that waits, it does so by
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
    def workers(self) -> Sequence[str]:
        """The ids of those that took part in the donor's unit."""
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

    def decided(self) -> Tensor:
        """The bytes that the next poll has brought to the donor, which there must be."""
        outputs = self._fetch()
        assert outputs is not None, "this worker catches up"
        return outputs.pop(0)

    def next(self, x: Tensor, length: int) -> Tensor | None:
        """What the next collective has brought to the donor: ``length`` elements of the dtype of
        ``x``, perhaps padded. None: there is no donor."""
        outputs = self._fetch()
        if outputs is None:
            return None
        output = outputs.pop(0)
        whole = output.nbytes // x.element_size()
        if not 0 <= whole - length < len(self._workers):
            raise RelayError(
                f"it exchanges {whole} elements in {self._call}, and this worker has {length}: the "
                "optimizer's groups and requires_grad must be as they are there at that step"
            )
        return output
