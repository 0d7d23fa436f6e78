"""Writes all options and the help of commands into docs/cli.md: a hook of mkdocs."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any

from laconic.cli import COMMANDS, main
from laconic.cli.commands import commands
from laconic.cli.options import OPTIONS

TABLE, HELP = "<!-- options -->", "<!-- commands -->"
"""The lines that the table of all options and the help of all commands replace."""


def help_of(command: str) -> str:
    """What ``laconic COMMAND --help`` prints, in lines of at most 100 characters."""
    os.environ.update(COLUMNS="100", NO_COLOR="1")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([command, "--help"])
    return printed.getvalue().strip()


def table() -> str:
    """Every option, with what it means, and the commands that have it."""
    _, each = commands()
    lines = ["| option | meaning | commands |", "|---|---|---|"]
    for name, (value, about) in OPTIONS.items():
        having = [
            command for command, parser in each.items() if name in parser._option_string_actions
        ]
        lines.append(f"| `{f'{name} {value}'.strip()}` | {about} | {', '.join(having)} |")
    return "\n".join(lines)


def on_page_markdown(markdown: str, **_: Any) -> str:
    if HELP not in markdown:
        return markdown
    help = "\n\n".join(f"## laconic {c}\n\n```text\n{help_of(c)}\n```" for c in COMMANDS)
    return markdown.replace(TABLE, table()).replace(HELP, help)
