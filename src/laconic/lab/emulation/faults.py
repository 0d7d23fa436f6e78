"""Plans of faults: which worker is killed, hangs, or is cut off, and when.

A plan is data. It starts nothing, and it does not know what a worker is: the lab carries it out on
hosts, and a simulator can carry it out on simulated workers. Times count from the start of the run,
in seconds or in steps, whichever the user of the plan has.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from laconic.errors import check_float, check_int
from laconic.units import parse_duration

__all__ = [
    "COORDINATOR",
    "Cut",
    "Event",
    "Fault",
    "Hang",
    "Kill",
    "Plan",
    "combined",
    "parse_cut",
    "parse_hang",
    "parse_kill",
    "random_kills",
]

COORDINATOR: Final = -1
"""The coordinator's number, where a fault names a worker."""

Time: TypeAlias = Callable[[str], float]
"""Parses a time. Raises ``ValueError`` for a text that is not one."""


@dataclass(frozen=True)
class Kill:
    """Worker ``worker``, or `COORDINATOR`, ends at once, without a word to the others."""

    at: float
    worker: int

    def __str__(self) -> str:
        return f"{self.at:g} kill {_name(self.worker)}"


@dataclass(frozen=True)
class Hang:
    """Worker ``worker`` stops at ``at`` and continues at ``until``, or never if that is None."""

    at: float
    worker: int
    until: float | None = None

    def __str__(self) -> str:
        until = "" if self.until is None else f" until {self.until:g}"
        return f"{self.at:g} hang {_name(self.worker)}{until}"


@dataclass(frozen=True)
class Cut:
    """No packet passes between ``worker`` and ``other`` from ``at`` to ``until``.

    If ``other`` is None, no packet passes between ``worker`` and anything else. If ``until`` is
    None, the cut is for good.
    """

    at: float
    worker: int
    other: int | None = None
    until: float | None = None

    def __str__(self) -> str:
        other = "" if self.other is None else f"-{_name(self.other)}"
        until = "" if self.until is None else f" until {self.until:g}"
        return f"{self.at:g} cut {_name(self.worker)}{other}{until}"


Fault: TypeAlias = Kill | Hang | Cut


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

    def __bool__(self) -> bool:
        return bool(self.faults)

    def __str__(self) -> str:
        """A line per fault, in order of time."""
        return "\n".join(map(str, sorted(self.faults, key=lambda fault: fault.at)))

    def check(self, workers: int) -> None:
        """Raise ``ValueError`` for a fault of a worker that does not exist, or at no time."""
        for fault in self.faults:
            until = None if isinstance(fault, Kill) else fault.until
            named = [fault.worker]
            if isinstance(fault, Cut) and fault.other is not None:
                named.append(fault.other)
            for worker in named:
                if worker != COORDINATOR and not 0 <= worker < workers:
                    raise ValueError(
                        f"a fault names {worker}, which does not exist: choose from 0 to "
                        f"{workers - 1}, or coordinator"
                    )
            if len(set(named)) < len(named):
                raise ValueError(f"a fault cuts {_name(named[0])} from itself: name two")
            check_float("the time of a fault", fault.at, 0.0)
            if until is not None and not fault.at < until < math.inf:
                raise ValueError(
                    f"a fault that begins at {fault.at:g} cannot end at {until:g}: its end must "
                    "be later"
                )

    def events(self) -> list[Event]:
        """Return the beginnings and the ends of the faults, in order of time."""
        events = [Event(fault.at, fault) for fault in self.faults]
        events += [
            Event(fault.until, fault, begins=False)
            for fault in self.faults
            if not isinstance(fault, Kill) and fault.until is not None
        ]
        # An end comes before a beginning at the same time: one fault may follow another.
        return sorted(events, key=lambda event: (event.at, event.begins))


def random_kills(mtbf: float, workers: int | Sequence[int], seed: int, horizon: float) -> Plan:
    """Return kills at random times up to ``horizon``.

    The times between two kills are exponential with the mean ``mtbf``, over all workers together.
    Each kill takes one of ``workers`` (a number of workers, or their numbers), all equally likely.
    Equal arguments give equal plans, and a longer horizon only adds kills at the end. Raises
    ``ValueError`` unless ``mtbf`` is positive.
    """
    check_float("mtbf", mtbf, 0.0, strict=True)
    check_float("horizon", horizon, 0.0)
    check_int("seed", seed, 0)
    numbers = range(workers) if isinstance(workers, int) else workers
    if not numbers:
        raise ValueError("random kills need at least one worker")
    generator = random.Random(seed)
    kills: list[Kill] = []
    now = generator.expovariate(1 / mtbf)
    while now <= horizon:
        kills.append(Kill(now, numbers[generator.randrange(len(numbers))]))
        now += generator.expovariate(1 / mtbf)
    return Plan(tuple(kills))


def parse_kill(text: str, time: Time = parse_duration) -> Kill:
    """Return the kill written as ``2@30s`` or ``coordinator@30s``."""
    form = "WORKER@TIME, such as 2@30s or coordinator@30s"
    who, at, until = _parts(text, time, form)
    if until is not None:
        raise ValueError(f"not a kill: {text!r}; a kill has no end: give {form}")
    return Kill(at, _worker(who, text, form))


def parse_hang(text: str, time: Time = parse_duration) -> Hang:
    """Return the hang written as ``1@40s`` or, with its end, ``1@40s..70s``."""
    form = "WORKER@TIME or WORKER@TIME..TIME, such as 1@40s or 1@40s..70s"
    who, at, until = _parts(text, time, form)
    return Hang(at, _worker(who, text, form), until)


def parse_cut(text: str, time: Time = parse_duration) -> Cut:
    """Return the cut written as ``0-3@50s..60s``, between two, or ``0@50s..60s``."""
    form = "WORKER-WORKER@TIME..TIME or WORKER@TIME..TIME, such as 0-3@50s..60s or 0@50s..60s"
    who, at, until = _parts(text, time, form)
    first, dash, second = who.partition("-")
    other = _worker(second, text, form) if dash else None
    return Cut(at, _worker(first, text, form), other, until)


def _parts(text: str, time: Time, form: str) -> tuple[str, float, float | None]:
    who, sign, when = text.partition("@")
    begin, dots, end = when.partition("..")
    if not sign:
        raise ValueError(f"not a fault: {text!r}; give {form}")
    try:
        return who, time(begin), time(end) if dots else None
    except ValueError as error:
        raise ValueError(f"not a fault: {text!r}: {error}; give {form}") from None


def _worker(text: str, whole: str, form: str) -> int:
    name = text.strip().removeprefix("host")
    if name == "coordinator":
        return COORDINATOR
    if not name.isascii() or not name.isdecimal():
        raise ValueError(f"not a fault: {whole!r}; give {form}")
    return int(name)


def _name(worker: int) -> str:
    return "coordinator" if worker == COORDINATOR else str(worker)


def combined(plans: Iterable[Plan]) -> Plan:
    """Return one plan with the faults of all ``plans``."""
    return Plan(tuple(fault for plan in plans for fault in plan.faults))
