"""Runs a part, here or in a process of its own."""

from __future__ import annotations

import os
import signal
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as mp

from benchmarks.cuda import FailedError, Numbers, Part

Row = dict[str, Any]
"""What a part has found."""


def run_part(part: Part, device: torch.device) -> Row:
    """Run it. A failure is part of the result."""
    start, error, numbers = time.perf_counter(), "", {}
    try:
        numbers = part.run(device)
    except FailedError as failed:
        error, numbers = str(failed), failed.numbers
    except Exception as raised:
        traceback.print_exc()
        error = f"{type(raised).__name__}: {raised}".splitlines()[0]
    return _row(part, time.perf_counter() - start, numbers, error)


def _row(part: Part, seconds: float, numbers: Numbers, error: str) -> Row:
    row = {"name": part.name, "text": part.text, "seconds": round(seconds, 2)}
    return {**row, "numbers": numbers, "error": error}


def run_apart(part: Part, device: torch.device) -> Row:
    """Run it in a process of its own, which is ended after ``part.most`` seconds with all that it
    has started: after some errors, a process can use no GPU any more."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(part, device, theirs))
    start = time.perf_counter()
    process.start()
    theirs.close()  # else the end of the process would not be seen
    try:
        if ours.poll(part.most):
            found: Row = ours.recv()
            return found
        error = f"took more than {part.most:.0f} s"
    except EOFError:
        error = "its process has ended"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # where it has not begun
        process.join()
    return _row(part, time.perf_counter() - start, {}, error)


def _serve(part: Part, device: torch.device, connection: Connection) -> None:
    os.setsid()
    connection.send(run_part(part, device))
