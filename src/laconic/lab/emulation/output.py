"""Capture what a program prints while it runs, line by line."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import Final

from laconic.lab.emulation.jobs import close_all

__all__ = ["Lines", "Stream"]

_BAR_SECONDS: Final = 1.0  # between two updates of a progress bar
_LONGEST_LINE: Final = 1 << 16
_LAST_LINES: Final = 10
_PIECE: Final = 1 << 16


class Lines:
    """Splits a stream of bytes into lines without line ends.

    A progress bar, which returns to the start of its line, yields one update per second and the
    last one. A line longer than 64 KiB is split.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._shown = float("-inf")

    def feed(self, piece: bytes, now: float) -> list[bytes]:
        """Return the lines that ``piece`` completes. ``now`` is in seconds."""
        *whole, self._rest = (self._rest + piece).split(b"\n")
        lines = [_last_state(line) for line in whole]
        before, bar, state = self._rest.rpartition(b"\r")
        if now - self._shown >= _BAR_SECONDS and _last_state(before):
            lines.append(_last_state(before))
            self._shown = now
            self._rest = bar + state
        if len(self._rest) > _LONGEST_LINE:
            lines += self.end()
        return lines

    def end(self) -> list[bytes]:
        """Return what is left at the end of the stream."""
        rest, self._rest = _last_state(self._rest), b""
        return [rest] if rest else []


def _last_state(line: bytes) -> bytes:
    """Return what a terminal shows of a line whose updates are separated by carriage returns."""
    return next((state for state in reversed(line.split(b"\r")) if state), b"")


class Stream:
    """A pipe for a process's output, and the file that stores the output, if any.

    ``last`` holds the last lines. Raises OSError with the file name if it cannot be written.
    """

    def __init__(self, log: Path | None) -> None:
        self.last: deque[bytes] = deque(maxlen=_LAST_LINES)
        self._lines = Lines()
        self._path = log
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._log = -1 if log is None else os.open(log, flags, 0o644)
        self.read_end, self.write_end = os.pipe()
        os.set_blocking(self.read_end, False)

    def read(self, now: float) -> list[bytes]:
        """Return the lines that are available."""
        return self._remember(self._lines.feed(self._take(), now))

    def drain(self, now: float) -> list[bytes]:
        """Return all remaining lines, including an incomplete last one, without waiting."""
        lines: list[bytes] = []
        while piece := self._take():
            lines += self._lines.feed(piece, now)
        return self._remember(lines + self._lines.end())

    def close(self) -> None:
        """Close all open descriptors."""
        close_all([self.read_end, self.write_end, *([self._log] if self._log >= 0 else [])])

    def _take(self) -> bytes:
        """Read what is available and store it in the file."""
        try:
            taken = piece = os.read(self.read_end, _PIECE)
        except BlockingIOError:
            return b""
        while piece and self._log >= 0:
            try:
                piece = piece[os.write(self._log, piece) :]
            except OSError as error:
                reason = f"cannot write {self._path}: {error.strerror}"
                raise OSError(reason) from error
        return taken

    def _remember(self, lines: list[bytes]) -> list[bytes]:
        self.last.extend(lines)
        return lines
