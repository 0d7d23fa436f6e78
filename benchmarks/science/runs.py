"""The runs of this benchmark, stored in a file, so that it can resume."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from benchmarks.journal import Journal, sources_digest
from benchmarks.science import experiment
from benchmarks.science.experiment import Job, Outcome, train


@cache
def sources() -> str:
    """Return a digest of the code that runs depend on. Runs of other code do not count."""
    return sources_digest([Path(experiment.__file__)])


def _journal(path: Path) -> Journal[Job, Outcome]:
    return Journal(path, Job, Outcome, train, sources())


def load(path: Path) -> dict[Job, Outcome]:
    """Return the runs in the file at ``path`` that were made by this code."""
    return _journal(path).load()


def outcomes(
    jobs: Iterable[Job], path: Path, processes: int, progress: Callable[[int, int], None]
) -> dict[Job, Outcome]:
    """Return the outcome of each job, from the file at ``path`` or from running it; see
    `Journal.outcomes`."""
    return _journal(path).outcomes(jobs, processes, progress)
