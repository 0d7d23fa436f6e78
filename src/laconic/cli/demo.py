"""``laconic demo``: what a slow network costs and how little of it laconic needs, in minutes."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic.cli.options import declare
from laconic.cli.progress import Display

if TYPE_CHECKING:
    from laconic.lab.race.result import Result

WIDTH = 80
"""Columns of the text, or fewer in a narrower terminal."""

INTRODUCTION = """\
Four hosts that send 100 Mbit/s each are emulated on this machine. On them the same model is
trained in {ways} ways, for {seconds:g} s each: a small transformer that learns Python code, byte
by byte, from 4 kB for each host. All begin with the same weights, get the same data, and use the
same optimizer (AdamW). They differ only in how the hosts agree. Measured is the loss on code that
is not trained on: lower is better. With start and validation, they take {minutes:.1f} minutes.
"""
OVERHEAD_SECONDS, VALIDATIONS = 14.0, 6
"""What each row takes besides training, on two cores, and how often it is validated."""


def add(parser: Any) -> None:
    """Add the description and the options of the command."""
    parser.description = (
        "Train a small model in several ways on four emulated hosts with 100 Mbit/s, and show in a "
        "picture and three sentences what each way costs and gains."
    )
    parser.epilog = "laconic compare does the same with your own recipes, networks and models."
    declare(parser, "--seconds --out", seconds="12", out="laconic-demo")


def run(arguments: argparse.Namespace) -> int:
    """Return 0 if all recipes finished."""
    import rich  # noqa: F401

    from laconic.lab.demo.outcome import EXPLAINED, RECIPES
    from laconic.lab.emulation.jobs import terminate_as_exit
    from laconic.lab.race import report, runner
    from laconic.lab.race.workloads import FEW

    settings = runner.Settings(
        recipes=tuple(RECIPES), workload=FEW, seconds=arguments.seconds, validations=VALIDATIONS
    )
    settings.check()
    minutes = len(EXPLAINED) * (arguments.seconds + OVERHEAD_SECONDS) / 60
    text = INTRODUCTION.format(ways=len(EXPLAINED), seconds=arguments.seconds, minutes=minutes)
    print(text, file=sys.stderr)
    report.prepare(arguments.out)
    command = shlex.join(["laconic", *sys.argv[1:]])
    result = None
    with terminate_as_exit(), Display(EXPLAINED) as display:
        for result in runner.run(settings, command, display.watch):
            report.save(result, arguments.out)
    assert result is not None, "a race has at least the row without communication"
    show(result, arguments.out)
    return 0 if all(row.status == "ok" for row in result.rows) else 1


def show(result: Result, directory: Path) -> None:
    """Write the picture and the report, and print the table and the sentences."""
    from rich.console import Console

    from laconic.lab.demo.outcome import COLUMNS, disturbed, sentences
    from laconic.lab.race import report
    from laconic.lab.race.wording import network

    console = Console(highlight=False, markup=False)
    console.width = min(console.width, WIDTH)
    console.print()
    console.print(report.table(result, COLUMNS))
    console.print(f"\n{network(result)}\n")
    for number, sentence in enumerate(sentences(result), start=1):
        console.print(f"{number}. {sentence}")
    if warning := disturbed(result):
        console.print(f"\nWarning: {warning}")
    page, _, picture = report.write(result, directory)
    console.print(f"\nPicture: {picture}\nReport:  {page}", soft_wrap=True)
