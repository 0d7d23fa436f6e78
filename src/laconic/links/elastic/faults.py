"""Who takes part in a simulated elastic run: what a trace has recorded, or a plan in steps."""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from laconic.errors import check_int
from laconic.links.calls import Call
from laconic.links.polls import Decision


def record(path: Path, event: Mapping[str, Any]) -> None:
    """Append ``event`` to the file of a worker's events, before the worker goes on."""
    with path.open("a") as file:
        file.write(json.dumps(event) + "\n")


class Trace:
    """What the workers of an elastic run have recorded in a directory (``Elastic(trace=)``): who
    took part in what.

    ``laconic.simulate(..., faults=Trace(directory))`` repeats the run: with the same program, it
    gives the same bits. ``ids`` are the workers, in the order in which they came; the simulator
    numbers them by it.

    Args:
        directory: with the files of all workers.

    Raises ``ValueError`` if the directory has no such records, or if they contradict each other.

    Examples:
        >>> trace = laconic.Trace("trace")  # after a run with Elastic(trace="trace")
        >>> results = laconic.simulate(train, faults=trace)  # train(number): a worker's program
    """

    recorded = True
    """Whether it says which rounds with a quorum close: see `decided`."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        files, where = sorted(Path(directory).glob("*.jsonl")), os.fspath(directory)
        if not files:
            raise ValueError(f"no worker has recorded anything in {where}")
        self._events = {file.stem: _events(file) for file in files}
        for id, unit in _lost(self._events.values()).items():
            # it may have completed its last unit alone: the others did that again without it
            own = self._events.get(id, [])
            own[:] = [e for e in own if e.get("unit", e.get("serial", 0)) < unit]
        self._by_unit: dict[int, list[str]] = {}
        for file in files:
            for event in (event for event in self._events[file.stem] if "unit" in event):
                ids = event["workers"]
                if self._by_unit.setdefault(event["unit"], ids) != ids:
                    raise ValueError(
                        f"{file} and another file list other workers in unit {event['unit']}: the "
                        "directory seems to hold files of several runs. Use a new directory for "
                        "each"
                    )
        self._changes = sorted(self._by_unit)
        self.ids: list[str] = []
        for unit in self._changes:
            self.ids += [id for id in self._by_unit[unit] if id not in self.ids]
        rounds = [e for events in self._events.values() for e in events if "round" in e]
        self._decisions = {e["serial"]: Decision.of(e["round"]) for e in rounds}
        lacking = sorted(set(self.ids) - set(self._events))
        if lacking:
            raise ValueError(
                f"{where} lacks what these workers have recorded: {', '.join(lacking)}. Copy their "
                "files from their hosts, and use a new directory for each run"
            )

    def _recorded(self, worker: int, name: str) -> list[dict[str, Any]]:
        """The events of a worker that have something of this ``name``."""
        return [event for event in self._events[self.ids[worker]] if name in event]

    @property
    def workers(self) -> int:
        """How many workers there were."""
        return len(self.ids)

    def joins(self, worker: int) -> int | None:
        """After which step a newcomer's donor sends its state; None for a worker of the start."""
        joins = self._recorded(worker, "donor")
        return joins[-1]["step"] if joins else None

    def donor(self, worker: int, active: Sequence[int]) -> int:
        """The donor of a newcomer, one of the ``active`` workers then."""
        return self.ids.index(self._recorded(worker, "donor")[-1]["donor"])

    def present(self, serial: int, call: Call) -> list[int]:
        """Those that take part in the unit ``serial`` of ``call``, in order of their ranks."""
        at = bisect_right(self._changes, serial)
        return [self.ids.index(id) for id in self._by_unit[self._changes[max(at, 1) - 1]]]

    def decided(self, serial: int) -> Decision | None:
        """The round with a quorum that closed in that unit, if one did."""
        found = self._decisions.get(serial)
        if found is None:
            return None
        return replace(found, roster=tuple(str(self.ids.index(id)) for id in found.roster))

    def killed(self, worker: int, step: int) -> bool:
        """See `Faults.killed`: the units say who takes part."""
        return False

    def deals(self, worker: int) -> list[Any] | None:
        """The recorded deals of samples."""
        return [event["deals"] for event in self._recorded(worker, "deals")]


def _lost(recorded: Iterable[Sequence[Mapping[str, Any]]]) -> dict[str, int]:
    """By lost worker, the first unit that the others did without it."""
    found: dict[str, int] = {}
    for events in recorded:
        changes = [event for event in events if "unit" in event]
        for before, now in pairwise(changes):
            for id in set(before["workers"]) - set(now["workers"]):
                found[id] = min(now["unit"], found.get(id, now["unit"]))
    return found


def _events(file: Path) -> list[dict[str, Any]]:
    """What a worker has recorded."""
    lines = file.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]  # else killed as it wrote


@dataclass(frozen=True)
class Faults:
    """A plan for `laconic.simulate`, in steps.

    Args:
        start: how many workers there are at the start, at least 1.
        kill: (worker, step) pairs: the worker ends after that step, before the rounds that follow
            it. With a quorum, when it arrives at a round after at least so many steps of its own.
        join: steps, ascending. After each, a new worker gets the state of the running worker that
            is killed latest. It takes part from the next step on in which workers exchange
            something. New workers are numbered in that order after those of the start.

    Examples:
        >>> laconic.Faults(start=4, kill=((2, 90),), join=(120,)).workers
        5
    """

    recorded = False

    start: int
    kill: tuple[tuple[int, int], ...] = ()
    join: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_int("start", self.start, 1)
        if not isinstance(self.join, (tuple, list)):
            raise ValueError(f"join must be steps, such as (120,), not {self.join!r}")
        pairs = isinstance(self.kill, (tuple, list)) and all(
            isinstance(each, (tuple, list)) and len(each) == 2 for each in self.kill
        )
        if not pairs:
            raise ValueError(f"kill must be (worker, step) pairs: ((2, 90),), not {self.kill!r}")
        for step in self.join:
            check_int("a step in join", step, 1)
        if list(self.join) != sorted(self.join):
            raise ValueError(f"the steps in join must ascend, not {list(self.join)}")
        for worker, step in self.kill:
            check_int("a step in kill", step, 0)
            if not 0 <= worker < self.workers:
                raise ValueError(f"kill: there are workers 0 to {self.workers - 1}, not {worker}")
        if len({worker for worker, _ in self.kill}) < len(self.kill):
            raise ValueError("kill: a worker is killed once")
        for step in (*self.join, *(step for _, step in self.kill)):
            if not self._alive(step):
                raise ValueError(f"no worker is left after step {step}")

    @property
    def workers(self) -> int:
        """How many workers there are over the whole run."""
        return self.start + len(self.join)

    def _born(self, worker: int) -> int:
        return -1 if worker < self.start else self.join[worker - self.start]

    def _alive(self, step: int) -> list[int]:
        """Those that take part in what follows ``step`` steps."""
        dead = {worker for worker, last in self.kill if last <= step}
        return [w for w in range(self.workers) if self._born(w) < step and w not in dead]

    def joins(self, worker: int) -> int | None:
        """See `Trace.joins`."""
        step = self._born(worker)
        return None if step < 0 else step

    def killed(self, worker: int, step: int) -> bool:
        """Whether it ends at the first round with a quorum after so many steps of its own."""
        return step >= dict(self.kill).get(worker, math.inf)

    def donor(self, worker: int, active: Sequence[int]) -> int:
        """See `Trace.donor`: the one that is killed last."""
        last = dict(self.kill)
        alive = set(active) & set(self._alive(self._born(worker)))
        return max(alive, key=lambda w: (last.get(w, math.inf), -w), default=-1)

    def present(self, serial: int, call: Call) -> list[int]:
        """See `Trace.present`."""
        return self._alive(call.step)

    def decided(self, serial: int) -> Decision | None:
        """See `Trace.decided`: times decide."""
        return None

    def deals(self, worker: int) -> list[Any] | None:
        """None: samples are dealt when workers come and go."""
        return None


Plan = Trace | Faults
"""Who takes part in a simulated run. Workers are numbers from 0."""
