"""Logging and profiling of SlowMoDistributedDataParallel."""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import profile, record_function

from laconic.device import profiler_activities
from laconic.engine.synchronizer import Synchronizer
from laconic.links.metered import CallTotals
from laconic.metrics import Metrics, Record

_tracing = False

TRACED = 4
"""Number of calls in a torch profiler trace. The last of them has a slow step."""
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

    Every rank writes a torch profiler trace of the calls up to the second slow step to
    ``slowmo_trace.rank<r>.json`` in the current directory, if ``traces`` is true. Simulated workers
    cannot do this, because torch has one profiler per process.
    """

    def __init__(self, sync: Synchronizer, rank: int, period: int, traces: bool) -> None:
        self._sync = sync
        self._traces = traces
        self._rank = rank
        self._period = period
        self._parts: dict[str, CallTotals] = {}
        self._before: dict[str, CallTotals] = {}
        self._profiler: profile | None = None

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the code in this context."""
        start = time.perf_counter()
        with record_function(f"slowmo: {name}"):
            yield
        part = self._parts.setdefault(name, CallTotals())
        part.count += 1
        part.seconds += time.perf_counter() - start

    def call(self, advance: Callable[[], None]) -> None:
        """Profile one call of perform_slowmo, implemented by ``advance()``."""
        if self._traces and self._sync.step == max(2 * self._period - TRACED, 0):
            self._start_trace()
        with self.part(WHOLE):
            advance()
        if self._sync.step == 2 * self._period:
            self._end_trace()
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

    def _start_trace(self) -> None:
        global _tracing
        if _tracing or torch._C._autograd._profiler_enabled():
            return  # torch has one profiler per process, and it is in use
        _tracing = True
        self._profiler = profile(activities=profiler_activities())
        self._profiler.start()

    def _end_trace(self) -> None:
        if self._profiler is not None:
            global _tracing
            self._profiler.stop()
            path = Path(f"slowmo_trace.rank{self._rank}.json")
            try:
                path = path.resolve()
                self._profiler.export_chrome_trace(str(path))
                if self._rank == 0:
                    sys.stdout.write(f"torch profiler trace: {path}\n")
            except (OSError, RuntimeError) as error:
                warnings.warn(f"cannot write the profiler trace {path}: {error}", stacklevel=2)
            self._profiler, _tracing = None, False
