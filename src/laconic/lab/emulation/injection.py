"""Carry out a plan of faults on the hosts of a lab, and start lost programs again."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from laconic.lab.emulation.cluster import Cluster, Loopback
from laconic.lab.emulation.faults import COORDINATOR, Event, Fault, Plan
from laconic.lab.emulation.jobs import Job

__all__ = ["COORDINATOR_PORT", "Happened", "Injection", "Starter"]

COORDINATOR_PORT: Final = 29400


@dataclass(frozen=True)
class Happened:
    """Something that the lab did, or saw, because of a fault.

    ``at`` is in seconds since the start, and ``time`` in seconds since 1970. ``host`` is for
    display.
    """

    at: float
    host: str
    what: str
    time: float = field(default_factory=time.time)

    def __str__(self) -> str:
        return f"{self.at:.1f} s: {self.host} {self.what}"


class Starter(Protocol):
    """Starts the processes of a run."""

    def start_rank(self, rank: int) -> None:
        """Start the process of a rank again, and give it to the job."""

    def start_coordinator(self) -> None:
        """Start the coordinator."""

    def coordinator_runs(self) -> bool:
        """Return whether the coordinator runs."""


class Injection:
    """The faults of one run.

    ``plan`` has been checked. ``restart`` is the time in seconds after which a lost program is
    started again, or None for never. ``report`` receives what happens. The run calls `act` often,
    and `forgive` when a program has failed.
    """

    def __init__(
        self,
        plan: Plan,
        restart: float | None,
        cluster: Cluster | Loopback,
        job: Job,
        starter: Starter,
        report: Callable[[Happened], None],
    ) -> None:
        self._restart, self._cluster, self._job = restart, cluster, job
        self._starter, self._report = starter, report
        self._coordinator = len(cluster.addresses) - 1
        self._events = plan.events()
        self._cuts: list[Fault] = []
        self._hung: set[int] = set()
        self._excused: set[int] = set()  # hosts whose next failure is a consequence of a fault
        self._touched: set[int] = set()  # hosts that had a fault
        self._restarts: list[tuple[float, int, int]] = []  # time, host, rank; -1 is the coordinator

    def act(self, now: float) -> None:
        """Carry out what is due at ``now``, in seconds since the start."""
        if self._job.succeeded():
            # The run is ending: a program started now would find nobody.
            self._events.clear()
            self._end_faults(now)
            self._excused |= self._touched
            return
        while self._events and self._events[0].at <= now:
            self._carry_out(self._events.pop(0), now)
        for due in sorted(one for one in self._restarts if one[0] <= now):
            self._restarts.remove(due)
            self._start(due[1], due[2], now)

    def next_due(self) -> float:
        """Return when `act` has something to do next, or infinity."""
        times = [event.at for event in self._events[:1]] + [at for at, _, _ in self._restarts]
        return min(times, default=math.inf)

    def forgive(self, now: float) -> bool:
        """Return whether all programs that have failed since did so because of a fault."""
        failed = self._job.failed()
        if not failed or not all(outcome.host in self._excused for outcome in failed):
            return False
        for outcome in failed:
            self._happened(now, outcome.host, f"failed after its fault: {outcome.how}")
            self._lose(outcome.host, outcome.rank, now)
        self._excused -= {outcome.host for outcome in failed}
        return True

    def _carry_out(self, event: Event, now: float) -> None:
        fault = event.fault
        host = self._number(fault.worker)
        self._touched.add(host)
        if fault.kind == "kill":
            self._kill(host, now)
        elif fault.kind == "hang":
            if event.begins:
                self._hang(host, now, for_good=fault.until is None)
            elif host in self._hung:
                self._resume(host, now)
        else:
            self._cut(fault, now, begins=event.begins)

    def _cut(self, cut: Fault, now: float, *, begins: bool) -> None:
        if begins:
            self._cuts.append(cut)
        else:
            self._cuts.remove(cut)
        self._cluster.cut(pair for each in self._cuts for pair in self._pairs(each))
        ends = [self._number(end) for end in (cut.worker, cut.other) if end is not None]
        self._excused.update(ends)
        self._touched.update(ends)
        preposition = "from" if begins else "to"
        other = f" {preposition} {self._name(ends[1])}" if ends[1:] else ""
        self._happened(now, ends[0], f"{'cut' if begins else 'connected again'}{other}")

    def _pairs(self, cut: Fault) -> list[tuple[int, int]]:
        host = self._number(cut.worker)
        if cut.other is not None:
            return [(host, self._number(cut.other))]
        return [(host, other) for other in range(self._coordinator + 1) if other != host]

    def _number(self, worker: int) -> int:
        return self._coordinator if worker == COORDINATOR else worker

    def _kill(self, host: int, now: float) -> None:
        ranks = self._job.running_on(host)
        if not (ranks or (host == self._coordinator and self._starter.coordinator_runs())):
            self._happened(now, host, "not killed: it does not run")
            return
        self._hung.discard(host)
        for rank in ranks:
            self._lose(host, rank, now)
        self._cluster.signal(host, signal.SIGKILL)
        if host == self._coordinator and self._restart is not None:
            self._restarts.append((now + self._restart, host, -1))
        self._happened(now, host, "killed")

    def _lose(self, host: int, rank: int, now: float) -> None:
        self._job.lose(rank, returns=self._restart is not None)
        if self._restart is not None:
            self._restarts.append((now + self._restart, host, rank))

    def _hang(self, host: int, now: float, *, for_good: bool) -> None:
        if for_good:
            for rank in self._job.running_on(host):
                self._job.lose(rank, returns=False)
        else:
            self._hung.add(host)
        self._cluster.signal(host, signal.SIGSTOP)
        self._happened(now, host, "stopped")

    def _resume(self, host: int, now: float) -> None:
        self._hung.discard(host)
        self._excused.add(host)
        self._cluster.signal(host, signal.SIGCONT)
        self._happened(now, host, "continued")

    def _start(self, host: int, rank: int, now: float) -> None:
        if rank < 0:
            self._starter.start_coordinator()
        else:
            self._starter.start_rank(rank)
        self._happened(now, host, "started again")

    def _end_faults(self, now: float) -> None:
        """End the faults that have an end, and start nothing again."""
        for host in sorted(self._hung):
            self._resume(host, now)
        if self._cuts:
            self._cuts.clear()
            self._cluster.cut(())
        for _, _, rank in self._restarts:
            if rank >= 0:
                self._job.lose(rank, returns=False)
        self._restarts.clear()

    def _happened(self, now: float, host: int, what: str) -> None:
        self._report(Happened(now, self._name(host), what))

    def _name(self, host: int) -> str:
        return "coordinator" if host == self._coordinator else f"host{host}"
