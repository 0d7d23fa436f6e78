"""The command line interface; its commands are in `laconic.cli.commands`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

from laconic.cli.commands import COMMANDS as COMMANDS
from laconic.cli.commands import overview as overview
from laconic.cli.commands import parsers
from laconic.errors import did_you_mean
from laconic.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. A user error prints one line and returns 2."""
    from laconic.cli.streams import guarded

    words = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: run(words))


def run(words: list[str]) -> int:
    """Run the command in ``words``."""
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        print(overview())
        return 0
    if name == "--version":
        print(f"laconic {__version__}")
        return 0
    if name == "__complete":
        from laconic.cli.completion import complete

        return complete(words[1:])
    if name not in COMMANDS:
        what = "option" if name.startswith("-") else "command"
        hint = did_you_mean(name, COMMANDS)
        choices = ", ".join(COMMANDS)
        raise ValueError(f"no {what} {name!r}{hint}: choose from the commands {choices}")
    # torch says so where it is imported without NumPy, which no command with torch alone needs
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    parser, commands = parsers([name])
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        command = commands[name]
        options = [option for action in command._actions for option in action.option_strings]
        hint = did_you_mean(unknown[0].partition("=")[0], options)
        command.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return int(arguments.run(arguments))
