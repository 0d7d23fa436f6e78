"""Says when a rank that waits for others should log that it does. No clock and no network."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence

log = logging.getLogger("laconic")

FIRST_SECONDS = 30.0
"""A rank that waits for others logs it after so many seconds, then after twice as many, and so
on."""
FIRST_ASK_SECONDS, LAST_ASK_SECONDS = 1.0, 30.0
"""A rank that waits asks the others at once, again after the first time, and so on, up to the
second."""
PAUSE_SECONDS = 10.0
"""Without a look for so long, a rank has not been waiting."""


class LongWait:
    """One wait after another of a rank that looks after the other ranks while it waits."""

    def __init__(self) -> None:
        self._what: Hashable = None
        self._since = self._last = float("-inf")
        self._next = FIRST_SECONDS

    def due(self, what: Hashable, now: float) -> float:
        """How many seconds this rank has waited for ``what``, if it should log that now; else 0.
        To be called about once per second of a wait, at the time ``now``."""
        if what != self._what or now - self._last > PAUSE_SECONDS:
            self._what, self._since, self._next = what, now, FIRST_SECONDS
        self._last = now
        seconds = now - self._since
        if seconds < self._next:
            return 0.0
        while self._next <= seconds:
            self._next *= 2
        return seconds


class Patience:
    """How long a rank that waits for others leaves them alone: twice as long each time it has asked
    them in the same wait."""

    def __init__(self) -> None:
        self._what: Hashable = None
        self._next = self._seconds = 0.0

    def ends(self, what: Hashable, now: float, again: bool) -> bool:
        """Whether to ask the others at the time ``now``, while this rank waits for ``what``; then
        ``again`` at the next time, too."""
        if what != self._what:
            self._what, self._next, self._seconds = what, now, FIRST_ASK_SECONDS
        if now < self._next:
            return False
        if not again:
            self._next = now + self._seconds
            self._seconds = min(2 * self._seconds, LAST_ASK_SECONDS)
        return True


def report(
    rank: int, ranks: Sequence[int], seconds: float, where: str, why: str, timeout: float
) -> None:
    """Log that ``rank`` has waited for other ``ranks``. ``where``: what they do together; ``why``:
    what is known about them."""
    names = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    log.warning(
        "rank %d has waited %.0f s for %s in %s: %s. It gives up after %g s (timeout=)",
        *(rank, seconds, names, where, why, timeout),
    )
