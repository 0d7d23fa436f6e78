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
    resolved = [directory.resolve() for directory in directories]
    twice = [
        str(d) for d, path in zip(directories, resolved, strict=True) if resolved.count(path) > 1
    ]
    if twice:
        raise ValueError(f"{twice[0]} is given twice")
    results = [report.read(directory) for directory in directories]
    several = len(directories) > 1
    out = arguments.out or (Path("laconic-report") if several else directories[0])
    if several and out.resolve() in resolved:
        raise ValueError(f"{out} contains one of the results to combine: choose another --out")
    report.prepare(out)
    joined = report.join(list(zip(labels(directories), results, strict=True)))
    show(joined, out, as_json=arguments.json)
    if arguments.open:
        report.show(out)
    return 0


def labels(directories: Sequence[Path]) -> list[str]:
    """Return a label for each directory: the shortest suffixes of the paths that differ."""
    parts = [directory.resolve().parts for directory in directories]
    most = max(map(len, parts))
    for length in range(1, most + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    raise AssertionError("different directories have different paths")
