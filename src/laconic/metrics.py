"""Write metrics during a run, for ``laconic.attach(..., metrics=)``.

A record is a dictionary of numbers and strings. `docs/metrics.md` lists its fields. The training
thread creates records, at most one per step and one every ``every`` seconds. A separate thread
writes them, so a full, slow or missing disk costs the metrics and nothing else.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from laconic.errors import check_float
from laconic.links.agreement import on_all_ranks
from laconic.links.link import Link
from laconic.units import finite

Record = Mapping[str, Any]


class Metrics:
    """A sink for records. To write your own, subclass it and override `write`.

    Args:
        every: the least number of seconds between two records. 0: one per step.

    Examples:
        >>> class Print(laconic.Metrics):
        ...     def write(self, record):
        ...         print(record["event"])
        >>> sync = laconic.attach(model, optimizer, laconic.local_sgd(8), metrics=Print(every=10))
    """

    def __init__(self, every: float = 1.0) -> None:
        self.every = check_float("every", every, 0.0)

    def prepare(self, rank: int) -> bool:
        """Return whether ``rank`` writes. Every rank calls it before the run. What it raises on
        one rank, `laconic.attach` raises on all."""
        return rank == 0

    def open(self, rank: int) -> None:
        """Begin to write. Called on the writing thread before the first record."""

    def write(self, record: Record) -> None:
        """Write one record. An exception is reported once and closes this sink."""
        raise NotImplementedError

    def close(self) -> None:
        """Release resources. Called after the last record."""

    def __str__(self) -> str:
        return type(self).__name__


class JsonLines(Metrics):
    """Append one line of JSON per record to a file.

    Args:
        path: a file: rank 0 writes it. With ``{rank}`` in it, such as ``runs/{rank}.jsonl``: every
            rank writes its own, on its own host.
        every: the least number of seconds between two records. 0: one per step.

    Examples:
        >>> metrics = laconic.JsonLines("run.jsonl", every=10)
        >>> sync = laconic.attach(model, optimizer, laconic.local_sgd(8), metrics=metrics)
    """

    def __init__(self, path: str | os.PathLike[str], every: float = 1.0) -> None:
        super().__init__(every)
        text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
        if not isinstance(text, str) or not text or "\0" in text:
            raise ValueError(f"metrics must be the path of a file, not {path!r}")
        self._path = text
        self._file = -1

    def prepare(self, rank: int) -> bool:
        writes, path = rank == 0 or "{rank}" in self._path, self._rank_path(rank)
        if writes and os.path.isdir(path):
            each = os.path.join(self._path, "{rank}.jsonl")
            raise ValueError(f"metrics={self._path!r} is a directory: give a file, such as {each}")
        if writes and not os.path.isdir(os.path.dirname(path) or "."):
            raise ValueError(f"metrics={self._path!r}: no such directory: create it first")
        return writes

    def _rank_path(self, rank: int) -> str:
        return self._path.replace("{rank}", str(rank))

    def open(self, rank: int) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
        self._file = os.open(self._rank_path(rank), flags, 0o644)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")  # the last line is incomplete: an earlier run was killed

    def write(self, record: Record) -> None:
        line = (json.dumps(finite(record), allow_nan=False) + "\n").encode()
        written = os.write(self._file, line)
        if written < len(line):
            raise OSError(f"{written} of {len(line)} bytes written: is the disk full?")

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def __str__(self) -> str:
        return self._path


Sink = str | os.PathLike[str] | Metrics
MetricsArgument = Sink | Sequence[Sink] | None


def check_metrics(metrics: MetricsArgument) -> list[Metrics]:
    """Return the sinks that ``metrics`` names: a path, a `Metrics`, or a sequence of these.

    Raises ``ValueError`` for anything else.
    """
    if metrics is None:
        return []
    values = list(metrics) if isinstance(metrics, (list, tuple)) else [metrics]
    sinks: list[Metrics] = []
    for value in values:
        if isinstance(value, Metrics):
            if not hasattr(value, "every"):
                raise ValueError(f"{type(value).__name__}.__init__ must call super().__init__()")
            sinks.append(copy.copy(value))  # an open file belongs to one run
        elif isinstance(value, (str, os.PathLike)):
            sinks.append(JsonLines(value))
        else:
            raise ValueError(
                "metrics must be a path, laconic.JsonLines, another laconic.Metrics, or a list of "
                f"these, not {value!r}"
            )
    return sinks


def agree_on_metrics(
    sinks: Sequence[Metrics], link: Link, number: int | None = None
) -> list[Metrics]:
    """Return the ``sinks`` that this rank writes. Call it on every rank, also without sinks.
    ``number``: of this rank's files, if it is not the rank.

    Raises ``ValueError`` on every rank if `Metrics.prepare` raises on any. Any later problem is a
    warning on the affected rank only.
    """
    with on_all_ranks(link.gather):
        return [sink for sink in sinks if sink.prepare(link.rank if number is None else number)]
