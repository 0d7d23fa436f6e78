"""Run a shell inside a host of a lab."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import termios
from collections.abc import Iterator, Mapping, Sequence

from laconic.lab.emulation.namespaces import Entry

__all__ = ["open_shell"]

# bash reads this as its startup file. It reads the user's own startup file first.
_START_UP = """[ -r ~/.bashrc ] && . ~/.bashrc
unset PROMPT_COMMAND
PS1='[{name}] \\w \\$ '
"""


def open_shell(entry: Entry, env: Mapping[str, str]) -> int:
    """Run an interactive shell on the terminal of this process and return its exit code.

    The shell is bash with the user's settings and a prompt that names the host, or sh if there is
    no bash. Processes that the shell leaves behind end with the lab.
    """
    variables = {**env, "PS1": f"[{entry.name}] $ "}
    with contextlib.ExitStack() as stack:
        argv: Sequence[str] = ["sh", "-i"]
        inherited = entry.descriptors()
        if shutil.which("bash"):
            start_up, write_end = os.pipe()
            stack.callback(os.close, start_up)
            with open(write_end, "w") as file:
                file.write(_START_UP.format(name=entry.name))
            argv = ["bash", "--rcfile", f"/dev/fd/{start_up}", "-i"]
            inherited = (*inherited, start_up)
        stack.enter_context(_terminal_restored())
        # No new session here: the shell would lose the terminal.
        shell = subprocess.Popen(entry.command(argv), env=variables, pass_fds=inherited)
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
