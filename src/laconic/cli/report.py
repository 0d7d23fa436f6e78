"""``laconic report``: rebuild the report of a race, or combine several races in one report."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from laconic.cli.options import declare


def add(parser: Any) -> None:
    """Add the description and the options of the command."""
    parser.description = (
        "Rebuild the page, plots and tables from the results.json of a race, or combine those of "
        "several races in one report, in --out (default: laconic-report)."
    )
    parser.add_argument(
        "directories", nargs="+", type=Path, metavar="DIR", help="output of laconic compare"
    )
    declare(parser, "--out --json --open")


def run(arguments: argparse.Namespace) -> int:
    """Write the report and return 0."""
    from laconic.cli.compare import show
    from laconic.lab.race import report

    directories: Sequence[Path] = arguments.directories
    found: dict[Path, Path] = {}
    for directory in directories:
        if found.setdefault(directory.resolve(), directory) is not directory:
            raise ValueError(f"{directory} is given twice")
    several = len(directories) > 1
    out = arguments.out or (Path("laconic-report") if several else directories[0])
    if several and out.resolve() in found:
        raise ValueError(f"{out} contains one of the results to combine: choose another --out")
    results = [(str(directory), report.read(directory)) for directory in directories]
    report.prepare(out)
    show(report.join(results), out, as_json=arguments.json)
    if arguments.open:
        report.show(out)
    return 0
