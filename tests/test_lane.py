"""The lane: what it keeps, and what it gives back."""

from __future__ import annotations

import threading
import time
import weakref
from functools import partial

import pytest
import torch

from laconic.lane import Lane


@pytest.mark.timeout(30)
def test_who_waits_does_the_job_itself_after_those_before_it() -> None:
    """A thread that is woken for it, and wakes the one that waits, is time that a round takes."""
    lane = Lane(True, torch.device("cpu"), lambda: None)
    ran: list[tuple[str, int]] = []

    def job(name: str) -> None:
        time.sleep(0.1)
        ran.append((name, threading.get_ident()))

    pending = lane.submit(partial(job, "beside"), "a job")
    lane.call(partial(job, "here"), "another")
    assert pending.done() and [name for name, _ in ran] == ["beside", "here"]
    assert ran[0][1] != ran[1][1] == threading.get_ident()
    lane.close()


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
