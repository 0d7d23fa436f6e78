"""What an elastic run has made of its steps, and who was present when.

The workers record events (`laconic.Elastic`, ``trace``): a line of JSON per event, in a file per
worker, with the time in seconds since 1970. Those that count here have a key ``presence``:

    begin     host: the worker takes part from now on
    view      workers: the ids of those that take part from now on. gone: those that do not any
              more, and how many steps they had computed, and others had received, as far as they
              were heard of
    left      the worker has left by itself, on SIGTERM
    finished  `Synchronizer.finish` is complete

Each of them has ``steps``: how many steps the worker has computed, and how many of these count. A
step counts if another worker has received its contribution, or if the final consensus contains it.
"""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from laconic.lab.emulation.injection import KILLED, Happened

__all__ = [
    "Goodput",
    "Worker",
    "read",
    "report",
    "summary",
    "trace_directory",
]

Events = Mapping[str, Sequence[Mapping[str, Any]]]
"""The events of each worker, by its id, in the order in which it has recorded them."""


@dataclass(frozen=True)
class Worker:
    """One worker. ``begin`` and ``end`` are in seconds since the start of the lab. ``how`` it has
    ended: ``finished``, ``left``, ``killed by plan``, ``lost``, or ``ended with the lab``."""

    id: str
    host: str
    begin: float
    end: float
    how: str
    computed: int
    counted: int


@dataclass(frozen=True)
class Goodput:
    """``workers``: by host, in the order in which they took part. ``runs_lost``: runs of which no
    worker was left."""

    workers: Sequence[Worker]
    runs_lost: int = 0

    @property
    def computed(self) -> int:
        """Steps that were computed, by all workers together."""
        return sum(worker.computed for worker in self.workers)

    @property
    def counted(self) -> int:
        """Those that count."""
        return sum(worker.counted for worker in self.workers)

    @property
    def ratio(self) -> float | None:
        """Steps that count over steps computed; None if none was computed."""
        return self.counted / self.computed if self.computed else None

    def document(self) -> dict[str, Any]:
        """Return all of it as JSON can hold it."""
        return {
            "goodput": self.ratio,
            "computed": self.computed,
            "counted": self.counted,
            "runs_lost": self.runs_lost,
            "workers": [vars(worker) for worker in self.workers],
        }


def trace_directory(out: Path | None, stack: contextlib.ExitStack) -> Path:
    """Return an empty directory in which the workers of a lab record: in ``out``, or a temporary
    one, which the ``stack`` removes. Raises ``OSError`` with its name."""
    if out is None:
        temporary = tempfile.TemporaryDirectory(prefix="laconic-lab-", ignore_cleanup_errors=True)
        return Path(stack.enter_context(temporary))
    directory = out.absolute() / "trace"
    try:
        directory.mkdir(exist_ok=True)
        for old in directory.glob("*.jsonl"):
            old.unlink()
    except OSError as error:
        raise OSError(f"cannot write {directory}: {error.strerror}") from error
    return directory


def read(directory: Path) -> Events:
    """Return the events in the files of a directory. Skips lines that are not complete: a worker
    was killed while it wrote them."""
    found = {}
    for path in directory.glob("*.jsonl"):
        *lines, _ = path.read_text(errors="replace").split("\n")
        found[path.stem] = [event for line in lines for event in _parsed(line)]
    return found


def _parsed(line: str) -> list[dict[str, Any]]:
    try:
        event = json.loads(line)
    except ValueError:
        return []
    return [event] if isinstance(event, dict) and "presence" in event else []


def summary(
    events: Events, happened: Iterable[Happened], start: float, seconds: float
) -> Goodput | None:
    """Return what the workers have made of their steps. None if no worker has taken part.

    ``happened``: what the lab has done to hosts. ``start``: when it began, in seconds since 1970.
    ``seconds``: when it began to end, in seconds since then. If no worker of a run has finished or
    was there until the lab ended, nothing of the run is left, and none of its steps count.
    """
    views = [event for own in events.values() for event in _of(own, "view")]
    kills = sorted((one for one in happened if one.what == KILLED), key=lambda kill: kill.at)
    workers = {
        id: _worker(id, own, views, kills, start, seconds)
        for id, own in events.items()
        if _of(own, "begin")
    }
    runs_lost = 0
    for run in _runs(views):
        members = [workers[id] for id in run if id in workers]
        if members and all(worker.how in ("left", "killed by plan", "lost") for worker in members):
            runs_lost += 1
            workers |= {worker.id: replace(worker, counted=0) for worker in members}
    order = sorted(workers.values(), key=lambda w: (len(w.host), w.host, w.begin))
    return Goodput(order, runs_lost) if order else None


def _of(events: Sequence[Mapping[str, Any]], *kinds: str) -> list[Mapping[str, Any]]:
    return [event for event in events if event["presence"] in kinds]


def _worker(
    id: str,
    own: Sequence[Mapping[str, Any]],
    views: Sequence[Mapping[str, Any]],
    kills: Sequence[Happened],
    start: float,
    seconds: float,
) -> Worker:
    """Return what the worker's ``own`` events and the ``views`` of all tell about it."""
    begin = _of(own, "begin")[0]
    host, end = begin["host"], start + seconds
    without = [view for view in views if id in view["gone"]]
    heard = [event["steps"] for event in own] + [view["gone"][id] for view in without]
    computed, counted = (max(each) for each in zip(*heard, strict=True))
    gone = min((view["time"] for view in without), default=math.inf)
    kill = next((k for k in kills if k.host == host and k.time >= begin["time"]), None)
    finals = _of(own, "finished", "left")
    final = finals[-1] if finals else None
    if final is not None and final["presence"] == "finished" and final["steps"][0] == computed:
        how, at = "finished", final["time"]  # else it has gone on after that
    elif final is not None and final["presence"] == "left" and final["time"] <= end:
        how, at = "left", final["time"]
    elif kill is not None and start + kill.at <= gone:
        how, at = "killed by plan", max(start + kill.at, begin["time"])
    elif gone < end:
        how, at = "lost", gone
    else:
        how, at = "ended with the lab", end
    first, last = round(begin["time"] - start, 3), round(at - start, 3)
    return Worker(id, host, first, last, how, computed, counted)


def _runs(views: Sequence[Mapping[str, Any]]) -> list[set[str]]:
    """Return the ids of the workers of each run: views of one run have workers in common."""
    runs: list[set[str]] = []
    for view in views:
        ids = {*view["workers"], *view["gone"]}
        apart = [run for run in runs if not run & ids]
        runs = [*apart, ids.union(*(run for run in runs if run & ids))]
    return runs


def report(goodput: Goodput) -> list[str]:
    """Return the lines for display."""
    if goodput.ratio is None:
        lines = ["goodput: no step was computed"]
    else:
        percent = math.floor(1000 * goodput.ratio) / 10  # 100 % only if all count
        counts = f"{goodput.counted} of {goodput.computed} steps counted"
        lines = [f"goodput {percent:g}%: {counts}"]
    if goodput.runs_lost:
        text = "a run was lost" if goodput.runs_lost == 1 else f"{goodput.runs_lost} runs were lost"
        lines.append(f"{text}, with all workers: none of the steps counted")
    wide = max(len(worker.host) for worker in goodput.workers)
    digits = len(str(goodput.computed))
    lines.append("who was present, in seconds since the start:")
    lines += [
        f"  {worker.host:{wide}}  {worker.id}  {worker.begin:7.1f} to {worker.end:7.1f}  "
        f"{worker.how:18}  {worker.counted:{digits}} of {worker.computed:{digits}} counted"
        for worker in goodput.workers
    ]
    return lines
