"""`Elastic`: workers that come and go."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from laconic.errors import check_float, check_int
from laconic.links.elastic.coordinator import parse_address

COORDINATOR_VARIABLE = "LACONIC_COORDINATOR"
"""Names the coordinator where ``coordinator`` is not given."""
TRACE_VARIABLE = "LACONIC_TRACE"
"""Names the directory where ``trace`` is not given."""


@dataclass(frozen=True)
class Elastic:
    """Train with workers that come and go: ``attach(..., elastic=Elastic("host:29400"))``.

    Args:
        coordinator: the address of the coordinator, as ``"host:port"``: of ``laconic
            coordinator``, or of a host on which workers run. The first of them that finds nobody
            at the address serves it. None: what the environment variable LACONIC_COORDINATOR says.
        min_workers: the least number of workers with which training goes on, at least 1; with
            fewer, the remaining ones wait. None: more than half of those before each change.
        workers: how many must have come before the run begins. None: ``min_workers``, or 2.
        job: the name of the run. Runs that share a coordinator need different names.
        wait: how many seconds to wait for enough workers, and for the coordinator.
        others: objects with ``state_dict()`` and ``load_state_dict()``, by name, such as a learning
            rate scheduler. A newcomer loads another worker's state of them. The samples of an
            `ElasticSampler` among them are dealt to the workers that take part. The names are the
            same on all workers. While a worker joins, another one copies their state in every step:
            they should be small. None: there are none.
        trace: a directory. Each worker writes a file there, which records who took part in which
            round, and when; `Trace` reads these files. None: what the environment variable
            LACONIC_TRACE says; without it, nothing is recorded.

    Examples:
        >>> elastic = laconic.Elastic("10.0.0.1:29400", workers=4, min_workers=2)
        >>> elastic.address()
        '10.0.0.1:29400'
    """

    coordinator: str | None = None
    min_workers: int | None = None
    workers: int | None = None
    job: str = "default"
    wait: float = 600.0
    others: Mapping[str, Any] | None = field(default=None, compare=False)
    trace: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.coordinator is not None:
            if not isinstance(self.coordinator, str):
                raise ValueError(f"coordinator must be 'host:port', not {self.coordinator!r}")
            parse_address(self.coordinator)
        if self.min_workers is not None:
            check_int("min_workers", self.min_workers, 1)
        if self.workers is not None:
            check_int("workers", self.workers, 1)
            if self.workers < (self.min_workers or 1):
                raise ValueError(
                    f"workers={self.workers} is below min_workers={self.min_workers}: the start "
                    "waits for at least as many as training goes on with"
                )
        check_float("wait", self.wait, 0.0, strict=True)
        if not isinstance(self.job, str) or not self.job or not self.job.isprintable():
            raise ValueError(f"job must be a name, not {self.job!r}")
        if self.trace is not None and not isinstance(self.trace, (str, os.PathLike)):
            raise ValueError(f"trace must be the path of a directory, not {self.trace!r}")
        named = isinstance(self.others, Mapping) and all(isinstance(n, str) for n in self.others)
        if self.others is not None and not named:
            raise ValueError(f"others must be objects by name, not {self.others!r}")

    def address(self) -> str:
        """The coordinator's address; raises ``ValueError`` if there is none."""
        found = self.coordinator or os.environ.get(COORDINATOR_VARIABLE)
        if not found:
            raise ValueError(
                'no coordinator is given: pass Elastic("host:29400"), or set '
                f"{COORDINATOR_VARIABLE}=host:29400, with a host on which a worker or `laconic "
                "coordinator` runs"
            )
        return found

    def trace_directory(self) -> Path | None:
        """Where this worker records; None: nowhere."""
        found = self.trace or os.environ.get(TRACE_VARIABLE)
        return Path(found).expanduser() if found else None
