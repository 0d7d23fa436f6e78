"""An accelerator that is as late as it may be, on the CPU: the device "late".

Its tensors are of a device of their own, so an operation on them and on a CPU tensor is an error.
Work is queued on the current stream, as on a GPU, and done only when an order that the program has
asked for demands it: when the host reads what the same stream computes, or something waits for an
event behind it. Work on another stream is never done by itself. So whatever a program does not wait
for has not happened:

- a host that reads memory before the event after the copy finds old bytes;
- so does another stream that reads a result before it waits for the event after it;
- a copy reads what is in its source when it is made, not when it was queued;
- memory whose last tensor is gone is overwritten by its own stream, unless `record_stream` has
  named the streams that still use it.

It needs torch's experimental Python back ends.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed.tensor  # before `device` replaces the Generator in its annotations
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

from laconic.device import ACCELERATORS, Accelerator
from laconic.links.comm_thread import CommThread

_lock = threading.RLock()
_here = threading.local()
_keys = itertools.count()
POISON = 0xA5
"""What memory holds that something else has used meanwhile."""


class LateEvent:
    """A point in a stream's work."""

    def __init__(self, stream: LateStream) -> None:
        self.stream, self.done = stream, False

    def wait(self, stream: LateStream) -> None:
        note("wait")
        with _lock:
            stream.queue.append((lambda: self.stream.run(self), set()))

    def synchronize(self) -> None:
        note("synchronize")
        if not self.done:
            waits.append((threading.current_thread().name, "an event"))
        self.stream.run(self)


class LateStream:
    """A queue of work, which somebody must ask for."""

    def __init__(self) -> None:
        self.queue: deque[tuple[Callable[[], object], set[int]]] = deque()
        """Work, and the keys of the memory that it uses."""

    def record_event(self) -> LateEvent:
        note("record_event")
        event = LateEvent(self)
        with _lock:
            self.queue.append((lambda: setattr(event, "done", True), set()))
        return event

    def run(self, until: LateEvent | None = None) -> None:
        """Do what is queued, up to the event ``until``."""
        with _lock:
            while self.queue and not (until is not None and until.done):
                self.queue.popleft()[0]()

    def uses(self, key: int) -> bool:
        return any(key in keys for _, keys in self.queue)


DEFAULT = LateStream()
STREAMS: list[LateStream] = [DEFAULT]


def current() -> LateStream:
    stream: LateStream = getattr(_here, "stream", DEFAULT)
    return stream


def switch(stream: LateStream) -> None:
    """Make it this thread's current stream."""
    _here.stream = stream


alive: weakref.WeakSet[Memory] = weakref.WeakSet()
"""All memory of the device that is in use."""


class Memory:
    """The memory of a tensor and its views."""

    def __init__(self, raw: Tensor) -> None:
        self.raw, self.home, self.key = raw, current(), next(_keys)
        self.recorded: set[int] = set()
        alive.add(self)

    def __del__(self) -> None:
        with _lock:
            pending = [s for s in STREAMS if s is not self.home and s.uses(self.key)]
            if any(id(s) not in self.recorded for s in pending):
                whole = torch.empty(0, dtype=torch.uint8).set_(self.raw.untyped_storage())
                self.home.queue.append((lambda: whole.fill_(POISON), {self.key}))


class Late(Tensor):
    """A tensor of the device "late", whose elements are those of ``raw``."""

    raw: Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, raw: Tensor, memory: Memory | None = None) -> Late:
        at: Any = {"strides": raw.stride(), "storage_offset": raw.storage_offset()}
        at |= {"device": "late:0", "dtype": raw.dtype}
        made = Tensor._make_wrapper_subclass(cls, raw.shape, **at)
        made.raw, made.memory = raw, memory or Memory(raw)
        return made

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def record_stream(self, stream: Any) -> None:
        self.memory.recorded.add(id(stream))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Late({self.raw})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _dispatch(func, args, dict(kwargs or {}))


_pinned: set[int] = set()
"""Where pinned memory is."""


waits: list[tuple[str, str]] = []
"""Each time that a thread has waited for the current stream: its name, and for what. A copy from
the host waits for it, too, unless its memory is pinned, and it is not blocking."""


def is_pinned(x: Tensor) -> bool:
    return x.untyped_storage().data_ptr() in _pinned


def _raw(x: Any) -> Any:
    return x.raw if isinstance(x, Late) else x


def _is_late(device: Any) -> bool:
    return device is not None and torch.device(device).type == "late"


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name, schema = func.overloadpacket.__name__, func._schema
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    copies = name in ("copy_", "_to_copy", "_foreach_copy_")
    host = [t for t in tensors if not isinstance(t, Late)]
    if any(t.dim() for t in host) and not copies:
        raise RuntimeError(f"{name}: some tensors are on the CPU, and some on late:0")
    # a number is read when the work is queued; memory, when it is done
    read = _raw if copies else lambda x: x.clone() if _is_number_on_host(x) else _raw(x)
    raw_args, raw_kwargs = tree_map(read, args), tree_map(read, kwargs)
    keys = {t.memory.key for t in tensors if isinstance(t, Late)}
    to = raw_kwargs.get("device")
    if _is_late(to):
        raw_kwargs["device"] = torch.device("cpu")

    def run() -> Any:
        with torch.no_grad():
            return func(*raw_args, **raw_kwargs)

    if _inverting and name in ("div", "div_") and _is_number(args[1]):
        func = getattr(torch.ops.aten, name.replace("div", "mul")).Tensor
        kind = args[0].dtype if args[0].dtype == torch.float64 else torch.float32
        inverse = torch.ones((), dtype=kind) / torch.as_tensor(_raw(args[1]), dtype=kind)
        raw_args = (raw_args[0], inverse, *raw_args[2:])
        if "out" in raw_kwargs:
            func = torch.ops.aten.mul.out
    stream = current()
    if not _is_view(schema) and not name.startswith(("empty", "new_empty")):
        note(name)
    if schema.is_mutable and not _random(func):
        beside = copies and all(is_pinned(t) for t in host) and _non_blocking(args, kwargs)
        if not host or beside:
            with _lock:
                stream.queue.append((run, keys))
        else:
            if any(t.dim() for t in host):  # a number is an argument of the kernel
                waits.append((threading.current_thread().name, name))
            stream.run()
            run()
        changed = kwargs.get("out", args[0])
        return None if name.startswith("_foreach_") else changed
    if not _is_view(schema) and not name.startswith(("empty", "new_empty")):
        made = None if _random(func) or to is not None else _room(func, raw_args, raw_kwargs)
        if made is not None:
            return _queued(run, made, keys, stream)
        stream.run()
    found = run()
    if name.startswith(("empty", "new_empty")):
        _poison(found)
    if name == "_local_scalar_dense" or (to is not None and not _is_late(to)):
        waits.append((threading.current_thread().name, name))
    if to is not None and not _is_late(to):
        return found
    bases = {t.raw.untyped_storage()._cdata: t.memory for t in tensors if isinstance(t, Late)}

    def wrap(x: Any) -> Any:
        return Late(x, bases.get(x.untyped_storage()._cdata)) if isinstance(x, Tensor) else x

    if name == "_local_scalar_dense":
        return found
    return tree_map(wrap, found)


def _room(func: Any, args: Any, kwargs: Any) -> Any:
    """Memory for what an operation returns; None if it returns more than tensors, or nobody knows
    their shapes before its end."""

    def shape(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    try:
        found = func(*tree_map(shape, args), **tree_map(shape, kwargs))
    except (NotImplementedError, RuntimeError):
        return None
    if not all(isinstance(t, Tensor) for t in tree_leaves(found)):
        return None
    return tree_map(lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype), found)


def _queued(run: Callable[[], Any], made: Any, keys: set[int], stream: LateStream) -> Any:
    """What an operation will return, once its stream does it, in the memory ``made``."""

    def work() -> None:
        for memory, t in zip(tree_leaves(made), tree_leaves(run()), strict=True):
            if memory.shape == t.shape:  # CPUs leave out statistics that evaluation does not need
                memory.copy_(t)

    for memory in tree_leaves(made):
        _poison(memory)
    results = tree_map(Late, made)
    with _lock:
        stream.queue.append((work, keys | {each.memory.key for each in tree_leaves(results)}))
    return results


def _poison(raw: Tensor) -> None:
    if raw.numel():
        torch.empty(0, dtype=torch.uint8).set_(raw.untyped_storage()).fill_(POISON)


calls: list[tuple[str, str]] = []
"""Each call of the device, as an accelerator's library counts them: the thread's name, and what."""


def note(what: str) -> None:
    calls.append((threading.current_thread().name, what))


_inverting: list[bool] = []


def _is_number_on_host(x: Any) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, Late) and not x.dim()


def _is_number(x: Any) -> bool:
    return not isinstance(x, Tensor) or _is_number_on_host(x)


def _random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _non_blocking(args: Any, kwargs: dict[str, Any]) -> bool:
    given = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    return bool(given)


def _is_view(schema: Any) -> bool:
    aliases = [r.alias_info for r in schema.returns]
    return any(a is not None and not a.is_write for a in aliases)


class Kernel:
    """Stands in for one of Triton's for GPUs: queues ``work``, which computes on the CPU."""

    def __init__(self, work: Callable[..., object]) -> None:
        self.work = work

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._launch

    def _launch(self, *given: Any) -> None:
        note("kernel")
        keys = {t.memory.key for t in given if isinstance(t, Late)}
        with _lock:
            current().queue.append((lambda: self.work(*map(_raw, given)), keys))


class LateTime:
    """A moment."""

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, later: LateTime) -> float:
        return 1000 * (later.seconds - self.seconds)


class LateAccelerator(Accelerator):
    """The device "late", for `laconic.device.ACCELERATORS`."""

    backend = "none"

    def count(self) -> int:
        return 1

    def can_communicate(self) -> bool:
        return False

    def select(self, index: int) -> None:
        assert index == 0

    def current(self) -> int:
        return 0

    def model_name(self, index: int) -> str:
        return "late"

    def current_stream(self, device: torch.device) -> LateStream:
        return current()

    def new_stream(self, device: torch.device) -> LateStream:
        STREAMS.append(LateStream())
        return STREAMS[-1]

    @contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        before = current()
        _here.stream = stream
        try:
            yield
        finally:
            _here.stream = before

    def pinned(self, nbytes: int) -> Tensor:
        made = torch.full((nbytes,), POISON, dtype=torch.uint8)
        _pinned.add(made.untyped_storage().data_ptr())
        _kept.append(made)  # or another tensor might be in its place
        return made

    def captures(self, device: torch.device) -> bool:
        return False

    def synchronize(self, device: torch.device) -> None:
        for stream in list(STREAMS):
            stream.run()

    def timing_event(self, device: torch.device) -> Any:
        self.synchronize(device)
        return LateTime()

    def in_use(self) -> bool:
        return False

    def random_state(self) -> Tensor:
        return torch.zeros(0, dtype=torch.uint8)

    def set_random_state(self, state: Tensor) -> None:
        assert not state.numel()


_kept: list[Tensor] = []
_library: list[torch.library.Library] = []


@contextmanager
def device(*, settles: bool = False, inverts: bool = False) -> Iterator[torch.device]:
    """The device, which laconic knows meanwhile as an accelerator. Unless it ``settles``, the
    communication thread does not wait at the end of a job: whoever uses a result can be faster.
    ``inverts``: it divides by a number as CUDA does, by a product with the rounded inverse."""
    found = set_up()
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(ACCELERATORS, "late", LateAccelerator())
        patched.setattr(torch, "Generator", _generator)
        if not settles:
            patched.setattr(CommThread, "_settle", lambda *_: None)
        _inverting[:] = [True] if inverts else []
        yield found
        _inverting.clear()
    for stream in STREAMS:
        stream.run()


class Module(_DummyBackendModule):
    """``torch.late``."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


_Generator = torch.Generator


def _generator(device: Any = "cpu") -> torch.Generator:
    return _Generator("cpu" if _is_late(device) else device)


def prepare(_: int) -> None:
    """Before the process first uses autograd, which then knows the devices that there are."""
    set_up()


def set_up() -> torch.device:
    """Make the device exist in this process, once, and return it."""
    if not _library:
        _setup_privateuseone_for_python_backend("late", Module())
        library = torch.library.Library("aten", "IMPL")
        for name in ("empty.memory_format", "empty_strided"):
            library.impl(name, _factory(name), "PrivateUse1")
        library.impl("_to_copy", _to_copy, "PrivateUse1")
        _library.append(library)
    return torch.device("late", 0)


def _factory(name: str) -> Callable[..., Late]:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def make(*args: Any, **kwargs: Any) -> Late:
        raw = op(*args, **{**kwargs, "device": "cpu"})
        _poison(raw)
        return Late(raw)

    return make


def _to_copy(x: Tensor, **kwargs: Any) -> Tensor:
    to = kwargs.get("device")
    made = torch.ops.aten._to_copy.default(x, **{**kwargs, "device": "cpu"})
    return Late(made) if _is_late(to) else made
