"""Runs rounds with a quorum on one worker, and their outer steps on rank 0."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median_low
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laconic.algorithms.exchanges.quorum import Contribution, QuorumMean
from laconic.algorithms.schedules import Every, own_pace
from laconic.algorithms.update import Clock
from laconic.buckets import state_dtype
from laconic.engine.channel import Channel, is_owned
from laconic.engine.parameter_rounds import ParameterRunner
from laconic.engine.session import Session
from laconic.links.comm_thread import Pending
from laconic.links.quorum.port import (
    Announcement,
    Appointment,
    Closing,
    Delivery,
    Port,
    Rules,
    Speed,
)
from laconic.links.quorum.start import open_port
from laconic.links.quorum.syncer import Syncer


class Sent(NamedTuple):
    """What a worker has sent after ``step``. The ``tensors`` receive the result."""

    step: int
    tensors: list[Tensor]
    pending: Pending[Closing]


@dataclass
class Kind:
    """Rounds that are due at the same steps, and close together.

    ``base``: the number of the round whose result this worker last received; 0: the common start.
    ``since``: the step after which it received that result, at the time ``began``. ``pace``: the
    number of steps until it arrives again; 0: as the schedule says. ``known``: whether rank 0 has
    the result ``base``. ``sent``: the round that it takes part in and whose result it has not
    taken over, because something interrupted the wait.
    """

    runners: list[ParameterRunner]
    schedule: Every
    exchange: QuorumMean
    base: int = 0
    since: int = 0
    began: float = 0.0
    pace: int = 0
    known: bool = True
    sent: Sent | None = None

    @property
    def channels(self) -> list[Channel]:
        """Those of all its rounds."""
        return [channel for running in self.runners for channel in running.channels]

    def due(self, step: int) -> bool:
        """Whether this worker arrives after ``step``."""
        if self.pace:
            return step >= self.since + self.pace
        return self.schedule(step)


class QuorumRounds:
    """The rounds of a recipe that close with a quorum. All ranks must make one at the same time."""

    def __init__(self, session: Session, rounds: Sequence[ParameterRunner]) -> None:
        self._session = session
        self._link = session.workers
        self.kinds = _kinds(rounds)
        like = [[c.bucket.empty() for c in kind.channels] for kind in self.kinds]
        self._syncer: Syncer | None = None
        self._merger: Merger | None = None
        self.port: Port = session.comm.call(
            partial(open_port, self._link, like, session.step, self._make_syncer),
            "opening rounds with a quorum",
        )
        for kind in self.kinds:
            kind.since, kind.began = session.step, self._worked(session.step)
            if kind.exchange.pace == "own":
                kind.pace = kind.schedule.offset or kind.schedule.period
        self.listen()

    def _make_syncer(self, recorded: Sequence[Closing] | None) -> Syncer:
        n = self._link.size
        self._merger = Merger(self.kinds, n, self._session.settings.seed)
        rules = [Rules(k.exchange.workers or n, k.exchange.grace) for k in self.kinds]
        self._syncer = Syncer(n, rules, self._merger, self._paces, recorded)
        return self._syncer

    def _paces(
        self, kind: int, speeds: Mapping[int, Speed], roster: Sequence[int]
    ) -> Sequence[Appointment]:
        exchange, n = self.kinds[kind].exchange, self._link.size
        if exchange.pace == "equal":
            return [Appointment(0)] * len(roster)
        fastest = max((s.steps for s in speeds.values()), default=0.0)
        usual = median_low([s.sending for s in speeds.values()] or [0.0])
        period, unknown = self.kinds[kind].schedule.period, Speed(fastest, usual)
        known = [speeds.get(rank, unknown) for rank in roster]
        skip = exchange.workers is not None and exchange.workers < n
        pace = partial(own_pace, period, fastest=fastest, grace=exchange.grace, skip=skip)
        return [Appointment(*pace(s.steps, sending=s.sending - usual)) for s in known]

    # -- one round ----

    def communicate(self, step: int, *, now: bool = False) -> int:
        """Take part in the rounds that are due after ``step``, or in all rounds if ``now``. Returns
        their number."""
        ran = 0
        for index, kind in enumerate(self.kinds):
            if now or kind.due(step):
                self._session.status(kind.runners[0].label(step))
                self._deliver(index, kind, step)
                self._session.status("computing")
                ran += len(kind.runners)
        return ran

    def _deliver(self, index: int, kind: Kind, step: int) -> None:
        tensors, bases = [], []
        for running in kind.runners:
            for channel in running.channels:
                x = channel.bucket.pack(channel.bucket.empty())
                clock = Clock(step, math.nan, running.executed, 0, self._link.size)
                tensors.append(running.round.update.send(x, channel.state, clock))
                if not kind.known:
                    bases.append(channel.exchange_state["base"].to(x.dtype))
        seconds = self._worked(step) - kind.began
        about = Announcement(index, kind.base, step - kind.since, seconds, step, self._rates())
        delivery = Delivery(about, tensors, None if kind.known else bases)
        job, label = partial(self.port.deliver, delivery), kind.runners[0].label(step)
        kind.sent = Sent(step, tensors, self._session.comm.submit(job, label))
        self._take_over(kind, kind.sent)

    def settle(self) -> None:
        """Take over the results of rounds whose wait something has interrupted, such as a signal
        handler that raised. To be called before x changes or is read."""
        for kind in self.kinds:
            if kind.sent is not None:
                self._take_over(kind, kind.sent)

    def _take_over(self, kind: Kind, sent: Sent) -> None:
        step, closing = sent.step, sent.pending.wait()
        for channel, received in zip(kind.channels, sent.tensors, strict=True):
            channel.bucket.unpack(received)
            channel.exchange_state["base"].copy_(received)
        for running in kind.runners:
            running.after_quorum()
        kind.base, kind.since, kind.known, kind.sent = closing.number, step, True, None
        kind.pace = closing.pace(self._link.rank)
        kind.began = self._worked(step)

    def _worked(self, step: int) -> float:
        """Seconds without those spent waiting, after ``step`` steps, since an arbitrary start."""
        return self.port.worked(step, self._session.comm.seconds_waiting)

    def _rates(self) -> tuple[float, ...]:
        optimizer = self._session.optimizer
        groups = () if optimizer is None else optimizer.param_groups
        return tuple(float(group.get("lr", math.nan)) for group in groups)

    # -- calls of all workers ----

    def listen(self) -> None:
        """From now on, announce calls that wait for all workers."""
        self._session.meet = self.meet

    def meet(self) -> None:
        """Announce a call that waits for all workers: see `Port.meet`."""
        self.settle()
        self._session.comm.call(partial(self.port.meet, self._session.step), "a call of all")

    def catch_up(self, *, keep: bool) -> None:
        """Move x of a late worker from the result from which it started to that of the latest
        round: ``x <- x + (a - base)``. The mean of x over all workers then includes every step.
        ``keep``: the worker continues from there. All ranks must call it, after `meet`."""
        session = self._session
        latest = [0] * len(self.kinds) if self._syncer is None else self._syncer.rounds
        row = torch.tensor([*latest, *(kind.base for kind in self.kinds)])
        everyone = session.gather(row)
        for index, kind in enumerate(self.kinds):
            number = int(everyone[0, index])
            if bool((everyone[:, len(self.kinds) + index] == number).all()):
                continue
            for at, channel in enumerate(kind.channels):
                if not _anchored(channel):  # running statistics are means: nothing is added to them
                    continue
                a = channel.bucket.empty()
                if self._merger is not None:
                    a.copy_(self._merger.results[index][at])
                session.comm.call(partial(session.world.broadcast, a), "catching up")
                if kind.base < number:
                    base = channel.exchange_state["base"]
                    x = channel.bucket.pack(channel.bucket.empty())
                    channel.bucket.unpack(x.to(base.dtype) + (a.to(base.dtype) - base))
                    if keep:
                        base.copy_(a)
            if keep:
                kind.base = number
                if self._merger is not None:
                    self._merger.all_hold(index, number)

    # -- saving ----

    def state_dict(self) -> dict[str, Any]:
        """Where this worker is, and on rank 0 which rounds have closed, as plain data."""
        worked = self._worked(self._session.step)
        numbers = [
            {"base": k.base, "since": k.since, "pace": k.pace, "taken": worked - k.began}
            for k in self.kinds
        ]
        syncer = None
        if self._syncer is not None and self._merger is not None:
            syncer = {**self._syncer.state(), "bases": self._merger.state()}
        return {"kinds": numbers, "syncer": syncer}

    def load(self, state: Mapping[str, Any], step: int) -> None:
        """Restore what `state_dict` returned after ``step`` steps."""
        self.port.restart(step)
        worked = self._worked(step)
        for kind, saved in zip(self.kinds, state["kinds"], strict=True):
            kind.base, kind.since, kind.pace = saved["base"], saved["since"], saved["pace"]
            kind.began = worked - saved["taken"]
            kind.known, kind.sent = False, None
        if self._syncer is not None and self._merger is not None and state["syncer"] is not None:
            self._syncer.load(state["syncer"])
            self._merger.load(state["syncer"]["bases"])

    def abandon(self) -> None:
        """Tell the others that this worker has failed."""
        self.port.abandon()

    def close(self) -> None:
        """This worker takes part in no more rounds."""
        if self._session.meet == self.meet:  # not another recipe's by now
            self._session.meet = None
        self._session.comm.submit(self.port.close, "leaving")


class Merger:
    """Takes the outer steps on rank 0, when a round closes. ``results``: the results of the latest
    round of each kind, by channel."""

    def __init__(self, kinds: Sequence[Kind], workers: int, seed: int) -> None:
        self._kinds, self._workers, self._seed = kinds, workers, seed
        self.results = [
            [c.exchange_state["base"].to(c.bucket.dtype, copy=True) for c in k.channels]
            for k in kinds
        ]
        self._earlier: list[dict[int, list[Tensor]]] = [{0: r} for r in self.results]
        """By kind and round number: the results from which some worker has started."""
        self._held = [[0] * workers for _ in kinds]
        """By kind and rank: the number of the round from whose result this worker has started."""

    @torch.no_grad()
    def __call__(self, closing: Closing, deliveries: Mapping[int, Delivery]) -> list[Tensor]:
        """Take the outer step of each round of the kind that closes. Return the results by
        channel."""
        kind, held = self._kinds[closing.kind], self._held[closing.kind]
        for rank, delivery in deliveries.items():
            if delivery.announcement.base != held[rank]:
                raise ValueError(
                    f"rank {rank} continues from round {delivery.announcement.base}, but rank 0 "
                    f"expects round {held[rank]}: load states that all ranks saved in one call of "
                    "laconic.save, or while no rank was in optimizer.step()"
                )
        results, at = [], 0
        for running in kind.runners:
            for channel in running.channels:
                results.append(self._merge(running, channel, at, closing, deliveries))
                at += 1
        self.results[closing.kind] = results
        earlier = self._earlier[closing.kind]
        earlier[closing.number] = results
        for rank in closing.roster:
            held[rank] = closing.number
        self._forget(closing.kind)
        return results

    def _merge(
        self,
        running: ParameterRunner,
        channel: Channel,
        at: int,
        closing: Closing,
        deliveries: Mapping[int, Delivery],
    ) -> Tensor:
        update, exchange, state = running.round.update, running.exchange, channel.state
        assert isinstance(exchange, QuorumMean), "this kind has no other"
        arrived = []
        for rank in closing.roster:
            tensors, bases = deliveries[rank].tensors, deliveries[rank].bases
            base = None
            if (begun := self._held[closing.kind][rank]) != closing.number - 1:
                base = (bases or self._earlier[closing.kind][begun])[at]
            arrived.append(Contribution(tensors[at], base, deliveries[rank].announcement.steps))
        anchor = self._anchor(running, channel)
        mean = exchange.mean(arrived, anchor, self._workers)
        first = deliveries[closing.roster[0]].announcement
        lr = first.rates[channel.bucket.group] if update.uses_lr else math.nan
        clock = Clock(
            *(first.step, lr, closing.number - 1, 0, self._workers, 0),
            seed=self._seed,
            bucket=channel.bucket.number,
            arrived=len(arrived),
        )
        owned = {k: t for k, t in state.items() if not t.dim() or is_owned(update, k, t)}
        result = update.combine(mean, owned, clock)
        state.update(owned)  # an outer optimizer makes its state in its first step
        return result.to(channel.bucket.dtype, copy=True)

    def _anchor(self, running: ParameterRunner, channel: Channel) -> Tensor | None:
        """The result of the previous round, to which late workers' steps are applied."""
        exchange, name = running.exchange, running.round.update.anchor
        if not isinstance(exchange, QuorumMean) or not exchange.anchored or name is None:
            return None
        return channel.state[name].to(state_dtype(channel.bucket.dtype))

    def all_hold(self, kind: int, number: int) -> None:
        """Record that all workers continue from the result of round ``number`` of this kind."""
        self._held[kind] = [number] * self._workers
        self._forget(kind)

    def _forget(self, kind: int) -> None:
        needed = {*self._held[kind]}
        earlier = self._earlier[kind]
        self._earlier[kind] = {n: r for n, r in earlier.items() if n in needed}

    def state(self) -> dict[str, Any]:
        """What a resumed run needs. Late workers send their bases themselves."""
        return {
            "held": [list(held) for held in self._held],
            "results": [[t.clone() for t in results] for results in self.results],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._held = [list(held) for held in state["held"]]
        self.results = [[t.clone() for t in results] for results in state["results"]]
        self._earlier = [{} for _ in self._kinds]


def _anchored(channel: Channel) -> bool:
    return isinstance(channel.exchange, QuorumMean) and channel.exchange.anchored


def _kinds(rounds: Sequence[ParameterRunner]) -> list[Kind]:
    found: dict[Every, list[ParameterRunner]] = {}
    for running in rounds:
        schedule = running.round.when
        assert isinstance(schedule, Every), "`check_quorum` has seen to it"
        found.setdefault(schedule, []).append(running)
    kinds = []
    for schedule, runners in found.items():
        exchange = runners[0].exchange
        assert isinstance(exchange, QuorumMean), "`check_quorum` has seen to it"
        kinds.append(Kind(runners, schedule, exchange))
    return kinds
