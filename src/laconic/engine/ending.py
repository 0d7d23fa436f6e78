"""Warns at the end of a program whose ranks hold different models because `Synchronizer.finish` was
not called."""

from __future__ import annotations

import atexit
import logging
import sys
import weakref
from collections.abc import Sequence

from laconic.algorithms.round import Recipe, workers_differ
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

    ``step``: the optimizer steps taken. ``complete``: after which of them the program last had the
    consensus, or the state to save, or the rounds left all workers with the same parameters. No
    `Synchronizer.finish` is missing after that step.
    """

    def __init__(self, recipe: Recipe, comm: CommThread) -> None:
        self.step = self.complete = 0
        self._comm = weakref.ref(comm)
        self.follow(recipe)

    def follow(self, recipe: Recipe) -> None:
        """``recipe`` is in force from now on; all workers begin it with the same model."""
        self._differ = workers_differ(recipe)
        self.complete = self.step

    def restart(self, step: int) -> None:
        """A state was loaded, which had been saved after ``step``."""
        self.step = self.complete = step

    @property
    def unfinished(self) -> bool:
        """Whether the ranks hold different models that nobody has averaged or saved since the last
        step. False after an error of the link."""
        comm = self._comm()
        alive = comm is None or not comm.failed
        return self.step != self.complete and self._differ and alive


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
