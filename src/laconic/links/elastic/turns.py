"""When a donor sends to its newcomer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from laconic.links.elastic.units import Units

SHARE = 0.1
"""The share of the time in which a donor sends although its own rounds need the network."""


class Turns:
    """When a donor, which does ``units``, sends to a newcomer: while no unit is under way, since
    both would share the network. During a unit it sends `SHARE` of the time, so that it comes to an
    end where units follow each other without a pause."""

    def __init__(self, units: Units) -> None:
        self._units, self._over = units, False
        self._latest = 0.0
        """How many seconds the latest piece took to send."""

    def over(self) -> None:
        """There are no turns from now on: it sends all the time."""
        with self._units.changed:
            self._over = True
            self._units.changed.notify_all()

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """A context in which to send a piece."""
        units = self._units
        with units.changed:
            units.changed.wait_for(
                lambda: self._over or not units.under_way, self._latest * (1 / SHARE - 1)
            )
        begin = time.monotonic()
        yield
        self._latest = time.monotonic() - begin
