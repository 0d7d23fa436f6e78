"""Logging, and the times, of SlowMoDistributedDataParallel."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from laconic.engine.synchronizer import Synchronizer
from laconic.links.metered import CallTotals
from laconic.metrics import Metrics, Record

WHOLE = "perform_slowmo, total"


class LogLines(Metrics):
    """Writes every record as a line of JSON to the logger ``laconic.slowmo``, at level DEBUG."""

    def __init__(self) -> None:
        super().__init__(every=0.0)

    def writes(self, rank: int) -> bool:
        return True

    def open(self, rank: int) -> None:
        self._logger = logging.getLogger("laconic.slowmo")
        self._logger.setLevel(logging.DEBUG)
        if not self._logger.hasHandlers():
            self._logger.addHandler(logging.StreamHandler())
        self._rank = rank

    def write(self, record: Record) -> None:
        self._logger.debug(json.dumps({"rank": self._rank, **record}))


class Profile:
    """Times the parts of a training with ``sync``.

    After every ``period`` calls, rank 0 prints a table of the calls since the previous table: how
    often each part ran, and its milliseconds and megabytes sent per run. For rounds and gradients,
    the time is that of the collectives, including the wait for slower ranks. The rest of the total
    is packing and arithmetic.
    """

    def __init__(self, sync: Synchronizer, rank: int, period: int) -> None:
        self._sync = sync
        self._rank = rank
        self._period = period
        self._parts: dict[str, CallTotals] = {}
        self._before: dict[str, CallTotals] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the code in this context."""
        start = time.perf_counter()
        yield
        part = self._parts.setdefault(name, CallTotals())
        part.count += 1
        part.seconds += time.perf_counter() - start

    def call(self, advance: Callable[[], None]) -> None:
        """Profile one call of perform_slowmo, implemented by ``advance()``."""
        with self.part(WHOLE):
            advance()
        if self._sync.step % self._period == 0:
            if self._rank == 0:
                sys.stdout.write(self.table())
                sys.stdout.flush()
            self._parts, self._before = {}, self._sync.calls()

    def table(self) -> str:
        """Return a table of the parts of the calls since the previous table."""
        rows = [("part", "calls", "ms each", "MB each")]
        calls = self._sync.calls()
        for name, call in {**self._parts, **calls}.items():
            last = self._before.get(name, CallTotals()) if name in calls else CallTotals()
            count = call.count - last.count
            if count:
                each = (call.seconds - last.seconds) / count, (call.bytes - last.bytes) / count
                rows.append((name, str(count), f"{1e3 * each[0]:.3f}", f"{each[1] / 1e6:.3f}"))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in rows
        ]
        title = f"SlowMo, rank {self._rank}, calls up to {self._sync.step}"
        return "\n".join([title, *lines, ""])
