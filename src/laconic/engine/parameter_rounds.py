"""Parameter rounds at work: their channels, and their messages in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from laconic.algorithms.round import Round
from laconic.algorithms.scores import Scores
from laconic.algorithms.update import Clock, Seen, computed, seen_by
from laconic.buckets import Bucket, bucketize
from laconic.engine.channel import ByGroup, Channel, ChannelSet, by_tensor, is_owned
from laconic.engine.comparison import held_by_all
from laconic.engine.joint_optimizer import forget
from laconic.engine.messages import InFlightBucket, InFlightRound, Messenger
from laconic.engine.overlap import AHEAD, Overlapping
from laconic.engine.session import Session, Sets
from laconic.errors import after_step
from laconic.links.comm_thread import Pending, coroutine
from laconic.links.link import complete, one_by_one
from laconic.links.null import NullLink
from laconic.parts import Fragment, module_buffers
from laconic.tensors import overwrite

X = -1
"""The number of memory for x next to messages."""


class ParameterRunner:
    """Runs ``round`` over its set of ``links``: `start` sends, `fold_due` folds.

    ``links``: by set of ranks; None: the session's.
    ``executed``: how many rounds were started. ``in_flight``: those to be folded later.
    """

    def __init__(
        self, round: Round, session: Session, scores: Scores, links: Sets | None = None
    ) -> None:
        self._links = links = links or session.links
        self.round = round
        self.link = link = links[round.over]
        # A set that crosses workers consists of the same rank of each: the ranks of a worker share
        # what the worker sends. In any other set each rank sends its own.
        crosses = round.over in ("workers", "group")
        self._replica = links["replica"] if crosses else NullLink()
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
    def communicates(self) -> bool:
        """Whether its messages leave this rank."""
        several = self._session.elastic is not None or self.link.size > 1
        across = several and self.round.exchange.communicates
        empty = isinstance(self.round.part, Fragment) and not self.channels
        return not empty and (across or self._replica.size > 1)

    def label(self, step: int) -> str:
        """What messages to the user call it."""
        return f"{self.round.name} {after_step(step)}"

    def fresh(
        self, joined: Sequence[Sequence[Tensor]], links: Sets | None = None
    ) -> ParameterRunner:
        """A new runner, as if these parameters had ``joined`` x, one batch after the other; perhaps
        on the rank of another run, over its ``links``."""
        made = ParameterRunner(self.round, self._session, self._scores, links or self._links)
        for batch in joined:
            made.set.add(batch)
        return made

    def become(self, other: ParameterRunner) -> None:
        """Take over the channels of ``other``, made by `fresh`, and what it has in flight."""
        self.set, self.in_flight, self.executed = other.set, other.in_flight, other.executed

    def clock(self, bucket: Bucket, step: int) -> Clock:
        """See `Messenger.clock`."""
        return self._messenger.clock(bucket, step, self.executed, self.present)

    # -- one round ----

    def start(self, step: int) -> None:
        """Run the round after ``step``: its messages are sent, and folded unless it has a delay."""
        self.in_flight.append(self._launch(step))
        self.fold_due(step)
        self.complete()

    def complete(self) -> None:
        """A round has started, or, with a quorum (`laconic.engine.quorum_rounds`), ended."""
        self.executed += 1
        if self.round.optimizer_state == "reset":
            for channel in self.channels:
                for segment in channel.bucket.segments:
                    forget(self._session.bound, segment.tensor)

    def _to_send(self, groups: ByGroup) -> list[dict[str, Tensor]]:
        """Of tensors that come and go, those that all ranks have; of buffers, whose mean this is
        about, only those that differ."""
        differing = self.round.part is module_buffers
        if differing and self._replica.size > 1:
            self._equalize(groups)
        return held_by_all(self.link, groups, differing=differing)

    def _with_other_ranks(self, groups: ByGroup, found: ByGroup) -> list[list[Tensor]]:
        """What was ``found`` of ``groups`` on any rank of this worker: all send the same."""
        own = [f"{number} {name}" for number, group in enumerate(found) for name in group]
        names = self._session.inside.union(own)
        return [
            [t for name, t in group.items() if f"{number} {name}" in names]
            for number, group in enumerate(groups)
        ]

    def _equalize(self, groups: ByGroup) -> None:
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
        update, exchange = self.round.update, self.round.exchange
        stateless = not exchange.slots and not update.slots
        return stateless and not (update.uses_lr or exchange.score_window)

    def _launch(self, step: int) -> InFlightRound:
        """Begin to send this round's messages."""
        delay, label = self.round.delay, self.label(step)
        if self.set.vary:
            if delay and self._can_select_later:
                return self._launch_varying(step)
            groups = self.set.varying()
            found = self._session.comm.call(partial(self._to_send, groups), label)
            self.set.replace(self._with_other_ranks(groups, found))
        together = self._overlap.use(len(self.channels))
        if not delay:
            in_turn = partial(self._sent_in_turn, step, AHEAD if together else 0)
            return InFlightRound(step, self.executed, in_turn)
        sent = [self._send(c, step, c.bucket.empty()) for c in self.channels]
        self._overlap.complete(label)
        checked = self._messenger.nonfinite.check(label)

        def buckets() -> list[InFlightBucket]:
            checked.wait()
            return sent

        return InFlightRound(step + delay, self.executed, buckets)

    def _sent_in_turn(self, step: int, ahead: int) -> Iterator[InFlightBucket]:
        """Send a bucket when all but ``ahead`` of those before it are folded: they share memory."""
        sent: deque[InFlightBucket] = deque()
        for number, channel in enumerate(self.channels):
            memory = self._session.memory(channel.bucket, number % (ahead + 1))
            sent.append(self._send(channel, step, memory))
            if len(sent) > ahead:
                yield sent.popleft()
        yield from sent
        self._messenger.nonfinite.check(self.label(step)).wait()

    def _send(self, channel: Channel, step: int, memory: Tensor) -> InFlightBucket:
        """Send a bucket's message, made in ``memory`` from x."""
        clock = self.clock(channel.bucket, step)
        job, sent = self._messenger.message(channel, clock, memory)
        if self.round.exchange.communicates or self._replica.size > 1:
            pending = self._overlap.begin(job, self.label(step), now=not self.round.delay)
        else:  # not in the communication thread: a newcomer's donor has no record of it
            pending = Pending.of(complete(job(one_by_one(self.link))))
        return InFlightBucket(channel, sent, pending)

    def _launch_varying(self, step: int) -> InFlightRound:
        """Send copies of tensors that come and go. Behind the messages under way the ranks agree on
        the tensors that all of them have; training does not wait for that."""
        executed, copies, messenger = self.executed, self.set.copies(), self._messenger

        async def send() -> list[InFlightBucket]:
            found = []
            groups = [list(group.values()) for group in self._to_send(copies)]
            for channel in self.set.cut(groups):
                at_work = self.link.size, self.link.rank
                clock = messenger.clock(channel.bucket, step, executed, at_work)
                carry, sent = messenger.message(channel, clock, channel.bucket.empty())
                arrival = await carry(one_by_one(self.link))
                found.append(InFlightBucket(channel, sent, Pending.of(arrival)))
            return found

        pending = self._session.comm.submit(coroutine(send), self.label(step))
        return InFlightRound(step + self.round.delay, executed, pending.wait, copies)

    # -- folding ----

    def fold_due(self, step: int, *, early: bool = False, write: bool = True) -> None:
        """Fold what is due after ``step``; ``early``: everything in flight. Without ``write`` x
        stays."""
        while self.in_flight and (early or self.in_flight[0].due <= step):
            self._fold(self.in_flight.pop(0), step, write)

    def _fold(self, flight: InFlightRound, step: int, write: bool) -> None:
        """Fold what ``flight`` brings."""
        update = self.round.update
        buckets, copied = flight.buckets(), self.set.copied(flight.copies) if write else []
        for tensor, copy in copied:
            overwrite(copy, tensor)
        for channel, y, pending in buckets:
            bucket, arrival = channel.bucket, pending.wait()
            self.present = arrival.present or self.present
            x = arrival.flat
            if self.round.delay or not update.replaces:
                at = self.clock(bucket, step)
                clock = replace(at, executed=flight.executed, weight=arrival.weight)
                x = bucket.pack(self._session.memory(bucket, X))
                with channel.states() as (state, _):
                    x = computed(update, "fold", [x, arrival.flat, y], state, clock)
            if write:
                bucket.unpack(x)
        for tensor, copy in copied:
            overwrite(tensor, copy)

    def quiesce(self, step: int, averaged: bool) -> None:
        """Fold everything in flight, and have the update quiesce: an outer step of another round
        follows."""
        self.fold_due(step, early=True)
        update = self.round.update
        if update.quiesce is not None:
            for channel in self.channels:
                x = channel.bucket.pack(self._session.memory(channel.bucket))
                with channel.states() as (state, _):
                    update.quiesce(x, Seen(state, update, "quiesce"), averaged)
                channel.bucket.unpack(x)

    def finish(self, step: int, *, weighted: bool = False) -> dict[int, float]:
        """Quiesce where the mean of x over workers counts next. With push weights, a part of x is
        in flight and is folded. Other messages are copies of an x that has moved on since: only
        the state takes them in. Returns the `push_weights`. ``weighted``: these will weigh the
        mean, for which x is left de-biased."""
        self.fold_due(step, early=True, write=self._sends_part_of_x)
        weights = self.push_weights()
        self.quiesce(step, averaged=not (weighted and weights))
        return weights

    def push_weights(self) -> dict[int, float]:
        """The push weight of each tensor by its id; empty where the update has none."""
        name = self.round.update.weight
        if name is None:
            return {}
        return {
            id(s.tensor): float(c.state[name]) for c in self.channels for s in c.bucket.segments
        }

    # -- every step ----

    def before_step(self, step: int, since: int = 0) -> None:
        """The update's `before_step` on every parameter. ``step``: the one about to be taken.
        ``since``: only in the channels from that number on."""
        self._on_every_tensor("before_step", step, since)

    def undo_before_step(self, step: int) -> None:
        """Divide by the push weights again, by which `before_step` has multiplied. The state stays
        as the step that has begun needs it."""
        if self._sends_part_of_x:
            self.after_step(step)

    def after_step(self, step: int) -> None:
        """The update's `after_step` on every parameter."""
        if self.round.update.in_every_step:
            self._on_every_tensor("after_step", step)

    def _on_every_tensor(self, name: str, step: int, since: int = 0) -> None:
        update = self.round.update
        method = getattr(update, name)
        if method is None:
            return
        for channel in self.channels[since:]:
            clock = self.clock(channel.bucket, step)
            for x, state in by_tensor(channel, update):
                method(x, *seen_by(update, name, state, clock))

    # -- what the workers agree on ----

    def write_anchor(self) -> None:
        """Write the anchor into x, gathered from its owners where it is sharded."""
        name = self.round.update.anchor
        assert name is not None
        for channel in self.channels:
            with channel.states() as (state, _):
                anchor = state[name]
            if is_owned(self.round.update, name, anchor):
                job = partial(self._messenger.gather_owned, anchor, channel)
                anchor = self._session.comm.call(job, "consensus")
            channel.bucket.unpack(anchor)

    @property
    def starts_relative(self) -> bool:
        """Whether its messages are relative to x0, and it has not run yet."""
        slots = {self.round.exchange.slots[k] for c in self.channels for k in c.exchange_state}
        return self.round.exchange.agrees and "everywhere" in slots and not self.executed

    def rebase(self, step: int | None = None) -> None:
        """Make messages relative to x, which all workers have now. With ``step`` it becomes the
        first worker's before, since processors differ."""
        for channel in self.channels:
            x = channel.bucket.pack(self._session.memory(channel.bucket))[channel.part]
            if step is not None:
                self._session.comm.call(partial(self.link.broadcast, x), self.label(step))
            with channel.states() as (_, exchange_state):
                self.round.exchange.rebase(x, exchange_state)
