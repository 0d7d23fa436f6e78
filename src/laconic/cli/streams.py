"""What all commands print through: errors as one line, and JSON.

A command never ends in a traceback, whatever its user, its files or its terminal do. With
``LACONIC_TRACEBACK=1`` errors have one.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from laconic.errors import LinkError, install
from laconic.units import finite

TRACEBACK = "LACONIC_TRACEBACK"
EXTRAS = {
    **dict.fromkeys(("numpy", "pyroute2", "rich", "sklearn"), "lab"),
    **{"cryptography": "tls", "yaml": "plan", "argcomplete": "completion"},
}
"""The extra of laconic that installs a package."""
EXPECTED = (ValueError, ImportError, OSError, LinkError)
"""Errors that the user can mend. Others are bugs."""


def guarded(run: Callable[[], int]) -> int:
    """Return what ``run`` returns, or after an error the exit code: 2 for what the user can mend,
    1 if the reader of the output has ended or for a bug, 130 after Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal may lack some characters
            stream.reconfigure(errors="replace")
    try:
        try:
            return run()
        finally:  # also after the help of a parser
            sys.stdout.flush()
    except KeyboardInterrupt:
        return _failed("interrupted", 130)
    except Exception as error:
        if os.environ.get(TRACEBACK) == "1":
            raise
        _discard_unwritten()
        if isinstance(error, BrokenPipeError):  # the reader, such as head, has ended
            return 1
        return _failed(error_line(error), 2 if isinstance(error, EXPECTED) else 1)


def error_line(error: Exception) -> str:
    """Return the error as one line."""
    if isinstance(error, OSError) and error.strerror:
        named = isinstance(error.filename, (str, bytes))
        return f"{os.fsdecode(error.filename)}: {error.strerror}" if named else error.strerror
    text = "; ".join(filter(None, map(str.strip, str(error).splitlines())))
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        how = install(EXTRAS[package]) if package in EXTRAS else f"install {package}"
        return f"the package {package} is missing: {how}"
    if isinstance(error, EXPECTED):
        return text or type(error).__name__
    return f"{type(error).__name__}: {text}: set {TRACEBACK}=1 to see where, and report it"


def print_json(value: dict[str, Any]) -> None:
    """Print ``value`` as JSON, with its keys in their order, in ASCII, and null for NaN."""
    print(json.dumps(finite(value), indent=2, allow_nan=False))


def _failed(line: str, code: int) -> int:
    with contextlib.suppress(OSError):  # nobody can read it
        print(f"laconic: {line}", file=sys.stderr, flush=True)
    return code


def _discard_unwritten() -> None:
    """If stdout cannot be written, send the rest nowhere: Python would fail on it when it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
