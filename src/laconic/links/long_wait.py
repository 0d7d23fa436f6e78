"""Says when a rank that waits for others should log that it does. No clock and no network."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence

from laconic.links.agreement import rank_list

log = logging.getLogger("laconic")

FIRST_SECONDS = 30.0
"""A rank that waits for others logs it after so many seconds, then after twice as many, and so
on."""
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


def report(
    rank: int, ranks: Sequence[int], seconds: float, where: str, why: str, timeout: float
) -> None:
    """Log that ``rank`` has waited for other ``ranks``. ``where``: what they do together; ``why``:
    what is known about them."""
    log.warning(
        "rank %d has waited %.0f s for %s in %s: %s. It gives up after %g s (timeout=)",
        *(rank, seconds, rank_list(ranks), where, why, timeout),
    )
