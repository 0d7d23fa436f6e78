"""A clock for what laconic measures in simulated runs, so that it does not depend on the machine.

Simulated workers take turns, so what they do on this clock is the same in every run.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest

from laconic.advisor import measure

TICK = 1e-6
"""Seconds that reading the clock takes, since the code that is measured must take some time."""


class Clock:
    """Stands in for the module `time`. It moves where something sleeps, and a little when read."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += TICK
        return self.now

    thread_time = process_time = perf_counter

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def controlled(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Have laconic measure by a new clock until the end of the test."""
    clock = Clock()
    for name, module in list(sys.modules.items()):
        if name.startswith("laconic.") and getattr(module, "time", None) is time:
            monkeypatch.setattr(module, "time", clock)
    # The background load runs in a thread, whose place in time would be chance.
    monkeypatch.setattr(measure._BackgroundLoad, "_work", lambda load: None)
    return clock
