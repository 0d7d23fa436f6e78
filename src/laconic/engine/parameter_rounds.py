"""Parameter rounds at work: their channels, and their messages in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor
from torch.optim import Optimizer

from laconic.algorithms.exchange import Exchange
from laconic.algorithms.round import Round
from laconic.algorithms.scores import Scores
from laconic.algorithms.update import (
    Clock,
    State,
    returned,
)
from laconic.buckets import Bucket, bucketize
from laconic.engine.channel import Channel, by_tensor, is_owned
from laconic.engine.channel_set import ChannelSet
from laconic.engine.comparison import held_by_all
from laconic.engine.in_flight import InFlightBucket, InFlightRound
from laconic.engine.messages import Messenger
from laconic.engine.overlap import AHEAD, Overlapping
from laconic.engine.session import Session
from laconic.errors import after_step
from laconic.links.comm_thread import Pending, coroutine
from laconic.links.link import Link
from laconic.links.simulated import single_link
from laconic.parts import Fragment, module_buffers
from laconic.tensors import overwrite

X = -1
"""The number of memory for x next to messages."""


class ParameterRunner:
    """Runs ``round`` over ``link``: `start` sends, `fold_due` folds.

    ``replica``: the link inside this worker; None: the session's.
    ``executed``: how many rounds were started. ``in_flight``: those to be folded later.
    """

    def __init__(
        self,
        round: Round,
        link: Link,
        session: Session,
        scores: Scores | None,
        replica: Link | None = None,
    ) -> None:
        self.round = round
        self.link = link
        # A set that crosses workers consists of the same rank of each: the ranks of a worker share
        # what the worker sends. In any other set each rank sends its own.
        crosses = round.over in ("workers", "group")
        self._replica = replica or session.links["replica"] if crosses else single_link()
        self._session, self._scores = session, scores
        self.set = ChannelSet(round, link, self._replica, session)
        self._messenger = Messenger(round, link, self._replica, session, scores)
        self._overlap = Overlapping(link, session.comm)
        self._sends_part_of_x = round.update.weight is not None
        """Whether what is in flight is missing from x."""
        self.executed = 0
        self.in_flight: list[InFlightRound] = []
        self.present = link.size, link.rank
        """How many workers took part in the round that was folded last, and the rank of this one
        there. What is sent depends on it, and not on the link: in an elastic run workers come and
        go while the training goes on, and a trace must give the same bits."""

    @property
    def channels(self) -> list[Channel]:
        """One for each bucket of the present tensors."""
        return self.set.all

    @property
    def exchange(self) -> Exchange:
        """With whom messages are exchanged."""
        return self.round.exchange

    @property
    def communicates(self) -> bool:
        """Whether its messages leave this rank."""
        several = self._session.elastic is not None or self.link.size > 1
        across = several and self.round.exchange.communicates
        empty = isinstance(self.round.part, Fragment) and not self.channels
        return not empty and (across or self._replica.size > 1)

    def label(self, step: int) -> str:
        """What messages to the user call it."""
        return f"{self.round.name} {after_step(step)}"

    def like(self, positions: Sequence[Sequence[int]]) -> ParameterRunner:
        """A new runner, as if parameters had joined at these `ChannelSet.positions`."""
        fresh = ParameterRunner(self.round, self.link, self._session, self._scores)
        fresh.set.add_at(positions)
        return fresh

    def elsewhere(self, link: Link, replica: Link) -> ParameterRunner:
        """A new runner, as if on the rank of another run: over ``link``, in a worker of the ranks
        of ``replica``."""
        fresh = ParameterRunner(self.round, link, self._session, self._scores, replica)
        fresh.set.add([p for batch in self.set.joined for p in batch])
        return fresh

    def become(self, other: ParameterRunner) -> None:
        """Take over the channels of ``other``, made by `like`, and what it has in flight."""
        self.set, self.in_flight, self.executed = other.set, other.in_flight, other.executed

    def learning_rate(self, bucket: Bucket) -> float:
        """See `Messenger.learning_rate`."""
        return self._messenger.learning_rate(bucket)

    def clock(self, bucket: Bucket, step: int) -> Clock:
        """See `Messenger.clock`."""
        present = None if self._session.elastic is None else self.present
        return self._messenger.clock(bucket, step, self.executed, present)

    # -- one round ----

    def start(self, step: int) -> None:
        """Send this round's messages after ``step``. Without a delay, also fold the answers."""
        if self.set.vary and not (self.round.delay and self._can_select_later):
            job = partial(self._to_send, self.set.varying())
            self.set.replace(self._session.comm.call(job, self.label(step)))
        if self.round.delay:
            self.in_flight.append(self._launch(step))
        else:
            self._exchange_now(step)
            self._session.nonfinite.check(self.exchange, self.label(step)).wait()
        self.complete()

    def complete(self) -> None:
        """A round has started, or, with a quorum (`laconic.engine.quorum_rounds`), ended."""
        self.executed += 1
        if self.round.optimizer_state == "reset":
            _forget(self.channels, self._session.bound)

    def _to_send(self, groups: Sequence[dict[str, Tensor]]) -> list[list[Tensor]]:
        """Of tensors that come and go, those that all ranks have; of buffers, whose mean this is
        about, only those that differ."""
        differing = self.round.part is module_buffers
        if differing and self._replica.size > 1:
            self._equalize(groups)
        found = held_by_all(self.link, groups, differing=differing)
        return [list(group.values()) for group in found]

    def _equalize(self, groups: Sequence[dict[str, Tensor]]) -> None:
        """Give the ranks of this worker, which share its messages, the mean of their buffers."""
        found = held_by_all(self._replica, groups, differing=True)
        for bucket in bucketize([list(group.values()) for group in found], self._replica.size):
            mean = bucket.pack(bucket.empty())
            self._replica.mean(mean)
            bucket.unpack(mean)

    @property
    def _can_select_later(self) -> bool:
        """Whether nothing done here depends on which tensors all ranks have, so that the ranks can
        agree on them while training goes on."""
        update, exchange = self.round.update, self.exchange
        stateless = not exchange.slots and not update.slots
        return stateless and not (update.uses_lr or exchange.score_window)

    def _exchange_now(self, step: int) -> None:
        """Send and fold one bucket after the other. Where they overlap, some are under way."""
        ahead = AHEAD if self._overlap.use(len(self.channels)) else 0
        sent: deque[InFlightBucket] = deque()
        for number, channel in enumerate(self.channels):
            memory = self._session.memory(channel.bucket, number % (ahead + 1))
            sent.append(self._send(channel, step, memory))
            if len(sent) > ahead:
                self._fold_bucket(sent.popleft(), step, self.executed)
        while sent:
            self._fold_bucket(sent.popleft(), step, self.executed)

    def _launch(self, step: int) -> InFlightRound:
        """Send a delayed round's messages."""
        if self.set.vary and self._can_select_later:
            return self._launch_varying(step)
        self._overlap.use(len(self.channels))
        sent = [self._send(c, step, c.bucket.empty()) for c in self.channels]
        self._overlap.complete(self.label(step))
        checked = self._session.nonfinite.check(self.exchange, self.label(step))
        at = step + self.round.delay, self.executed
        return InFlightRound(*at, Pending.of(sent), checked=checked)

    def _send(self, channel: Channel, step: int, memory: Tensor) -> InFlightBucket:
        """Send a bucket's message, made in ``memory`` from x."""
        bucket = channel.bucket
        clock = self.clock(bucket, step)
        message, sent = self._messenger.message(channel, clock, memory)
        clock = self._messenger.stamped(clock, channel.state)
        job = partial(self._messenger.carry, channel, message, clock, self._overlap.used)
        pending = self._overlap.begin(job, self.label(step), now=not self.round.delay)
        return InFlightBucket(channel, sent, pending)

    def _launch_varying(self, step: int) -> InFlightRound:
        """Send copies of tensors that come and go. Behind the messages under way the ranks agree on
        the tensors that all of them have; training does not wait for that."""
        executed, copies, messenger = self.executed, self.set.copies(), self._messenger

        async def send() -> list[InFlightBucket]:
            found = []
            for channel in self.set.cut(self._to_send(copies)):
                clock = messenger.clock(channel.bucket, step, executed)
                message, sent = messenger.message(channel, clock, channel.bucket.empty())
                arrival = await messenger.carry(channel, message, clock)
                found.append(InFlightBucket(channel, sent, Pending.of(arrival)))
            return found

        pending = self._session.comm.submit(coroutine(send), self.label(step))
        return InFlightRound(step + self.round.delay, executed, pending, copies)

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
        buckets, copied = flight.buckets, self.set.copied(flight.copies) if write else []
        for tensor, copy in copied:
            overwrite(copy, tensor)
        for bucket in buckets:
            self._fold_bucket(bucket, step, flight.executed, copies, write=write)
        for tensor, copy in copied:
            overwrite(tensor, copy)

    def _fold_bucket(
        self,
        sent: InFlightBucket,
        step: int,
        executed: int,
        copies: Mapping[int, State] | None = None,
        *,
        write: bool = True,
    ) -> None:
        """Fold one bucket of a round before which ``executed`` were started: see `_fold`."""
        channel, y, pending = sent
        bucket, update = channel.bucket, self.round.update
        arrival = pending.wait()
        present = arrival.present or self.present
        x = arrival.flat if copies is None else arrival.flat.clone()
        if copies is None:
            self.present = present
        if self.round.delay or not update.replaces:
            at = self.clock(bucket, step)
            clock = replace(at, executed=executed, weight=arrival.weight, workers=present[0])
            received, x = x, bucket.pack(self._session.memory(bucket, X))
            with channel.states() as (own, _):
                state = own if copies is None else copies[id(channel)]
                x = returned(update, "fold", update.fold(x, received, y, state, clock), state)
        if write:
            bucket.unpack(x)

    def quiesce(self, step: int, averaged: bool) -> None:
        """Fold everything in flight, and have the update quiesce: an outer step of another round
        follows."""
        self.fold_due(step, early=True)
        self._quiesce(averaged)

    def finish(self, step: int) -> None:
        """Quiesce where the mean of x over workers counts next. With push weights, a part of x is
        in flight and is folded. Other messages are copies of an x that has moved on since: only
        the state takes them in."""
        self._fold_at_end(step)
        self._quiesce(averaged=True)

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
        self._quiesce(averaged=not weights)
        return weights

    def _fold_at_end(self, step: int) -> None:
        while self.in_flight:
            self._fold(self.in_flight.pop(0), step, write=self._sends_part_of_x)

    def _quiesce(self, averaged: bool, copies: Mapping[int, State] | None = None) -> None:
        """``copies``: as in `_fold`."""
        quiesce = self.round.update.quiesce
        if quiesce is not None:
            for channel in self.channels:
                x = channel.bucket.pack(self._session.memory(channel.bucket))
                with channel.states() as (own, _):
                    state = own if copies is None else copies[id(channel)]
                    quiesce(x, state, averaged)
                channel.bucket.unpack(x)

    # -- every step ----

    def before_step(self, step: int) -> None:
        """The update's `before_step` on every parameter. ``step``: the one about to be taken."""
        if self.round.update.before_step is not None:
            _on_every_tensor(self, self.round.update.before_step, step)

    def undo_before_step(self, step: int) -> None:
        """Divide by the push weights again, by which `before_step` has multiplied."""
        if self._sends_part_of_x:
            self.after_step(step)

    def after_step(self, step: int) -> None:
        """The update's `after_step` on every parameter."""
        update = self.round.update
        if update.after_step is not None and update.pulls:
            _on_every_tensor(self, update.after_step, step)

    # -- what the workers agree on ----

    def write_finished(self, step: int) -> None:
        """Write into x what `finish` would leave there. The round itself does not change."""
        if self.round.update.quiesce is None:
            return
        copies = _copies(self.channels)
        for flight in self.in_flight:
            self._fold(flight, step, copies, write=self._sends_part_of_x)
        self._quiesce(averaged=True, copies=copies)

    def write_anchor(self, step: int) -> None:
        """Write the anchor into x, gathered from its owners where it is sharded. The round itself
        does not change: what is in flight and moves the anchor only when it is folded is folded
        into a copy."""
        name = self.round.update.anchor
        assert name is not None
        copies: dict[int, State] = {}
        if self.in_flight and not self.round.update.replaces:
            copies = _copies(self.channels)
            for flight in self.in_flight:
                self._fold(flight, step, copies, write=False)
        for channel in self.channels:
            with channel.states() as (state, _):
                anchor = copies.get(id(channel), state)[name]
            if is_owned(self.round.update, name, anchor):
                job = partial(self._messenger.gather_owned, anchor, channel)
                anchor = self._session.comm.call(job, "consensus")
            channel.bucket.unpack(anchor)

    @property
    def starts_relative(self) -> bool:
        """Whether its messages are relative to x0, and it has not run yet."""
        slots = {self.exchange.slots[k] for c in self.channels for k in c.exchange_state}
        return self.exchange.agrees and "everywhere" in slots and not self.executed

    def start_here(self, step: int) -> None:
        """Make messages relative to the x of now: the first worker's, since processors differ."""
        for channel in self.channels:
            x = channel.bucket.pack(self._session.memory(channel.bucket))[channel.part]
            self._session.comm.call(partial(self.link.broadcast, x), self.label(step))
            _rebase(channel, x)

    def rebase(self) -> None:
        """x is the anchor on all workers now."""
        if self.round.update.anchor and self.exchange.agrees:
            for channel in self.channels:
                bucket = channel.bucket
                _rebase(channel, bucket.pack(self._session.memory(bucket))[channel.part])


def _rebase(channel: Channel, x: Tensor) -> None:
    rebase = channel.exchange.rebase
    if rebase is not None:
        with channel.states() as (_, exchange_state):
            rebase(x, exchange_state)


def _on_every_tensor(
    runner: ParameterRunner, method: Callable[[Tensor, State, Clock], None], step: int
) -> None:
    """Call the update's ``method`` on every parameter."""
    for channel in runner.channels:
        clock = runner.clock(channel.bucket, step)
        for each in by_tensor(channel, runner.round.update, clock):
            method(*each)


def _copies(channels: Sequence[Channel]) -> dict[int, State]:
    """Copies of the channels' states, by the channel's id."""
    copies: dict[int, State] = {}
    for channel in channels:
        with channel.states() as (state, _):
            copies[id(channel)] = {name: t.clone() for name, t in state.items()}
    return copies


def _forget(channels: Sequence[Channel], optimizer: Optimizer) -> None:
    """Clear the optimizer's state of these parameters."""
    for channel in channels:
        for segment in channel.bucket.segments:
            optimizer.state.pop(segment.tensor, None)
