"""Writes the help of each command into docs/cli.md when the site is built: a hook of mkdocs."""

from __future__ import annotations

import contextlib
import io
import os
import re
from typing import Any

from laconic.cli import main

MARK = re.compile(r"^<!-- help: (\w+) -->$", re.MULTILINE)
"""The line that the help of a command replaces."""


def help_of(command: str) -> str:
    """What ``laconic COMMAND --help`` prints, in lines of at most 100 characters."""
    os.environ.update(COLUMNS="100", NO_COLOR="1")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([command, "--help"])
    return printed.getvalue().strip()


def on_page_markdown(markdown: str, **_: Any) -> str:
    return MARK.sub(lambda mark: f"```text\n{help_of(mark[1])}\n```", markdown)
