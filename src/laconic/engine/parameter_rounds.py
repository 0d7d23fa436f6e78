"""A round at work on one model: its buckets, its state, its messages in flight. Belongs to the
synchroniser, which says when."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.algorithms.round import Arrival, Clock, Exchange, Round, State
from laconic.algorithms.scores import Scores, of_worker
from laconic.buckets import (
    BUCKET_BYTES,
    Bucket,
    Fragment,
    Scratch,
    Segment,
    bucketize,
    parameters,
    state_dtype,
)
from laconic.engine.nonfinite import Refusals
from laconic.errors import NotFiniteError
from laconic.links.comm_thread import CommThread, Pending
from laconic.links.link import Link, held_by_all
from laconic.links.simulated import single_link


class Message(NamedTuple):
    """One bucket's message in flight: ``sent`` is y where the update keeps it."""

    bucket: Bucket
    state: State
    sent: Tensor | None
    pending: Pending[Arrival]
    message: Tensor | None = None
    """Kept until it has arrived: the card may still be sending it."""


@dataclass
class Flight:
    """One delayed round in flight, to be folded after step ``due``. ``copies``: what the messages'
    buckets are made of where it is not the tensors themselves, by group and name."""

    due: int
    sent: Pending[list[Message]]
    copies: Sequence[dict[str, Tensor]] = ()
    told: Pending[None] = field(default_factory=lambda: Pending.of(None))
    """Raises where one was refused."""

    @property
    def messages(self) -> list[Message]:
        """One for each bucket; waits until it is known which there are."""
        self.told.wait()
        return self.sent.wait()


@dataclass
class Surroundings:
    """What all rounds of one synchroniser share."""

    model: nn.Module
    optimizer: Optimizer
    lane: CommThread
    scratch: Scratch
    """Room for the message under way, and for x beside it."""
    beside: Scratch
    replica: Link
    refusals: Refusals
    scores: Scores | None
    seed: int


class RunningRound:
    """``round`` at work over ``link``."""

    def __init__(self, round: Round, link: Link, shared: Surroundings) -> None:
        self.round = round
        self.link = link
        # a set that crosses workers is one of equal places in them: the ranks of a worker share
        # what it has to carry. In any other set each rank speaks for itself.
        crosses = round.over in ("workers", "group")
        self._replica = shared.replica if crosses else single_link()
        self.buckets: list[Bucket] = []
        self.states: list[State] = []
        self.carried: list[State] = []
        """What the exchange keeps for each bucket."""
        self.executed = 0
        self.flights: list[Flight] = []
        self.joined: list[int] = []
        """How many parameter groups came at a time: those are in the same buckets."""
        self._shared = shared

    @property
    def exchange(self) -> Exchange:
        """With whom messages are exchanged."""
        return self.round.exchange

    @property
    def communicates(self) -> bool:
        """Whether its messages leave this rank."""
        across = self.link.size > 1 and self.round.exchange.communicates
        empty = isinstance(self.round.part, Fragment) and not self.buckets
        return not empty and (across or self._replica.size > 1)

    def label(self, step: int) -> str:
        """What messages to the user call it."""
        return f"{self.round.name} after step {step}"

    def grow(self) -> None:
        """Take in the parameter groups added since the last call; called where x is x0."""
        self._add(self._selected()[sum(self.joined) :])

    def like(self, joined: Sequence[int]) -> RunningRound:
        """This one as it would be, had parameter groups come in these numbers."""
        fresh = RunningRound(self.round, self.link, self._shared)
        groups = self._selected()
        if sum(joined) != len(groups):
            raise ValueError(f"the state was saved for {sum(joined)} groups, not {len(groups)}")
        for count in joined:
            start = sum(fresh.joined)
            fresh._add(groups[start : start + count])
        return fresh

    def elsewhere(self, link: Link, replica: Link) -> RunningRound:
        """This one as it would be on the rank of another run: over ``link``, in a worker whose
        ranks are those of ``replica``."""
        fresh = RunningRound(self.round, link, replace(self._shared, replica=replica))
        fresh.grow()
        return fresh

    def become(self, other: RunningRound) -> None:
        """Go on as ``other``, which nobody else runs."""
        vars(self).update(vars(other))

    def _selected(self) -> Sequence[Sequence[Tensor | Segment]]:
        part, model, optimizer = self.round.part, self._shared.model, self._shared.optimizer
        if isinstance(part, Fragment):
            return part.segments(model, optimizer)
        return [list(group.values()) for group in part(model, optimizer)]

    def _add(self, groups: Sequence[Sequence[Tensor | Segment]]) -> None:
        new = self.cut(groups, sum(self.joined), len(self.buckets))
        self.joined += [len(groups)] if groups else []
        self.buckets += new
        self.states += [self._init(bucket) for bucket in new]
        self.carried += [self._init_carried(bucket) for bucket in new]

    def cut(
        self, groups: Sequence[Sequence[Tensor | Segment]], first: int = 0, number: int = 0
    ) -> list[Bucket]:
        """Buckets over ``groups``, of which the first is the optimiser's of number ``first``; their
        own numbers are from ``number`` on."""
        workers = self.link.size
        owners = self.round.exchange.owners(workers) or workers
        pieces = self.round.exchange.multiple(workers) * self._replica.size
        # each owner gets a slice from every other worker: with fewer owners buckets are smaller
        most = BUCKET_BYTES * owners // workers if owners < workers else None
        # buckets span groups, as a few biases on their own would take as many messages as the rest
        apart = self.round.update.uses_lr
        joined = groups if apart else [[t for group in groups for t in group]]
        whole = self.round.exchange.whole
        found = bucketize(joined, pieces, first_group=first, most_bytes=most, whole=whole)
        for bucket in found:
            bucket.number, number = number, number + 1
        return found

    def _select_again(self) -> None:
        """Take those of the tensors that come and go that all ranks have."""
        job = partial(held_by_all, self.link, self._varying())
        held = self._shared.lane.call(job, self.label(0))
        self.buckets, self.states, self.carried, self.joined = [], [], [], []
        self._add(held)
        if any(self.states) or any(self.carried):
            raise ValueError(
                f"{self.round.name}: its update or exchange keeps state, which begins with what "
                "all workers start with, and its part= had nothing then: take ones that keep none"
            )

    def _init(self, bucket: Bucket) -> State:
        """The update's state on its stretch of x0; each piece of state gets a copy of its own."""
        update = self.round.update
        x = bucket.pack(self._room(bucket))
        dtype = state_dtype(bucket.dtype)
        owned = update.init(x[self.region(bucket)].to(dtype, copy=True))
        if all(t.dim() == 0 or self.is_owned(name, t) for name, t in owned.items()):
            return owned
        whole = update.init(x.to(dtype, copy=True))
        return {name: owned[name] if self.is_owned(name, t) else t for name, t in whole.items()}

    def _init_carried(self, bucket: Bucket) -> State:
        """The exchange's state on the part of x0 that this rank carries."""
        exchange = self.round.exchange.shaped(bucket.shapes)
        if not exchange.slots:
            return {}
        part, owned = self.part(bucket), self.region(bucket)
        x = bucket.pack(self._room(bucket))[part].to(state_dtype(bucket.dtype), copy=True)
        return exchange.init(x, slice(owned.start - part.start, owned.stop - part.start))

    def is_owned(self, name: str, tensor: Tensor) -> bool:
        """Whether a state tensor is kept for this rank's `region` of a bucket only."""
        return tensor.dim() > 0 and self.round.update.slots.get(name, "owner") == "owner"

    def region(self, bucket: Bucket) -> slice:
        """The stretch of ``bucket`` whose ``owner`` state is kept here: within the part that this
        rank carries for its worker, what the exchange leaves to it."""
        part = self.part(bucket)
        within = self.round.exchange.region(self.link, part.stop - part.start)
        return slice(part.start + within.start, part.start + within.stop)

    def part(self, bucket: Bucket) -> slice:
        """The stretch of ``bucket`` that this rank carries for its worker."""
        each = bucket.length // self._replica.size
        return slice(self._replica.rank * each, (self._replica.rank + 1) * each)

    def _room(self, bucket: Bucket) -> Tensor:
        return self._shared.scratch.take(bucket.length, bucket.dtype, bucket.device)

    def _clock(self, bucket: Bucket, step: int, executed: int | None = None) -> Clock:
        group = self._shared.optimizer.param_groups[bucket.group]
        lr = float(group.get("lr", math.nan)) if self.round.update.uses_lr else math.nan
        link, delay = self.link, self.round.delay
        seed = self._shared.seed
        at = link.size, link.rank
        number = self.executed if executed is None else executed
        clock = Clock(step, lr, number, delay, *at, seed=seed, bucket=bucket.number)
        degree = self.round.exchange.out_degree(clock)
        return replace(clock, out_degree=degree) if degree else clock

    def _sent_with(self, state: State, clock: Clock) -> Clock:
        """``clock`` as the message just made takes it along: with its weight, and the score."""
        weight, window = self.round.update.weight, self.round.exchange.scored
        if weight is not None:
            clock = replace(clock, weight=float(state[weight]))
        if window and self._shared.scores is not None:
            clock = replace(clock, score=self._shared.scores.now(window))
        return clock

    def _carry(
        self, exchange: Exchange, message: Tensor, state: State, carried: State, clock: Clock
    ) -> Arrival:
        """The message to the other workers and back, with the outer step in between. The ranks
        of one worker hold the same message: each carries its part across, then they share."""

        def combine(mean: Tensor) -> Tensor:
            owned = {k: t for k, t in state.items() if not t.dim() or self.is_owned(k, t)}
            result = self.round.update.combine(mean.to(state_dtype(mean.dtype)), owned, clock)
            state.update(owned)  # an outer optimiser makes its state in its first step
            return result

        replica = self._replica
        part = message.view(replica.size, -1)[replica.rank]
        if self.round.exchange.scored and replica.size > 1:
            ranks = replica.gather(torch.tensor(clock.score, dtype=torch.float64))
            clock = replace(clock, score=of_worker(ranks))
        refusal: NotFiniteError | None = None
        try:
            result = exchange.run(self.link, part, combine, clock, carried)
        except NotFiniteError as error:
            refusal = error
        if replica.size > 1 and exchange.slots:  # the ranks of all places in the workers must know
            told = replica.gather(torch.tensor([float(refusal is not None)]))
            if bool(told.any()) and refusal is None:
                refusal = NotFiniteError("what other ranks of this worker carry is not finite")
        if refusal is not None:
            self._shared.refusals.keep(refusal)
            return Arrival(message)
        if replica.size > 1:
            replica.all_gather(result.flat, message)
            return result._replace(flat=message, lent=False)
        if result.lent and not self._reads_only:
            fits = message.dtype == result.flat.dtype
            own = message.copy_(result.flat) if fits else result.flat.clone()
            return result._replace(flat=own, lent=False)
        return result

    # -- one step of the way ----

    def start(self, step: int) -> None:
        """Send this round's messages after ``step``; without a delay, fold the answers too."""
        if self.varies and self.round.delay and self._asks_beside:
            self.flights.append(self._launch_varying(step))
        else:
            if self.varies:
                self._select_again()
            self._start_buckets(step)
        self.executed += 1
        if self.round.optimizer_state == "reset":
            self._forget()

    @property
    def varies(self) -> bool:
        """Whether its tensors may come and go: no state belongs to them."""
        fixed = self.round.part is parameters or isinstance(self.round.part, Fragment)
        return not fixed and not any(self.states) and not any(self.carried)

    @property
    def _asks_beside(self) -> bool:
        """Whether which tensors all ranks have can be asked beside the training, as nothing that is
        done here depends on it."""
        update, exchange = self.round.update, self.exchange
        stateless = not exchange.slots and not update.init(torch.zeros(1))
        return stateless and not (update.uses_lr or exchange.scored or update.overrides("depart"))

    def _start_buckets(self, step: int) -> None:
        if self.round.delay:
            messages = [self._launch(b, s, c, step) for b, s, c in self._kept()]
            told = self._shared.refusals.tell(self.exchange, self.label(step))
            flight = Flight(step + self.round.delay, Pending.of(messages), told=told)
            self.flights.append(flight)
        else:
            for bucket, state, carried in self._kept():
                self._exchange(bucket, state, carried, step)
            self._shared.refusals.tell(self.exchange, self.label(step)).wait()

    def _pairs(self) -> Iterable[tuple[Bucket, State]]:
        return zip(self.buckets, self.states, strict=True)

    @property
    def _reads_only(self) -> bool:
        """Whether what arrives is copied into the parameters at once, and not changed before."""
        return self.round.update.replaces and not self.round.delay

    def _kept(self) -> Iterable[tuple[Bucket, State, State]]:
        return zip(self.buckets, self.states, self.carried, strict=True)

    def _exchange(self, bucket: Bucket, state: State, carried: State, step: int) -> None:
        update, clock = self.round.update, self._clock(bucket, step)
        message = update.send(bucket.pack(self._room(bucket)), state, clock)
        clock = self._sent_with(state, clock)
        exchange = self.round.exchange.shaped(bucket.shapes)
        received, weight, _ = self._shared.lane.call(
            partial(self._carry, exchange, message, state, carried, clock), self.label(step)
        )
        if not update.replaces:
            x = bucket.pack(self._shared.beside.take(bucket.length, bucket.dtype, bucket.device))
            received = update.fold(x, received, None, state, replace(clock, weight=weight))
        bucket.unpack(received)

    def _launch(self, bucket: Bucket, state: State, carried: State, step: int) -> Message:
        update, clock = self.round.update, self._clock(bucket, step)
        y = bucket.pack(bucket.empty())
        message = update.send(y, state, clock)
        if update.keeps_sent and message is y:
            message = y.clone()
        clock = self._sent_with(state, clock)
        exchange = self.round.exchange.shaped(bucket.shapes)
        pending = self._shared.lane.submit(
            partial(self._carry, exchange, message, state, carried, clock), self.label(step)
        )
        if update.overrides("depart"):
            x = bucket.pack(self._room(bucket))
            update.depart(x, state, clock)
            bucket.unpack(x)
        return Message(bucket, state, y if update.keeps_sent else None, pending, message)

    def _launch_varying(self, step: int) -> Flight:
        """Send tensors that come and go. Which of them all ranks have is asked behind the messages
        under way, which are not waited for here: what is sent are copies of what is there now."""
        update, executed, copies = self.round.update, self.executed, self.copies()

        def send() -> list[Message]:
            messages = []
            for bucket in self.cut(held_by_all(self.link, copies)):
                clock = self._clock(bucket, step, executed)
                y = bucket.pack(bucket.empty())
                message = update.send(y, {}, clock)
                if update.keeps_sent and message is y:
                    message = y.clone()
                exchange = self.exchange.shaped(bucket.shapes)
                arrival = self._carry(exchange, message, {}, {}, clock)
                kept = y if update.keeps_sent else None
                messages.append(Message(bucket, {}, kept, Pending.of(arrival), message))
            return messages

        pending = self._shared.lane.submit(send, self.label(step))
        return Flight(step + self.round.delay, pending, copies)

    def fold_due(self, step: int, *, early: bool = False) -> None:
        """Fold what is due after ``step``; ``early``: everything in flight."""
        while self.flights and (early or self.flights[0].due <= step):
            self._fold(self.flights.pop(0), step)

    def _fold(
        self,
        flight: Flight,
        step: int,
        copies: Mapping[int, State] | None = None,
        *,
        write: bool = True,
    ) -> None:
        """Fold what ``flight`` brings. With ``copies`` of the buckets' states, by the state's id,
        the states and the flight itself stay as they are; without ``write`` x does."""
        messages, copied = flight.messages, self._copied(flight) if write else []
        for tensor, copy in copied:
            copy.copy_(tensor)
        for message in messages:
            bucket, state = message.bucket, message.state
            received, weight, _ = message.pending.wait()
            if copies is not None:
                received, state = received.clone(), copies[id(state)]
            clock = replace(self._clock(bucket, step), weight=weight)
            x = bucket.pack(self._room(bucket))
            x = self.round.update.fold(x, received, message.sent, state, clock)
            if write:
                bucket.unpack(x)
        for tensor, copy in copied:
            tensor.copy_(copy)

    def _copied(self, flight: Flight) -> list[tuple[Tensor, Tensor]]:
        """The tensors of which ``flight`` has copies, as far as they are still of that shape."""
        if not flight.copies:
            return []
        groups = self._varying()
        held = [
            (group[name].detach(), copy)
            for group, copies in zip(groups, flight.copies, strict=False)  # others joined since
            for name, copy in copies.items()
            if name in group
        ]
        return [(t, copy) for t, copy in held if (t.shape, t.dtype) == (copy.shape, copy.dtype)]

    def copies(self) -> list[dict[str, Tensor]]:
        """Of the tensors that come and go, as they are now."""
        return [{k: t.detach().clone() for k, t in group.items()} for group in self._varying()]

    def _varying(self) -> Sequence[dict[str, Tensor]]:
        """Tensors that come and go, as an optimiser's state: those of now."""
        assert not isinstance(self.round.part, Fragment), "its parameters stay"
        return self.round.part(self._shared.model, self._shared.optimizer)

    def settle(self, step: int, averaged: bool) -> None:
        """Come to rest, as an outer step above asks: nothing in flight, update settled."""
        self.fold_due(step, early=True)
        self._settle(self.states, averaged)

    def finish(self, step: int) -> None:
        """Come to rest where the mean of x over workers is what counts next. With push weights a
        part of x is in flight, and is folded. Other messages are copies of an x that has moved on:
        only the update's state takes them in (an outer step did when they were sent)."""
        self._fold_at_end(step)
        self._settle(self.states, averaged=True)

    def finish_weighted(self, step: int) -> dict[int, float]:
        """As `finish`, but leaves x de-biased and returns the push weight of each tensor, by its
        id. The caller takes the weighted mean over the workers that are left."""
        self._fold_at_end(step)
        name = self.round.update.weight
        weights = {
            id(segment.tensor): float(state[name])
            for bucket, state in self._pairs()
            for segment in bucket.segments
            if name is not None
        }
        self._settle(self.states, averaged=not weights)
        return weights

    def _fold_at_end(self, step: int) -> None:
        while self.flights:
            self._fold(self.flights.pop(0), step, write=self._sends_itself)

    @property
    def _sends_itself(self) -> bool:
        """Whether what is in flight is missing from x."""
        return self.round.update.weight is not None

    def _settle(self, states: Sequence[State], averaged: bool) -> None:
        if self.round.update.overrides("settle"):
            for bucket, state in zip(self.buckets, states, strict=True):
                x = bucket.pack(self._room(bucket))
                self.round.update.settle(x, state, averaged)
                bucket.unpack(x)

    def before_step(self, step: int) -> None:
        """The update's `before_step` on every parameter; ``step`` is the one about to be taken."""
        if self.round.update.overrides("before_step"):
            for x, state, clock in self._stretches(step):
                self.round.update.before_step(x, state, clock)

    def after_step(self, step: int) -> None:
        """The update's `after_step` on every parameter."""
        if self.round.update.pulls:
            for x, state, clock in self._stretches(step):
                self.round.update.after_step(x, state, clock)

    def _stretches(self, step: int) -> Iterable[tuple[Tensor, State, Clock]]:
        """Every parameter with its stretch of the state that lives on all workers; what is done
        to it in place is written back."""
        for bucket, state in self._pairs():
            clock = self._clock(bucket, step)
            cut = {
                name: bucket.split(t)
                for name, t in state.items()
                if t.dim() and not self.is_owned(name, t)
            }
            here = {name: t for name, t in state.items() if name not in cut}
            views = bucket.views()
            for index, segment in enumerate(bucket.segments):
                x = segment.view() if views is None else views[index]
                yield x, here | {name: pieces[index] for name, pieces in cut.items()}, clock
                if views is None:
                    segment.write(x)

    def _forget(self) -> None:
        """The optimiser's own state for this round's parameters, as before its first step."""
        for bucket in self.buckets:
            for segment in bucket.segments:
                self._shared.optimizer.state.pop(segment.tensor, None)

    # -- what the workers agree on ----

    def write_at_rest(self, step: int) -> None:
        """x <- what `finish` would make of it; the round itself goes on as it was."""
        if not self.round.update.overrides("settle"):
            return
        states = [{name: t.clone() for name, t in state.items()} for state in self.states]
        copies = {id(state): copy for state, copy in zip(self.states, states, strict=True)}
        for flight in self.flights:
            self._fold(flight, step, copies, write=self._sends_itself)
        self._settle(states, averaged=True)

    def write_anchor(self) -> None:
        """x <- a, gathered from its owners where it is sharded."""
        assert self.round.update.anchor is not None
        name = self.round.update.anchor
        for bucket, state in self._pairs():
            anchor = state[name]
            if self.is_owned(name, anchor):
                anchor = self._shared.lane.call(partial(self._whole, anchor, bucket), "consensus")
            bucket.unpack(anchor)

    @property
    def begins_at_x(self) -> bool:
        """Whether its messages are relative to x0, and it has not run yet."""
        kept = {self.exchange.slots[name] for state in self.carried for name in state}
        return self.exchange.agrees and "everywhere" in kept and not self.executed

    def begin_here(self, step: int) -> None:
        """Be relative to the x of now: the first worker's, as processors may differ."""
        for bucket, _, carried in self._kept():
            x = bucket.pack(self._room(bucket))[self.part(bucket)]
            self._shared.lane.call(partial(self.link.broadcast, x), self.label(step))
            self.exchange.shaped(bucket.shapes).rest(x, carried)

    def rest(self) -> None:
        """x is the anchor on all workers now."""
        if self.round.update.anchor and self.exchange.agrees and self.exchange.slots:
            for bucket, _, carried in self._kept():
                x = bucket.pack(self._room(bucket))[self.part(bucket)]
                self.exchange.shaped(bucket.shapes).rest(x, carried)

    def _whole(self, owned: Tensor, bucket: Bucket) -> Tensor:
        """A bucket's tensor from the slices of it that its owners keep."""
        replica = self._replica
        part = bucket.length // replica.size
        owners = self.round.exchange.owners(self.link.size)
        levels = ((self.link, part, owners), (replica, bucket.length, replica.size))
        for link, length, slices in levels:
            if slices is not None and link.size > 1:
                gathered = owned.new_empty(length)
                link.all_gather(owned, gathered, slices)
                owned = gathered
        assert owned.numel() == bucket.length
        return owned
