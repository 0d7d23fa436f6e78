"""The command line interface, with one file per command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from laconic import __version__
from laconic.cli import advise, compare, coordinator, doctor, keys, lab, plan, report, tune, watch
from laconic.errors import did_you_mean


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. A user error prints one line and returns 2."""
    parser = argparse.ArgumentParser(
        prog="laconic",
        description="Train PyTorch models data-parallel over slow networks with little "
        "communication.",
    )
    parser.add_argument("--version", action="version", version=f"laconic {__version__}")
    commands = parser.add_subparsers(
        title="commands", required=True, metavar="COMMAND", dest="command_name"
    )
    compare.add(commands)
    advise.add(commands)
    plan.add(commands)
    report.add(commands)
    lab.add(commands)
    doctor.add(commands)
    watch.add(commands)
    tune.add(commands)
    coordinator.add(commands)
    keys.add(commands)
    words = list(sys.argv[1:] if argv is None else argv)
    if words and not words[0].startswith("-") and words[0] not in commands.choices:
        names = ", ".join(commands.choices)
        hint = did_you_mean(words[0], commands.choices)
        parser.error(f"no command {words[0]!r}{hint}: choose from {names}")
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        command = commands.choices[arguments.command_name]
        options = [option for action in command._actions for option in action.option_strings]
        hint = did_you_mean(unknown[0].partition("=")[0], options)
        command.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    try:
        return int(arguments.run(arguments))
    except (ValueError, ImportError, OSError) as error:
        print(f"laconic: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("laconic: interrupted", file=sys.stderr)
        return 130
