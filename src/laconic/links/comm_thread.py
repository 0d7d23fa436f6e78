"""The lane: the one place from which collectives are issued, one after the other.

Every rank hands the same jobs to its lane in the same order, so the collectives have one order
everywhere, whichever thread asked. A job that nobody waits for yet runs in a thread beside the
training (on CUDA: on a stream of its own).
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from laconic.errors import LinkError, NotFiniteError

T = TypeVar("T")


LEAVING = 5.0
"""Seconds that a process at its end waits for messages in flight, which others may wait for."""
LOOK = 1.0
"""Seconds of waiting after which one looks after the other ranks, and again and again; the link
says what it does how often."""


class Pending(Generic[T]):
    """The result of a job handed to a lane."""

    def __init__(self, lane: Lane | None, label: str = "") -> None:
        self._lane = lane
        self._label = label
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
        if self._lane is not None and not self._event.is_set():
            start = time.perf_counter()
            try:
                while not self._event.wait(LOOK):
                    self._lane.look(self._label)
            finally:
                self._lane.waited(start)
        if self.error is not None:
            raise self.error
        if self._ready is not None and self._lane is not None:
            # of the model's device, which need not be the current one
            self._ready.wait(torch.cuda.current_stream(self._lane.device))
            for tensor in _tensors(self._result):  # made on the lane's stream, used on this one
                if tensor.is_cuda:  # buffers may be on the CPU
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return self._result  # type: ignore[return-value]

    def settle(self) -> None:
        """Wait for it to be over, whatever comes of it."""
        with contextlib.suppress(Exception):
            self.wait()

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
    as simulated workers need, at once. ``check`` raises a `LinkError` if other ranks are known not
    to come to what this one waits for."""

    def __init__(self, threaded: bool, device: torch.device, check: Callable[[], None]) -> None:
        self.seconds_waiting = 0.0
        self.observer: Callable[[float, float], None] | None = None
        self._threaded = threaded
        self.device = device
        self._check = check
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._before: threading.Thread | None = None
        self._stream: torch.cuda.Stream | None = None
        self._latest: Pending[Any] | None = None
        self._preface: Callable[[], object] | None = None
        self._error: BaseException | None = None
        self._waiting: deque[Pending[Any]] = deque()

    def announce(self, preface: Callable[[], object]) -> None:
        """Run ``preface`` right before the next job, and as a part of it."""
        self._preface = preface

    def call(self, job: Callable[[], T], label: str) -> T:
        """Run ``job`` after those before it and return its result; counts as waiting. ``label``
        says what it is, should its link fail."""
        if self._threaded and self.device.type == "cpu":
            return self.submit(job, label).wait()
        if self._latest is not None:
            self._latest.wait()  # raises what it raised; the card waits for its work
            self._latest = None
        if self._error is not None:
            raise self._error
        start = time.perf_counter()
        try:
            return self._whole(job, label)()
        except BaseException as error:
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
        """Have ``job`` run after those before it, beside what the caller does next. After one that
        failed none runs, as ranks would no longer be in step: they get its error."""
        pending: Pending[T] = Pending(self, label)
        named = self._whole(job, label)
        if not self._threaded:
            if self._error is None:
                pending.run(named)
                self._error = pending.error if isinstance(pending.error, Exception) else None
            else:
                pending.fail(self._error)
            return pending
        if self._thread is None:
            work = partial(_work, self._jobs, self._before)
            self._thread = threading.Thread(target=work, daemon=True, name="laconic-lane")
            self._thread.start()
            _lanes.add(self)
        self._latest = pending
        self._waiting.append(pending)
        if self.device.type == "cuda":
            now = torch.cuda.current_stream(self.device).record_event()
            self._jobs.put(lambda: self._run_on_stream(pending, named, now))
        else:
            self._jobs.put(lambda: self._run(pending, named))
        return pending

    def _run(self, pending: Pending[Any], job: Callable[[], Any]) -> None:
        self._waiting.popleft()
        if self._error is None:
            pending.run(job, self._stream)
            self._error = self._error or pending.error
        else:
            pending.fail(self._error)

    def _run_on_stream(
        self, pending: Pending[T], job: Callable[[], T], after: torch.cuda.Event
    ) -> None:
        try:
            if self._stream is None:
                self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._stream):
                after.wait(self._stream)
                self._run(pending, job)
        except BaseException as error:  # the card's, before the job or after it
            self._error = self._error or error
            if not pending.done():
                pending.fail(error)

    def close(self) -> None:
        """Let the thread end after the jobs it has; another call starts one again, which waits for
        that end, as two would mix up their messages."""
        self._jobs.put(None)
        self._before = self._thread or self._before
        self._thread, self._jobs = None, queue.SimpleQueue()

    def leave(self, until: float) -> None:
        """Let the thread end, and wait for that, but not beyond ``until``."""
        self.close()
        if self._before is not None:
            self._before.join(max(until - time.monotonic(), 0))

    def drain(self) -> None:
        """Wait for the job that came last, whatever comes of it."""
        if self._latest is not None:
            self._latest.settle()

    def abandon(self) -> bool:
        """Run no more jobs but the one under way; returns whether there were some, or one failed
        that the other ranks may be waiting in."""
        error = self._error or (self._latest.error if self._latest is not None else None)
        self._error = error or LinkError("left by an exception, with messages unsent")
        alone = error is not None and not isinstance(error, NotFiniteError)  # that, all ranks raise
        return alone or bool(self._waiting)

    def look(self, label: str) -> None:
        """Raise if what is waited for will not come; no later job runs then."""
        try:
            _labelled(self._check, label)
        except LinkError as error:
            self._error = error
            raise

    def _whole(self, job: Callable[[], T], label: str) -> Callable[[], T]:
        preface, self._preface = self._preface, None
        return partial(_labelled, job, label, preface)


_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()
"""Those that have, or had, a thread."""


@atexit.register
def _leave() -> None:
    """The interpreter stops threads wherever they are, which ends the process with SIGABRT where
    one is within torch."""
    until = time.monotonic() + LEAVING
    for lane in list(_lanes):
        lane.leave(until)


def _work(
    jobs: queue.SimpleQueue[Callable[[], None] | None], before: threading.Thread | None
) -> None:
    torch.set_grad_enabled(False)
    if before is not None:
        before.join()
    while (task := jobs.get()) is not None:
        task()
        del task  # or its tensors would stay until the next one comes


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    within = value._result if isinstance(value, Pending) else value
    parts = within if isinstance(within, (tuple, list)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _labelled(job: Callable[[], T], label: str, preface: Callable[[], object] | None = None) -> T:
    try:
        with torch.inference_mode(False), torch.no_grad():  # its tensors outlive the caller's mode
            if preface is not None:
                preface()
            return job()
    except LinkError as error:
        # it says all that its cause does
        raise LinkError(f"{label}: {error}", ranks=error.ranks) from None
