"""The communication thread: the one place that starts collectives, one after the other.

Every rank submits the same jobs in the same order, so all ranks start their collectives in one
order, whichever thread submitted them. A job runs beside the training; on an accelerator, on a
stream of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import CoroutineType
from typing import Any, Generic, Protocol, TypeVar, cast

import torch

from laconic.device import Event, Stream, accelerator, use_on_current_stream
from laconic.errors import LinkError, NotFiniteError
from laconic.links.link import Job

T = TypeVar("T")


EXIT_SECONDS = 5.0
"""How long a process that ends waits for its last job, which other ranks may be waiting for."""
CHECK_SECONDS = 1.0
"""How often a caller that waits checks the other ranks. The link decides what it asks them then."""


class Around(Protocol):
    """Runs a job, such as `laconic.links.elastic.link.ElasticLink.unit`."""

    def __call__(self, job: Callable[[], T], /) -> T: ...


def coroutine(job: Callable[[], Job[T]]) -> Callable[[], T]:
    """A coroutine function as a job, which then runs to its end."""
    return cast("Callable[[], T]", job)


def run_here(preface: Callable[[], object] | None, job: Callable[[], T]) -> T:
    """Run ``preface``, if there is one, and ``job``, perhaps a `coroutine`, to its end, in this
    thread."""
    if preface is not None:
        preface()
    result: Any = job()
    while isinstance(result, CoroutineType):  # not `complete`, which would be one more frame
        try:
            result.send(None)
        except StopIteration as end:
            result = end.value
    return cast("T", result)


class Pending(Generic[T]):
    """The result of a job submitted to a `CommThread`."""

    def __init__(self, thread: CommThread | None, label: str = "") -> None:
        self._thread = thread
        self.label = label
        self.ended = threading.Event()
        self.error: BaseException | None = None
        """What the job has raised."""
        self.ready: Event | None = None
        """The point in the job's stream after its work."""
        self._result: T | None = None

    @classmethod
    def of(cls, result: T) -> Pending[T]:
        """A `Pending` whose result is known already."""
        pending: Pending[T] = cls(None)
        pending.run(lambda: result)
        return pending

    def done(self) -> bool:
        """Whether the job has ended, with a result or an error."""
        return self.ended.is_set()

    def wait(self) -> T:
        """Wait for the result and return it; the caller's stream then waits for the job's work.
        Raises what the job raised."""
        if self._thread is not None:
            self._thread.wait_for(self.ended, self.label)
        if self.error is not None:
            raise self.error
        if self.ready is not None and self._thread is not None:
            # on the stream of the model's device, which need not be the current device
            self.ready.wait(self._thread.current_stream())
            for tensor in _tensors(self._result):  # made on the job's stream, used on this one
                use_on_current_stream(tensor)
        return self._result  # type: ignore[return-value]

    def wait_quietly(self) -> None:
        """Wait until the job has ended. An error is not raised here."""
        with contextlib.suppress(Exception):
            self.wait()

    def run(self, job: Callable[[], T]) -> None:
        """Run ``job`` in this thread and keep its result or error."""
        try:
            self.complete(job())
        except BaseException as error:  # any error belongs to the caller of `wait`
            self.fail(error)

    def complete(self, result: T, stream: Stream | None = None) -> None:
        """End with ``result``. ``stream``: where the work on an accelerator went."""
        self.ready = None if stream is None else stream.record_event()
        self._result = result
        self.ended.set()

    def fail(self, error: BaseException) -> None:
        """End with ``error``."""
        self.error = error
        self.ended.set()


def _never() -> None:
    pass


class CommThread:
    """Runs jobs in the order in which they are submitted.

    ``threaded``: in a thread of its own; otherwise at once, as simulated workers need. ``device``:
    where the tensors are. ``check`` raises a `LinkError` if another rank is known not to come to
    the collective that this one waits for. ``around`` runs each job, perhaps several times; None:
    once.
    ``queues``: see `Link.queues`. ``interrupt()`` ends the job under way, since the process ends.
    """

    def __init__(
        self,
        threaded: bool,
        device: torch.device,
        check: Callable[[], None],
        around: Around | None = None,
        *,
        queues: bool = False,
        interrupt: Callable[[], None] = lambda: None,
    ) -> None:
        self.seconds_waiting = 0.0
        self.processor_seconds = 0.0
        """What the jobs have used of a processor."""
        self.device = device
        self.threaded = threaded
        self._accelerator = accelerator(device)
        self._calls_here = not threaded or (self._accelerator is not None and queues)
        """Whether `call` runs its job in the caller's thread, on the caller's stream."""
        self._check = check
        self.around = around
        self._interrupt = interrupt
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = _Idle()
        self._thread: threading.Thread | None = None
        self._before: threading.Thread | None = None
        """The thread before this one, which may still be ending."""
        self._stream: Stream | None = None
        self._latest: tuple[threading.Event, str] | None = None
        """When the job submitted last has ended, and its label."""
        self._preface: Callable[[], object] | None = None
        self._error: BaseException | None = None
        self._waiting: deque[Pending[Any]] = deque()
        """Jobs that have not begun."""
        self._checking: Pending[None] | None = None
        """The latest check of the other ranks."""

    def _whole(self, job: Callable[[], T]) -> Callable[[], T]:
        """``job``, after what `before_next` was given."""
        preface, self._preface = self._preface, None
        return partial(run_here, preface, job)

    def _do(self, whole: Callable[[], T]) -> T:
        return whole() if self.around is None else self.around(whole)

    def before_next(self, preface: Callable[[], object]) -> None:
        """Run ``preface`` right before the next job, as a part of it."""
        self._preface = preface

    def call(self, job: Callable[[], T], label: str) -> T:
        """Run ``job`` after those submitted before, and return its result. The time counts as
        waiting. ``label`` says in errors what the job is."""
        if not self._calls_here:
            return self.submit(job, label).wait()
        self.drain()
        start = time.perf_counter()
        try:
            return self._here(self._whole(job), label)
        finally:
            self.record_wait(start)

    def _here(self, whole: Callable[[], T], label: str) -> T:
        """Run a ``whole`` job in the caller's thread, unless one before it failed."""
        if self._error is not None:
            raise self._error
        try:
            with torch.inference_mode(False), torch.no_grad():  # its tensors outlive the caller's
                return self._do(whole)
        except BaseException as error:
            self._error = labeled = _with_label(error, label)
            if labeled is error:
                raise
            raise labeled from None  # it says all that its cause does

    def wait_for(self, ended: threading.Event, label: str) -> None:
        """Wait until a job has ``ended``, and check the other ranks meanwhile. The time counts as
        waiting."""
        if ended.is_set():
            return
        start = time.perf_counter()
        try:
            while not ended.wait(CHECK_SECONDS):
                self._check_beside(label)
        finally:
            self.record_wait(start)

    def record_wait(self, start: float) -> None:
        """Count the time since ``start`` as waiting."""
        self.seconds_waiting += time.perf_counter() - start

    def current_stream(self) -> Stream | None:
        """The stream that this thread's work on the device goes to; None on the CPU."""
        if self._accelerator is None:
            return None
        return self._accelerator.current_stream(self.device)

    def submit(self, job: Callable[[], T], label: str) -> Pending[T]:
        """Have ``job`` run after those submitted before, beside what the caller does next. After a
        job that failed no other runs, as the ranks would no longer be in step: it gets the same
        error."""
        pending: Pending[T] = Pending(self, label)
        whole = self._whole(job)
        if not self.threaded:
            pending.run(partial(self._here, whole, label))
            return pending
        if self._thread is None:
            work = partial(_work, self._jobs, self._before, self._idle)
            self._thread = threading.Thread(target=work, daemon=True, name="laconic-comm")
            self._thread.start()
            _threads.add(self)
        self._latest = pending.ended, label
        self._waiting.append(pending)
        stream = self.current_stream()
        now = None if stream is None else stream.record_event()
        self._jobs.put(partial(self._run, pending, whole, now))
        return pending

    def _run(self, pending: Pending[T], whole: Callable[[], T], after: Event | None) -> None:
        """Run a ``whole`` job in this thread, unless one before it failed; on an accelerator, once
        the event ``after`` has happened."""
        self._waiting.popleft()
        if self._error is not None:
            pending.fail(self._error)
            return
        start = time.thread_time()
        try:
            with self._on_stream(after), torch.inference_mode(False), torch.no_grad():
                result = self._do(whole)
                self.processor_seconds += time.thread_time() - start
                pending.complete(result, self._stream)
                self._settle(pending.ready)  # what the job holds is freed when this returns
        except BaseException as error:  # the job's, or the accelerator's before it or after it
            labeled = _with_label(error, pending.label)
            self._error = self._error or labeled
            self._settle()  # the caller may free what is still written to
            if not pending.done():
                pending.fail(labeled)

    @contextlib.contextmanager
    def _on_stream(self, after: Event | None) -> Iterator[None]:
        """A context in which work on an accelerator goes to this object's own stream, once the
        event ``after`` has happened."""
        if after is None:
            yield
            return
        assert self._accelerator is not None, "only accelerators have streams"
        if self._stream is None:
            if self.device.index is not None:  # else this thread would use the first one, too
                self._accelerator.select(self.device.index)
            self._stream = self._accelerator.new_stream(self.device)
        with self._accelerator.on_stream(self._stream):
            after.wait(self._stream)
            yield

    def _settle(self, end: Event | None = None) -> None:
        """Wait until the accelerator has done all work of the jobs so far, whose ``end`` may be
        known."""
        if self._stream is not None:
            with contextlib.suppress(Exception):  # of the accelerator: the next wait raises it
                (end or self._stream.record_event()).synchronize()

    def poke(self, task: Callable[[], None]) -> None:
        """Have the thread, if there is one, run ``task`` between two jobs. It must not raise."""
        if self._thread is not None:
            self._jobs.put(task)

    def run_by(self, around: Around | None, idle: Callable[[], float | None] = _never) -> None:
        """Have ``around`` run each job from now on; and the thread, if there is one, run ``idle``
        now, and, as long as it has no job, again after as many seconds as ``idle`` returns; None:
        no more. An error of ``idle`` is that of the next job. On an accelerator, it has the jobs'
        stream, after the caller's work so far."""
        stream = self.current_stream()
        after = None if stream is None else stream.record_event()

        def task() -> float | None:
            try:
                with self._on_stream(after):
                    return idle()
            except Exception as error:
                self._error = self._error or error
                return None

        self.around, self._idle.task = around, task
        self.poke(self._idle.run)

    @contextlib.contextmanager
    def between_jobs(self) -> Iterator[None]:
        """A context, while no job is under way, in which the caller's work on an accelerator comes
        after that of the jobs so far, and before that of later ones."""
        here = self.current_stream()
        if here is not None and self._stream is not None:
            self._stream.record_event().wait(here)
        yield
        if here is not None and self._stream is not None:
            here.record_event().wait(self._stream)

    def on_stream_of_jobs(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which the caller's work on an accelerator goes to the jobs' stream, behind
        that of the job under way, which must wait for the caller."""
        if self._stream is None or self._accelerator is None:
            return contextlib.nullcontext()
        return self._accelerator.on_stream(self._stream)

    def close(self) -> None:
        """Let the thread end after the jobs that it has. A later job starts another thread, which
        first waits for the end of this one: two at once would mix up their messages."""
        self._jobs.put(None)
        self._before = self._thread or self._before
        self._thread, self._jobs = None, queue.SimpleQueue()

    def close_and_wait(self, until: float) -> None:
        """Let the thread end, and wait for that, at most until the time ``until``."""
        self.close()
        if self._before is not None:
            self._before.join(max(until - time.monotonic(), 0))

    def end(self) -> None:
        """End the thread, which still runs a job."""
        if self._before is not None and self._before.is_alive():
            self._interrupt()
            self._before.join(EXIT_SECONDS)

    def drain(self) -> None:
        """Wait until the last job has ended, with a result or an error. The caller's stream waits
        for its work."""
        if self._latest is not None:
            with contextlib.suppress(Exception):
                self.wait_for(*self._latest)
                if self._stream is not None:
                    self._stream.record_event().wait(self.current_stream())

    def recover(self) -> None:
        """Run jobs again after one that has failed."""
        self._error = self._latest = None

    def latest(self) -> Callable[[], bool]:
        """A function that says whether the job submitted last has ended, and so all before it."""
        latest = self._latest
        return lambda: latest is None or latest[0].is_set()

    @property
    def failed(self) -> bool:
        """Whether a job has failed, so that no other runs."""
        return self._error is not None

    def abandon(self) -> bool:
        """Begin no more jobs. Returns whether other ranks may be waiting for one: some were not
        begun, or one failed on this rank alone."""
        error = self._error
        self._error = error or LinkError("left by an exception, with messages unsent")
        alone = error is not None and not isinstance(error, NotFiniteError)  # that, all ranks raise
        return alone or bool(self._waiting)

    def _check_beside(self, label: str) -> None:
        """Check the other ranks in a thread of its own, unless that is under way: their answers may
        take several round trips, and what the caller waits for may come before. Raise what the
        check before this one has found: then the collective that the caller waits for will not
        complete, and no job begins after that."""
        before = self._checking
        if before is not None and not before.done():
            return
        if before is not None and before.error is not None:
            labeled = _with_label(before.error, label)
            if isinstance(labeled, LinkError):
                self._error = labeled
            raise labeled
        self._checking = check = Pending[None](None)
        threading.Thread(
            target=check.run, args=(self._check,), daemon=True, name="laconic-check"
        ).start()


_threads: weakref.WeakSet[CommThread] = weakref.WeakSet()
"""Those that have, or had, a thread."""


@atexit.register
def _close_all() -> None:
    """The interpreter stops threads wherever they are. If one of them is inside torch, the process
    ends with SIGABRT."""
    until = time.monotonic() + EXIT_SECONDS
    for thread in list(_threads):
        thread.close_and_wait(until)
    for thread in list(_threads):
        thread.end()


class _Idle:
    """What a thread does that has no job: see `CommThread.run_by`."""

    def __init__(self) -> None:
        self.task: Callable[[], float | None] = _never
        self.seconds: float | None = None

    def run(self) -> None:
        self.seconds = self.task()


def _work(
    jobs: queue.SimpleQueue[Callable[[], None] | None],
    before: threading.Thread | None,
    idle: _Idle,
) -> None:
    torch.set_grad_enabled(False)
    if before is not None:
        before.join()
    while True:
        try:
            task = jobs.get(timeout=idle.seconds)
        except queue.Empty:
            idle.run()
            continue
        if task is None:
            return
        task()
        del task  # or its tensors would stay until the next one comes


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    within = value._result if isinstance(value, Pending) else value
    parts = within if isinstance(within, (tuple, list)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _with_label(error: BaseException, label: str) -> BaseException:
    """``error``; a `LinkError` or `NotFiniteError` with ``label`` in front of its text."""
    if isinstance(error, LinkError):
        return LinkError(f"{label}: {error}", ranks=error.ranks)
    if isinstance(error, NotFiniteError):
        return NotFiniteError(f"{label}: {error}")
    return error
