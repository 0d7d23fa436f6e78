"""Warns at the end of a program whose ranks hold different models because `Synchronizer.finish` was
not called."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from dataclasses import dataclass
from functools import partial

from laconic.links.simulation import at_end

log = logging.getLogger("laconic")

WARNING = (
    "sync.finish() was not called after the last step: the ranks hold different models; call it "
    "after the last step, or validate and save inside sync.consensus()"
)


@dataclass
class Ending:
    """What the end of a program needs to know of one synchronizer, and may outlive it.

    ``missing``: whether `Synchronizer.finish` is: the ranks hold different models that nobody has
    averaged or saved since the last step.
    """

    missing: bool = False


_warned: list[bool] = []


def watch(ending: Ending) -> None:
    """Warn if `finish` is missing when the program, or the present simulation, ends."""
    calls = at_end.get()
    if calls is None:
        atexit.register(warn, ending)
    else:
        calls.append(partial(warn, ending))


def warn(ending: Ending) -> None:
    """Warn, once in a process, if `finish` is missing, unless an exception ends the program."""
    if ending.missing and not _warned and getattr(sys, "last_value", None) is None:
        _warned.append(True)
        log.warning(WARNING)


os.register_at_fork(after_in_child=partial(atexit.unregister, warn))
