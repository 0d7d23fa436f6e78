"""The lane: what it keeps, and what it gives back."""

from __future__ import annotations

import subprocess
import threading
import time
import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from laconic.errors import LinkError
from laconic.links import comm_thread
from laconic.links.comm_thread import CommThread, Pending

from tests.support import programs


def test_a_job_that_is_done_keeps_no_tensor() -> None:
    """Its thread waits for the next one meanwhile, perhaps for long."""
    lane = CommThread(True, torch.device("cpu"), lambda: None)
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


def test_who_waits_does_not_wait_for_a_check_of_the_other_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their answers take several round trips. Only one check is under way."""
    monkeypatch.setattr(comm_thread, "CHECK_SECONDS", 0.05)
    begun, began, end = [], threading.Event(), threading.Event()

    def check() -> None:
        begun.append(threading.current_thread())
        began.set()
        end.wait()

    def job() -> None:
        began.wait()
        time.sleep(0.3)  # in which other checks could begin

    lane = CommThread(True, torch.device("cpu"), check)
    lane.submit(job, "a job").wait()  # though the check has not ended
    assert len(begun) == 1 and begun[0] is not threading.current_thread()
    end.set()
    begun[0].join()
    began.clear()
    lane.submit(began.wait, "another job").wait()
    assert len(begun) > 1
    lane.close()


def test_what_a_check_has_found_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no job begins after that."""
    monkeypatch.setattr(comm_thread, "CHECK_SECONDS", 0.05)

    def check() -> None:
        raise LinkError("rank 1 is gone", ranks=[1])

    lane, ran = CommThread(True, torch.device("cpu"), check), threading.Event()
    release = threading.Event()
    pending = lane.submit(release.wait, "a job")
    with pytest.raises(LinkError, match="a job: rank 1 is gone"):
        pending.wait()
    later = lane.submit(ran.set, "a job after it")
    release.set()
    with pytest.raises(LinkError, match="rank 1 is gone"):
        later.wait()
    assert not ran.is_set()
    lane.close()


def test_no_job_runs_after_one_that_failed() -> None:
    """Without a thread, too: as the ranks would no longer be in step."""
    lane = CommThread(False, torch.device("cpu"), lambda: None)
    ran: list[int] = []

    def fail() -> None:
        raise ValueError("no")

    first, second = lane.submit(fail, "a failure"), lane.submit(partial(ran.append, 1), "a job")
    for pending in (first, second):
        with pytest.raises(ValueError, match="no"):
            pending.wait()
    assert not ran


def test_a_lane_that_was_closed_goes_on_after_what_it_still_had() -> None:
    """One thread at a time, or two would mix up their messages."""
    lane = CommThread(True, torch.device("cpu"), lambda: None)
    ran: list[int] = []

    def slow() -> None:
        time.sleep(0.2)
        ran.append(1)

    lane.submit(slow, "a job under way")
    lane.close()
    lane.submit(partial(ran.append, 2), "a job afterward").wait()
    assert ran == [1, 2]
    lane.submit(slow, "another")
    lane.drain()
    assert ran == [1, 2, 1]
    lane.close()


def test_an_error_of_the_card_before_a_job_reaches_who_waits() -> None:
    lane = CommThread(True, torch.device("cuda"), lambda: None)

    class Broken:
        def wait(self, stream: object) -> None:
            raise RuntimeError("device-side assert")

    pending: Pending[int] = Pending(lane, "a job")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "Stream", lambda _, priority: None)
        patched.setattr(torch.cuda, "stream", lambda _: nullcontext())
        lane._run_on_stream(pending, lambda: 2, None, Broken())  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="device-side assert"):
        pending.wait()
    assert isinstance(lane._error, RuntimeError)


class OnGpu(torch.Tensor):
    """Stands in for a tensor on the second GPU, of which no machine without one has any; what is
    done to it is noted."""

    is_cuda = True  # type: ignore[assignment]
    device = torch.device("cuda", 1)  # type: ignore[assignment]

    def record_stream(self, stream: Any) -> None:
        self.recorded = stream


class FakeEvent:
    """Notes the streams that wait for it; None stands for the current device's."""

    def __init__(self) -> None:
        self.waiting: list[object] = []

    def wait(self, stream: object = None) -> None:
        self.waiting.append(stream)


class FakeStream:
    """Of the lane; its event stands for the end of a job."""

    def __init__(self) -> None:
        self.event = FakeEvent()

    def record_event(self) -> FakeEvent:
        return self.event


def stream_of(device: torch.device) -> str:
    if device.type != "cuda":
        raise ValueError(f"Expected a cuda device, but got: {device}")  # as torch's does
    return f"the current stream of {device}"


def test_who_waits_for_a_job_waits_on_the_stream_of_the_models_gpu() -> None:
    """Which need not be the current one: tensors would be read before they are there."""
    lane, stream = CommThread(True, torch.device("cuda", 1), lambda: None), FakeStream()
    pending: Pending[torch.Tensor] = Pending(lane, "a job")
    made = torch.ones(2).as_subclass(OnGpu)
    pending.run(lambda: made, stream)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "current_stream", stream_of)
        assert pending.wait() is made
    assert stream.event.waiting == ["the current stream of cuda:1"]
    assert made.recorded == "the current stream of cuda:1"  # type: ignore[attr-defined]


def test_a_buffer_on_the_cpu_may_come_from_a_stream() -> None:
    """As buffers do that are not on the parameters' GPU: there is no memory to be kept for it."""
    lane, stream = CommThread(True, torch.device("cuda", 0), lambda: None), FakeStream()
    pending: Pending[torch.Tensor] = Pending(lane, "a job")
    buffer = torch.ones(2)
    pending.run(lambda: buffer, stream)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "current_stream", stream_of)
        assert pending.wait() is buffer
    assert stream.event.waiting == ["the current stream of cuda:0"]


def test_a_job_beside_the_training_runs_on_a_stream_of_the_models_gpu() -> None:
    """After what the caller's stream of that GPU has to do."""
    lane = CommThread(True, torch.device("cuda", 1), lambda: None)
    before, made, entered = FakeEvent(), [], []

    class Made(FakeStream):
        def __init__(self, device: torch.device, priority: int) -> None:
            super().__init__()
            self.device, self.priority = device, priority
            made.append(self)

    class Current:
        def record_event(self) -> FakeEvent:
            return before

    asked: list[torch.device] = []
    selected: list[int] = []

    def current(device: torch.device) -> Current:
        asked.append(device)
        return Current()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "Stream", Made)
        patched.setattr(torch.cuda, "stream", lambda s: nullcontext(entered.append(s)))
        patched.setattr(torch.cuda, "current_stream", current)
        patched.setattr(torch.cuda, "set_device", selected.append)
        pending = lane.submit(lambda: 2, "a job")
        assert pending.wait() == 2
        lane.close()
    assert selected == [1], "else this thread would have a context on the first GPU, too"
    (stream,) = made
    assert stream.device == torch.device("cuda", 1)
    assert (before.waiting, entered) == ([stream], [stream])
    assert asked == [torch.device("cuda", 1)] * 2  # of the caller, and of who waits
    assert len(stream.event.waiting) == 1 and isinstance(stream.event.waiting[0], Current)


ENDS_WITH_A_JOB_UNDER_WAY = """
import torch
from laconic.links.comm_thread import CommThread

torch.set_num_threads(1)
lane = CommThread(True, torch.device("cpu"), lambda: None)
x = torch.randn(100, 100)

def job():
    for _ in range(500):
        x @ x
    print("done", flush=True)

lane.submit(job, "a job")
"""


def test_a_process_that_ends_waits_for_the_job_under_way() -> None:
    """Python would stop its thread within torch, which is a SIGABRT."""
    command = [*programs.NEW, "-c", ENDS_WITH_A_JOB_UNDER_WAY]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
