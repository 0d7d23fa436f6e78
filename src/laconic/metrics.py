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

import torch

from laconic.errors import check_float, error_text
from laconic.links.agreement import agree
from laconic.links.link import Link
from laconic.units import finite

Record = Mapping[str, Any]

MOST_SINKS = 8
NOT_GIVEN, READY, DIRECTORY, MISSING, FAILED = range(5)


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

    Args:
        path: a file: rank 0 writes it. With ``{rank}`` in it: every rank writes its own. A
            directory: every rank writes ``rank{rank}.jsonl`` in it, on its own host.
        every: the least number of seconds between two records. 0: one per step.

    Examples:
        >>> metrics = laconic.JsonLines("run.jsonl", every=10)
        >>> sync = laconic.attach(model, optimizer, laconic.local_sgd(8), metrics=metrics)
    """

    def __init__(self, path: str | os.PathLike[str], every: float = 1.0) -> None:
        super().__init__(every)
        text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
        if not isinstance(text, str) or not text or "\0" in text:
            raise ValueError(f"metrics must be the path of a file or directory, not {path!r}")
        self._path = text
        self._file = -1

    def survey(self, rank: int) -> int:
        if os.path.isdir(self._rank_path(rank)):
            self._path = os.path.join(self._path, "rank{rank}.jsonl")
            return DIRECTORY
        parent = os.path.dirname(self._rank_path(rank)) or "."
        return READY if os.path.isdir(parent) or not self.writes(rank) else MISSING

    def _rank_path(self, rank: int) -> str:
        return self._path.replace("{rank}", str(rank))

    def writes(self, rank: int) -> bool:
        return rank == 0 or "{rank}" in self._path

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
    if len(values) > MOST_SINKS:
        raise ValueError(f"metrics takes at most {MOST_SINKS} sinks, not {len(values)}")
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

    Raises ``ValueError`` on every rank if the directory to write in is missing on one of them, or
    if a sink's `Metrics.survey` or `Metrics.writes` raises. Any other problem is a warning on the
    affected rank only.
    """
    codes, caught = [], None
    rank = link.rank if number is None else number
    try:
        codes = [sink.survey(rank) for sink in sinks]
        own = [sink for sink in sinks if sink.writes(rank)]
    except Exception as error:  # of a user's own sink
        codes, caught = [FAILED], error
    padded = codes + [NOT_GIVEN] * (MOST_SINKS - len(codes))
    gathered = link.gather(torch.tensor(padded)).cpu()
    try:
        problem = None if caught is None else error_text(caught)
        agree(link.gather, problem, (gathered == FAILED).any(1))
    except ValueError as refused:
        raise refused from caught
    for index, column in enumerate(gathered.unbind(1)):
        codes = column.tolist()
        shared = DIRECTORY in codes
        lacking = [r for r, c in enumerate(codes) if c == MISSING or (shared and c == READY)]
        if lacking:
            which = f"metrics={str(sinks[index])!r}" if index < len(sinks) else "metrics"
            ranks = f"rank{'s' * (len(lacking) > 1)} {', '.join(map(str, lacking))}"
            raise ValueError(f"{which}: no such directory on {ranks}: create it first")
    return own
