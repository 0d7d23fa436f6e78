"""``laconic report``: rebuild the report of a race."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from laconic.cli.options import declare


def add(parser: Any) -> None:
    """Add the description and the options of the command."""
    parser.description = "Rebuild the page, picture and table from the results.json of a race."
    parser.add_argument("directory", type=Path, metavar="DIR", help="output of laconic compare")
    declare(parser, "--json")


def run(arguments: argparse.Namespace) -> int:
    """Write the report and return 0."""
    from laconic.cli.compare import show
    from laconic.lab.race import report

    show(report.read(arguments.directory), arguments.directory, as_json=arguments.json)
    return 0
