"""Accelerators: the only module, beside their links and kernels, that calls `torch.cuda`.

Each kind is one `Accelerator`, in `ACCELERATORS` by its device type. To add a kind, write a
subclass and add its row. Its tensors then travel by way of host memory; for collectives of its own
see `laconic.links.torch_link`. A function given a device without an accelerator, such as the CPU,
does nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Event(Protocol):
    """A point in a stream's work."""

    def wait(self, stream: Any) -> None:
        """Have ``stream`` wait for it, and not this thread."""

    def synchronize(self) -> None:
        """Have this thread wait for it."""


class Stream(Protocol):
    """A queue of work on an accelerator."""

    def record_event(self) -> Event:
        """The point after all work so far."""


class Accelerator:
    """What laconic needs of one kind of accelerator, here of NVIDIA's GPUs; others are subclasses.
    ``backend``: torch's process group for it."""

    backend = "nccl"

    def count(self) -> int:
        """How many of them this process sees; 0 where torch cannot use them."""
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def can_communicate(self) -> bool:
        """Whether this torch has the ``backend``."""
        return dist.is_nccl_available()

    def select(self, index: int) -> None:
        """Make one of them the current one."""
        torch.cuda.set_device(index)

    def current(self) -> int:
        """The index of the current one."""
        return torch.cuda.current_device()

    def model_name(self, index: int) -> str:
        """What the manufacturer calls it."""
        return torch.cuda.get_device_name(index)

    def current_stream(self, device: torch.device) -> Stream:
        """The stream that this thread's work on ``device`` goes to."""
        return torch.cuda.current_stream(device)

    def new_stream(self, device: torch.device) -> Stream:
        """Another one, whose work goes first where two streams have some."""
        return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which this thread's work goes to ``stream``."""
        return torch.cuda.stream(stream)

    def pinned(self, nbytes: int) -> Tensor:
        """Bytes in host memory. A copy from or to them with ``non_blocking=True`` is work of the
        current stream; after they are freed, nobody gets them before it is done."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def captures(self, device: torch.device) -> bool:
        """Whether this thread's work on ``device`` is being recorded, such as in a CUDA graph, to
        be repeated."""
        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()

    def synchronize(self, device: torch.device) -> None:
        """Wait until all work on ``device`` is done."""
        torch.cuda.synchronize(device)

    def timing_event(self, device: torch.device) -> Any:
        """A point in the current stream of ``device``, with ``elapsed_time(later)`` in
        milliseconds."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    def in_use(self) -> bool:
        """Whether this process has used one of them."""
        return torch.cuda.is_initialized()  # type: ignore[no-untyped-call, no-any-return]

    def random_state(self) -> Tensor:
        """The state of the current one's random generator."""
        return torch.cuda.get_rng_state()

    def set_random_state(self, state: Tensor) -> None:
        """Put it back."""
        torch.cuda.set_rng_state(state)


ACCELERATORS: dict[str, Accelerator] = {"cuda": Accelerator()}
"""By the type of `torch.device`."""


def accelerator(device: torch.device) -> Accelerator | None:
    """The kind that ``device`` is of; None for the CPU."""
    return ACCELERATORS.get(device.type)


# -- which device is this process's ----


def select_own() -> str:
    """Make this process's own accelerator the current one, where there are some, and return the
    name of the process group's back ends. Raises ``ValueError`` where there are fewer of them than
    ranks on this host."""
    for name, kind in ACCELERATORS.items():
        if kind.count() and kind.can_communicate():
            kind.select(own_index(kind.count()))
            return f"cpu:gloo,{name}:{kind.backend}"
    return "gloo"


def own_index(visible: int) -> int:
    """Which of the ``visible`` GPUs is this process's: LOCAL_RANK, or the only one."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if visible == 1:
        return 0
    ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), local + 1)
    if ranks > visible:
        raise ValueError(
            f"{visible} GPUs are visible to LOCAL_RANK {local} of {ranks} on this host: start at "
            "most one process for each GPU, give each process its own by CUDA_VISIBLE_DEVICES, or "
            "call torch.cuda.set_device and torch.distributed.init_process_group yourself"
        )
    return local


def common_device() -> torch.device:
    """Where a rank without parameters communicates: on its accelerator if the process group uses
    one, as the other ranks then do; else on the CPU."""
    backends = str(dist.get_backend_config()) if dist.is_initialized() else ""
    for name, kind in ACCELERATORS.items():
        if kind.backend in backends:
            # by its number, as another thread may have another current device
            return torch.device(name, kind.current())
    return torch.device("cpu")


# -- time and memory ----


def synchronize(device: torch.device) -> None:
    """Wait until all work on ``device`` is done."""
    kind = accelerator(device)
    if kind is not None:
        kind.synchronize(device)


def time_mark(device: torch.device) -> Any:
    """This moment in the work on ``device``, for `seconds_between`."""
    kind = accelerator(device)
    return time.perf_counter() if kind is None else kind.timing_event(device)


def seconds_between(start: Any, end: Any) -> float:
    """From one `time_mark` to a later one, once the work is done."""
    if isinstance(start, float):
        return float(end - start)
    return float(start.elapsed_time(end)) / 1000


_PRECISION = threading.Lock()
"""Held while `full_precision` is in force, which holds for the process."""


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """A context in which matrices on ``device`` are multiplied in their own dtype: not under
    autocast, nor in TF32 or bfloat16, whatever `torch.set_float32_matmul_precision` says."""
    with torch.autocast(device.type, enabled=False), _PRECISION:
        restore = _set_full_precision(device)
        try:
            yield
        finally:
            restore()


def _set_full_precision(device: torch.device) -> Callable[[], None]:
    """Returns what undoes it."""
    if not hasattr(torch.backends, "fp32_precision"):  # torch 2.9 has one for each kind of device
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        return partial(torch.set_float32_matmul_precision, before)
    backends: Any = torch.backends  # the older functions raise in programs that use this
    setting = (backends.cuda if device.type == "cuda" else backends.mkldnn).matmul
    own = setting.fp32_precision
    setting.fp32_precision = "ieee"

    def restore() -> None:
        setting.fp32_precision = "none"  # follows `torch.backends.fp32_precision`
        if setting.fp32_precision != own:
            setting.fp32_precision = own

    return restore


# -- streams ----


def refuse_capture(device: torch.device, what: str) -> None:
    """Raise ``RuntimeError`` if ``what`` is being recorded to be repeated later, as the repetition
    would not communicate."""
    kind = accelerator(device)
    if kind is not None and kind.captures(device):
        raise RuntimeError(
            f"{what} is captured in a CUDA graph, whose repetitions would not communicate: capture "
            "the forward and backward pass alone, with a recipe that averages parameters, and call "
            "optimizer.step() outside of the graph"
        )


def not_compiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """``hook``, which torch.compile calls as it is and does not trace. It imports torch._dynamo, as
    any optimizer of torch does."""
    reason = "laconic's hook sends messages: call torch.compile without fullgraph=True"
    disabled: Callable[..., Any] = torch.compiler.disable(hook, reason=reason)  # type: ignore[no-untyped-call]
    return disabled


def use_on_current_stream(tensor: Tensor) -> None:
    """Keep the memory of ``tensor``, made on another stream, until the current stream's work so far
    is done. Does nothing for a tensor on the CPU."""
    kind = accelerator(tensor.device)
    if kind is not None:
        tensor.record_stream(kind.current_stream(tensor.device))  # type: ignore[arg-type]
