"""The commands, with one file for each.

The module of a command has ``add``, which adds its description and options to a parser, and
``run``.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any, NoReturn

from laconic.cli.options import Stored
from laconic.version import __version__

COMMANDS = {
    "demo": "see what a slow network costs, and what laconic gains",
    "compare": "race recipes on an emulated slow network",
    "lab": "run any program on an emulated slow network",
    "advise": "which recipe pays off, from a few numbers or a measurement",
    "plan": "what a run on a described cluster takes, before you rent it",
    "doctor": "check this host and the network to others",
    "keys": "make the keys and certificates of a job",
    "coordinator": "run the coordinator of elastic runs",
    "report": "rebuild the report of a race",
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line with the next step, and whose options are given once."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        for name in (None, "store"):
            self.register("action", name, Stored)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def commands() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of all commands, and that of each."""
    parser = Parser(
        prog="laconic",
        description="Train PyTorch models data-parallel over slow networks with little "
        "communication.",
        epilog="laconic COMMAND --help explains a command.",
    )
    parser.add_argument("--version", action="version", version=f"laconic {__version__}")
    each: Any = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, about in COMMANDS.items():
        module = import_module(f"laconic.cli.{name}")
        module.add(command := each.add_parser(name, help=about))
        command.set_defaults(run=module.run, given=())
    return parser, each.choices
