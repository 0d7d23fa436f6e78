"""Messages of a parameter round: made from x, exchanged with the other workers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.algorithms.exchange import Arrival
from laconic.algorithms.round import Round
from laconic.algorithms.scores import Scores, of_worker
from laconic.algorithms.update import Clock, State, Tensors, Update, returned
from laconic.buckets import Bucket
from laconic.engine.channel import Channel, is_owned
from laconic.engine.overlap import collectives
from laconic.engine.session import Session
from laconic.engine.sharded_tensors import ShardedTensors
from laconic.errors import NotFiniteError
from laconic.links.link import Link
from laconic.tensors import is_sharded, state_dtype


def has_lr(group: Mapping[str, Any]) -> bool:
    """Whether a parameter group has a learning rate."""
    return group.get("lr") is not None


def no_lr(update: Update, optimizer: Optimizer) -> str:
    """The error message if a group has none, and ``update`` uses it."""
    return (
        f"{type(update).__name__} needs a learning rate, and a parameter group of "
        f"{type(optimizer).__name__} has no 'lr': use an optimizer whose groups have one, or "
        "another recipe"
    )


class Messenger:
    """Makes and exchanges the messages of ``round``. ``link``: to the other workers; ``replica``:
    to the other ranks of this worker, which share its messages."""

    def __init__(
        self, round: Round, link: Link, replica: Link, session: Session, scores: Scores | None
    ) -> None:
        self._round = round
        self._link = link
        self._replica = replica
        self._session, self._scores = session, scores

    def clock(
        self, bucket: Bucket, step: int, executed: int, present: tuple[int, int] | None = None
    ) -> Clock:
        """What the update and the exchange know at ``step``, after ``executed`` rounds.
        ``present``: how many workers there are, and the rank of this one; None: as on the link."""
        update = self._round.update
        lr = self.learning_rate(bucket)
        at = present or (self._link.size, self._link.rank)
        seed, delay = self._session.settings.seed, self._round.delay
        clock = Clock(step, lr, executed, delay, *at, seed=seed, bucket=bucket.number)
        if update.whole:
            clock = replace(clock, tensors=self._tensors(bucket))
        out_degree = self._round.exchange.out_degree
        if out_degree is not None:
            clock = replace(clock, out_degree=out_degree(clock))
        return clock

    def learning_rate(self, bucket: Bucket) -> float:
        """That of the bucket's parameter group, whose index changes if the program removes one
        before it; NaN where the update does not use it."""
        update, optimizer = self._round.update, self._session.bound
        if not update.uses_lr:
            return math.nan
        p = bucket.segments[0].tensor
        groups = optimizer.param_groups
        own = (group for group in groups if any(each is p for each in group["params"]))
        group = next(own, None) or groups[bucket.group]  # p may be no parameter
        if not has_lr(group):
            raise ValueError(no_lr(update, optimizer))
        return float(group["lr"])

    def _tensors(self, bucket: Bucket) -> Tensors:
        if any(is_sharded(s.tensor) for s in bucket.segments):
            return ShardedTensors(bucket, self._session.links["shards"], self._session.comm)
        return Tensors(bucket.shapes)

    def stamped(self, clock: Clock, state: State) -> Clock:
        """``clock`` with what travels with the message just made: its weight, and the score."""
        weight = self._round.update.weight
        if weight is not None:
            clock = replace(clock, weight=float(state[weight]))
        window = self._round.exchange.score_window
        if window and self._scores is not None:
            clock = replace(clock, score=self._scores.now(window))
        return clock

    def message(
        self, channel: Channel, clock: Clock, memory: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Make the message from x, which is copied into ``memory``. Returns y with it, if a delayed
        `Update.fold` will need it."""
        update = self._round.update
        y = channel.bucket.pack(memory)
        with channel.states() as (state, _):
            message = returned(update, "send", update.send(y, state, clock), state)
        if not (self._round.delay and update.keeps_sent):
            return message, None
        if message is y:
            if update.sends_changes:
                raise ValueError(
                    f"{type(update).__name__}.send overwrites x, which its `fold` needs "
                    "(keeps_sent): return a new tensor"
                )
            message = y.clone()
        return message, y

    async def carry(
        self, channel: Channel, message: Tensor, clock: Clock, overlap: bool = False
    ) -> Arrival:
        """Exchange the message with the other workers, with the outer step in between. The ranks of
        one worker hold the same message: each carries its part across, then they share.
        ``overlap``: whether other buckets are under way meanwhile."""
        update, link = self._round.update, collectives(self._link, overlap)
        elastic = self._session.elastic is not None
        if elastic:  # another attempt may be among others, and needs the message
            clock = replace(clock, workers=self._link.size, worker=self._link.rank)
            if channel.exchange.slots and not channel.exchange.keeps_message:
                message = message.clone()
        slice_clock = replace(clock, tensors=Tensors()) if update.whole else clock

        names = [k for k, t in channel.state.items() if not t.dim() or is_owned(update, k, t)]

        def combine(mean: Tensor) -> Tensor:
            owned = {name: state[name] for name in names}
            result = update.combine(mean.to(state_dtype(mean.dtype)), owned, slice_clock)
            result = returned(update, "combine", result, owned)
            state.update(owned)  # an outer optimizer makes its state in its first step
            return result

        replica = self._replica
        part = message.view(replica.size, -1)[replica.rank]
        if channel.exchange.score_window and replica.size > 1:
            ranks = replica.gather(torch.tensor(clock.score, dtype=torch.float64))
            clock = replace(clock, score=of_worker(ranks))
        error: NotFiniteError | None = None
        try:
            with channel.states() as (state, exchange_state):
                result = await channel.exchange.run(link, part, combine, clock, exchange_state)
            if elastic:
                result = result._replace(present=(clock.workers, clock.worker))
        except NotFiniteError as raised:
            error = raised
        if replica.size > 1 and channel.exchange.slots:  # the worker's other ranks must learn of it
            failed = replica.gather(torch.tensor([float(error is not None)]))
            if bool(failed.any()) and error is None:
                error = NotFiniteError("what other ranks of this worker carry is not finite")
        if error is not None:
            self._session.nonfinite.report(error)
            return Arrival(message)
        if replica.size > 1:
            replica.all_gather(result.flat, message)
            return result._replace(flat=message, lent=False)
        reads_only = update.replaces and not self._round.delay
        if result.lent and not reads_only:
            fits = message.dtype == result.flat.dtype
            own = message.copy_(result.flat) if fits else result.flat.clone()
            return result._replace(flat=own, lent=False)
        return result

    def gather_owned(self, owned: Tensor, channel: Channel) -> Tensor:
        """A bucket's state tensor, from the slices of it that its owners keep."""
        replica, length = self._replica, channel.bucket.length
        owners = self._round.exchange.owners(self._link.size)
        levels = (
            (self._link, length // replica.size, owners),
            (replica, length, replica.size),
        )
        for link, size, slices in levels:
            if slices is not None and link.size > 1:
                gathered = owned.new_empty(size)
                link.all_gather(owned, gathered, slices)
                owned = gathered
        assert owned.numel() == length
        return owned
