"""``laconic demo``: what a slow network costs and how little of it laconic needs, in minutes."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic.cli.options import declare, given

if TYPE_CHECKING:
    from laconic.lab.race.result import Result, Row
    from laconic.lab.race.runner import Event, Settings

WIDTH = 80
"""Columns of the text, or fewer in a narrower terminal."""

INTRODUCTION = """\
Four hosts that send {rate} each are emulated on this machine. On them the same model
is trained in {ways} ways, for {seconds:g} s each: a small transformer that learns Python code, byte
by byte. All begin with the same weights, get the same data, and use the same optimizer (AdamW).
They differ only in how the hosts agree. Measured is the loss on code that is not trained on: lower
is better. One after the other, with start and validation, they take about {minutes:.0f} minutes.
"""


def add(parser: Any) -> None:
    """Add the description and the options of the command."""
    parser.description = (
        "Train a small model in several ways on four emulated hosts with 100 Mbit/s, and show in a "
        "picture and three sentences what each way costs and gains."
    )
    parser.epilog = (
        "laconic compare does the same with recipes, networks and models of your choice."
    )
    declare(parser.add_mutually_exclusive_group(), "--elastic --seconds", seconds="15")
    declare(parser, "--out", out="laconic-demo")


def run(arguments: argparse.Namespace) -> int:
    """Return 0 if the demo has worked: all recipes finished, or with --elastic, all workers."""
    import matplotlib  # noqa: F401
    import rich  # noqa: F401

    if arguments.elastic:
        if given(arguments, "--out"):
            raise ValueError("--elastic writes no report: leave out --out")
        from laconic.lab.demo import kill

        return kill.run()
    from laconic.lab.emulation.jobs import terminate_as_exit
    from laconic.lab.race import report, runner

    settings = settings_of(arguments.seconds)
    settings.check()
    report.prepare(arguments.out)
    command = shlex.join(["laconic", *sys.argv[1:]])
    result = None
    with terminate_as_exit(), Display(settings) as display:
        for result in runner.run(settings, command, display.watch):
            report.save(result, arguments.out)
    assert result is not None, "a race has at least the row without communication"
    show(result, arguments.out)
    return 0 if all(row.status == "ok" for row in result.rows) else 1


def settings_of(seconds: float) -> Settings:
    """Return what the demo races: equal settings for all recipes."""
    from laconic.lab.demo.outcome import FREE, RECIPES
    from laconic.lab.race.runner import Settings
    from laconic.lab.race.workloads import SMALL

    return Settings(recipes=tuple(RECIPES), free=(FREE,), workload=SMALL, seconds=seconds)


def show(result: Result, directory: Path) -> None:
    """Write the picture and the report, and print the table and the sentences."""
    from rich.console import Console

    from laconic.lab.demo.outcome import disturbed, sentences, table
    from laconic.lab.demo.picture import draw
    from laconic.lab.race import report
    from laconic.lab.race.wording import network

    console = Console(highlight=False, markup=False)
    console.width = min(console.width, WIDTH)
    console.print()
    console.print(table(result))
    console.print(f"\n{network(result)}\n")
    for number, sentence in enumerate(sentences(result), start=1):
        console.print(f"{number}. {sentence}")
    if warning := disturbed(result):
        console.print(f"\nWarning: {warning}")
    page = report.write(result, directory)[0]
    picture = draw(result, directory / "demo.png")
    console.print(f"\nPicture: {picture}\nReport:  {page}", soft_wrap=True)


class Display:
    """Says what is being measured, and shows the progress of each row on a terminal."""

    def __init__(self, settings: Settings) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        from laconic.lab.demo.outcome import EXPLAINED

        self._settings, self._explained = settings, EXPLAINED
        self._console = Console(stderr=True, highlight=False, markup=False)
        self._console.width = min(self._console.width, WIDTH)
        columns = TextColumn("  "), BarColumn(bar_width=24), TextColumn("{task.description}")
        live = self._console.is_terminal
        self._progress = Progress(*columns, console=self._console, transient=True, disable=not live)
        self._task = self._progress.add_task("", visible=False)
        self._number = 0

    def __enter__(self) -> Display:
        from laconic.units import format_rate

        seconds, ways = self._settings.seconds or 0.0, len(self._explained)
        text = INTRODUCTION.format(
            rate=format_rate(self._settings.bandwidth),
            ways=ways,
            seconds=seconds,
            minutes=ways * (seconds + OVERHEAD_SECONDS) / 60,
        )
        self._console.print(" ".join(text.split()), end="\n\n")
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def watch(self, name: str, event: Event) -> None:
        """Show an event from a row's worker."""
        kind = event["event"]
        if kind == "launched":
            self._number += 1
            text = f"{self._number}/{len(self._explained)} {name}: {self._explained[name]}"
            self._console.print(text)
            self._update("starting four processes", total=None)
        elif kind == "planning":
            self._update("timing a few steps, to plan the run", total=None)
        elif kind == "step":
            text = f"step {event['step']} of {event['steps']}, training loss {event['loss']:.2f}"
            self._update(text, total=event["steps"], completed=event["step"])
        elif kind == "done":
            self._progress.update(self._task, visible=False)
            self._console.print(f"    {_done(event['row'])}")

    def _update(self, text: str, **fields: Any) -> None:
        self._progress.update(self._task, description=text, visible=True, **fields)


OVERHEAD_SECONDS = 15.0
"""What each row takes besides training, on two cores."""


def _done(row: Row) -> str:
    if row.status != "ok" or row.loss is None:
        return f"{row.status}: {row.error}"
    waiting = f", of which {row.waiting:.0%} waiting for the network"
    return f"{row.steps:,} steps in {row.seconds:.0f} s{waiting}: loss {row.loss:.2f}"
