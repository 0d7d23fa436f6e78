"""Memory that a run's workers share with the process that watches them."""

from __future__ import annotations

import ctypes
import mmap

MOST_WORKERS = 400
"""Processes in one run, one after the other."""
PHASES = "backward", "inner step", "encode", "send", "reduce", "decode", "outer step", "complete"
PHASES += "save", "state", "feed", "replay", "connect", "compare", "leave"
"""Places in a worker at which it can end itself; see `benchmarks.chaos.worker`."""
STARTED, READY, DONE = range(3)
IN_TIME, LATE, SOME_LOST, ALL_LOST = range(4)
"""Messages to the coordinator: each is late by up to 1.5 s; every other one is lost; all are."""


class Slot(ctypes.Structure):
    """What one process says of itself, and where it is to end itself."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("stage", "step", "workers", "signal", "beats")),
        *((name, ctypes.c_int64) for name in ("phase", "entry")),  # the phase's number, from 1
        *((name, ctypes.c_double) for name in ("deadline", "struck")),  # `time.monotonic`
    )

    def arm(self, phase: str, entry: int, signal: int) -> None:
        """Send ``signal`` to itself at the ``entry``-th entry of ``phase`` from now on."""
        self.struck, self.entry, self.signal = 0.0, entry, signal
        self.phase = PHASES.index(phase) + 1


class Board(ctypes.Structure):
    """All slots, by process, and the step after which the run ends."""

    _fields_ = (("stop", ctypes.c_int64), ("slots", Slot * MOST_WORKERS))


def make() -> Board:
    """A board that forks of this process share."""
    board = Board.from_buffer(mmap.mmap(-1, ctypes.sizeof(Board)))
    board.stop = 2**62
    return board
