"""When to communicate: pure functions of the step, counted from 1.

A schedule is a frozen value with ``schedule(step) -> bool``, so that it can be compared, printed,
checked for equality between ranks and evaluated ahead of time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from laconic.errors import check_int


class Schedule(Protocol):
    """Says whether a round falls due after ``step`` (a gradient round: in ``step``)."""

    def __call__(self, step: int) -> bool: ...


@dataclass(frozen=True)
class Every:
    """After steps ``period, 2*period, 3*period, ...``, or ``offset, offset + period, ...``."""

    period: int
    offset: int = 0

    def __call__(self, step: int) -> bool:
        return step % self.period == self.offset

    def __repr__(self) -> str:
        offset = f", offset={self.offset}" if self.offset else ""
        return f"Every(period={self.period}{offset})"


@dataclass(frozen=True)
class Unless:
    """``schedule``, but not where ``skipped`` falls due."""

    schedule: Schedule
    skipped: Schedule

    def __call__(self, step: int) -> bool:
        return self.schedule(step) and not self.skipped(step)


@dataclass(frozen=True)
class After:
    """``schedule``, at steps greater than ``start`` only."""

    start: int
    schedule: Schedule

    def __call__(self, step: int) -> bool:
        return step > self.start and self.schedule(step)


@dataclass(frozen=True)
class Until:
    """``schedule``, at steps up to and including ``end`` only."""

    end: int
    schedule: Schedule

    def __call__(self, step: int) -> bool:
        return step <= self.end and self.schedule(step)


@dataclass(frozen=True)
class AnyOf:
    """Where at least one of ``schedules`` falls due."""

    schedules: tuple[Schedule, ...]

    def __call__(self, step: int) -> bool:
        return any(schedule(step) for schedule in self.schedules)


def every(period: int, *, offset: int = 0, unless: Schedule | None = None) -> Schedule:
    """Steps ``period, 2*period, ...`` (with an ``offset``: ``offset, offset + period, ...``), but
    for those where ``unless`` falls due.

    Raises ``ValueError`` unless ``period`` is an integer of at least 1 and ``offset`` one of at
    least 0.
    """
    schedule = Every(check_int("period", period, 1), check_int("offset", offset, 0) % period)
    return schedule if unless is None else Unless(schedule, unless)


def after(start: int, schedule: Schedule) -> Schedule:
    """``schedule`` at the steps greater than ``start`` (an integer of at least 0)."""
    return After(check_int("start", start, 0), schedule)


def until(end: int, schedule: Schedule) -> Schedule:
    """``schedule`` at the steps up to and including ``end`` (an integer of at least 0)."""
    return Until(check_int("end", end, 0), schedule)


def any_of(*schedules: Schedule) -> Schedule:
    """The steps at which at least one of ``schedules`` falls due."""
    return schedules[0] if len(set(schedules)) == 1 else AnyOf(tuple(dict.fromkeys(schedules)))
