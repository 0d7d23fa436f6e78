"""Traps of GPUs, with stand-ins for functions of torch.cuda on machines without a GPU."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import laconic as la
from benchmarks.traps import Trapped, trap
from laconic.links.comm_thread import CommThread, Pending


class _Event:
    """Records the streams that wait for it."""

    def __init__(self) -> None:
        self.waiting: list[object] = []

    def wait(self, stream: object = None) -> None:
        self.waiting.append(stream or torch.cuda.current_stream())


class _Stream:
    def __init__(self) -> None:
        self.event = _Event()

    def record_event(self) -> _Event:
        return self.event


def _current(device: torch.device | None = None) -> str:
    if device is not None and device.type != "cuda":
        raise ValueError(f"Expected a cuda device, but got: {device}")  # as torch's does
    return f"the stream of {device or 'cuda:0'}"  # GPU 0 is the current one


def _wait(device: str, result: Any) -> list[object]:
    """Return the streams that wait after a background job, for a model on ``device``."""
    lane, stream = CommThread(True, torch.device(device), lambda: None), _Stream()
    pending: Pending[Any] = Pending(lane, "a job")
    pending.run(lambda: result, stream)  # type: ignore[arg-type]
    with mock.patch.object(torch.cuda, "current_stream", _current):
        pending.wait()
    return stream.event.waiting


@trap("a round with a delay is waited for on the model's GPU 1 while GPU 0 is the current one")
def model_on_another_gpu() -> str:
    waiting = _wait("cuda:1", None)
    if waiting != ["the stream of cuda:1"]:
        raise Trapped(f"{waiting[0]} waits for the average, and training uses unfinished data")
    return "the stream of the model's GPU waits"


@trap("a buffer on the CPU is averaged with a delay, next to parameters on a GPU")
def cpu_buffer_with_a_delay() -> str:
    buffer = torch.ones(2)
    try:
        _wait("cuda:0", buffer)
    except ValueError as error:
        raise Trapped(f"{type(error).__name__}: {str(error).splitlines()[0][:90]}") from None
    return "it is averaged"


@trap("a part of the model is on another device")
def parameters_on_two_devices() -> str:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1, device="meta"))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)

    def attach(_: int) -> str:
        try:
            la.attach(model, optimizer, la.local_sgd(2)).detach()
        except ValueError as error:
            return str(error)
        return ""

    (message,) = la.simulate(attach, workers=1)
    if "several devices" not in message:
        raise Trapped(message or "it is attached without an error")
    return message[:100]


def _chosen(visible: int, local: str, on_host: str) -> list[int]:
    """Return the GPUs that `laconic.init` makes the current one."""
    found: list[int] = []

    def set_device(device: int) -> None:
        if device >= visible:
            raise RuntimeError("CUDA error: invalid device ordinal")
        found.append(device)

    env = {"LOCAL_RANK": local, "LOCAL_WORLD_SIZE": on_host}
    with (
        mock.patch.dict(os.environ, env),
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "device_count", lambda: visible),
        mock.patch.object(torch.cuda, "set_device", set_device),
        mock.patch.object(dist, "is_nccl_available", lambda: True),
        mock.patch.object(dist, "init_process_group", lambda *_, **__: None),
    ):
        la.init()
    return found


@trap("each process sees only one GPU (CUDA_VISIBLE_DEVICES), and LOCAL_RANK is 3")
def one_visible_gpu() -> str:
    try:
        chosen = _chosen(1, "3", "4")
    except RuntimeError as error:
        raise Trapped(f"laconic.init() fails with {error}") from None
    if chosen != [0]:
        raise Trapped(f"it chooses GPU {chosen}, but there is only one")
    return "it chooses the only GPU"


@trap("more ranks than GPUs on a host")
def more_ranks_than_gpus() -> str:
    messages = []
    for local in ("0", "5"):
        try:
            _chosen(4, local, "6")
        except ValueError as error:
            messages.append(str(error))
        except RuntimeError as error:
            raise Trapped(
                f"LOCAL_RANK {local} fails with {error}, and others wait for it"
            ) from None
        else:
            messages.append("")
    if not all("4 GPUs are visible" in text for text in messages):
        raise Trapped("some ranks continue and wait for the others")
    return messages[0][:100]
