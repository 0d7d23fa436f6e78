"""The records of a run: what happened since the last one, at most one per step."""

from __future__ import annotations

import atexit
import os
import platform
import socket
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from laconic.metrics import JsonLines
from laconic.version import __version__


@dataclass(frozen=True)
class Stats:
    """What a synchronizer has done so far on this rank.

    Attributes:
        steps: optimizer steps since `laconic.attach`.
        rounds: rounds on parameters completed; averages of gradients are not counted.
        bytes_sent: payload bytes sent.
        bytes_received: payload bytes received.
        bytes_by_collective: payload bytes sent, by the name of the collective. Under
            ``"measurement"``: what `laconic.auto` has sent to measure the network.
        bytes_by_set: payload bytes sent to the other ``"workers"``, to those of the own
            ``"group"``, inside a worker (``"replica"``; ``"shards"`` where its model is sharded),
            and to all ranks (``"world"``).
        seconds_waiting: host time in which training waited for a round. With NCCL a round without a
            delay is waited for on the GPU, which this does not measure.
        workers_lost: in an elastic run, the workers that were lost or have left since its start.
        steps_lost: how many of their steps no other worker has received, as far as the others had
            heard of them.
        steps_drifted: after how many steps workers were found to differ in what they should hold
            alike: all parameters where only gradients are averaged, elsewhere what rounds make
            equal.

    Examples:
        >>> sync = laconic.attach(model, optimizer, laconic.local_sgd(8))
        >>> sync.stats().bytes_sent  # one worker has nobody to send to
        0
    """

    steps: int
    rounds: int
    bytes_sent: int
    bytes_received: int
    bytes_by_collective: Mapping[str, int]
    bytes_by_set: Mapping[str, int]
    seconds_waiting: float
    workers_lost: int = 0
    steps_lost: int = 0
    steps_drifted: int = 0


class Recorder:
    """Makes the records of one synchronizer. Does nothing before `start`."""

    def __init__(self) -> None:
        self._file: JsonLines | None = None
        self._steps = 0

    def start(self, file: JsonLines, stats: Callable[[], Stats], about: Mapping[str, Any]) -> None:
        """Write to ``file`` from now on. ``stats()`` returns the totals so far. ``about`` goes into
        the first record."""
        self._file, self._stats = file, stats
        self._remember(stats())
        self._append(
            "start",
            **about,
            every=file.every,
            host=socket.gethostname(),
            pid=os.getpid(),
            laconic=__version__,
            torch=torch.__version__,
            python=platform.python_version(),
        )
        _open.add(self)

    def after_step(self) -> None:
        """Count a step that was taken, or that a GradScaler skipped."""
        self._steps += 1
        if self._file is not None and time.perf_counter() >= self._time + self._file.every:
            self.event("steps")

    def failed(self, error: BaseException) -> None:
        """Record an error."""
        self.event("error", error=f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Write a last record."""
        self.event("end")
        self._file = None
        _open.discard(self)

    def event(self, event: str, **more: Any) -> None:
        """Write what has happened since the last record."""
        if self._file is None:
            return
        seconds, steps, before = time.perf_counter() - self._time, self._steps, self._before
        stats = self._stats()
        waited = stats.seconds_waiting - before.seconds_waiting
        self._append(
            event,
            step=stats.steps,
            rounds=stats.rounds,
            bytes_sent=stats.bytes_sent,
            bytes_received=stats.bytes_received,
            seconds_waiting=round(stats.seconds_waiting, 6),
            seconds=round(seconds, 6),
            steps=steps - self._steps_before,
            sent=stats.bytes_sent - before.bytes_sent,
            waiting=round(min(waited / seconds, 1.0), 4) if seconds > 0 else 0.0,
            **more,
        )
        self._remember(stats)

    def _remember(self, stats: Stats) -> None:
        self._time, self._steps_before, self._before = time.perf_counter(), self._steps, stats

    def _append(self, event: str, **about: Any) -> None:
        assert self._file is not None
        if not self._file.write({"event": event, "time": round(time.time(), 3), **about}):
            self._file = None


_open: weakref.WeakSet[Recorder] = weakref.WeakSet()
os.register_at_fork(after_in_child=_open.clear)


@atexit.register
def _close_all() -> None:
    """Write the last records of unfinished runs, and the exception that ends the program."""
    error = getattr(sys, "last_value", None)
    for recorder in list(_open):
        if error is not None:
            recorder.failed(error)
        recorder.close()
