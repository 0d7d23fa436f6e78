"""Results of races, made by hand."""

from __future__ import annotations

import io
import math
from dataclasses import replace

from rich.console import Console

from laconic.lab.race import report
from laconic.lab.race.result import NO_COMMUNICATION, Point, Result, Row, Status


def row(
    recipe: str,
    *points: tuple[int, float, float],
    status: Status = "ok",
    megabytes: float = 2.0,
    **more: object,
) -> Row:
    """A row from points (step, seconds, loss), with 2 MB sent per step."""
    steps, seconds, loss = points[-1] if points else (0, 0.0, math.nan)
    made = Row(
        recipe=recipe,
        status=status,
        error=None,
        steps=steps,
        seconds=seconds,
        seconds_per_step=seconds / steps if steps else 0.0,
        loss=loss,
        ledger_bytes_per_step=megabytes * 1e6,
        interface_bytes_per_step=megabytes * 1.05e6,
        waiting=0.25,
        curve=tuple(Point(step, at, 2.0 * step, loss) for step, at, loss in points),
    )
    return replace(made, **more)  # type: ignore[arg-type]


def result(*rows: Row, **settings: object) -> Result:
    """A race of 30 s on four hosts with 100 Mbit/s."""
    known = {
        "workload": "text", "parameters": 865280, "hosts": 4, "per_host": 1, "bandwidth": 1e8,
        "latency": 0.0, "seconds": 30.0, "steps": None, "seed": 0, "network": "emulated",
        "data": None, **settings,
    }  # fmt: skip
    return Result(rows, known, {"cpu": "two cores"}, {"torch": "2"}, "laconic race")


def rendered(shown: Result, width: int = 140) -> str:
    """The table as text."""
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(report.table(shown))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


SILENT = row(NO_COMMUNICATION, (0, 0, 5.5), (200, 20, 3.0), (300, 30, 2.9), megabytes=0.0)
DDP = row("ddp()", (0, 0, 5.5), (40, 16, 3.0), (75, 30, 2.45))
LOCAL = row("local_sgd(12)", (0, 0, 5.5), (70, 8, 2.7), (80, 9.2, 2.5), (240, 30.5, 2.01))
DIVERGED = row(
    *("easgd(4, beta=3.0)", (0, 0, 5.5), (10, 1, 90.0), (20, 2, math.inf)),
    status="diverged",
    error="the loss is not finite at step 20\nTraceback of no interest",
)
FAILED = row("sgp()", status="failed", error="worker 2 did not answer within 20 s in round 3")
FULL = result(SILENT, DDP, LOCAL, DIVERGED, FAILED)
