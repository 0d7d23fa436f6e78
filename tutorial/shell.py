"""Commands of chapter 5."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path


def started(folder: str, *commands: str, **environment: str) -> list[list[str]]:
    """Run commands at the same time and show what each prints; the lines about epochs, of each.

    ``folder``: for their temporary files.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # this Python's first
    ours = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "TMPDIR": folder}
    running = [
        subprocess.Popen(
            shlex.split(command), env=ours | environment, stdout=subprocess.PIPE, text=True
        )
        for command in commands
    ]
    printed = [process.communicate()[0] for process in running]
    set_to = "".join(f"{name}={value} " for name, value in environment.items())
    for command, text in zip(commands, printed, strict=True):
        print(f"$ {set_to}{command}\n{text}")
    assert all(process.returncode == 0 for process in running)
    return [[line for line in text.splitlines() if "epoch" in line] for text in printed]
