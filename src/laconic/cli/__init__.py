"""The command line interface; its commands are in `laconic.cli.commands`."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence

from laconic.cli.commands import COMMANDS as COMMANDS
from laconic.cli.commands import commands
from laconic.cli.options import OPTIONS, attribute
from laconic.errors import did_you_mean


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. A user error prints one line and returns 2."""
    from laconic.cli.streams import guarded

    words = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: run(words or ["--help"]))


def run(words: Sequence[str]) -> int:
    """Run the command in ``words``."""
    parser, _ = commands()
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)
    # torch says so where it is imported without NumPy, which no command with torch alone needs
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        known = [option for option in OPTIONS if hasattr(arguments, attribute(option))]
        hint = did_you_mean(unknown[0].partition("=")[0], known)
        raise ValueError(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return int(arguments.run(arguments))
