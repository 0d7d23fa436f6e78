"""Messages of a parameter round: made from x, exchanged with the other workers, and in flight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from laconic.algorithms.exchange import Arrival, Combine
from laconic.algorithms.round import Round
from laconic.algorithms.scores import Scores, of_worker
from laconic.algorithms.update import Clock, State, Tensors, Update, computed, rated
from laconic.buckets import Bucket
from laconic.engine.channel import ByGroup, Channel
from laconic.engine.comparison import NonfiniteCheck
from laconic.engine.session import Session
from laconic.errors import NotFiniteError
from laconic.links.comm_thread import Pending
from laconic.links.link import AsyncLink, Job, Link
from laconic.tensors import is_sharded, local, state_dtype


def outer_step(update: Update, state: State, clock: Clock) -> Combine:
    """The outer step on a mean, where it arrives: `Update.combine` with the ``state`` there."""
    clock = replace(clock, tensors=Tensors())

    def combine(mean: Tensor) -> Tensor:
        return computed(update, "combine", [mean.to(state_dtype(mean.dtype))], state, clock)

    return combine


class Messenger:
    """Makes and exchanges the messages of ``round``. ``link``: to the other workers; ``replica``:
    to the other ranks of this worker, which share its messages."""

    def __init__(
        self, round: Round, link: Link, replica: Link, session: Session, scores: Scores
    ) -> None:
        self._round = round
        self._link = link
        self._replica = replica
        self._session, self._scores = session, scores
        inside = replica if replica.size > 1 else session.links["shards"]
        self.nonfinite = NonfiniteCheck(inside, round.exchange, session.comm)

    def clock(self, bucket: Bucket, step: int, executed: int, present: tuple[int, int]) -> Clock:
        """What the update and the exchange know at ``step``, after ``executed`` rounds.
        ``present``: how many workers there are, and the rank of this one."""
        update = self._round.update
        lr = math.nan
        if update.uses_lr:  # the index of the group changes if the program removes one before it
            p, groups = bucket.segments[0].tensor, self._session.bound.param_groups
            own = (group for group in groups if any(each is p for each in group["params"]))
            lr = float((next(own, None) or groups[bucket.group])["lr"])  # p may be no parameter
        seed, delay = self._session.settings.seed, self._round.delay
        clock = Clock(step, lr, executed, delay, *present, seed=seed)
        if update.scope == "tensors":
            sharded = any(is_sharded(s.tensor) for s in bucket.segments)
            tensors = ShardedTensors(bucket) if sharded else Tensors(bucket.shapes)
            clock = replace(clock, tensors=tensors)
        out_degree = self._round.exchange.out_degree
        if out_degree is not None:
            clock = replace(clock, out_degree=out_degree(clock))
        return clock

    def message(
        self, channel: Channel, clock: Clock, memory: Tensor
    ) -> tuple[Callable[[AsyncLink], Job[Arrival]], Tensor | None]:
        """Make the message from x, which is copied into ``memory``. Returns what carries it over
        the collectives of a link, and y, if a delayed `Update.fold` will need it."""
        update, sent = self._round.update, None
        y = channel.bucket.pack(memory)
        with channel.states() as (state, _):
            message = computed(update, "send", [y], state, clock)
        if self._round.delay and update.keeps_sent:
            if message is y and update.sends == "change":
                raise ValueError(
                    f"{type(update).__name__}.send overwrites x, which its `fold` needs "
                    "(keeps_sent): return a new tensor"
                )
            message, sent = message.clone() if message is y else message, y
        if update.weight is not None:
            clock = replace(clock, weight=float(channel.state[update.weight]))
        window = self._round.exchange.score_window
        if window:
            clock = replace(clock, score=self._scores.now(window))
        return partial(self._carry, channel, message, clock), sent

    async def _carry(
        self, channel: Channel, message: Tensor, clock: Clock, link: AsyncLink
    ) -> Arrival:
        """Exchange the message with the other workers, over the collectives of their ``link``, with
        the outer step in between. The ranks of one worker hold the same message: each carries its
        part across, then they share."""
        update = self._round.update
        elastic = self._session.elastic is not None
        if elastic:  # another attempt may be among others, and needs the message
            clock = replace(clock, workers=self._link.size, worker=self._link.rank)
            if channel.exchange.slots:
                message = message.clone()
        replica = self._replica
        part = message.view(replica.size, -1)[replica.rank]
        if channel.exchange.score_window and replica.size > 1:
            ranks = replica.gather(torch.tensor(clock.score, dtype=torch.float64))
            clock = replace(clock, score=of_worker(ranks))
        try:
            with channel.states() as (state, exchange_state):
                combine, now = outer_step(update, state, clock), rated(update, clock)
                result = await channel.exchange.run(link, part, combine, now, exchange_state)
        except NotFiniteError as error:
            self.nonfinite.report(error)
            result = Arrival(part)
        if elastic:
            result = result._replace(present=(clock.workers, clock.worker))
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
        gathers = [(self._link, length // replica.size)] if owners == self._link.size else []
        for link, size in (*gathers, (replica, length)):
            if link.size > 1:
                gathered = owned.new_empty(size)
                link.all_gather(owned, gathered)
                owned = gathered
        assert owned.numel() == length
        return owned


class InFlightBucket(NamedTuple):
    """One bucket's message in flight. ``sent``: y, where the update needs it."""

    channel: Channel
    sent: Tensor | None
    pending: Pending[Arrival]


@dataclass
class InFlightRound:
    """One round in flight, to be folded after step ``due``. ``executed``: how many were
    started before it. ``copies``: what was sent of tensors that come and go. ``buckets()`` waits
    until it is known which there are, and returns them; raises if a message was not finite. Those
    of a round without a delay are sent one after the other, while the caller iterates over them,
    once.
    """

    due: int
    executed: int
    buckets: Callable[[], Iterable[InFlightBucket]]
    copies: ByGroup = ()


class ShardedTensors(Tensors):
    """Those of ``bucket``, of which every rank of this worker has a shard.

    `map` brings each chosen tensor together on all ranks of the worker. They share the tensors by
    size: one of them computes, and sends the others their shards of the result.
    """

    def __init__(self, bucket: Bucket) -> None:
        super().__init__([s.tensor.shape for s in bucket.segments])
        self._bucket = bucket

    def map(
        self,
        flat: Tensor,
        function: Callable[[Tensor], Tensor],
        where: Callable[[torch.Size], bool] = lambda shape: True,
    ) -> None:
        from torch.distributed.tensor import DTensor, distribute_tensor  # slow to import

        def as_shard(p: Tensor, piece: Tensor) -> DTensor:
            assert isinstance(p, DTensor), "where FSDP shards some, it shards all"
            at = piece.view(local(p).shape), p.device_mesh, p.placements
            return DTensor.from_local(*at, shape=p.shape, stride=p.stride())

        pairs = zip(self._bucket.segments, self._bucket.split(flat), strict=True)
        chosen = [(s.tensor, piece) for s, piece in pairs if where(s.tensor.shape)]
        chosen.sort(key=lambda each: -each[0].numel())
        shards = [as_shard(p, piece) for p, piece in chosen]
        wholes = [shard.full_tensor() for shard in shards]
        for k, (shard, whole) in enumerate(zip(shards, wholes, strict=True)):
            if shard.device_mesh.get_local_rank() == k % shard.device_mesh.size():
                whole.copy_(function(whole))
        for k, (shard, whole) in enumerate(zip(shards, wholes, strict=True)):
            at = shard.device_mesh, shard.placements
            result = distribute_tensor(whole, *at, src_data_rank=k % shard.device_mesh.size())
            shard.to_local().copy_(result.to_local())
