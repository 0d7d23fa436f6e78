"""The channels of a parameter round: which tensors it is about, and their initial state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from torch import Tensor

from laconic.algorithms.round import Round
from laconic.algorithms.update import Slot, State
from laconic.buckets import Segment
from laconic.engine.channel import Channel, is_owned, open_channels
from laconic.engine.offload import HostState
from laconic.engine.session import Session
from laconic.errors import check_choice
from laconic.links.link import Link
from laconic.parts import Fragment, parameters
from laconic.tensors import state_dtype

Tensors = Sequence[Sequence[Tensor | Segment]]
"""By parameter group."""


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
        self.joined: list[list[Tensor]] = []
        """The parameters that were taken in together: those share buckets."""

    @property
    def stateful(self) -> bool:
        """Whether the update keeps state for the present tensors."""
        return any(channel.state for channel in self.all)

    @property
    def vary(self) -> bool:
        """Whether the tensors may come and go: they are not parameters, and no state belongs to
        them."""
        fixed = self._round.part is parameters or isinstance(self._round.part, Fragment)
        return not fixed and not self.stateful and not any(c.exchange_state for c in self.all)

    def add(self, params: Sequence[Tensor]) -> None:
        """Open channels for ``params``, which join x with the same values on all workers: x0."""
        self._add(self._selected({id(p) for p in params}))
        self.joined.append(list(params))

    @property
    def positions(self) -> list[list[int]]:
        """`joined`, as positions in the optimizer's order."""
        position = {id(p): k for k, p in enumerate(self._held())}
        return [[position[id(p)] for p in batch] for batch in self.joined]

    def add_at(self, positions: Sequence[Sequence[int]]) -> None:
        """Open channels as if parameters had joined at these `positions`."""
        held = self._held()
        for batch in positions:
            self.add([held[k] for k in batch])

    def _held(self) -> list[Tensor]:
        return [p for group in self._session.held() for p in group]

    def replace(self, tensors: Tensors) -> None:
        """Open channels for ``tensors``, which vary, in place of those before."""
        self.all = []
        self._add(tensors)
        if not self.vary:
            raise ValueError(
                f"{self._round.name}: its update or exchange keeps state, which begins with what "
                "all workers start with, and its part= had nothing then: use ones without state"
            )

    def cut(self, tensors: Tensors, number: int = 0) -> list[Channel]:
        """See `open_channels`."""
        at = self._round.update, self._round.exchange, self._link, self._replica
        return open_channels(tensors, *at, number, elastic=self._session.elastic is not None)

    def varying(self) -> Sequence[dict[str, Tensor]]:
        """The present tensors, by group and name, of a round whose tensors vary."""
        assert not isinstance(self._round.part, Fragment), "parameters do not vary"
        return self._round.part(self._session.model, self._session.bound)

    def copies(self) -> list[dict[str, Tensor]]:
        """Copies of the present tensors, of a round whose tensors vary."""
        return [{k: t.detach().clone() for k, t in group.items()} for group in self.varying()]

    def copied(self, copies: Sequence[dict[str, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """The present tensors of which there are ``copies`` of the same shape, each with its
        copy."""
        if not copies:
            return []
        pairs = [
            (group[name].detach(), copy)
            for group, named in zip(self.varying(), copies, strict=False)  # some groups are new
            for name, copy in named.items()
            if name in group
        ]
        return [(t, copy) for t, copy in pairs if (t.shape, t.dtype) == (copy.shape, copy.dtype)]

    def _selected(self, joining: set[int]) -> Tensors:
        """The round's tensors among the parameters whose ids are ``joining``. The first time, also
        those that are no parameters of the optimizer."""
        part, session = self._round.part, self._session
        if isinstance(part, Fragment):
            groups = [[p for p in g if id(p) in joining] for g in session.held()]
            return part.segments(session.model, groups)
        others = set() if self.joined else {id(p) for p in self._held()}
        return [
            [t for t in group.values() if id(t) in joining or (others and id(t) not in others)]
            for group in part(session.model, session.bound)
        ]

    def _add(self, tensors: Tensors) -> None:
        new = self.cut(tensors, len(self.all))
        self.all += new
        for channel in new:
            state = self._initial_state(channel)
            used = self._round.update.in_every_step
            channel.state = state if used else self._kept(channel, state)
        for channel in new:
            state = self._initial_exchange_state(channel)
            channel.exchange_state = self._kept(channel, state)

    def _kept(self, channel: Channel, state: State) -> State:
        """``state``, in host memory if it belongs there."""
        device = channel.bucket.device
        offload = self._session.settings.offload and self._session.device.type != "cpu"
        return HostState(state, device) if offload else state

    def _initial_state(self, channel: Channel) -> State:
        """The update's state on its part of x0. Each state tensor gets a copy of its own."""
        update, bucket = self._round.update, channel.bucket
        x = bucket.pack(self._session.memory(bucket))
        dtype = state_dtype(bucket.dtype)
        owned = update.init(x[channel.region].to(dtype, copy=True))
        if missing := sorted(owned.keys() - update.slots.keys()):
            raise ValueError(
                f"{type(update).__name__}.init makes state {missing} that its slots do not list: "
                'say where each lives, "owner", "everywhere", "private" or "pooled"'
            )
        for name, slot in update.slots.items():
            check_choice(f"{type(update).__name__}.slots[{name!r}]", slot, get_args(Slot))
        if all(t.dim() == 0 or is_owned(update, name, t) for name, t in owned.items()):
            return owned
        whole = update.init(x.to(dtype, copy=True))
        return {name: owned[name] if is_owned(update, name, t) else t for name, t in whole.items()}

    def _initial_exchange_state(self, channel: Channel) -> State:
        """The exchange's state on the part of x0 that this rank carries."""
        if not channel.exchange.slots:
            return {}
        bucket = channel.bucket
        x = bucket.pack(self._session.memory(bucket))[channel.part]
        return channel.exchange.init(x.to(state_dtype(bucket.dtype), copy=True), channel.owned)
