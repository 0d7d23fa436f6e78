"""Gradient buckets whose messages are under way together, where round trips are long.

A bucket's average runs in stages (`laconic.links.link.Stages`). All ranks take the same stages in
the same order, whatever arrives first, so messages need no tags.
"""

from __future__ import annotations

from laconic.errors import NotFiniteError
from laconic.links.link import Stages

SMALL_BYTES = 2**18
"""A message of so many bytes takes about as long to send as it is on its way: 0.02 s at 100 Mbit/s,
0.04 s at 50 Mbit/s."""


def stages_at_once(largest: float) -> int:
    """How many stages buckets that overlap take when one begins, if their largest message has so
    many bytes.

    One: a bucket's first message is sent before the second message of the bucket before it, so
    small ones wait little. Two: it is sent after that message, which a long backward pass can then
    hide, but before it has arrived.
    """
    return 1 if largest <= SMALL_BYTES else 2


class Overlap:
    """Averages of buckets that are under way together. Used in the communication thread."""

    def __init__(self) -> None:
        self._going: list[Stages[None]] = []
        """The newest first."""
        self._failed: NotFiniteError | None = None

    def begin(self, stages: Stages[None], at_once: int) -> None:
        """Take the first stage of a bucket, and then the next one of those before it; all of that
        ``at_once`` times."""
        self._going.insert(0, stages)
        for _ in range(at_once):
            self._advance()

    def complete(self) -> None:
        """Take all stages that are left. Raises `NotFiniteError` at the end, when nothing is under
        way any more, if a bucket did."""
        while self._going:
            self._advance()
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def _advance(self) -> None:
        left = []
        for stages in self._going:
            try:
                if next(stages, self) is not self:
                    left.append(stages)
            except NotFiniteError as error:  # on all ranks; the other buckets are still awaited
                self._failed = self._failed or error
        self._going = left
