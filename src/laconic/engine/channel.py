"""A channel: one bucket, the exchange for it, and the state that both keep, which may be in host
memory. The channels of a parameter round: which tensors it is about.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import get_args

import torch
from torch import Tensor

from laconic.algorithms.exchange import Exchange
from laconic.algorithms.round import Round
from laconic.algorithms.update import Slot, State, Update
from laconic.buckets import Bucket, Segment, bucketize
from laconic.device import Accelerator, Event, accelerator
from laconic.engine.session import Session
from laconic.errors import check_choice
from laconic.links.link import Link
from laconic.parts import Fragment, parameters
from laconic.tensors import state_dtype


@dataclass
class Channel:
    """``bucket`` over ``exchange``, which is the round's for the shapes in the bucket.

    ``part``: the slice of the bucket that this rank carries for its worker: the ranks of one worker
    share its messages. ``region``: the slice within it whose ``owner`` state is kept here.
    ``state``: the update's; ``exchange_state``: the exchange's, for the ``part``. They may be in
    host memory (`HostState`), and are computed with inside `states`.
    """

    bucket: Bucket
    exchange: Exchange
    part: slice
    region: slice
    state: State = field(default_factory=dict)
    exchange_state: State = field(default_factory=dict)

    @property
    def owned(self) -> slice:
        """`region` within `part`, as exchanges count."""
        start = self.part.start
        return slice(self.region.start - start, self.region.stop - start)

    @contextmanager
    def states(self) -> Iterator[tuple[State, State]]:
        """Both states on the bucket's device, where they may be changed."""
        first, second = (
            s.on_device() if isinstance(s, HostState) else nullcontext(s)
            for s in (self.state, self.exchange_state)
        )
        with first as state, second as exchange_state:
            yield state, exchange_state


def by_tensor(channel: Channel, update: Update) -> Iterator[tuple[Tensor, State]]:
    """Each tensor of the bucket, to be changed in place, with its part of the state that lives on
    all workers."""
    bucket = channel.bucket
    views = bucket.views()
    pieces = {
        name: bucket.split(t)
        for name, t in channel.state.items()
        if t.dim() and not is_owned(update, name, t)
    }
    rest = {name: t for name, t in channel.state.items() if name not in pieces}
    for index, x in enumerate(views):
        yield x, rest | {name: split[index] for name, split in pieces.items()}


def is_owned(update: Update, name: str, tensor: Tensor) -> bool:
    """Whether this rank keeps the state tensor ``name`` of ``update`` only for its
    `Channel.region`, rather than for the whole bucket."""
    return tensor.dim() > 0 and update.slots.get(name, "owner") == "owner"


Tensors = Sequence[Sequence[Tensor | Segment]]
"""By parameter group."""
ByGroup = Sequence[Mapping[str, Tensor]]
"""Tensors by name, by group."""


class ChannelSet:
    """The channels of ``round``.

    The tensors that a round is about are fixed, or, where nothing keeps state for them (module
    buffers, optimizer state), selected again at each round: then they `vary`.
    """

    def __init__(self, round: Round, link: Link, replica: Link, session: Session) -> None:
        self._round = round
        self._link = link
        self._replica = replica
        self._session = session
        self.all: list[Channel] = []
        self._begun = False
        """Whether parameters were added before."""

    @property
    def vary(self) -> bool:
        """Whether the tensors may come and go: they are not parameters, and no state belongs to
        them."""
        fixed = self._round.part is parameters or isinstance(self._round.part, Fragment)
        return not fixed and not any(c.state or c.exchange_state for c in self.all)

    def add(self, params: Sequence[Tensor]) -> None:
        """Open channels for ``params``, which join x with the same values on all workers: x0."""
        self._add(self._selected({id(p) for p in params}))
        self._begun = True

    def replace(self, tensors: Tensors) -> None:
        """Open channels for ``tensors``, which vary, in place of those before."""
        self.all = []
        self._add(tensors)
        if not self.vary:
            raise ValueError(
                f"{self._round.name}: its update or exchange keeps state, which begins with what "
                "all workers start with, and its part= had nothing then: use ones without state"
            )

    def cut(self, tensors: Tensors) -> list[Channel]:
        """Cut ``tensors`` into buckets, and give each a channel without state. In an elastic run
        nothing may depend on the number of workers."""
        update, exchange, replica = self._round.update, self._round.exchange, self._replica
        workers = 1 if self._session.elastic is not None else self._link.size
        multiple = exchange.multiple(workers) * replica.size
        # buckets span groups, since a few biases by themselves would need as many messages as the
        # rest
        spans = tensors if update.uses_lr else [[t for group in tensors for t in group]]
        found = []
        for bucket in bucketize(spans, multiple, whole=update.scope == "tensors"):
            each = bucket.length // replica.size
            part = slice(replica.rank * each, (replica.rank + 1) * each)
            within = exchange.region(self._link, each)
            region = slice(part.start + within.start, part.start + within.stop)
            found.append(Channel(bucket, exchange, part, region))
        return found

    def varying(self) -> ByGroup:
        """The present tensors of a round whose tensors vary."""
        assert not isinstance(self._round.part, Fragment), "parameters do not vary"
        return self._round.part(self._session.model, self._session.bound)

    def copies(self) -> ByGroup:
        """Copies of the present tensors, of a round whose tensors vary."""
        return [{k: t.detach().clone() for k, t in g.items()} for g in self.varying()]

    def copied(self, copies: ByGroup) -> list[tuple[Tensor, Tensor]]:
        """The present tensors of which there are ``copies`` of the same shape, each with its
        copy."""
        pairs = [
            (now[name].detach(), copy)
            for now, named in zip(self.varying() if copies else (), copies, strict=False)
            for name, copy in named.items()
            if name in now
        ]
        return [(t, copy) for t, copy in pairs if (t.shape, t.dtype) == (copy.shape, copy.dtype)]

    def _selected(self, joining: set[int]) -> Tensors:
        """The round's tensors among the parameters whose ids are ``joining``. The first time, also
        those that are no parameters of the optimizer."""
        part, session = self._round.part, self._session
        if isinstance(part, Fragment):
            groups = [[p for p in g if id(p) in joining] for g in session.held()]
            return part.segments(session.model, groups)
        others = set() if self._begun else {id(p) for group in session.held() for p in group}
        return [
            [t for t in group.values() if id(t) in joining or (others and id(t) not in others)]
            for group in part(session.model, session.bound)
        ]

    def _add(self, tensors: Tensors) -> None:
        new = self.cut(tensors)
        self.all += new
        for channel in new:
            self._make_states(channel)

    def _kept(self, channel: Channel, state: State) -> State:
        """``state``, in host memory if it belongs there."""
        device = channel.bucket.device
        offload = self._session.settings.offload and self._session.device.type != "cpu"
        return HostState(state, device) if offload else state

    def _make_states(self, channel: Channel) -> None:
        """Make the states of the update and the exchange from x0. Each tensor of the update's gets
        a copy of its own."""
        update, exchange, bucket = self._round.update, channel.exchange, channel.bucket
        x, dtype = bucket.pack(self._session.memory(bucket)), state_dtype(bucket.dtype)
        state = update.init(x.to(dtype, copy=True))
        if missing := sorted(state.keys() - update.slots.keys()):
            raise ValueError(
                f"{type(update).__name__}.init makes state {missing} that its slots do not list: "
                'say where each lives, "owner", "everywhere" or "private"'
            )
        for name, slot in update.slots.items():
            check_choice(f"{type(update).__name__}.slots[{name!r}]", slot, get_args(Slot))
        own = channel.region
        for name, t in state.items():
            if is_owned(update, name, t):
                if t.shape != x.shape:
                    raise ValueError(
                        f'{type(update).__name__}.init makes "owner" state {name!r} with the shape '
                        f"{list(t.shape)}: it needs an element for each of x, {list(x.shape)}, or "
                        "no dimensions"
                    )
                state[name] = t[own].clone()
        channel.state = state if update.in_every_step else self._kept(channel, state)
        if exchange.slots:
            carried = exchange.init(x[channel.part].to(dtype, copy=True), channel.owned)
            channel.exchange_state = self._kept(channel, carried)


class HostState(UserDict[str, Tensor]):
    """A state whose tensors are in pinned host memory. `on_device` gives it to computations on
    ``device``. Numbers (tensors without dimensions) are as they were made."""

    def __init__(self, state: State, device: torch.device) -> None:
        kind = accelerator(device)
        assert kind is not None, "the CPU's state is in host memory"
        self._kind: Accelerator = kind
        self._device = device
        self._copied: dict[str, Event] = {}
        """By name, the point after the last copies from and to its memory."""
        super().__init__(state)

    def __getitem__(self, name: str) -> Tensor:
        """The tensor in host memory, once no copy from or to it is under way."""
        copied = self._copied.pop(name, None)
        if copied is not None:
            copied.synchronize()
        return self.data[name]

    def __setitem__(self, name: str, value: Tensor) -> None:
        """Keep ``value``. A copy from the device is queued there."""
        if not value.dim():
            self.data[name] = value
            return
        queued = value.device.type != "cpu"
        memory = self.data.get(name) if queued else self.get(name)
        if memory is None or (memory.shape, memory.dtype) != (value.shape, value.dtype):
            memory = self._kind.pinned(value.nbytes).view(value.dtype).view(value.shape)
        stream = self._kind.current_stream(self._device)
        if queued and name in self._copied:  # perhaps on another stream
            self._copied[name].wait(stream)
        self.data[name] = memory.copy_(value, non_blocking=queued)
        if queued:
            self._copied[name] = stream.record_event()

    def __delitem__(self, name: str) -> None:
        self[name]  # nothing may be copied to memory that is freed
        del self.data[name]

    @contextmanager
    def on_device(self) -> Iterator[State]:
        """The same state on the device. What is used of it is copied there on the current stream
        first, and back at the end."""
        copies = _OnDevice(self)
        yield copies
        for name in self.data.keys() - copies.keys():
            del self[name]
        for name, copy in copies.data.items():
            if name in copies.used:  # kernels may have changed it
                self[name] = copy

    def to_device(self, name: str) -> Tensor:
        """Queue a copy of a tensor to the device."""
        host = self.data[name]
        if not host.dim():
            return host
        copied = self._copied.get(name)  # perhaps on another stream, or another thread takes it
        if copied is not None:
            copied.wait(self._kind.current_stream(self._device))
        return torch.empty_like(host, device=self._device).copy_(host, non_blocking=True)


class _OnDevice(UserDict[str, Tensor]):
    """A `HostState` on its device. A tensor is copied when it is first used."""

    def __init__(self, host: HostState) -> None:
        self._host = host
        self.used: set[str] = set()
        self.data = dict(host.data)

    def __getitem__(self, name: str) -> Tensor:
        if name in self.data and name not in self.used:
            self[name] = self._host.to_device(name)
        return self.data[name]

    def __setitem__(self, name: str, value: Tensor) -> None:
        self.data[name] = value
        self.used.add(name)
