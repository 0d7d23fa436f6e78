"""``laconic watch``: show a run that writes metrics while it runs."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic.cli.options import declare
from laconic.errors import after_step

if TYPE_CHECKING:
    from rich.console import RenderableType

WINDOW_SECONDS = 60.0
"""Rates are averaged over this time, so that a round every ten seconds is not a spike."""
STALE_SECONDS = 10.0
"""A run is stale without a record for this long and for three times the usual interval."""
LONGEST_LINE = 1 << 20
LATEST_CALLS = 4
LATEST_CHANGES = 4
CHUNK = 1 << 20
STARTS = {
    **dict.fromkeys(("rank", "ranks", "workers", "step"), int),
    **dict.fromkeys(("time", "every"), float),
    **dict.fromkeys(("host", "laconic", "torch"), str),
    "schedule": list,
}
"""Fields of a run's first record that are shown, with their types."""


def add(parser: Any) -> None:
    """Add the description and the options of the command."""
    parser.description = (
        "Show what laconic.attach(..., metrics=) writes: progress, speed, bytes sent and waiting "
        "time of a run. Follows the files until Ctrl-C."
    )
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", type=Path, help="files, or a directory of files"
    )
    declare(parser, "--once")


def run(arguments: argparse.Namespace) -> int:
    """Watch until interrupted and return 0."""
    from rich.console import Console

    console = Console()
    watched = Watcher(arguments.paths)
    try:
        watched.poll()
        if arguments.once:
            watched.check_found()
            console.print(watched.page())
        elif console.is_terminal:
            _show(watched, console)
        else:
            for line in watched.lines():
                print(line, flush=True)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # the reader, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _show(watched: Watcher, console: Any) -> None:
    from rich.live import Live

    with Live(watched.page(), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(0.5)
            watched.poll()
            live.update(watched.page(), refresh=True)


class LogFile:
    """A file of records that is read as it grows. Only its latest run counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.modified = 0.0
        self._reset_file()

    def _reset_file(self) -> None:
        self._inode, self._offset, self._rest = 0, 0, b""
        self.unreadable = 0
        self._reset_run({})

    def _reset_run(self, start: dict[str, Any]) -> None:
        self.start = start
        self.latest: dict[str, Any] = {}
        self.error = ""
        self.calls: dict[str, dict[str, Any]] = {}
        self._window: deque[dict[str, Any]] = deque()
        self.changes: list[str] = []
        """Who has joined and left in an elastic run, one line for each view."""
        self._ids: list[str] | None = None
        self._workers = int(start.get("workers", 0))

    def poll(self) -> None:
        """Read new records. A file that was replaced or truncated is read from its start."""
        try:
            with open(self.path, "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._reset_file()
                    self._inode = status.st_ino
                self.modified = status.st_mtime
                file.seek(self._offset)
                while piece := file.read(CHUNK):
                    self._offset += len(piece)
                    *lines, self._rest = (self._rest + piece).split(b"\n")
                    for line in lines:
                        self._read(line)
                    if len(self._rest) > LONGEST_LINE:
                        self.unreadable += 1
                        self._rest = b""
        except FileNotFoundError:
            return  # not there yet, or being replaced

    def _read(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            if record["event"] == "start":
                if not STARTS.items() <= {k: type(v) for k, v in record.items()}.items():
                    raise ValueError("not a record of laconic")
                self._reset_run(record)
                return
            for name in ("seconds", "steps", "sent", "waiting", "rounds", "step", "bytes_sent"):
                float(record[name])
            self._window.append(record)
            while record["time"] - self._window[0]["time"] > WINDOW_SECONDS:
                self._window.popleft()
            for call in record["calls"]:
                self.calls.pop(call["name"], None)  # so that the latest comes last
                self.calls[call["name"]] = call
            if record["event"] == "view":
                self._read_view(record)
            self.error = record.get("error", self.error)
            self.latest = record
        except (ValueError, LookupError, TypeError):
            self.unreadable += 1  # an incomplete line of a killed run, or not a record at all

    def _read_view(self, record: dict[str, Any]) -> None:
        ids, step = [str(id) for id in record["ids"]], record["step"]
        if self._ids is None:  # the first record does not name the workers
            who = [f"{self._workers} before"] * bool(self._workers)
        else:
            joined = [id for id in ids if id not in self._ids]
            left = [id for id in self._ids if id not in ids]
            who = [f"{' '.join(joined)} joined"] * bool(joined)
            who += [f"{' '.join(left)} left"] * bool(left)
        lost = f"{record['workers_lost']} lost so far, with {record['steps_lost']} steps"
        self.changes.append(f"{after_step(step)}: {len(ids)} workers, {', '.join([*who, lost])}")
        self._ids, self._workers = ids, len(ids)

    @property
    def has_run(self) -> bool:
        """Whether the file contains a run."""
        return bool(self.start)

    @property
    def rank(self) -> int:
        return int(self.start.get("rank", 0))

    def rates(self) -> tuple[float, float, float] | None:
        """Return steps per second, bytes sent per second and the share of time spent waiting.

        None until there is a record.
        """
        seconds = sum(r["seconds"] for r in self._window)
        if seconds <= 0:
            return None
        return (
            sum(r["steps"] for r in self._window) / seconds,
            sum(r["sent"] for r in self._window) / seconds,
            sum(r["waiting"] * r["seconds"] for r in self._window) / seconds,
        )

    def age(self) -> float:
        """Return the seconds since the last record."""
        return max(time.time() - self.modified, 0.0)

    def stale(self) -> bool:
        """Return whether a record is overdue."""
        gaps = [r["seconds"] for r in self._window]
        usual = max([float(self.start.get("every", 0)), *gaps])
        return not self.ending() and self.age() > max(STALE_SECONDS, 3 * usual)

    def ending(self) -> str:
        """Return how the run ended, or "" while it runs."""
        event = self.latest.get("event")
        ended = "error" if self.error else "ended"
        return {"end": ended, "error": "error", "finish": "finished"}.get(str(event), "")


class Watcher:
    """The files that a user names, and those in the directories that a user names."""

    def __init__(self, paths: Sequence[Path]) -> None:
        for path in paths:
            if not path.parent.is_dir():
                raise ValueError(f"cannot watch {path}: no directory {path.parent}")
        self._paths = paths
        self._files: dict[Path, LogFile] = {}

    def poll(self) -> None:
        """Read new records. Raises ``ValueError`` for a named file that is not a metrics file."""
        for path in self._paths:
            inside = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
            for name in inside:
                file = self._files.setdefault(name, LogFile(name))
                file.poll()
                if name == path and file.unreadable and not file.has_run:
                    raise ValueError(f"{path} contains no metrics of laconic")

    def check_found(self) -> None:
        """Raise ``ValueError`` if no run was found."""
        if not self.runs():
            named = ", ".join(map(str, self._paths))
            raise ValueError(f"no metrics in {named}: check that the run writes there")

    def runs(self) -> list[LogFile]:
        """Return the files that contain a run, by rank."""
        files = [file for file in self._files.values() if file.has_run]
        return sorted(files, key=lambda file: (file.rank, file.path))

    def page(self) -> RenderableType:
        """Return the whole display for a terminal."""
        from rich.console import Group
        from rich.text import Text

        runs = self.runs()
        waiting = [Text(line, style="yellow") for line in self._waiting()]
        if not runs:
            return Group(*waiting)
        start = runs[0].start
        head = (
            f"{start['ranks']} ranks, {start['workers']} workers; laconic {start['laconic']}, "
            f"torch {start['torch']}"
        )
        parts: list[RenderableType] = [Text(head), *map(Text, start["schedule"]), _table(runs)]
        parts += [Text(_call(call)) for call in list(runs[0].calls.values())[-LATEST_CALLS:]]
        parts += [Text(change) for change in runs[0].changes[-LATEST_CHANGES:]]
        parts += [Text(f"rank {r.rank}: {r.error}", style="red") for r in runs if r.error]
        return Group(*parts, *waiting)

    def lines(self) -> Iterator[str]:
        """Yield a line per change, once a second, for a file or a pipe."""
        shown: dict[Path, Any] = {}
        changes: dict[Path, tuple[dict[str, Any], int]] = {}
        yield from self._waiting()
        while True:
            for file in self.runs():
                start, count = changes.get(file.path, (file.start, 0))
                count = count if start == file.start else 0
                for change in file.changes[count:]:
                    yield f"rank {file.rank}: {change}"
                changes[file.path] = file.start, len(file.changes)
                now = "stale" if file.stale() else (file.start, file.latest)
                if shown.get(file.path) != now:
                    shown[file.path] = now
                    yield _line(file)
            time.sleep(1.0)
            self.poll()

    def _waiting(self) -> Iterator[str]:
        """Yield one line for each path without a run so far."""
        for path in self._paths:
            if not any(f.has_run and path in (f.path, f.path.parent) for f in self._files.values()):
                yield f"waiting for metrics in {path}"


def _table(runs: Iterable[LogFile]) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, caption_justify="left")
    table.caption = f"Rates of the last {WINDOW_SECONDS:.0f} s. MB: payload sent."
    for name in ("rank", "step", "steps/s", "MB/s", "waiting", "rounds", "MB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("host", max_width=12, no_wrap=True)
    table.add_column("news", no_wrap=True)
    for file in runs:
        latest = file.latest
        rates = file.rates()
        speed = ("-", "-", "-") if rates is None else _format(rates)
        stale = f"none for {file.age():.0f} s"
        style = "red" if file.stale() or file.error else ""
        table.add_row(
            str(file.rank),
            str(latest.get("step", file.start["step"])),
            *speed,
            str(latest.get("rounds", 0)),
            f"{latest.get('bytes_sent', 0) / 1e6:.4g}",
            Text(str(file.start["host"])),
            Text(
                stale if file.stale() else file.ending() or f"{file.age():.0f} s ago",
                style=style,
            ),
        )
    return table


def _format(rates: tuple[float, float, float]) -> tuple[str, str, str]:
    steps, sent, waiting = rates
    return f"{steps:.3g}", f"{sent / 1e6:.3g}", f"{waiting:.0%}"


def _call(call: dict[str, Any]) -> str:
    count = max(call["count"], 1)
    seconds, megabytes = call["seconds"] / count, call["bytes"] / count / 1e6
    return f"{call['name']}, last {after_step(call['step'])}: {seconds:.3g} s, {megabytes:.3g} MB"


def _line(file: LogFile) -> str:
    """Return one run in one line."""
    latest, rates = file.latest, file.rates()
    at = latest.get("time", file.start["time"])
    when = time.strftime("%H:%M:%S", time.localtime(at))
    parts = [f"{when} rank {file.rank}: step {latest.get('step', file.start['step'])}"]
    if rates is not None:
        steps, sent, waiting = _format(rates)
        parts += [f"{steps} steps/s", f"{sent} MB/s sent", f"{waiting} waiting"]
        parts.append(f"{latest['rounds']} rounds")
    if file.stale():
        parts.append(f"no record for {file.age():.0f} s")
    elif file.ending():
        parts.append(file.ending())
    return ", ".join(parts) + (f": {file.error}" if file.error else "")
