"""The commands, with one file for each."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

from laconic.cli.options import Once


class Command(NamedTuple):
    """What `overview` says about a command. The module of its name in this package has ``add``,
    which adds its description and options to a parser, and ``run``."""

    group: str
    help: str


COMMANDS = {
    "demo": Command("learn", "see what a slow network costs, and what laconic gains"),
    "compare": Command("learn", "race recipes on an emulated slow network"),
    "lab": Command("learn", "run any program on an emulated slow network"),
    "advise": Command("decide", "which recipe pays off, from a few numbers or a measurement"),
    "plan": Command("decide", "what a run on a described cluster takes, before you rent it"),
    "tune": Command("decide", "find good settings of a recipe on your workload"),
    "doctor": Command("run", "check this host and the network to others"),
    "keys": Command("run", "make the keys and certificates of a job"),
    "coordinator": Command("run", "run the coordinator of elastic runs"),
    "watch": Command("look", "show a run that writes metrics"),
    "report": Command("look", "rebuild the report of a race, or combine several"),
    "completion": Command("", "let bash, zsh or fish complete commands and options"),
}
"""All commands, those of one group together."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line with the next step, and whose options are given once."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, allow_abbrev=False, **options)
        for name in (None, "store"):
            self.register("action", name, Once)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def overview() -> str:
    """Return what laconic can do, grouped by need."""
    lines = ["Train PyTorch models data-parallel over slow networks with little communication.", ""]
    before = None
    for name, (group, text) in COMMANDS.items():
        if group:
            lines.append(f"{group if group != before else '':8}{name:13}{text}")
        before = group
    return "\n".join(
        [
            *lines,
            "",
            "laconic COMMAND --help explains a command; laconic --version prints the version.",
            "laconic completion SHELL lets bash, zsh or fish complete commands and options.",
        ]
    )


def parsers(names: Iterable[str]) -> tuple[Parser, dict[str, argparse.ArgumentParser]]:
    """Return a parser for the commands ``names``, and the parser of each."""
    parser = Parser(prog="laconic")
    commands: Any = parser.add_subparsers(required=True, metavar="COMMAND", dest="command_name")
    for name in names:
        module = import_module(f"laconic.cli.{name}")
        module.add(command := commands.add_parser(name))
        command.set_defaults(run=module.run, given=())
    return parser, commands.choices
