"""The communication thread: what it keeps, and what it gives back."""

from __future__ import annotations

import subprocess
import sys
import time
import weakref
from functools import partial

import pytest
import torch

from laconic.links.comm_thread import CommThread


def test_a_job_that_is_done_keeps_no_tensor() -> None:
    """Its thread waits for the next one meanwhile, perhaps for long."""
    thread = CommThread(True, torch.device("cpu"), lambda: None)
    flat = torch.ones(4)
    seen = weakref.ref(flat)
    pending = thread.submit(partial(torch.sum, flat), "a sum")
    assert float(pending.wait()) == 4.0
    del flat
    thread.submit(lambda: None, "another job").wait()
    del pending
    end = time.monotonic() + 10
    while seen() is not None and time.monotonic() < end:
        time.sleep(0.01)
    assert seen() is None
    thread.close()


def test_no_job_runs_after_one_that_failed() -> None:
    """Without a thread, too: as the ranks would no longer be in step."""
    thread = CommThread(False, torch.device("cpu"), lambda: None)
    ran: list[int] = []

    def fail() -> None:
        raise ValueError("no")

    first, second = thread.submit(fail, "a failure"), thread.submit(partial(ran.append, 1), "a job")
    for pending in (first, second):
        with pytest.raises(ValueError, match="no"):
            pending.wait()
    assert not ran


ENDS_WITH_A_JOB_UNDER_WAY = """
import torch
from laconic.links.comm_thread import CommThread

torch.set_num_threads(1)
thread = CommThread(True, torch.device("cpu"), lambda: None)
x = torch.randn(100, 100)

def job():
    for _ in range(500):
        x @ x
    print("done", flush=True)

thread.submit(job, "a job")
"""


@pytest.mark.slow
def test_a_process_that_ends_waits_for_the_job_under_way() -> None:
    """Python would stop its thread within torch, which is a SIGABRT."""
    command = [sys.executable, "-c", ENDS_WITH_A_JOB_UNDER_WAY]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
