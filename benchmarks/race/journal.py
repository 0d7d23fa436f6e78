"""The journal of finished runs, one line of JSON each, so that a race can resume.

A line has the settings that all runs of a table share (task, length and machine), a key derived
from them, the job, and the lab's result: rows, settings, machine, versions, command.
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

from benchmarks.race.networks import Network
from laconic.lab.race.result import Result, Row

T = TypeVar("T")
Shared = Mapping[str, object]
"""Settings by name; JSON."""


def key(shared: Shared) -> str:
    """Return a key of eight hexadecimal digits for the settings."""
    text = json.dumps(shared, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Job:
    """A row with a seed on a network.

    ``network`` is None for the row without communication, for which the network does not matter.
    """

    row: str
    network: Network | None
    seed: int


@dataclass(frozen=True)
class Entry:
    """A finished job and its result, a race with a single row."""

    shared: Shared
    job: Job
    result: Result

    @property
    def run(self) -> Row:
        """The row of the result."""
        return self.result.rows[0]

    def to_line(self) -> str:
        """Return the line for the journal."""
        network = self.job.network
        where = {"bandwidth": None} if network is None else network.document()
        job = {"row": self.job.row, **where, "seed": self.job.seed}
        result = json.loads(self.result.to_json())
        return json.dumps({"key": key(self.shared), "shared": self.shared, **job, "result": result})

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Entry:
        """Parse what `to_line` wrote. Raises ``ValueError`` for anything else."""
        try:
            job = Job(fields["row"], _network(fields), fields["seed"])
            shared, result = fields["shared"], Result.from_json(json.dumps(fields["result"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a run of this benchmark: {error!r}") from None
        if (
            not isinstance(shared, dict)
            or len(result.rows) != 1
            or fields.get("key") != key(shared)
        ):
            raise ValueError("not a run of this benchmark: its settings and key disagree")
        return cls(shared, job, result)


def _network(fields: Mapping[str, Any]) -> Network | None:
    """Return the network of a line. Lines of earlier versions have a bandwidth only."""
    if fields["bandwidth"] is None:
        return None
    names = ("latency", "jitter", "loss", "control")
    return Network(fields["bandwidth"], **{n: fields[n] for n in names if n in fields})


def load(path: Path) -> list[Entry]:
    """Return the journal's entries, the last one per job and settings.

    Returns none if there is no file, and ignores incomplete lines. Raises ``ValueError`` for any
    other line and ``OSError`` if the file cannot be read.
    """
    found: dict[tuple[str, Job], Entry] = {}
    for entry in read(path, Entry.from_fields):
        found.pop((key(entry.shared), entry.job), None)
        found[key(entry.shared), entry.job] = entry
    return list(found.values())


def read(path: Path, parse: Callable[[dict[str, Any]], T]) -> Iterator[T]:
    """Yield the result of ``parse`` for each complete line of a journal, if the file exists.

    A ``ValueError`` of ``parse`` is raised with the line number.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            fields = json.loads(line)
        except json.JSONDecodeError:
            continue  # incomplete, after a power failure or on a full disk
        try:
            yield parse(fields if isinstance(fields, dict) else {})
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None


def by_key(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Group the entries by the key of their settings. Entries of one group are comparable."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(key(entry.shared), []).append(entry)
    return groups


@contextmanager
def opened(path: Path) -> Iterator[IO[str]]:
    """Open the journal to append to it.

    Raises ``ValueError`` if another process uses it: two races at once would compete for
    processors.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another race is writing to {path}: wait until it ends") from None
        yield file


def append(file: IO[str], entry: Entry) -> None:
    """Append a line and make sure that it is on the disk."""
    path = Path(file.name)
    incomplete = path.stat().st_size and path.read_bytes()[-1:] != b"\n"
    file.write("\n" * bool(incomplete) + entry.to_line() + "\n")
    file.flush()
    os.fsync(file.fileno())
