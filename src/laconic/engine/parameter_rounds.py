"""Parameter rounds at work: their channels, and their messages in flight."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.algorithms.exchange import Arrival, Exchange, Gossip, Rebase, Scored
from laconic.algorithms.round import Round
from laconic.algorithms.scores import Scores, of_worker
from laconic.algorithms.update import (
    AfterSend,
    AfterStep,
    BeforeStep,
    Clock,
    Quiesce,
    State,
)
from laconic.buckets import Bucket, Fragment, Scratch, Segment, parameters, state_dtype
from laconic.engine.channel import Channel, is_owned, open_channels
from laconic.engine.nonfinite import NonfiniteCheck
from laconic.errors import NotFiniteError
from laconic.links.comm_thread import CommThread, Pending
from laconic.links.link import Link, held_by_all
from laconic.links.simulated import single_link


class InFlightBucket(NamedTuple):
    """One bucket's message in flight. ``sent``: y, where the update needs it."""

    channel: Channel
    sent: Tensor | None
    pending: Pending[Arrival]
    message: Tensor | None = None
    """Kept until it has arrived: the GPU may still be sending it."""


@dataclass
class InFlightRound:
    """One delayed round in flight, to be folded after step ``due``. ``copies``: what was sent of
    tensors that come and go, by group and name. ``checked``: raises if a message was not finite."""

    due: int
    sent: Pending[list[InFlightBucket]]
    copies: Sequence[dict[str, Tensor]] = ()
    checked: Pending[None] = field(default_factory=lambda: Pending.of(None))

    @property
    def buckets(self) -> list[InFlightBucket]:
        """Wait until it is known which buckets there are, and return them."""
        self.checked.wait()
        return self.sent.wait()


@dataclass
class RoundContext:
    """What all rounds of one recipe run share. ``scratch``: memory for the message being sent;
    ``beside``: for x next to it."""

    model: nn.Module
    optimizer: Optimizer
    comm: CommThread
    scratch: Scratch
    beside: Scratch
    replica: Link
    nonfinite: NonfiniteCheck
    scores: Scores | None
    seed: int


class ParameterRunner:
    """Runs ``round`` over ``link``.

    The tensors that a round is about are fixed, or, where nothing keeps state for them (module
    buffers, optimizer state), selected anew at each round: then they `vary`.
    """

    def __init__(self, round: Round, link: Link, context: RoundContext) -> None:
        self.round = round
        self.link = link
        # A set that crosses workers consists of the same rank of each: the ranks of a worker share
        # what the worker sends. In any other set each rank sends its own.
        crosses = round.over in ("workers", "group")
        self._replica = context.replica if crosses else single_link()
        self.channels: list[Channel] = []
        self.executed = 0
        self.in_flight: list[InFlightRound] = []
        self.joined: list[int] = []
        """How many parameter groups were added each time: those share buckets."""
        self._context = context

    @property
    def exchange(self) -> Exchange:
        """With whom messages are exchanged."""
        return self.round.exchange

    @property
    def communicates(self) -> bool:
        """Whether its messages leave this rank."""
        across = self.link.size > 1 and self.round.exchange.communicates
        empty = isinstance(self.round.part, Fragment) and not self.channels
        return not empty and (across or self._replica.size > 1)

    @property
    def stateful(self) -> bool:
        """Whether the update keeps state for the present tensors."""
        return any(channel.state for channel in self.channels)

    @property
    def varies(self) -> bool:
        """Whether its tensors may come and go: they are not parameters, and no state belongs to
        them."""
        fixed = self.round.part is parameters or isinstance(self.round.part, Fragment)
        return not fixed and not self.stateful and not any(c.exchange_state for c in self.channels)

    def label(self, step: int) -> str:
        """What messages to the user call it."""
        return f"{self.round.name} after step {step}"

    # -- channels ----

    def add_groups(self) -> None:
        """Open channels for the parameter groups added since the last call. x is x0 then."""
        self._add(self._selected()[sum(self.joined) :])

    def like(self, joined: Sequence[int]) -> ParameterRunner:
        """A new runner, as if parameter groups had been added in these numbers."""
        fresh = ParameterRunner(self.round, self.link, self._context)
        groups = self._selected()
        if sum(joined) != len(groups):
            raise ValueError(f"the state was saved for {sum(joined)} groups, not {len(groups)}")
        for count in joined:
            start = sum(fresh.joined)
            fresh._add(groups[start : start + count])
        return fresh

    def elsewhere(self, link: Link, replica: Link) -> ParameterRunner:
        """A new runner, as if on the rank of another run: over ``link``, in a worker of the ranks
        of ``replica``."""
        fresh = ParameterRunner(self.round, link, replace(self._context, replica=replica))
        fresh.add_groups()
        return fresh

    def become(self, other: ParameterRunner) -> None:
        """Take over the channels of ``other``, made by `like`, and what it has in flight."""
        self.channels, self.in_flight = other.channels, other.in_flight
        self.executed, self.joined = other.executed, other.joined

    def _selected(self) -> Sequence[Sequence[Tensor | Segment]]:
        part, model, optimizer = self.round.part, self._context.model, self._context.optimizer
        if isinstance(part, Fragment):
            return part.segments(model, optimizer)
        return [list(group.values()) for group in part(model, optimizer)]

    def _add(self, groups: Sequence[Sequence[Tensor | Segment]]) -> None:
        new = self.cut(groups, sum(self.joined), len(self.channels))
        self.joined += [len(groups)] if groups else []
        self.channels += new
        for channel in new:
            channel.state = self._initial_state(channel)
        for channel in new:
            channel.exchange_state = self._initial_exchange_state(channel)

    def cut(
        self, groups: Sequence[Sequence[Tensor | Segment]], first_group: int = 0, number: int = 0
    ) -> list[Channel]:
        """See `open_channels`."""
        at = self.round.update, self.exchange, self.link, self._replica
        return open_channels(groups, *at, first_group, number)

    def _initial_state(self, channel: Channel) -> State:
        """The update's state on its part of x0. Each state tensor gets a copy of its own."""
        update, bucket = self.round.update, channel.bucket
        x = bucket.pack(self._room(bucket))
        dtype = state_dtype(bucket.dtype)
        owned = update.init(x[channel.region].to(dtype, copy=True))
        if missing := sorted(owned.keys() - update.slots.keys()):
            raise ValueError(
                f"{type(update).__name__}.init makes state {missing} that its slots do not list: "
                'say where each lives, "owner", "everywhere", "private" or "pooled"'
            )
        if all(t.dim() == 0 or is_owned(update, name, t) for name, t in owned.items()):
            return owned
        whole = update.init(x.to(dtype, copy=True))
        return {name: owned[name] if is_owned(update, name, t) else t for name, t in whole.items()}

    def _initial_exchange_state(self, channel: Channel) -> State:
        """The exchange's state on the part of x0 that this rank carries."""
        if not channel.exchange.slots:
            return {}
        bucket = channel.bucket
        x = bucket.pack(self._room(bucket))[channel.part]
        return channel.exchange.init(x.to(state_dtype(bucket.dtype), copy=True), channel.owned)

    def _room(self, bucket: Bucket) -> Tensor:
        return self._context.scratch.take(bucket.length, bucket.dtype, bucket.device)

    def _clock(self, bucket: Bucket, step: int, executed: int | None = None) -> Clock:
        group = self._context.optimizer.param_groups[bucket.group]
        lr = float(group.get("lr", math.nan)) if self.round.update.uses_lr else math.nan
        number = self.executed if executed is None else executed
        at = self.link.size, self.link.rank
        seed = self._context.seed
        clock = Clock(step, lr, number, self.round.delay, *at, seed=seed, bucket=bucket.number)
        exchange = self.exchange
        return (
            replace(clock, out_degree=exchange.out_degree(clock))
            if isinstance(exchange, Gossip)
            else clock
        )

    def _with_message(self, clock: Clock, state: State) -> Clock:
        """``clock`` with what travels with the message just made: its weight, and the score."""
        weight = self.round.update.weight
        if weight is not None:
            clock = replace(clock, weight=float(state[weight]))
        if isinstance(self.exchange, Scored) and self._context.scores is not None:
            score = self._context.scores.now(self.exchange.score_window)
            clock = replace(clock, score=score)
        return clock

    # -- one round ----

    def start(self, step: int) -> None:
        """Send this round's messages after ``step``. Without a delay, also fold the answers."""
        if self.varies and self.round.delay and self._can_select_later:
            self.in_flight.append(self._launch_varying(step))
        else:
            if self.varies:
                self._select_again()
            self._start_channels(step)
        self.executed += 1
        if self.round.optimizer_state == "reset":
            self._reset_optimizer()

    @property
    def _can_select_later(self) -> bool:
        """Whether nothing done here depends on which tensors all ranks have, so that the ranks can
        agree on them while training goes on."""
        update, exchange = self.round.update, self.exchange
        stateless = not exchange.slots and not update.slots
        special = update.uses_lr or isinstance(exchange, Scored) or isinstance(update, AfterSend)
        return stateless and not special

    def _start_channels(self, step: int) -> None:
        nonfinite, label = self._context.nonfinite, self.label(step)
        if self.round.delay:
            sent = [self._launch(channel, step) for channel in self.channels]
            checked = nonfinite.check(self.exchange, label)
            due = step + self.round.delay
            self.in_flight.append(InFlightRound(due, Pending.of(sent), checked=checked))
        else:
            for channel in self.channels:
                self._exchange_now(channel, step)
            nonfinite.check(self.exchange, label).wait()

    def _exchange_now(self, channel: Channel, step: int) -> None:
        update, bucket, state = self.round.update, channel.bucket, channel.state
        clock = self._clock(bucket, step)
        message = update.send(bucket.pack(self._room(bucket)), state, clock)
        clock = self._with_message(clock, state)
        job = partial(self._carry, channel, message, clock)
        received, weight, _ = self._context.comm.call(job, self.label(step))
        if not update.replaces:
            beside = self._context.beside
            x = bucket.pack(beside.take(bucket.length, bucket.dtype, bucket.device))
            received = update.fold(x, received, None, state, replace(clock, weight=weight))
        bucket.unpack(received)

    def _launch(self, channel: Channel, step: int) -> InFlightBucket:
        update, bucket, state = self.round.update, channel.bucket, channel.state
        clock = self._clock(bucket, step)
        message, sent = self._message(channel, clock)
        clock = self._with_message(clock, state)
        job = partial(self._carry, channel, message, clock)
        pending = self._context.comm.submit(job, self.label(step))
        if isinstance(update, AfterSend):
            x = bucket.pack(self._room(bucket))
            update.after_send(x, state, clock)
            bucket.unpack(x)
        return InFlightBucket(channel, sent, pending, message)

    def _message(self, channel: Channel, clock: Clock) -> tuple[Tensor, Tensor | None]:
        """A delayed round's message, and y, if `fold` will need it."""
        update = self.round.update
        y = channel.bucket.pack(channel.bucket.empty())
        message = update.send(y, channel.state, clock)
        if update.keeps_sent and message is y:
            message = y.clone()
        return message, y if update.keeps_sent else None

    def _carry(self, channel: Channel, message: Tensor, clock: Clock) -> Arrival:
        """Exchange the message with the other workers, with the outer step in between. The ranks of
        one worker hold the same message: each carries its part across, then they share."""
        update, state = self.round.update, channel.state

        def combine(mean: Tensor) -> Tensor:
            owned = {k: t for k, t in state.items() if not t.dim() or is_owned(update, k, t)}
            result = update.combine(mean.to(state_dtype(mean.dtype)), owned, clock)
            state.update(owned)  # an outer optimizer makes its state in its first step
            return result

        replica = self._replica
        part = message.view(replica.size, -1)[replica.rank]
        if isinstance(channel.exchange, Scored) and replica.size > 1:
            ranks = replica.gather(torch.tensor(clock.score, dtype=torch.float64))
            clock = replace(clock, score=of_worker(ranks))
        error: NotFiniteError | None = None
        try:
            result = channel.exchange.run(self.link, part, combine, clock, channel.exchange_state)
        except NotFiniteError as raised:
            error = raised
        if replica.size > 1 and channel.exchange.slots:  # the worker's other ranks must learn of it
            failed = replica.gather(torch.tensor([float(error is not None)]))
            if bool(failed.any()) and error is None:
                error = NotFiniteError("what other ranks of this worker carry is not finite")
        if error is not None:
            self._context.nonfinite.report(error)
            return Arrival(message)
        if replica.size > 1:
            replica.all_gather(result.flat, message)
            return result._replace(flat=message, lent=False)
        reads_only = update.replaces and not self.round.delay
        if result.lent and not reads_only:
            fits = message.dtype == result.flat.dtype
            own = message.copy_(result.flat) if fits else result.flat.clone()
            return result._replace(flat=own, lent=False)
        return result

    # -- tensors that come and go ----

    def _varying(self) -> Sequence[dict[str, Tensor]]:
        """The tensors of now that a varying round is about."""
        assert not isinstance(self.round.part, Fragment), "parameters do not vary"
        return self.round.part(self._context.model, self._context.optimizer)

    def copies(self) -> list[dict[str, Tensor]]:
        """Copies of the tensors of now."""
        return [{k: t.detach().clone() for k, t in group.items()} for group in self._varying()]

    def _select_again(self) -> None:
        """Open channels for the tensors of now that all ranks have."""
        job = partial(held_by_all, self.link, self._varying())
        common = self._context.comm.call(job, self.label(0))
        self.channels, self.joined = [], []
        self._add(common)
        if not self.varies:
            raise ValueError(
                f"{self.round.name}: its update or exchange keeps state, which begins with what "
                "all workers start with, and its part= had nothing then: use ones without state"
            )

    def _launch_varying(self, step: int) -> InFlightRound:
        """Send copies of the tensors of now. Behind the messages under way the ranks agree on the
        tensors that all of them have; nobody waits for that here."""
        executed, copies = self.executed, self.copies()

        def send() -> list[InFlightBucket]:
            found = []
            for channel in self.cut(held_by_all(self.link, copies)):
                clock = self._clock(channel.bucket, step, executed)
                message, sent = self._message(channel, clock)
                arrival = self._carry(channel, message, clock)
                found.append(InFlightBucket(channel, sent, Pending.of(arrival), message))
            return found

        pending = self._context.comm.submit(send, self.label(step))
        return InFlightRound(step + self.round.delay, pending, copies)

    def _copied(self, flight: InFlightRound) -> list[tuple[Tensor, Tensor]]:
        """The present tensors of which ``flight`` has copies of the same shape."""
        if not flight.copies:
            return []
        held = [
            (group[name].detach(), copy)
            for group, copies in zip(self._varying(), flight.copies, strict=False)  # some are new
            for name, copy in copies.items()
            if name in group
        ]
        return [(t, copy) for t, copy in held if (t.shape, t.dtype) == (copy.shape, copy.dtype)]

    # -- folding ----

    def fold_due(self, step: int, *, early: bool = False) -> None:
        """Fold what is due after ``step``; ``early``: everything in flight."""
        while self.in_flight and (early or self.in_flight[0].due <= step):
            self._fold(self.in_flight.pop(0), step)

    def _fold(
        self,
        flight: InFlightRound,
        step: int,
        copies: Mapping[int, State] | None = None,
        *,
        write: bool = True,
    ) -> None:
        """Fold what ``flight`` brings. With ``copies`` of the channels' states, by the channel's
        id, those change in place of the states, and the flight can be folded again. Without
        ``write`` x stays."""
        buckets, copied = flight.buckets, self._copied(flight) if write else []
        for tensor, copy in copied:
            copy.copy_(tensor)
        for channel, sent, pending, _ in buckets:
            received, weight, _ = pending.wait()
            bucket, state = channel.bucket, channel.state
            if copies is not None:
                received, state = received.clone(), copies[id(channel)]
            clock = replace(self._clock(bucket, step), weight=weight)
            x = bucket.pack(self._room(bucket))
            x = self.round.update.fold(x, received, sent, state, clock)
            if write:
                bucket.unpack(x)
        for tensor, copy in copied:
            tensor.copy_(copy)

    def quiesce(self, step: int, averaged: bool) -> None:
        """Fold everything in flight, and have the update quiesce: an outer step of another round
        follows."""
        self.fold_due(step, early=True)
        self._quiesce([channel.state for channel in self.channels], averaged)

    def finish(self, step: int) -> None:
        """Quiesce where the mean of x over workers counts next. With push weights, a part of x is
        in flight and is folded. Other messages are copies of an x that has moved on since: only
        the state takes them in."""
        self._fold_at_end(step)
        self._quiesce([channel.state for channel in self.channels], averaged=True)

    def finish_weighted(self, step: int) -> dict[int, float]:
        """As `finish`, but leave x de-biased, and return the push weight of each tensor by its id.
        The caller takes the weighted mean over the workers that are left."""
        self._fold_at_end(step)
        name = self.round.update.weight
        weights = {
            id(segment.tensor): float(channel.state[name])
            for channel in self.channels
            for segment in channel.bucket.segments
            if name is not None
        }
        self._quiesce([channel.state for channel in self.channels], averaged=not weights)
        return weights

    def _fold_at_end(self, step: int) -> None:
        while self.in_flight:
            self._fold(self.in_flight.pop(0), step, write=self._sends_part_of_x)

    @property
    def _sends_part_of_x(self) -> bool:
        """Whether what is in flight is missing from x."""
        return self.round.update.weight is not None

    def _quiesce(self, states: Sequence[State], averaged: bool) -> None:
        update = self.round.update
        if isinstance(update, Quiesce):
            for channel, state in zip(self.channels, states, strict=True):
                x = channel.bucket.pack(self._room(channel.bucket))
                update.quiesce(x, state, averaged)
                channel.bucket.unpack(x)

    # -- every step ----

    def before_step(self, step: int) -> None:
        """The update's `before_step` on every parameter. ``step``: the one about to be taken."""
        update = self.round.update
        if isinstance(update, BeforeStep):
            for x, state, clock in self._tensors(step):
                update.before_step(x, state, clock)

    def after_step(self, step: int) -> None:
        """The update's `after_step` on every parameter."""
        update = self.round.update
        if isinstance(update, AfterStep) and update.pulls:
            for x, state, clock in self._tensors(step):
                update.after_step(x, state, clock)

    def _tensors(self, step: int) -> Iterator[tuple[Tensor, State, Clock]]:
        """Each parameter, with its part of the state that lives on all workers. Changes made in
        place are written back."""
        for channel in self.channels:
            bucket = channel.bucket
            clock = self._clock(bucket, step)
            pieces = {
                name: bucket.split(t)
                for name, t in channel.state.items()
                if t.dim() and not is_owned(self.round.update, name, t)
            }
            rest = {name: t for name, t in channel.state.items() if name not in pieces}
            views = bucket.views()
            for index, segment in enumerate(bucket.segments):
                x = segment.view() if views is None else views[index]
                own = {name: tensors[index] for name, tensors in pieces.items()}
                yield x, rest | own, clock
                if views is None:
                    segment.write(x)

    def _reset_optimizer(self) -> None:
        """Clear the optimizer's state of this round's parameters."""
        for channel in self.channels:
            for segment in channel.bucket.segments:
                self._context.optimizer.state.pop(segment.tensor, None)

    # -- what the workers agree on ----

    def write_finished(self, step: int) -> None:
        """Write into x what `finish` would leave there. The round itself does not change."""
        if not isinstance(self.round.update, Quiesce):
            return
        states = [{k: t.clone() for k, t in c.state.items()} for c in self.channels]
        copies = {id(c): state for c, state in zip(self.channels, states, strict=True)}
        for flight in self.in_flight:
            self._fold(flight, step, copies, write=self._sends_part_of_x)
        self._quiesce(states, averaged=True)

    def write_anchor(self) -> None:
        """Write the anchor into x, gathered from its owners where it is sharded."""
        name = self.round.update.anchor
        assert name is not None
        for channel in self.channels:
            anchor = channel.state[name]
            if is_owned(self.round.update, name, anchor):
                job = partial(self._gather_owned, anchor, channel)
                anchor = self._context.comm.call(job, "consensus")
            channel.bucket.unpack(anchor)

    def _gather_owned(self, owned: Tensor, channel: Channel) -> Tensor:
        """A bucket's tensor, from the slices of it that its owners keep."""
        replica, length = self._replica, channel.bucket.length
        owners = self.exchange.owners(self.link.size)
        levels = (
            (self.link, length // replica.size, owners),
            (replica, length, replica.size),
        )
        for link, size, slices in levels:
            if slices is not None and link.size > 1:
                gathered = owned.new_empty(size)
                link.all_gather(owned, gathered, slices)
                owned = gathered
        assert owned.numel() == length
        return owned

    @property
    def starts_relative(self) -> bool:
        """Whether its messages are relative to x0, and it has not run yet."""
        slots = {self.exchange.slots[k] for c in self.channels for k in c.exchange_state}
        return self.exchange.agrees and "everywhere" in slots and not self.executed

    def start_here(self, step: int) -> None:
        """Make messages relative to the x of now: the first worker's, since processors differ."""
        for channel in self.channels:
            x = channel.bucket.pack(self._room(channel.bucket))[channel.part]
            self._context.comm.call(partial(self.link.broadcast, x), self.label(step))
            _rebase(channel, x)

    def rebase(self) -> None:
        """x is the anchor on all workers now."""
        if self.round.update.anchor and self.exchange.agrees:
            for channel in self.channels:
                _rebase(channel, channel.bucket.pack(self._room(channel.bucket))[channel.part])


def _rebase(channel: Channel, x: Tensor) -> None:
    if isinstance(channel.exchange, Rebase):
        channel.exchange.rebase(x, channel.exchange_state)
