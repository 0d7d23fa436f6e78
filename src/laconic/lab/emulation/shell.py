"""Run a shell inside a host of a lab."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import termios
from collections.abc import Iterator, Mapping

from laconic.lab.emulation.namespaces import Entry

__all__ = ["open_shell"]


def open_shell(entry: Entry, env: Mapping[str, str]) -> int:
    """Run an interactive shell on the terminal of this process and return its exit code.

    The shell is bash with a prompt that names the host, or sh if there is no bash. Processes that
    the shell leaves behind end with the lab.
    """
    argv = ["bash", "--norc", "-i"] if shutil.which("bash") else ["sh", "-i"]
    prompt = {"PS1": f"[{entry.name}] $ "}
    with _terminal_restored():
        # No new session here: the shell would lose the terminal.
        shell = subprocess.Popen(
            entry.command(argv), env={**env, **prompt}, pass_fds=entry.descriptors()
        )
        code = shell.wait()
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _terminal_restored() -> Iterator[None]:
    """Leave Ctrl-C to the shell and restore the terminal afterward, even if the shell is killed."""
    settings = None
    with contextlib.suppress(termios.error):
        settings = termios.tcgetattr(0)
    # A handler, not SIG_IGN: the shell's programs would inherit that.
    from_terminal = (signal.SIGINT, signal.SIGQUIT)
    old = {number: signal.signal(number, lambda *_: None) for number in from_terminal}
    try:
        yield
    finally:
        if settings is not None:
            # A killed shell leaves its own process group in the foreground.
            old[signal.SIGTTOU] = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
            with contextlib.suppress(OSError, termios.error):
                os.tcsetpgrp(0, os.getpgrp())
                termios.tcsetattr(0, termios.TCSADRAIN, settings)
        for number, handler in old.items():
            signal.signal(number, handler)
