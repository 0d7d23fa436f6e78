"""What all commands print through: errors as one line, JSON, and streams that may fail.

A command never ends in a traceback, whatever its user, its files or its terminal do. With
``LACONIC_TRACEBACK=1`` errors have one.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import json
import os
import select
import sys
from collections.abc import Callable, Iterator
from typing import Any

from laconic.errors import LinkError, install
from laconic.units import finite

TRACEBACK = "LACONIC_TRACEBACK"
EXTRAS = {
    **dict.fromkeys(("matplotlib", "numpy", "pyroute2", "rich", "sklearn"), "lab"),
    **{"cryptography": "tls", "optuna": "tune"},
}
"""The extra of laconic that installs a package."""
ASCII = {"–": "-", "—": "-", "×": "x", "±": "+-", "…": "...", "→": "->", "†": "*", "‡": "**"}
"""What is written instead of characters that the terminal's encoding lacks; otherwise ``?``."""
NEXT_STEPS = {
    errno.EACCES: "choose a path that you may use",
    errno.EPERM: "choose a path that you may use",
    errno.EROFS: "choose a directory that can be written",
    errno.ENOSPC: "free some space, or choose another disk",
    errno.EDQUOT: "free some space, or choose another disk",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "give a path whose parents are directories",
    errno.EEXIST: "give the path of a directory, or a new one",
    errno.EISDIR: "give the path of a file",
    errno.ENAMETOOLONG: "give a shorter path",
}
"""What to do about an error of the operating system that names a path, or about one of `FULL`."""
FULL = (errno.ENOSPC, errno.EDQUOT)


def guarded(run: Callable[[], int]) -> int:
    """Return what ``run`` returns, or after an error the exit code: 2 for what the user can mend,
    1 if the reader of the output has ended or for a bug, 130 after Ctrl-C."""
    with _any_text():
        return _guarded(run)


def _guarded(run: Callable[[], int]) -> int:
    try:
        try:
            code = run()
            sys.stdout.flush()
            return code
        except SystemExit:  # of a parser, which has printed its line or its help
            sys.stdout.flush()
            raise
    except KeyboardInterrupt:
        return _failed("interrupted", 130)
    except Exception as error:
        if os.environ.get(TRACEBACK) == "1":
            raise
        reader_ended = isinstance(error, BrokenPipeError) and _reader_ended()
        _discard_unwritten()
        if reader_ended:  # such as head
            return 1
        expected = isinstance(error, (ValueError, ImportError, OSError, LinkError))
        return _failed(error_line(error), 2 if expected else 1)


def error_line(error: Exception) -> str:
    """Return the error as one line that ends with what to do."""
    if isinstance(error, OSError) and error.errno is not None:
        path = error.filename
        where = [] if path is None or isinstance(path, int) else [os.fsdecode(path)]
        step = NEXT_STEPS.get(error.errno) if where or error.errno in FULL else None
        return ": ".join(filter(None, [*where, error.strerror, step]))
    if isinstance(error, MemoryError):
        return "not enough memory: try a smaller model or fewer workers"
    text = "; ".join(filter(None, map(str.strip, str(error).splitlines())))
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        how = install(EXTRAS[package]) if package in EXTRAS else f"install {package}"
        return f"the package {package} is missing: {how}"
    if isinstance(error, (ValueError, ImportError, OSError, LinkError)):
        return text or type(error).__name__
    return f"{type(error).__name__}: {text}: set {TRACEBACK}=1 to see where, and report it"


def print_json(value: dict[str, Any]) -> None:
    """Print ``value`` as JSON, with its keys in their order, in ASCII, and null for NaN."""
    print(json.dumps(finite(value), indent=2, allow_nan=False))


def _failed(line: str, code: int) -> int:
    with contextlib.suppress(OSError):  # nobody can read it
        print(f"laconic: {line}", file=sys.stderr, flush=True)
    return code


@contextlib.contextmanager
def _any_text() -> Iterator[None]:
    """Let the streams accept any text, also where they are closed or not in UTF-8."""
    codecs.register_error("laconic", _replace)
    before = []
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # it was closed when Python started
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            before.append((stream, stream.errors))
            stream.reconfigure(errors="laconic")
    try:
        yield
    finally:
        for stream, errors in before:
            with contextlib.suppress(OSError, ValueError):  # it cannot be written, or is closed
                stream.reconfigure(errors=errors)


def _replace(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError), "only for writing"
    text = error.object[error.start : error.end]
    return "".join(ASCII.get(character, "?") for character in text), error.end


def _reader_ended() -> bool:
    """Return whether nobody reads stdout any more."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(events & select.POLLERR for _, events in poll.poll(0))
    except io.UnsupportedOperation:
        return False  # in memory


def _discard_unwritten() -> None:
    """If stdout cannot be written, send the rest nowhere: Python would fail on it when it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
