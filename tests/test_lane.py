"""The lane: what it keeps, and what it gives back."""

from __future__ import annotations

import time
import weakref
from functools import partial

import pytest
import torch

from laconic.lane import Lane


@pytest.mark.timeout(30)
def test_a_job_that_is_done_keeps_no_tensor() -> None:
    """Its thread waits for the next one meanwhile, perhaps for long."""
    lane = Lane(True, torch.device("cpu"), lambda: None)
    flat = torch.ones(4)
    seen = weakref.ref(flat)
    pending = lane.submit(partial(torch.sum, flat), "a sum")
    assert float(pending.wait()) == 4.0
    del flat, pending
    lane._latest = None
    end = time.monotonic() + 10
    while seen() is not None and time.monotonic() < end:
        time.sleep(0.01)
    assert seen() is None
    lane.close()


def test_no_job_runs_after_one_that_failed() -> None:
    """Without a thread, too: as the ranks would no longer be in step."""
    lane = Lane(False, torch.device("cpu"), lambda: None)
    ran: list[int] = []

    def fail() -> None:
        raise ValueError("no")

    first, second = lane.submit(fail, "a failure"), lane.submit(partial(ran.append, 1), "a job")
    for pending in (first, second):
        with pytest.raises(ValueError, match="no"):
            pending.wait()
    assert not ran
