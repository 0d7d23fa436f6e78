"""Plans of faults: which worker is killed, hangs, or is cut off, and when.

A plan is data: the lab carries it out on hosts. Times are in seconds since the start of the run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from laconic.errors import check_float
from laconic.units import parse_duration

__all__ = ["COORDINATOR", "Event", "Fault", "Kind", "Plan", "parse"]

COORDINATOR: Final = -1
"""The coordinator's number, where a fault names a worker."""
Kind: TypeAlias = Literal["kill", "hang", "cut"]
_FORMS: Final[dict[Kind, str]] = {
    "kill": "WORKER@TIME, such as 2@30s or coordinator@30s",
    "hang": "WORKER@TIME or WORKER@TIME..TIME, such as 1@40s or 1@40s..70s",
    "cut": "WORKER-WORKER@TIME..TIME or WORKER@TIME..TIME, such as 0-3@50s..60s or 0@50s..60s",
}


@dataclass(frozen=True)
class Fault:
    """What happens to a worker, or to the `COORDINATOR`, at a time.

    A kill ends it at once, without a word to the others. A hang stops it until ``until``. During a
    cut, no packet passes between it and ``other``, or anything else if that is None. Without
    ``until``, a hang or a cut is for good.
    """

    kind: Kind
    at: float
    worker: int
    other: int | None = None
    until: float | None = None


@dataclass(frozen=True)
class Event:
    """A moment of a plan: a fault begins, or if not ``begins``, it ends."""

    at: float
    fault: Fault
    begins: bool = True


@dataclass(frozen=True)
class Plan:
    """The faults of a run, in any order."""

    faults: tuple[Fault, ...] = ()

    def check(self, workers: int) -> None:
        """Raise ``ValueError`` for a fault of a worker that does not exist, or at no time."""
        for fault in self.faults:
            for worker in (fault.worker, fault.other):
                if worker not in (None, COORDINATOR, *range(workers)):
                    raise ValueError(
                        f"a fault names {worker}, which does not exist: choose from 0 to "
                        f"{workers - 1}, or coordinator"
                    )
            if fault.worker == fault.other:
                raise ValueError(f"a fault cuts {_name(fault.worker)} from itself: name two")
            check_float("the time of a fault", fault.at, 0.0)
            if fault.until is not None and not fault.at < fault.until < math.inf:
                raise ValueError(
                    f"a fault that begins at {fault.at:g} cannot end at {fault.until:g}: its end "
                    "must be later"
                )

    def events(self) -> list[Event]:
        """Return the beginnings and the ends of the faults, in order of time."""
        events = [Event(fault.at, fault) for fault in self.faults]
        events += [
            Event(fault.until, fault, begins=False)
            for fault in self.faults
            if fault.until is not None
        ]
        # An end comes before a beginning at the same time: one fault may follow another.
        return sorted(events, key=lambda event: (event.at, event.begins))


def parse(kind: Kind, text: str) -> Fault:
    """Return the fault that a text describes, such as ``2@30s``, ``1@40s..70s`` or
    ``0-3@50s..60s``."""
    who, _, when = text.partition("@")
    begin, dots, end = when.partition("..")
    first, dash, second = who.partition("-")
    try:
        if (dash and kind != "cut") or (dots and kind == "kill"):
            raise ValueError(f"it has {'two workers' if dash else 'an end'}")
        other = _worker(second) if dash else None
        until = parse_duration(end) if dots else None
        return Fault(kind, parse_duration(begin), _worker(first), other, until)
    except ValueError as error:
        raise ValueError(f"not a {kind}: {text!r}: {error}; give {_FORMS[kind]}") from None


def _worker(text: str) -> int:
    name = text.strip().removeprefix("host")
    if name == "coordinator":
        return COORDINATOR
    if not name.isascii() or not name.isdecimal():
        raise ValueError(f"{text!r} is no worker")
    return int(name)


def _name(worker: int) -> str:
    return "coordinator" if worker == COORDINATOR else str(worker)
