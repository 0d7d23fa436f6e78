"""What the workers of a run write down, and what follows from it.

Every process writes its own file: a line of JSON per event, with the time in seconds since 1970. A
process that is killed leaves what it has written. The events are:

    start       host
    attached    round: the process has found the others, and has their state
    step        an optimizer step
    lost        the steps since the last round have no effect: the process took over another state
    round       round, steps: the round is complete, and holds so many steps of this process
    loaded      round: the process goes on from a checkpoint
    final       round, loss, curve: the held-out loss at the end, and [round, loss] on the way
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

HOSTS = 4
STOP = "stop"
"""The file that holds the round after which all workers end."""


class Recorder:
    """Writes the events of this process into a directory. Counts the steps that a round holds."""

    def __init__(self, directory: Path, host: int) -> None:
        self._directory = directory
        self.incarnation = len([*directory.glob(f"host{host}-*.jsonl")])
        path = directory / f"host{host}-{self.incarnation}-{os.getpid()}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._pending = 0
        self.say("start", host=host)

    def say(self, event: str, **more: object) -> None:
        """Write an event."""
        line = json.dumps({"event": event, "time": time.time(), **more}) + "\n"
        os.write(self._file, line.encode())

    def step(self) -> None:
        """An optimizer step has been computed."""
        self._pending += 1
        self.say("step")

    def lost(self) -> None:
        """The steps since the last round have no effect."""
        self._pending = 0
        self.say("lost")

    def round(self, number: int) -> bool:
        """A round is complete. Return whether it is the last one."""
        self.say("round", round=number, steps=self._pending)
        self._pending = 0
        try:
            return number >= int((self._directory / STOP).read_text())
        except (FileNotFoundError, ValueError):
            return False


@dataclass(frozen=True)
class Process:
    """The events of one process."""

    host: int
    events: Sequence[Mapping[str, Any]]

    def of(self, *names: str) -> list[Mapping[str, Any]]:
        """Return the events with these names."""
        return [event for event in self.events if event["event"] in names]


def read(directory: Path) -> list[Process]:
    """Return the processes of a run, in order of their start."""
    processes = []
    for path in directory.glob("host*-*.jsonl"):
        *whole, _ = path.read_text().split("\n")
        events = [json.loads(line) for line in whole]
        if events:
            processes.append(Process(events[0]["host"], events))
    return sorted(processes, key=lambda process: process.events[0]["time"])


def last_round(processes: Sequence[Process]) -> int:
    """Return the largest round that any process has completed."""
    return max((event["round"] for p in processes for event in p.of("round")), default=0)


def summary(processes: Sequence[Process], faults: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of a run. ``faults``: what the lab did, as in its rates.json."""
    rounds = [(e["time"], e["round"]) for p in processes for e in p.of("round")]
    kills = [fault for fault in faults if fault["what"] == "killed"]
    starts = [fault for fault in faults if fault["what"] == "started again"]
    finals = [event for process in processes for event in process.of("final")]
    computed = sum(len(process.of("step")) for process in processes)
    counted = counted_steps(processes)
    begin = min((time for time, _ in rounds), default=0.0)
    end = max((time for time, _ in rounds), default=0.0)
    last = last_round(processes)
    return {
        "rounds": last,
        "seconds": end - begin,
        "computed": computed,
        "counted": counted,
        "goodput": counted / computed if computed else None,
        "loss": min((final["loss"] for final in finals), default=None),
        "losses": [final["loss"] for final in finals],
        "curve": next((final["curve"] for final in finals if final.get("curve")), []),
        "kills": len(kills),
        "to_next_round": [_next_round(kill["time"], rounds) for kill in kills],
        "to_taking_part": [_taking_part(start, processes) for start in starts],
    }


def counted_steps(processes: Sequence[Process]) -> int:
    """Return how many steps have an effect on the final model.

    When a run goes on from a checkpoint, the rounds after it have none, and run again.
    """
    counted: dict[int, int] = {}
    events = sorted(
        (event for process in processes for event in process.of("round", "loaded")),
        key=lambda event: event["time"],
    )
    for event in events:
        if event["event"] == "loaded":
            counted = {number: n for number, n in counted.items() if number <= event["round"]}
        else:
            counted[event["round"]] = counted.get(event["round"], 0) + event["steps"]
    return sum(counted.values())


def _next_round(kill: float, rounds: Sequence[tuple[float, int]]) -> float | None:
    """Return the seconds from a kill to the next round that had not been completed before it."""
    before = max((number for at, number in rounds if at <= kill), default=0)
    return min((at - kill for at, number in rounds if at > kill and number > before), default=None)


def _taking_part(start: Mapping[str, Any], processes: Sequence[Process]) -> float | None:
    """Return the seconds from a start to the first round that holds steps of this host.

    None if the host was killed again before, or the run ended.
    """
    host = int(start["host"].removeprefix("host"))
    times = [
        event["time"] - start["time"]
        for process in processes
        if process.host == host
        for event in process.of("round")
        if event["steps"] and event["time"] > start["time"]
    ]
    return min(times, default=None)


def spread(values: Sequence[float | None]) -> str:
    """Return the median and the largest of the values that are known, for display."""
    known = [value for value in values if value is not None]
    missing = f", {len(values) - len(known)} never" if len(known) < len(values) else ""
    return f"{median(known):.1f} / {max(known):.1f}{missing}" if known else f"-{missing}"
