"""Write metrics during a run, for ``laconic.attach(..., metrics=)``.

A record is a dictionary of numbers and strings. `docs/metrics.md` lists its fields. The training
thread creates records, at most one per step and one every ``every`` seconds. A separate thread
writes them, so a full, slow or missing disk costs the metrics and nothing else.
"""

from __future__ import annotations

import atexit
import copy
import importlib
import importlib.util
import json
import math
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
from typing import TYPE_CHECKING, Any

import torch

from laconic.errors import LinkError, check_float
from laconic.links.link import Link
from laconic.links.metered import CallTotals, Ledger

if TYPE_CHECKING:
    from laconic.engine.synchronizer import Stats

Record = Mapping[str, Any]

UNWRITTEN = 100
"""The number of records that may be queued. A sink that falls further behind is closed."""
CLOSING_SECONDS = 5.0
"""How long the end of a run waits for the last records to be written."""
MOST_SINKS = 8
NOT_GIVEN, READY, DIRECTORY, MISSING = range(4)


class Metrics:
    """A sink for records. To write your own, subclass it and override `write`.

    ``every`` is the minimum number of seconds between two records. 0 writes one per step.
    """

    def __init__(self, every: float = 1.0) -> None:
        self.every = check_float("every", every, 0.0)

    def survey(self, rank: int) -> int:
        """Return what ``rank`` finds before the run: READY, DIRECTORY, or MISSING if this rank
        cannot write. If one rank returns DIRECTORY, all ranks must."""
        return READY

    def writes(self, rank: int) -> bool:
        """Return whether ``rank`` writes. Called after `survey`."""
        return rank == 0

    def open(self, rank: int) -> None:
        """Prepare for writing. Called on the writing thread before the first record."""

    def write(self, record: Record) -> None:
        """Write one record. An exception is reported once and closes this sink."""
        raise NotImplementedError

    def close(self) -> None:
        """Release resources. Called after the last record."""

    def __str__(self) -> str:
        return type(self).__name__


class JsonLines(Metrics):
    """Append one line of JSON per record to a file.

    If ``path`` is a file, rank 0 writes it. If it contains ``{rank}``, every rank writes its own
    file. If it is a directory, every rank writes ``rank{rank}.jsonl`` in it, on its own host.
    """

    def __init__(self, path: str | os.PathLike[str], every: float = 1.0) -> None:
        super().__init__(every)
        text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
        if not isinstance(text, str) or not text or "\0" in text:
            raise ValueError(f"metrics must be the path of a file or directory, not {path!r}")
        self._path = text
        self._every_rank = "{rank}" in text
        self._file = -1

    def survey(self, rank: int) -> int:
        if os.path.isdir(self._rank_path(rank)):
            self._path = os.path.join(self._path, "rank{rank}.jsonl")
            self._every_rank = True
            return DIRECTORY
        parent = os.path.dirname(self._rank_path(rank)) or "."
        return READY if os.path.isdir(parent) or not self.writes(rank) else MISSING

    def _rank_path(self, rank: int) -> str:
        return self._path.replace("{rank}", str(rank))

    def writes(self, rank: int) -> bool:
        return self._every_rank or rank == 0

    def open(self, rank: int) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
        self._file = os.open(self._rank_path(rank), flags, 0o644)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")  # the last line is incomplete: an earlier run was killed

    def write(self, record: Record) -> None:
        line = (json.dumps(_finite(record), allow_nan=False) + "\n").encode()
        written = os.write(self._file, line)
        if written < len(line):
            raise OSError(f"{written} of {len(line)} bytes written: is the disk full?")

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def __str__(self) -> str:
        return self._path


class TensorBoard(Metrics):
    """Write scalars for TensorBoard under ``laconic/``.

    Rank 0 writes to ``directory``. If it contains ``{rank}``, every rank writes its own.

    Raises ImportError if the package ``tensorboard`` is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str], every: float = 10.0) -> None:
        super().__init__(every)
        if not isinstance(directory, (str, os.PathLike)) or not os.fspath(directory):
            raise ValueError(f"directory must be the path of a directory, not {directory!r}")
        if importlib.util.find_spec("tensorboard") is None:
            raise ImportError("laconic.TensorBoard needs tensorboard: pip install tensorboard")
        self._directory = str(os.fspath(directory))
        self._writer: Any = None

    def writes(self, rank: int) -> bool:
        return rank == 0 or "{rank}" in self._directory

    def open(self, rank: int) -> None:
        path = self._directory.replace("{rank}", str(rank))
        self._writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(path)

    def write(self, record: Record) -> None:
        if record["event"] == "start":
            self._writer.add_text("laconic/recipe", record["recipe"], record["step"])
            return
        step = record["step"]
        values: dict[str, float | None] = {
            "seconds per step": record["seconds_per_step"],
            "waiting share": record["waiting"],
            "MB sent": record["bytes_sent"] / 1e6,
            "rounds": record["rounds"],
            "steps skipped": record["skipped"],
            **{f"lr/group {group}": lr for group, lr in enumerate(record["lr"])},
        }
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(f"laconic/{name}", value, step, walltime=record["time"])
        if record["event"] != "steps":
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def __str__(self) -> str:
        return f"TensorBoard({self._directory!r})"


Sink = str | os.PathLike[str] | Metrics
MetricsArgument = Sink | Sequence[Sink] | None


def check_metrics(metrics: MetricsArgument) -> list[Metrics]:
    """Return the sinks that ``metrics`` names: a path, a `Metrics`, or a sequence of these.

    Raises ``ValueError`` for anything else.
    """
    if metrics is None:
        return []
    values = list(metrics) if isinstance(metrics, (list, tuple)) else [metrics]
    if len(values) > MOST_SINKS:
        raise ValueError(f"metrics takes at most {MOST_SINKS} sinks, not {len(values)}")
    sinks: list[Metrics] = []
    for value in values:
        if isinstance(value, Metrics):
            sinks.append(copy.copy(value))  # an open file belongs to one run
        elif isinstance(value, (str, os.PathLike)):
            sinks.append(JsonLines(value))
        else:
            raise ValueError(
                "metrics must be a path, laconic.JsonLines, laconic.TensorBoard, another "
                f"laconic.Metrics, or a list of these, not {value!r}"
            )
    return sinks


def agree_on_metrics(sinks: Sequence[Metrics], link: Link) -> list[Metrics]:
    """Return the ``sinks`` that this rank writes. Call it on every rank, also without sinks.

    Raises ``ValueError`` on every rank if the directory to write in is missing on one of them. Any
    other problem is reported as a warning on the affected rank only.
    """
    codes = [sink.survey(link.rank) for sink in sinks]
    padded = codes + [NOT_GIVEN] * (MOST_SINKS - len(codes))
    gathered = link.gather(torch.tensor(padded)).cpu()
    for index, column in enumerate(gathered.unbind(1)):
        codes = column.tolist()
        shared = DIRECTORY in codes
        lacking = [r for r, c in enumerate(codes) if c == MISSING or (shared and c == READY)]
        if lacking:
            which = f"metrics={str(sinks[index])!r}" if index < len(sinks) else "metrics"
            ranks = f"rank{'s' * (len(lacking) > 1)} {', '.join(map(str, lacking))}"
            raise ValueError(f"{which}: no such directory on {ranks}: create it first")
    return [sink for sink in sinks if sink.writes(link.rank)]


class _Writer:
    """Writes the records of one sink, in order, on a thread of its own."""

    def __init__(self, sink: Metrics, rank: int) -> None:
        self.sink = sink
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


@dataclass
class _Track:
    """One writer, and the counters at its last record."""

    writer: _Writer
    time: float
    steps: int
    stats: Stats
    calls: Mapping[str, CallTotals]


class Recorder:
    """Creates the records of one synchronizer and passes them to the writers.

    ``stats()`` returns the totals so far. ``about`` goes into the first record. Without ``sinks``
    the recorder does nothing.
    """

    def __init__(
        self,
        sinks: Sequence[Metrics] = (),
        stats: Callable[[], Stats] | None = None,
        ledger: Ledger | None = None,
        rates: Callable[[], Sequence[Any]] | None = None,
        about: Record | None = None,
    ) -> None:
        self._due = math.inf
        self._steps = self._skipped = 0
        self._failure: BaseException | None = None
        self._tracks: list[_Track] = []
        if not sinks:
            return
        assert stats and ledger and rates and about
        self._stats, self._ledger, self._rates = stats, ledger, rates
        self._lock = threading.Lock()  # a link's error is recorded by the thread that meets it
        ledger.failed = self._link_failed
        now, calls = time.perf_counter(), self._calls()
        for sink in sinks:
            writer = _Writer(sink, about["rank"])
            weakref.finalize(self, writer.put, None).atexit = False
            self._tracks.append(_Track(writer, now, 0, stats(), calls))
            writer.put({**_timestamped("start"), **about, **_versions(), "every": sink.every})
        self._plan()
        _open.add(self)

    def after_step(self, *, skipped: bool = False) -> None:
        """Count a step that was taken, or that a GradScaler skipped."""
        self._steps += 1
        self._skipped += skipped
        if time.perf_counter() < self._due:
            return
        self._warn_of_problems()
        now = time.perf_counter()
        with self._lock:
            for track in self._tracks:
                if now >= track.time + track.writer.sink.every:
                    self._write(track, "steps")
            self._plan()

    def event(self, event: str, **more: Any) -> None:
        """Write a record immediately."""
        if self._tracks:
            with self._lock:
                for track in self._tracks:
                    self._write(track, event, **more)

    def failed(self, error: BaseException) -> None:
        """Record an error, unless it is the one recorded last."""
        if self._failure is None or self._failure not in (error, error.__context__):
            self.event("error", error=f"{type(error).__name__}: {error}")
        self._failure = error

    def close(self) -> None:
        """Write a last record and wait up to CLOSING_SECONDS per sink for all to be written."""
        self.event("end")
        for track in self._tracks:
            track.writer.close()
        self._warn_of_problems()
        self._tracks, self._due = [], math.inf
        _open.discard(self)

    def _link_failed(self, error: LinkError) -> None:
        self._failure = error
        self.event("error", error=f"LinkError: {self._ledger.call}: {error}")

    def _plan(self) -> None:
        dues = [track.time + track.writer.sink.every for track in self._tracks]
        self._due = min(dues, default=math.inf)

    def _warn_of_problems(self) -> None:
        """Warn once about each sink that accepts no more records, and remove it."""
        broken = [track.writer for track in self._tracks if track.writer.problem]
        self._tracks = [track for track in self._tracks if track.writer not in broken]
        self._plan()
        for writer in broken:
            text = f"metrics stopped, training continues: {writer.sink}: {writer.problem}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _write(self, track: _Track, event: str, **more: Any) -> None:
        now, stats, calls = time.perf_counter(), self._stats(), self._calls()
        before, seconds, steps = track.stats, now - track.time, self._steps - track.steps
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
            "calls": _differences(calls, track.calls),
            **more,
        }
        track.writer.put(record)
        track.time, track.steps, track.stats, track.calls = now, self._steps, stats, calls

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


def _versions() -> dict[str, str | int]:
    from laconic import __version__

    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "laconic": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


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


def _finite(value: Any) -> Any:
    """Return ``value`` with None in place of numbers that JSON does not support."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, (list, tuple)) else value
