"""``laconic watch``: show a run that writes metrics, while it runs."""

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

from laconic.errors import install

if TYPE_CHECKING:
    from rich.console import RenderableType

WINDOW_SECONDS = 60.0
"""Rates are means over this long, so that a round every ten seconds is no spike."""
STALE_SECONDS = 10.0
"""No news for longer than this, and than three usual gaps between records, is a warning."""
LONGEST_LINE = 1 << 20
LATEST_CALLS = 4
CHUNK = 1 << 20
STARTS = {
    **dict.fromkeys(("rank", "ranks", "workers", "step"), int),
    **dict.fromkeys(("time", "every"), float),
    **dict.fromkeys(("host", "laconic", "torch"), str),
    "schedule": list,
}
"""What of a run's first record is shown."""


def add(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "watch",
        help="show a run that writes metrics",
        description="Show what laconic.attach(..., metrics=) writes: where the run is, how fast, "
        "what it sends and how long it waits. Follows the files until Ctrl-C.",
    )
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", type=Path, help="files, or a directory of them"
    )
    parser.add_argument("--once", action="store_true", help="show the present state and end")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """0, also when interrupted: watching ends no other way."""
    try:
        from rich.console import Console
    except ImportError as error:
        raise ImportError(f"laconic watch needs {error.name}: {install('lab')}") from None
    console = Console()
    watched = Watched(arguments.paths)
    try:
        watched.poll()
        if arguments.once:
            watched.check_present()
            console.print(watched.page())
        elif console.is_terminal:
            _show(watched, console)
        else:
            for line in watched.lines():
                print(line, flush=True)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # into head, say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _show(watched: Watched, console: Any) -> None:
    from rich.live import Live

    with Live(watched.page(), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(0.5)
            watched.poll()
            live.update(watched.page(), refresh=True)


class Followed:
    """One file of records, read as it grows: the latest run in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.modified = 0.0
        self._forget_file()

    def _forget_file(self) -> None:
        self._inode, self._offset, self._rest = 0, 0, b""
        self.unreadable = 0
        self._forget_run({})

    def _forget_run(self, start: dict[str, Any]) -> None:
        self.start = start
        self.latest: dict[str, Any] = {}
        self.error = ""
        self.calls: dict[str, dict[str, Any]] = {}
        self._window: deque[dict[str, Any]] = deque()

    def poll(self) -> None:
        """Read what is new; a file that was replaced or emptied is read from its beginning."""
        try:
            with open(self.path, "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._forget_file()
                    self._inode = status.st_ino
                self.modified = status.st_mtime
                file.seek(self._offset)
                while piece := file.read(CHUNK):
                    self._offset += len(piece)
                    *lines, self._rest = (self._rest + piece).split(b"\n")
                    for line in lines:
                        self._take(line)
                    if len(self._rest) > LONGEST_LINE:
                        self.unreadable += 1
                        self._rest = b""
        except FileNotFoundError:
            return  # not there yet, or just being replaced

    def _take(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            if record["event"] == "start":
                if not STARTS.items() <= {k: type(v) for k, v in record.items()}.items():
                    raise ValueError("another program's record")
                self._forget_run(record)
                return
            for name in ("seconds", "steps", "sent", "waiting", "rounds", "step", "bytes_sent"):
                float(record[name])
            self._window.append(record)
            while record["time"] - self._window[0]["time"] > WINDOW_SECONDS:
                self._window.popleft()
            for call in record["calls"]:
                self.calls.pop(call["name"], None)  # so that the latest comes last
                self.calls[call["name"]] = call
            self.error = record.get("error", self.error)
            self.latest = record
        except (ValueError, LookupError, TypeError):
            self.unreadable += 1  # half a line that a killed run left, or no record at all

    @property
    def seen(self) -> bool:
        """Whether a run was found in it."""
        return bool(self.start)

    @property
    def rank(self) -> int:
        return int(self.start.get("rank", 0))

    def rates(self) -> tuple[float, float, float] | None:
        """Steps per second, bytes sent per second, share of the time spent waiting; None as long
        as nothing is known."""
        seconds = sum(r["seconds"] for r in self._window)
        if seconds <= 0:
            return None
        return (
            sum(r["steps"] for r in self._window) / seconds,
            sum(r["sent"] for r in self._window) / seconds,
            sum(r["waiting"] * r["seconds"] for r in self._window) / seconds,
        )

    def age(self) -> float:
        """Seconds since the last record."""
        return max(time.time() - self.modified, 0.0)

    def stale(self) -> bool:
        """Whether a record is overdue."""
        gaps = [r["seconds"] for r in self._window]
        usual = max([float(self.start.get("every", 0)), *gaps])
        return not self.news() and self.age() > max(STALE_SECONDS, 3 * usual)

    def news(self) -> str:
        """How the run ended, if it did."""
        event = self.latest.get("event")
        ended = "error" if self.error else "ended"
        return {"end": ended, "error": "error", "finish": "finished"}.get(str(event), "")


class Watched:
    """The files that a user named, and those that appear in the directories."""

    def __init__(self, paths: Sequence[Path]) -> None:
        for path in paths:
            if not path.parent.is_dir():
                raise ValueError(f"cannot watch {path}: there is no directory {path.parent}")
        self._paths = paths
        self._files: dict[Path, Followed] = {}

    def poll(self) -> None:
        """Read what is new. Raises ``ValueError`` for a named file that holds something else."""
        for path in self._paths:
            inside = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
            for one in inside:
                followed = self._files.setdefault(one, Followed(one))
                followed.poll()
                if one == path and followed.unreadable and not followed.seen:
                    raise ValueError(f"{path} holds no metrics of laconic")

    def check_present(self) -> None:
        """Raise ``ValueError`` if there is nothing to see."""
        if not self.runs():
            named = ", ".join(map(str, self._paths))
            raise ValueError(f"no metrics in {named}: does the run write there?")

    def runs(self) -> list[Followed]:
        """Those with a run, by rank."""
        seen = [followed for followed in self._files.values() if followed.seen]
        return sorted(seen, key=lambda f: (f.rank, f.path))

    def page(self) -> RenderableType:
        """All of it, for a terminal."""
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
        parts += [Text(f"rank {r.rank}: {r.error}", style="red") for r in runs if r.error]
        return Group(*parts, *waiting)

    def lines(self) -> Iterator[str]:
        """What is new, once a second, for a file or a pipe."""
        told: dict[Path, Any] = {}
        yield from self._waiting()
        while True:
            for followed in self.runs():
                now = "stale" if followed.stale() else (followed.start, followed.latest)
                if told.get(followed.path) != now:
                    told[followed.path] = now
                    yield _line(followed)
            time.sleep(1.0)
            self.poll()

    def _waiting(self) -> Iterator[str]:
        """One line for each path without a run so far."""
        for path in self._paths:
            if not any(f.seen and path in (f.path, f.path.parent) for f in self._files.values()):
                yield f"waiting for metrics in {path}"


def _table(runs: Iterable[Followed]) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, caption_justify="left")
    table.caption = f"Rates of the last {WINDOW_SECONDS:.0f} s; MB: payload that was sent."
    for name in ("rank", "step", "steps/s", "MB/s", "waiting", "rounds", "MB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("host", max_width=12, no_wrap=True)
    table.add_column("news", no_wrap=True)
    for followed in runs:
        latest = followed.latest
        rates = followed.rates()
        speed = ("-", "-", "-") if rates is None else _told(rates)
        stale = f"none for {followed.age():.0f} s"
        style = "red" if followed.stale() or followed.error else ""
        table.add_row(
            str(followed.rank),
            str(latest.get("step", followed.start["step"])),
            *speed,
            str(latest.get("rounds", 0)),
            f"{latest.get('bytes_sent', 0) / 1e6:.4g}",
            Text(str(followed.start["host"])),
            Text(
                stale if followed.stale() else followed.news() or f"{followed.age():.0f} s ago",
                style=style,
            ),
        )
    return table


def _told(rates: tuple[float, float, float]) -> tuple[str, str, str]:
    steps, sent, waiting = rates
    return f"{steps:.3g}", f"{sent / 1e6:.3g}", f"{waiting:.0%}"


def _call(call: dict[str, Any]) -> str:
    count = max(call["count"], 1)
    seconds, megabytes = call["seconds"] / count, call["bytes"] / count / 1e6
    return f"{call['name']}, last after step {call['step']}: {seconds:.3g} s, {megabytes:.3g} MB"


def _line(followed: Followed) -> str:
    """One run in one line."""
    latest, rates = followed.latest, followed.rates()
    at = latest.get("time", followed.start["time"])
    when = time.strftime("%H:%M:%S", time.localtime(at))
    parts = [f"{when} rank {followed.rank}: step {latest.get('step', followed.start['step'])}"]
    if rates is not None:
        steps, sent, waiting = _told(rates)
        parts += [f"{steps} steps/s", f"{sent} MB/s sent", f"{waiting} waiting"]
        parts.append(f"{latest['rounds']} rounds")
    if followed.stale():
        parts.append(f"no news for {followed.age():.0f} s")
    elif followed.news():
        parts.append(followed.news())
    return ", ".join(parts) + (f": {followed.error}" if followed.error else "")
