"""When to communicate: pure functions of the step number, which starts at 1.

A schedule is a frozen value with ``schedule(step) -> bool``. It can be compared, printed, checked
for equality between ranks, and evaluated ahead of time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from laconic.errors import check_int


class Schedule(Protocol):
    """Return whether a round is due after ``step`` (a gradient round: during ``step``)."""

    def __call__(self, step: int) -> bool: ...


@dataclass(frozen=True)
class Every:
    """Due after steps ``period, 2*period, 3*period, ...``, or ``offset, offset + period, ...``."""

    period: int
    offset: int = 0

    def __call__(self, step: int) -> bool:
        return step >= self.offset and (step - self.offset) % self.period == 0

    def __repr__(self) -> str:
        offset = f", offset={self.offset}" if self.offset else ""
        return f"Every(period={self.period}{offset})"


@dataclass(frozen=True)
class Unless:
    """Due when ``schedule`` is due and ``skipped`` is not."""

    schedule: Schedule
    skipped: Schedule

    def __call__(self, step: int) -> bool:
        return self.schedule(step) and not self.skipped(step)


@dataclass(frozen=True)
class After:
    """Due when ``schedule`` is due, at steps greater than ``start`` only."""

    start: int
    schedule: Schedule

    def __call__(self, step: int) -> bool:
        return step > self.start and self.schedule(step)


@dataclass(frozen=True)
class Until:
    """Due when ``schedule`` is due, at steps up to and including ``end`` only."""

    end: int
    schedule: Schedule

    def __call__(self, step: int) -> bool:
        return step <= self.end and self.schedule(step)


@dataclass(frozen=True)
class AnyOf:
    """Due when at least one of ``schedules`` is due."""

    schedules: tuple[Schedule, ...]

    def __call__(self, step: int) -> bool:
        return any(schedule(step) for schedule in self.schedules)


LONGEST_PATTERN = 10**6
"""So many steps `always_due` and `ends` follow schedules, in less than a second."""


def always_due(*schedules: Schedule) -> bool:
    """Return whether at least one of ``schedules`` is due at every step. False where that is not
    known: functions of a user's own count as never due."""
    patterns = {s: pattern for s in schedules if (pattern := _pattern(s)) is not None}
    numbers = {0}.union(*(numbers for numbers, _ in patterns.values()))
    period = math.lcm(*(period for _, period in patterns.values()))
    return period <= LONGEST_PATTERN and all(
        any(schedule(step) for schedule in patterns)
        for number in numbers
        for step in range(max(number, 1), number + period + 1)
    )


def ends(schedule: Schedule, step: int) -> bool:
    """Return whether ``schedule`` is due at no step after ``step``. False where that is not
    known."""
    pattern = _pattern(schedule)
    if pattern is None:
        return False
    numbers, period = pattern
    later = range(step + 1, max(step, *numbers) + period + 1)
    due = any(schedule(s) for s in later[:LONGEST_PATTERN])
    return not due and len(later) <= LONGEST_PATTERN


def _pattern(schedule: Schedule) -> tuple[set[int], int] | None:
    """The numbers of steps in ``schedule``, and its period: from one of them to the next, and after
    the last one, it repeats with the period. None: it is not made of the kinds here."""
    numbers, period = {0}, 1
    parts: list[object] = [schedule]
    for part in parts:  # what they are made of is added to them
        if isinstance(part, tuple):
            parts += part
        elif isinstance(part, int):
            numbers.add(part)
        elif isinstance(part, (Every, Unless, After, Until, AnyOf)):
            period = math.lcm(period, part.period if isinstance(part, Every) else 1)
            parts += [value for name, value in vars(part).items() if name != "period"]
        else:
            return None
    return numbers, period


LATE_STEPS = 0.25
"""So many steps later than planned a worker at its own pace may arrive, if the grace allows it."""


def own_pace(period: int, speed: float, fastest: float, *, grace: float = 0.0) -> int:
    """Return how many steps a worker takes from one of its rounds to the next, so that it arrives
    with the fastest worker, which takes ``period`` steps::

        steps = max(floor(period * speed / fastest + min(speed * grace, 1/4)), 1)

    Speeds are in steps per second. These are the dynamic local updates of Liu et al. 2024, arXiv
    2401.09135, Equation 6. The quarter of a step is there because measured speeds vary, and a
    worker that comes within the ``grace`` takes part: one that is 1% slower than the fastest need
    not wait for a whole step.
    """
    if not speed or not fastest:
        return period if speed == fastest else 1
    steps = speed * (period / fastest) + min(speed * grace, LATE_STEPS)
    return max(math.floor(steps + 1e-6), 1)  # a third of 12 is 4, whatever rounding says


def every(period: int, *, offset: int = 0, unless: Schedule | None = None) -> Schedule:
    """Return a schedule of steps ``period, 2*period, ...``

    Args:
        period: steps from one to the next, an integer of at least 1.
        offset: the first step, an integer of at least 0: the steps are ``offset, offset + period,
            ...``. 0: the first one is ``period``.
        unless: a schedule of steps to leave out. None: none.

    Raises ``ValueError`` for other values.

    Examples:
        >>> [step for step in range(1, 21) if laconic.every(6)(step)]
        [6, 12, 18]
    """
    check_int("period", period, 1)
    schedule = Every(period, 0 if check_int("offset", offset, 0) == period else offset)
    return schedule if unless is None else Unless(schedule, unless)


def after(start: int, schedule: Schedule) -> Schedule:
    """Return ``schedule`` at the steps greater than ``start``.

    Args:
        start: an integer of at least 0.
        schedule: what to limit.

    Examples:
        >>> [step for step in range(1, 21) if laconic.after(10, laconic.every(6))(step)]
        [12, 18]
    """
    return After(check_int("start", start, 0), schedule)


def until(end: int, schedule: Schedule) -> Schedule:
    """Return ``schedule`` at the steps up to and including ``end``.

    Args:
        end: an integer of at least 0.
        schedule: what to limit.

    Examples:
        >>> [step for step in range(1, 21) if laconic.until(12, laconic.every(6))(step)]
        [6, 12]
    """
    return Until(check_int("end", end, 0), schedule)


def any_of(*schedules: Schedule) -> Schedule:
    """Return a schedule of the steps at which at least one of ``schedules`` is due.

    Args:
        schedules: what to join.

    Examples:
        >>> both = laconic.any_of(laconic.every(6), laconic.every(8))
        >>> [step for step in range(1, 21) if both(step)]
        [6, 8, 12, 16, 18]
    """
    return schedules[0] if len(set(schedules)) == 1 else AnyOf(tuple(dict.fromkeys(schedules)))
