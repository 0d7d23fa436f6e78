"""Warns at the end of a program whose ranks hold different models because `Synchronizer.finish` was
not called."""

from __future__ import annotations

import atexit
import logging
import sys
import weakref
from collections.abc import Sequence

from laconic.links import forks
from laconic.links.comm_thread import CommThread
from laconic.links.simulation import at_end

log = logging.getLogger("laconic")

WARNING = (
    "sync.finish() was not called after the last step: the ranks hold different models; call it "
    "after the last step, or validate and save inside sync.consensus()"
)


class Ending:
    """What the end of a program needs to know of one synchronizer. Refers to nothing that holds the
    model, and so can outlive it.

    ``missing``: whether `Synchronizer.finish` is: the ranks hold different models that nobody has
    averaged or saved since the last step.
    """

    def __init__(self, comm: CommThread) -> None:
        self.missing = False
        self._comm = weakref.ref(comm)

    @property
    def unfinished(self) -> bool:
        """Whether `finish` is missing. False after an error of the link."""
        comm = self._comm()
        return self.missing and (comm is None or not comm.failed)


_endings: list[Ending] = []
"""What `_at_exit` looks at."""
_warned: list[bool] = []


def watch(ending: Ending) -> None:
    """Warn if ``ending`` is unfinished when the program, or the present simulation, ends."""
    calls = at_end.get()
    if calls is None:
        _endings.append(ending)
    else:
        calls.append(lambda: warn([ending]))


def warn(endings: Sequence[Ending]) -> None:
    """Warn if any of ``endings`` is unfinished: once in a process."""
    if not _warned and any(ending.unfinished for ending in endings):
        _warned.append(True)
        log.warning(WARNING)


@atexit.register
def _at_exit() -> None:
    if getattr(sys, "last_value", None) is None:  # else an exception ends the program
        warn(_endings)


forks.call_in_child(_endings.clear)
