"""Metrics of a run: what ``laconic.attach(..., metrics=)`` writes while a training goes on.

A record is a dictionary of numbers and words; `docs/metrics.md` lists its fields. Records are
made on the training's thread, at most one for a step and one every ``every`` seconds, and written
by a thread of its own, so that a disk that is full, slow or gone costs the metrics and nothing
else.
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
"""Records that may wait to be written; a place that takes none for longer gets no more."""
CLOSING_SECONDS = 5.0
"""How long the end of a run waits for the last records to be written."""
MOST_PLACES = 8
NOT_GIVEN, READY, DIRECTORY, MISSING = range(4)


class Metrics:
    """Where records go. For a place of your own, subclass it and write `write`.

    ``every``: least seconds between two records; 0 is one for each step.
    """

    def __init__(self, every: float = 1.0) -> None:
        self.every = check_float("every", every, 0.0)

    def survey(self, rank: int) -> int:
        """What ``rank`` finds there before the run: READY, DIRECTORY (then every rank must find
        one), or MISSING where this rank cannot write."""
        return READY

    def writes(self, rank: int) -> bool:
        """Whether ``rank`` writes; called after `survey`."""
        return rank == 0

    def open(self, rank: int) -> None:
        """Called before the first record, on the thread that writes."""

    def write(self, record: Record) -> None:
        """Write one record. Whatever it raises is reported once, and ends these metrics."""
        raise NotImplementedError

    def close(self) -> None:
        """Called after the last record."""

    def __str__(self) -> str:
        return type(self).__name__


class JsonLines(Metrics):
    """One line of JSON for each record, appended to a file.

    ``path``: a file, which rank 0 writes; with ``{rank}`` in it, every rank's own; a directory:
    every rank writes ``rank{rank}.jsonl`` in it, on its own host.
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
        if os.path.isdir(self._own_path(rank)):
            self._path = os.path.join(self._path, "rank{rank}.jsonl")
            self._every_rank = True
            return DIRECTORY
        parent = os.path.dirname(self._own_path(rank)) or "."
        return READY if os.path.isdir(parent) or not self.writes(rank) else MISSING

    def _own_path(self, rank: int) -> str:
        return self._path.replace("{rank}", str(rank))

    def writes(self, rank: int) -> bool:
        return self._every_rank or rank == 0

    def open(self, rank: int) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
        self._file = os.open(self._own_path(rank), flags, 0o644)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")  # a run that was killed left half a line

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
    """Scalars for TensorBoard, under ``laconic/``, written by rank 0 into ``directory``; with
    ``{rank}`` in it, every rank's own.

    Raises ImportError, with the remedy, where the package ``tensorboard`` is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str], every: float = 10.0) -> None:
        super().__init__(every)
        if not isinstance(directory, (str, os.PathLike)) or not os.fspath(directory):
            raise ValueError(f"directory must be the path of a directory, not {directory!r}")
        if importlib.util.find_spec("tensorboard") is None:
            raise ImportError(
                "laconic.TensorBoard needs the package tensorboard: pip install tensorboard"
            )
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
                self._writer.add_scalar(
                    f"laconic/{name}", value, record["step"], walltime=record["time"]
                )
        if record["event"] != "steps":
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def __str__(self) -> str:
        return f"TensorBoard({self._directory!r})"


Place = str | os.PathLike[str] | Metrics
MetricsArgument = Place | Sequence[Place] | None


def check_metrics(metrics: MetricsArgument) -> list[Metrics]:
    """The places that a user names: a path, a `Metrics`, or a sequence of these, or None.

    Raises ``ValueError`` for anything else.
    """
    if metrics is None:
        return []
    given = list(metrics) if isinstance(metrics, (list, tuple)) else [metrics]
    if len(given) > MOST_PLACES:
        raise ValueError(f"metrics can go to at most {MOST_PLACES} places, not {len(given)}")
    places: list[Metrics] = []
    for one in given:
        if isinstance(one, Metrics):
            places.append(copy.copy(one))  # what it has open belongs to one run
        elif isinstance(one, (str, os.PathLike)):
            places.append(JsonLines(one))
        else:
            raise ValueError(
                "metrics must be a path, laconic.JsonLines, laconic.TensorBoard, another "
                f"laconic.Metrics, or a list of these, not {one!r}"
            )
    return places


def agree_on_metrics(places: Sequence[Metrics], link: Link) -> list[Metrics]:
    """Those of ``places`` that this rank writes. Every rank calls it, also one without any.

    Raises ``ValueError``, on every rank, where one of them lacks the directory to write in. What
    else keeps a rank from writing is that rank's own trouble: a warning there.
    """
    found = [place.survey(link.rank) for place in places]
    padded = found + [NOT_GIVEN] * (MOST_PLACES - len(found))
    everyone = link.gather(torch.tensor(padded)).cpu()
    for index, column in enumerate(everyone.unbind(1)):
        codes = column.tolist()
        shared = DIRECTORY in codes
        lacking = [r for r, c in enumerate(codes) if c == MISSING or (shared and c == READY)]
        if lacking:
            which = f"metrics={str(places[index])!r}" if index < len(places) else "metrics"
            ranks = f"rank{'s' * (len(lacking) > 1)} {', '.join(map(str, lacking))}"
            raise ValueError(f"{which}: there is no such directory on {ranks}: make it first")
    return [place for place in places if place.writes(link.rank)]


class _Writer:
    """Writes the records of one place, one after the other, from a thread of its own."""

    def __init__(self, place: Metrics, rank: int) -> None:
        self.place = place
        self.problem: str | None = None
        """Why nothing is written any more."""
        self._rank = rank
        self._queue: queue.Queue[Record | None] = queue.Queue(UNWRITTEN)
        self._thread = threading.Thread(target=self._work, daemon=True, name="laconic-metrics")
        self._thread.start()

    def put(self, record: Record | None) -> None:
        """Have ``record`` written; None: have the thread end after those before it."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.problem = f"{UNWRITTEN} records wait to be written: it takes no more"

    def _work(self) -> None:
        try:
            self.place.open(self._rank)
            while (record := self._queue.get()) is not None and self.problem is None:
                self.place.write(record)
        except Exception as error:  # a place of the user's own may raise anything
            self.problem = f"{type(error).__name__}: {error}"
        try:
            self.place.close()
        except Exception as error:
            self.problem = self.problem or f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """Wait, but not for ever, for what is still to be written."""
        self.put(None)
        self._thread.join(CLOSING_SECONDS)
        if self._thread.is_alive() and self.problem is None:
            self.problem = f"its last records were not written within {CLOSING_SECONDS:g} s"


@dataclass
class _Track:
    """One writer, and how things stood at its last record."""

    writer: _Writer
    time: float
    steps: int
    stats: Stats
    calls: Mapping[str, CallTotals]


class Recorder:
    """Makes the records of one synchroniser, and hands them to those that write them.

    ``stats()``: what happened so far; ``about``: what the first record says of the run. Without
    ``places`` it does nothing.
    """

    def __init__(
        self,
        places: Sequence[Metrics] = (),
        stats: Callable[[], Stats] | None = None,
        ledger: Ledger | None = None,
        rates: Callable[[], Sequence[object]] | None = None,
        about: Record | None = None,
    ) -> None:
        self._due = math.inf
        self._steps = self._skipped = 0
        self._failure: BaseException | None = None
        self._tracks: list[_Track] = []
        if not places:
            return
        assert stats and ledger and rates and about
        self._stats, self._ledger, self._rates = stats, ledger, rates
        self._lock = threading.Lock()  # a link's error is recorded by the thread that meets it
        ledger.failed = self._link_failed
        now, calls = time.perf_counter(), self._calls()
        for place in places:
            writer = _Writer(place, about["rank"])
            weakref.finalize(self, writer.put, None).atexit = False
            self._tracks.append(_Track(writer, now, 0, stats(), calls))
            writer.put({**_now("start"), **about, **_versions(), "every": place.every})
        self._plan()
        _open.add(self)

    def after_step(self, *, skipped: bool = False) -> None:
        """A step was taken, or, by a GradScaler, left out."""
        self._steps += 1
        self._skipped += skipped
        if time.perf_counter() < self._due:
            return
        self._warn_of_problems()
        now = time.perf_counter()
        with self._lock:
            for track in self._tracks:
                if now >= track.time + track.writer.place.every:
                    self._write(track, "steps")
            self._plan()

    def event(self, event: str, **more: Any) -> None:
        """Write a record now."""
        if self._tracks:
            with self._lock:
                for track in self._tracks:
                    self._write(track, event, **more)

    def failed(self, error: BaseException) -> None:
        """Record an error, if it is not the one recorded last."""
        if self._failure is None or self._failure not in (error, error.__context__):
            self.event("error", error=f"{type(error).__name__}: {error}")
        self._failure = error

    def close(self) -> None:
        """Write a last record and wait, but not for ever, until all are written."""
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
        dues = [track.time + track.writer.place.every for track in self._tracks]
        self._due = min(dues, default=math.inf)

    def _warn_of_problems(self) -> None:
        """Once for each place that takes no more records, which then gets none."""
        broken = [track.writer for track in self._tracks if track.writer.problem]
        self._tracks = [track for track in self._tracks if track.writer not in broken]
        self._plan()
        for writer in broken:
            warnings.warn(
                f"metrics end here, the training goes on: {writer.place}: {writer.problem}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _write(self, track: _Track, event: str, **more: Any) -> None:
        now, stats, calls = time.perf_counter(), self._stats(), self._calls()
        before, seconds, steps = track.stats, now - track.time, self._steps - track.steps
        waited = stats.seconds_waiting - before.seconds_waiting
        record = {
            **_now(event),
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
            "lr": [_number(rate) for rate in self._rates()],
            "calls": _differences(calls, track.calls),
            **more,
        }
        track.writer.put(record)
        track.time, track.steps, track.stats, track.calls = now, self._steps, stats, calls

    def _calls(self) -> dict[str, CallTotals]:
        # the lane's thread books calls meanwhile: dict() copies in one go
        return {name: replace(call) for name, call in dict(self._ledger.by_call).items()}


_open: weakref.WeakSet[Recorder] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """The last records of runs that neither `finish` nor `detach` ended; with the error, where one
    ends the program."""
    error = getattr(sys, "last_value", None)
    for recorder in list(_open):
        if error is not None:
            recorder.failed(error)
        recorder.close()


def _now(event: str) -> dict[str, Any]:
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
    """What went over the link since the last record, by name."""
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


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _finite(value: Any) -> Any:
    """``value`` with None in place of numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, (list, tuple)) else value
