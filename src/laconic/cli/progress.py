"""What ``laconic demo`` and ``compare`` show while recipes are raced."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from laconic.lab.race.result import Row
    from laconic.lab.race.runner import Event

DOING = {"launched": "starting", "warming up": "taking the first steps, which do not count"}
"""What a row is doing after an event."""


class Display:
    """Prints a line when a row begins, and one when it has ended. In between, a terminal has a bar.

    ``explained``: what the rows are, by their names, or "". ``runs``: how often each one runs.
    """

    def __init__(self, explained: Mapping[str, str], runs: int = 1) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._explained, self._total = explained, runs * len(explained)
        self._console = Console(stderr=True, highlight=False, markup=False)
        self._progress = Progress(
            *(TextColumn("  "), BarColumn(bar_width=24), TextColumn("{task.description}")),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("", visible=False)
        self._begun = 0

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def watch(self, name: str, event: Event) -> None:
        """Show an event from a row's worker."""
        kind = event["event"]
        if kind == "launched":
            self._begun += 1
            what = f": {self._explained[name]}" if self._explained[name] else ""
            self._console.print(f"{self._begun}/{self._total} {name}{what}")
        if kind in DOING:
            self._update(DOING[kind], total=None)
        elif kind == "step":
            text = f"step {event['step']} of {event['steps']}, training loss {event['loss']:.2f}"
            self._update(text, total=event["steps"], completed=event["step"])
        elif kind == "done":
            self._progress.update(self._task, visible=False)
            self._console.print(f"    {name}: {_done(event['row'])}")

    def _update(self, text: str, **fields: Any) -> None:
        self._progress.update(self._task, description=text, visible=True, **fields)


def _done(row: Row) -> str:
    if row.status != "ok" or row.loss is None:
        return f"{row.status}: {row.error}"
    known = not math.isnan(row.waiting)  # unlike that of other libraries
    waiting = f", of which {row.waiting:.0%} waiting for the network" if known else ""
    return f"{row.steps:,} steps in {row.seconds:.0f} s{waiting}: loss {row.loss:.3g}"
