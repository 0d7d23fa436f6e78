"""The runs that were finished, one line of JSON each, so that a race that was killed goes on.

A line has the settings that all figures of a table must share (of task, length and machine), a key
made of them, which run it is, and the lab's own result: rows, settings, machine, versions, command.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from laconic.lab.race.result import Result, Row

T = TypeVar("T")
Shared = Mapping[str, object]
"""Settings by name; JSON."""


def key(shared: Shared) -> str:
    """Eight digits for the settings."""
    text = json.dumps(shared, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Job:
    """A row on a network (``bandwidth`` of each host in bit/s; None for the row without
    communication, whose network does not matter) with a seed."""

    row: str
    bandwidth: float | None
    seed: int


@dataclass(frozen=True)
class Entry:
    """A job that was finished, and the race of a single row that came of it."""

    shared: Shared
    job: Job
    result: Result

    @property
    def run(self) -> Row:
        """The row of the lab."""
        return self.result.rows[0]

    def to_line(self) -> str:
        """For the journal."""
        job = {"row": self.job.row, "bandwidth": self.job.bandwidth, "seed": self.job.seed}
        result = json.loads(self.result.to_json())
        return json.dumps({"key": key(self.shared), "shared": self.shared, **job, "result": result})

    @classmethod
    def from_fields(cls, fields: dict[str, object]) -> Entry:
        """From what `to_line` wrote. Raises ``ValueError`` for anything else."""
        try:
            job = Job(*(fields[name] for name in ("row", "bandwidth", "seed")))  # type: ignore[arg-type]
            shared, result = fields["shared"], Result.from_json(json.dumps(fields["result"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a run of this benchmark: {error!r}") from None
        if (
            not isinstance(shared, dict)
            or len(result.rows) != 1
            or fields.get("key") != key(shared)
        ):
            raise ValueError("not a run of this benchmark: its settings and its key do not agree")
        return cls(shared, job, result)


def load(path: Path) -> list[Entry]:
    """The journal's entries, the last one of each job under its settings; none where there is no
    file. A line that was cut off does not count. Raises ``ValueError`` for a line of another kind
    and ``OSError`` for a file that cannot be read."""
    found: dict[tuple[str, Job], Entry] = {}
    for entry in read(path, Entry.from_fields):
        found.pop((key(entry.shared), entry.job), None)
        found[key(entry.shared), entry.job] = entry
    return list(found.values())


def read(path: Path, parse: Callable[[dict[str, Any]], T]) -> Iterator[T]:
    """What ``parse`` makes of each line of a journal; nothing where there is no file. A line that
    was cut off does not count; a ``ValueError`` of ``parse`` is told with the line's number."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            fields = json.loads(line)
        except json.JSONDecodeError:
            continue  # the machine was switched off, or the disk full, while it was written
        try:
            yield parse(fields if isinstance(fields, dict) else {})
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None


def by_key(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """The entries that may be compared with each other, by the key of their settings."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(key(entry.shared), []).append(entry)
    return groups


@contextmanager
def opened(path: Path) -> Iterator[IO[str]]:
    """The journal, to append to. Raises ``ValueError`` while another process has it: two races at
    once would take each other's processors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another race is writing to {path}: wait for its end") from None
        yield file


def append(file: IO[str], entry: Entry) -> None:
    """Add a line, and see that it is on the disk."""
    written = Path(file.name)
    cut = written.stat().st_size and written.read_bytes()[-1:] != b"\n"
    file.write("\n" * bool(cut) + entry.to_line() + "\n")
    file.flush()
    os.fsync(file.fileno())
