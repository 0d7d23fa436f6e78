"""Finished runs of the race and their journal.

A line has the settings that all runs of a table share (task, length and machine), a key derived
from them, the job, and the lab's result: rows, settings, machine, versions, command.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.race.networks import Network
from benchmarks.study import Journal, checked, key
from laconic.lab.race.result import Result, Row


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

    shared: Mapping[str, object]
    job: Job
    result: Result

    @property
    def run(self) -> Row:
        """The row of the result."""
        return self.result.rows[0]

    @property
    def identity(self) -> Hashable:
        return key(self.shared), self.job

    def document(self) -> dict[str, Any]:
        """Return the line of the journal."""
        network = self.job.network
        where = {"bandwidth": None} if network is None else network.document()
        job = {"row": self.job.row, **where, "seed": self.job.seed}
        result = json.loads(self.result.to_json())
        return {"key": key(self.shared), "shared": self.shared, **job, "result": result}


def parsed(fields: Mapping[str, Any]) -> Entry:
    """Parse what `Entry.document` returned."""
    job = Job(fields["row"], _network(fields), fields["seed"])
    result = Result.from_json(json.dumps(fields["result"]))
    if len(result.rows) != 1:
        raise ValueError("its result must have one row")
    return Entry(checked(fields), job, result)


def _network(fields: Mapping[str, Any]) -> Network | None:
    """Return the network of a line. Lines of earlier versions have a bandwidth only."""
    if fields["bandwidth"] is None:
        return None
    names = ("latency", "jitter", "loss", "control")
    return Network(fields["bandwidth"], **{n: fields[n] for n in names if n in fields})


def journal(path: Path) -> Journal[Entry]:
    """The runs in the file at ``path``."""
    return Journal(path, parsed)


def comparable(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Group the entries by a key of the settings that decide about their figures. These are all but
    the number of validations, during which the clock stops. Of each job, the last entry counts."""
    groups: dict[str, dict[Job, Entry]] = {}
    for entry in entries:
        decisive = {name: v for name, v in entry.shared.items() if name != "validations"}
        groups.setdefault(key(decisive), {})[entry.job] = entry
    return {name: list(found.values()) for name, found in groups.items()}
