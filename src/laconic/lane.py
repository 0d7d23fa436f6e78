"""The lane: the one place from which collectives are issued, one after the other.

Every rank hands the same jobs to its lane in the same order, so the collectives have one order
everywhere, whichever thread asked. A job that nobody waits for yet runs in a thread beside the
training (on CUDA: on a stream of its own).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from laconic.errors import LinkError

T = TypeVar("T")


class Pending(Generic[T]):
    """The result of a job handed to a lane."""

    def __init__(self, lane: Lane | None) -> None:
        self._lane = lane
        self._event = threading.Event()
        self.error: BaseException | None = None
        self._result: T | None = None
        self._ready: torch.cuda.Event | None = None

    @classmethod
    def of(cls, result: T) -> Pending[T]:
        """One whose result is there already."""
        pending: Pending[T] = cls(None)
        pending.run(lambda: result)
        return pending

    def done(self) -> bool:
        """Whether the result is there (or the error)."""
        return self._event.is_set()

    def wait(self) -> T:
        """The result; raises what the job raised."""
        if not self._event.is_set():
            start = time.perf_counter()
            self._event.wait()
            if self._lane is not None:
                self._lane.waited(start)
        if self.error is not None:
            raise self.error
        if self._ready is not None:
            self._ready.wait()
        return self._result  # type: ignore[return-value]

    def run(self, job: Callable[[], T], stream: torch.cuda.Stream | None = None) -> None:
        """Run ``job`` here, its work on the card being on ``stream``; keep what comes of it."""
        try:
            self._result = job()
            self._ready = None if stream is None else stream.record_event()
        except BaseException as error:  # whatever it is, it belongs to who waits
            self.error = error
        self._event.set()

    def fail(self, error: BaseException) -> None:
        """Keep ``error`` for who waits."""
        self.error = error
        self._event.set()


class Lane:
    """Runs jobs in the order in which they come. ``threaded``: in a thread of its own; otherwise,
    as simulated workers need, at once."""

    def __init__(self, threaded: bool, device: torch.device) -> None:
        self.seconds_waiting = 0.0
        self.observer: Callable[[float, float], None] | None = None
        self._threaded = threaded
        self._device = device
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stream: torch.cuda.Stream | None = None
        self._latest: Pending[Any] | None = None
        self._error: BaseException | None = None

    def call(self, job: Callable[[], T], label: str) -> T:
        """Run ``job`` after those before it and return its result; counts as waiting. ``label``
        says what it is, should its link fail."""
        if self._latest is not None:
            self._latest.wait()  # raises what it raised; on CUDA, the card waits for its work
            self._latest = None
        if self._error is not None:
            raise self._error
        start = time.perf_counter()
        try:
            return _labelled(job, label)
        except LinkError as error:
            self._error = error
            raise
        finally:
            self.waited(start)

    def waited(self, start: float) -> None:
        """Book the time since ``start`` as waiting, and tell the observer."""
        end = time.perf_counter()
        self.seconds_waiting += end - start
        if self.observer is not None:
            self.observer(start, end)

    def submit(self, job: Callable[[], T], label: str) -> Pending[T]:
        """Have ``job`` run after those before it, beside what the caller does next. After one whose
        link failed none runs: they get its error."""
        pending: Pending[T] = Pending(self)
        named = partial(_labelled, job, label)
        if not self._threaded:
            pending.run(named)
            return pending
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True, name="laconic-lane")
            self._thread.start()
        self._latest = pending
        if self._device.type == "cuda":
            now = torch.cuda.current_stream(self._device).record_event()
            self._jobs.put(lambda: self._run_on_stream(pending, named, now))
        else:
            self._jobs.put(lambda: self._run(pending, named))
        return pending

    def _run(self, pending: Pending[Any], job: Callable[[], Any]) -> None:
        if self._error is None:
            pending.run(job, self._stream)
            self._error = pending.error
        else:
            pending.fail(self._error)

    def _run_on_stream(
        self, pending: Pending[T], job: Callable[[], T], after: torch.cuda.Event
    ) -> None:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            after.wait()
            self._run(pending, job)

    def _work(self) -> None:
        torch.set_grad_enabled(False)
        while (task := self._jobs.get()) is not None:
            task()

    def close(self) -> None:
        """Let the thread end after the jobs it has."""
        self._jobs.put(None)


def _labelled(job: Callable[[], T], label: str) -> T:
    try:
        with torch.inference_mode(False), torch.no_grad():  # its tensors outlive the caller's mode
            return job()
    except LinkError as error:
        raise LinkError(f"{label}: {error}") from error
