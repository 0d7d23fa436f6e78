"""Writes the help of each command into docs/cli.md when the site is built: a hook of mkdocs."""

from __future__ import annotations

import contextlib
import io
import os
import re
from typing import Any

from laconic.cli import COMMANDS, main
from laconic.cli.commands import parsers
from laconic.cli.options import OPTIONS

MARK = re.compile(r"^<!-- help: (\w+) -->$", re.MULTILINE)
"""The line that the help of a command replaces."""
TABLE = "<!-- options -->"
"""The line that the table of all options replaces."""


def help_of(command: str) -> str:
    """What ``laconic COMMAND --help`` prints, in lines of at most 100 characters."""
    os.environ.update(COLUMNS="100", NO_COLOR="1")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([command, "--help"])
    return printed.getvalue().strip()


def table() -> str:
    """Every option, with what it means, and the commands that have it."""
    _, commands = parsers(COMMANDS)
    lines = ["| option | meaning | commands |", "|---|---|---|"]
    for name, option in OPTIONS.items():
        having = [c for c, parser in commands.items() if name in parser._option_string_actions]
        spelled = f"{name} {option.value}".strip()
        lines.append(f"| `{spelled}` | {option.help} | {', '.join(having)} |")
    return "\n".join(lines)


def on_page_markdown(markdown: str, **_: Any) -> str:
    markdown = markdown.replace(TABLE, table())
    return MARK.sub(lambda mark: f"```text\n{help_of(mark[1])}\n```", markdown)
