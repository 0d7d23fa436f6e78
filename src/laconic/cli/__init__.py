"""The command line: one file for each command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from laconic import __version__
from laconic.cli import advise, compare, doctor, lab, report, tune, watch


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code. A user's mistake is one line and exit code 2."""
    parser = argparse.ArgumentParser(
        prog="laconic",
        description="Train PyTorch models data-parallel over slow networks by talking less.",
    )
    parser.add_argument("--version", action="version", version=f"laconic {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    compare.add(commands)
    advise.add(commands)
    report.add(commands)
    lab.add(commands)
    doctor.add(commands)
    watch.add(commands)
    tune.add(commands)
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except (ValueError, ImportError, OSError) as error:
        print(f"laconic: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("laconic: interrupted", file=sys.stderr)
        return 130
