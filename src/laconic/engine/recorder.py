"""The records of a run: what happened since the last one, at most one per step."""

from __future__ import annotations

import atexit
import os
import platform
import queue
import socket
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from laconic.links.metered import CallTotals, Ledger
from laconic.metrics import Metrics, Record
from laconic.version import __version__

UNWRITTEN = 100
"""The number of records that may be queued. A sink that falls further behind is closed."""
CLOSING_SECONDS = 5.0
"""How long the end of a run waits for the last records to be written."""


@dataclass(frozen=True)
class Stats:
    """What a synchronizer has done so far on this rank.

    Attributes:
        steps: optimizer steps since `laconic.attach`.
        rounds: rounds on parameters completed; averages of gradients are not counted.
        bytes_sent: payload bytes sent.
        bytes_received: payload bytes received.
        bytes_by_collective: payload bytes sent, by the name of the collective. Under
            ``"measurement"``: what `laconic.auto` has sent to measure the network.
        bytes_by_set: payload bytes sent to the other ``"workers"``, to those of the own
            ``"group"``, inside a worker (``"replica"``; ``"shards"`` where its model is sharded),
            and to all ranks (``"world"``).
        seconds_waiting: host time in which training waited for a round. With NCCL a round without a
            delay is waited for on the GPU, which this does not measure.
        workers_lost: in an elastic run, the workers that were lost or have left since its start.
        steps_lost: how many of their steps no other worker has received, as far as the others had
            heard of them.
        steps_drifted: after how many steps workers were found to differ in what they should hold
            alike: all parameters where only gradients are averaged, elsewhere what rounds make
            equal.

    Examples:
        >>> sync = laconic.attach(model, optimizer, laconic.local_sgd(8))
        >>> sync.stats().bytes_sent  # one worker has nobody to send to
        0
    """

    steps: int
    rounds: int
    bytes_sent: int
    bytes_received: int
    bytes_by_collective: Mapping[str, int]
    bytes_by_set: Mapping[str, int]
    seconds_waiting: float
    workers_lost: int = 0
    steps_lost: int = 0
    steps_drifted: int = 0


class _Writer:
    """Writes the records of one sink, in order, on a thread of its own. ``time``, ``steps``,
    ``stats`` and ``calls`` are those of its last record."""

    def __init__(
        self, sink: Metrics, rank: int, stats: Stats, calls: Mapping[str, CallTotals]
    ) -> None:
        self.sink, self.stats, self.calls = sink, stats, calls
        self.time, self.steps = time.perf_counter(), 0
        self.problem: str | None = None
        """Why writing has stopped."""
        self._rank = rank
        self._queue: queue.Queue[Record | None] = queue.Queue(UNWRITTEN)
        self._thread = threading.Thread(target=self._work, daemon=True, name="laconic-metrics")
        self._thread.start()

    def put(self, record: Record | None) -> None:
        """Queue ``record``. None ends the thread after the records queued before."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.problem = f"{UNWRITTEN} records are waiting to be written: it accepts no more"

    def _work(self) -> None:
        try:
            self.sink.open(self._rank)
            while (record := self._queue.get()) is not None and self.problem is None:
                self.sink.write(record)
        except Exception as error:  # a user-defined sink may raise anything
            self.problem = f"{type(error).__name__}: {error}"
        try:
            self.sink.close()
        except Exception as error:
            self.problem = self.problem or f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """Wait up to CLOSING_SECONDS for the queued records to be written."""
        self.put(None)
        self._thread.join(CLOSING_SECONDS)
        if self._thread.is_alive() and self.problem is None:
            self.problem = f"its last records were not written within {CLOSING_SECONDS:g} s"


class Recorder:
    """Creates the records of one synchronizer and passes them to the writers. Does nothing before
    `start`."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._steps = self._skipped = 0
        self._failure: BaseException | None = None
        self._writers: list[_Writer] = []
        self._lock = threading.Lock()  # a link's error is recorded by the thread that meets it

    def start(
        self,
        sinks: Sequence[Metrics],
        stats: Callable[[], Stats],
        rates: Callable[[], Sequence[Any]],
        about: Record,
    ) -> None:
        """Write to ``sinks`` from now on. ``stats()`` returns the totals so far. ``about`` goes
        into the first record."""
        if not sinks:
            return
        self._stats, self._rates = stats, rates
        self._steps = self._skipped = 0
        about = {
            **about,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "laconic": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        for sink in sinks:
            writer = _Writer(sink, about["rank"], stats(), self._calls())
            weakref.finalize(self, writer.put, None).atexit = False
            self._writers.append(writer)
            writer.put({**_timestamped("start"), **about, "every": sink.every})
        _open.add(self)

    def after_step(self, *, skipped: bool = False) -> None:
        """Count a step that was taken, or that a GradScaler skipped."""
        self._steps += 1
        self._skipped += skipped
        now = time.perf_counter()
        due = [w for w in self._writers if now >= w.time + w.sink.every]
        if due:
            self._warn_of_problems()
            with self._lock:
                for writer in due:
                    self._write(writer, "steps")

    def event(self, event: str, **more: Any) -> None:
        """Write a record immediately."""
        if self._writers:
            with self._lock:
                for writer in self._writers:
                    self._write(writer, event, **more)

    def failed(self, error: BaseException) -> None:
        """Record an error, unless it is the one recorded last."""
        if self._failure is None or self._failure not in (error, error.__context__):
            self.event("error", error=f"{type(error).__name__}: {error}")
        self._failure = error

    def close(self) -> None:
        """Write a last record and wait up to CLOSING_SECONDS per sink for all to be written."""
        self.event("end")
        for writer in self._writers:
            writer.close()
        self._warn_of_problems()
        self._writers = []
        _open.discard(self)

    def _warn_of_problems(self) -> None:
        """Warn once about each sink that accepts no more records, and remove it."""
        broken = [writer for writer in self._writers if writer.problem]
        self._writers = [writer for writer in self._writers if writer not in broken]
        for writer in broken:
            text = f"metrics stopped, training continues: {writer.sink}: {writer.problem}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _write(self, writer: _Writer, event: str, **more: Any) -> None:
        now, stats, calls = time.perf_counter(), self._stats(), self._calls()
        before, seconds, steps = writer.stats, now - writer.time, self._steps - writer.steps
        waited = stats.seconds_waiting - before.seconds_waiting
        record = {
            **_timestamped(event),
            "step": stats.steps,
            "rounds": stats.rounds,
            "skipped": self._skipped,
            "bytes_sent": stats.bytes_sent,
            "bytes_received": stats.bytes_received,
            "seconds_waiting": round(stats.seconds_waiting, 6),
            "seconds": round(seconds, 6),
            "steps": steps,
            "seconds_per_step": round(seconds / steps, 6) if steps else None,
            "sent": stats.bytes_sent - before.bytes_sent,
            "received": stats.bytes_received - before.bytes_received,
            "waiting": round(min(waited / seconds, 1.0), 4) if seconds > 0 else 0.0,
            "lr": [None if rate is None else float(rate) for rate in self._rates()],
            "calls": _differences(calls, writer.calls),
            **more,
        }
        writer.put(record)
        writer.time, writer.steps, writer.stats, writer.calls = now, self._steps, stats, calls

    def _calls(self) -> dict[str, CallTotals]:
        # The communication thread adds calls meanwhile. dict() copies in one go.
        return {name: replace(call) for name, call in dict(self._ledger.by_call).items()}


_open: weakref.WeakSet[Recorder] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Write the last records of unfinished runs, and the exception that ends the program."""
    error = getattr(sys, "last_value", None)
    for recorder in list(_open):
        if error is not None:
            recorder.failed(error)
        recorder.close()


def _timestamped(event: str) -> dict[str, Any]:
    return {"event": event, "time": round(time.time(), 3)}


def _differences(
    calls: Mapping[str, CallTotals], before: Mapping[str, CallTotals]
) -> list[dict[str, Any]]:
    """Return what changed in ``calls`` since the last record, by name."""
    nothing = CallTotals()
    changed = [(name, call, before.get(name, nothing)) for name, call in calls.items()]
    return [
        {
            "name": name,
            "step": call.step,
            "count": call.count - old.count,
            "bytes": call.bytes - old.bytes,
            "seconds": round(call.seconds - old.seconds, 6),
        }
        for name, call, old in changed
        if call != old
    ]
