"""``laconic report``: make the report on races anew, or one report of several."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "report",
        help="rebuild the report of races, or join several",
        description="Rebuild page, plots and tables from the results.json of a race, or join those "
        "of several races in one report.",
    )
    parser.add_argument(
        "directories", nargs="+", type=Path, metavar="DIR", help="where laconic compare wrote to"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="default: the directory itself; of several, laconic-report",
    )
    parser.add_argument("--open", action="store_true", help="show the report in a browser")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """0 when it is written."""
    from laconic.cli.compare import needs, show
    from laconic.lab.race import report

    needs("report")
    given: Sequence[Path] = arguments.directories
    places = [directory.resolve() for directory in given]
    twice = [str(d) for d, place in zip(given, places, strict=True) if places.count(place) > 1]
    if twice:
        raise ValueError(f"{twice[0]} is given twice")
    results = [report.read(directory) for directory in given]
    out = arguments.out or (given[0] if len(given) == 1 else Path("laconic-report"))
    if len(given) > 1 and out.resolve() in places:
        raise ValueError(f"{out} holds one of the results to be joined: choose another --out")
    report.prepare(out)
    show(report.join(list(zip(labels(given), results, strict=True))), out)
    if arguments.open:
        report.show(out)
    return 0


def labels(directories: Sequence[Path]) -> list[str]:
    """What to call each: as much of the end of its path as tells them apart."""
    parts = [directory.resolve().parts for directory in directories]
    most = max(map(len, parts))
    for length in range(1, most + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    raise AssertionError("different directories have different paths")
