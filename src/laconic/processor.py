"""How much processor time messages take, and whether training waits for it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

OWN = Path("/proc/thread-self/schedstat")


class Usage(NamedTuple):
    """What has been used since the start: ``bytes`` sent, the ``seconds`` of the collectives that
    sent them, the processor seconds of their ``work``, and of this thread the seconds ``running``
    and those ``ready`` to run without a processor."""

    bytes: float
    seconds: float
    work: float
    running: float
    ready: float

    @classmethod
    def now(cls, sent: float, seconds: float, work: float) -> Usage:
        """The usage up to now, in the calling thread. ``ready`` is 0 where the system does not say:
        Linux does."""
        try:
            ready = int(OWN.read_text().split()[1]) * 1e-9
        except (OSError, ValueError, IndexError):
            ready = 0.0
        return cls(sent, seconds, work, time.thread_time(), ready)

    def since(self, before: Usage) -> Usage:
        """What was used between ``before`` and this one."""
        return Usage(*(now - then for now, then in zip(self, before, strict=True)))

    @property
    def carry(self) -> float:
        """The processor seconds per byte sent; 0 if nothing was."""
        return self.work / self.bytes if self.bytes > 0 else 0.0

    @property
    def contention(self) -> float:
        """How many seconds this thread loses per second of `work`: none where processors are idle.
        It loses no more than it has waited for a processor. Where others use them, too, a second of
        work takes as much longer as this thread's own running does."""
        if self.work <= 0 or self.running <= 0:
            return 0.0
        return min(max(self.ready, 0.0) / self.work, 1 + max(self.ready, 0.0) / self.running)
