"""``laconic watch``: show a run that writes metrics while it runs."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Sequence
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
LATEST = 4
"""How many calls, and how many changes of workers, are shown."""
COLUMNS = ("rank", "step", "steps/s", "MB/s", "waiting", "rounds", "MB")
ENDINGS = {"end": "ended", "error": "error", "finish": "finished"}


def add(parser: Any) -> None:
    """Add the description and the options of the command."""
    parser.description = (
        "Show what laconic.attach(..., metrics=) writes: progress, speed, bytes sent and waiting "
        "time of a run. Follows the files on a terminal until Ctrl-C."
    )
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", type=Path, help="files, or a directory of files"
    )
    declare(parser, "--once")


def run(arguments: argparse.Namespace) -> int:
    """Watch until interrupted and return 0."""
    from rich.console import Console
    from rich.live import Live

    console, files = Console(), Files(arguments.paths)
    if arguments.once or not console.is_terminal:
        if not files.runs():
            named = ", ".join(map(str, arguments.paths))
            raise ValueError(f"no metrics in {named}: check that the run writes there")
        console.print(files.page())
        return 0
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(files.page(), refresh=True)
            time.sleep(0.5)
    return 0


class LogFile:
    """A file of records that is read as it grows. Only its latest run counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.modified = 0.0
        self._offset = 0
        self._begin({})

    def _begin(self, start: dict[str, Any]) -> None:
        self.start = start
        self.latest: dict[str, Any] = {}
        self.error = ""
        self.calls: dict[str, dict[str, Any]] = {}
        self.changes: list[str] = []
        """Who has joined and left in an elastic run, one line for each view."""
        self._ids: list[str] | None = None
        self._window: deque[dict[str, Any]] = deque()

    def poll(self) -> None:
        """Read new records. A file that has become shorter is read from its start."""
        with contextlib.suppress(FileNotFoundError), open(self.path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size < self._offset:
                self._offset = 0
                self._begin({})
            self.modified = status.st_mtime
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # its writer is not done, or was killed
                self._offset += len(line)
                with contextlib.suppress(ValueError, LookupError, TypeError):  # of others
                    self._read(json.loads(line))

    def _read(self, record: dict[str, Any]) -> None:
        if record["event"] == "start":
            self._begin(record)
            return
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

    def _read_view(self, record: dict[str, Any]) -> None:
        ids = [str(id) for id in record["ids"]]
        parts = [f"{after_step(record['step'])}: {len(ids)} workers"]
        before = ids if self._ids is None else self._ids  # the first record does not name them
        for what, some, others in (("joined", ids, before), ("left", before, ids)):
            if changed := [id for id in some if id not in others]:
                parts.append(f"{' '.join(changed)} {what}")
        parts.append(f"{record['workers_lost']} lost so far, with {record['steps_lost']} steps")
        self.changes.append(", ".join(parts))
        self._ids = ids

    def rates(self) -> tuple[str, str, str]:
        """Return steps and megabytes sent per second, and the share of time spent waiting."""
        seconds = sum(r["seconds"] for r in self._window)
        if seconds <= 0:
            return "-", "-", "-"
        steps = sum(r["steps"] for r in self._window) / seconds
        sent = sum(r["sent"] for r in self._window) / seconds
        waiting = sum(r["waiting"] * r["seconds"] for r in self._window) / seconds
        return f"{steps:.3g}", f"{sent / 1e6:.3g}", f"{waiting:.0%}"

    def news(self) -> tuple[str, bool]:
        """Return how the run ended or when its last record came, and whether that is a problem."""
        if ending := ENDINGS.get(self.latest.get("event", "")):
            return ("error" if self.error else ending), bool(self.error)
        age = max(time.time() - self.modified, 0.0)
        usual = max([float(self.start["every"]), *(r["seconds"] for r in self._window)])
        if age > max(STALE_SECONDS, 3 * usual):
            return f"none for {age:.0f} s", True
        return f"{age:.0f} s ago", bool(self.error)


class Files:
    """The files that a user names, and those in the directories that a user names."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._files: dict[Path, LogFile] = {}

    def runs(self) -> list[LogFile]:
        """Read new records, and return the files that contain a run, by rank."""
        for path in self._paths:
            for name in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
                self._files.setdefault(name, LogFile(name)).poll()
        found = [file for file in self._files.values() if file.start]
        return sorted(found, key=lambda file: (file.start["rank"], file.path))

    def page(self) -> RenderableType:
        """Return the whole display for a terminal."""
        from rich.console import Group
        from rich.text import Text

        runs = self.runs()
        if not runs:
            return Text(f"waiting for metrics in {', '.join(map(str, self._paths))}")
        first = runs[0]
        head = "{ranks} ranks, {workers} workers; laconic {laconic}, torch {torch}"
        lines = [head.format_map(first.start), *first.start["schedule"]]
        more = [_call(call) for call in list(first.calls.values())[-LATEST:]]
        more += first.changes[-LATEST:]
        errors = [f"rank {run.start['rank']}: {run.error}" for run in runs if run.error]
        red = [Text(error, style="red") for error in errors]
        return Group(*map(Text, lines), _table(runs), *map(Text, more), *red)


def _table(runs: Sequence[LogFile]) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, caption_justify="left")
    table.caption = f"Rates of the last {WINDOW_SECONDS:.0f} s. MB: payload sent."
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("host", max_width=12, no_wrap=True)
    table.add_column("news", no_wrap=True)
    for run in runs:
        latest, (news, problem) = run.latest, run.news()
        table.add_row(
            str(run.start["rank"]),
            str(latest.get("step", run.start["step"])),
            *run.rates(),
            str(latest.get("rounds", 0)),
            f"{latest.get('bytes_sent', 0) / 1e6:.4g}",
            Text(str(run.start["host"])),
            Text(news, style="red" if problem else ""),
        )
    return table


def _call(call: dict[str, Any]) -> str:
    count = max(call["count"], 1)
    seconds, megabytes = call["seconds"] / count, call["bytes"] / count / 1e6
    return f"{call['name']}, last {after_step(call['step'])}: {seconds:.3g} s, {megabytes:.3g} MB"
