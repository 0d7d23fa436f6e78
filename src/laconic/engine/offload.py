"""Outer state in host memory, on the accelerator only while it is computed with."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

import torch
from torch import Tensor

from laconic.algorithms.update import State
from laconic.device import Accelerator, Event, accelerator


class HostState(MutableMapping[str, Tensor]):
    """A state whose tensors are in pinned host memory. `on_device` gives it to computations on
    ``device``. Numbers (tensors without dimensions) are as they were made."""

    def __init__(self, state: State, device: torch.device) -> None:
        kind = accelerator(device)
        assert kind is not None, "the CPU's state is in host memory"
        self._kind: Accelerator = kind
        self._device = device
        self._tensors: dict[str, Tensor] = {}
        self._copied: dict[str, Event] = {}
        """By name, the point after the last copies from and to its memory."""
        self.update(state)

    def __getitem__(self, name: str) -> Tensor:
        """The tensor in host memory, once no copy from or to it is under way."""
        copied = self._copied.pop(name, None)
        if copied is not None:
            copied.synchronize()
        return self._tensors[name]

    def __setitem__(self, name: str, value: Tensor) -> None:
        now = self.get(name)
        if value.dim():
            if now is None or (now.shape, now.dtype) != (value.shape, value.dtype):
                now = self._pinned(value)
            value = now.copy_(value)
        self._tensors[name] = value

    def __delitem__(self, name: str) -> None:
        self[name]  # nothing may be copied to memory that is freed
        del self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def _pinned(self, like: Tensor) -> Tensor:
        return self._kind.pinned(like.nbytes).view(like.dtype).view(like.shape)

    @contextmanager
    def on_device(self) -> Iterator[State]:
        """The same state on the device. What is used of it is copied there on the current stream
        first, and back at the end."""
        copies = _OnDevice(self)
        yield copies
        copies.copy_back()

    def to_device(self, name: str) -> Tensor:
        """Queue a copy of a tensor to the device."""
        host = self._tensors[name]
        if not host.dim():
            return host
        if name in self._copied:  # perhaps on another stream
            self._copied[name].wait(self._kind.current_stream(self._device))
        return torch.empty_like(host, device=self._device).copy_(host, non_blocking=True)

    def from_device(self, name: str, value: Tensor) -> None:
        """Queue a copy of a tensor from the device."""
        now = self._tensors.get(name)
        if not value.dim():
            self[name] = value
            return
        if now is None or (now.shape, now.dtype) != (value.shape, value.dtype):
            now = self._tensors[name] = self._pinned(value)
        now.copy_(value, non_blocking=True)
        self._copied[name] = self._kind.current_stream(self._device).record_event()


class _OnDevice(MutableMapping[str, Tensor]):
    """A `HostState` on its device. A tensor is copied when it is first used."""

    def __init__(self, host: HostState) -> None:
        self._host = host
        self._used: dict[str, Tensor] = {}
        self._names = dict.fromkeys(host)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._used:
            if name not in self._names:
                raise KeyError(name)
            self._used[name] = self._host.to_device(name)
        return self._used[name]

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._used[name] = value
        self._names[name] = None

    def __delitem__(self, name: str) -> None:
        del self._names[name]
        self._used.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._names))

    def __len__(self) -> int:
        return len(self._names)

    def copy_back(self) -> None:
        """Queue copies to host memory of all that was used, since kernels may have changed it."""
        for name in [name for name in self._host if name not in self._names]:
            del self._host[name]
        for name, value in self._used.items():
            self._host.from_device(name, value)
