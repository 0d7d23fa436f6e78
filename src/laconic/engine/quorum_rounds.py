"""Runs rounds with a quorum on one worker, and their outer steps on rank 0."""

from __future__ import annotations

import time
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
from laconic.engine.channel import Channel
from laconic.engine.elastic_quorum import ElasticPort
from laconic.engine.messages import combined, owned_names
from laconic.engine.parameter_rounds import ParameterRunner
from laconic.engine.session import Session
from laconic.errors import NotFiniteError
from laconic.links.comm_thread import Pending
from laconic.links.cost import Cost
from laconic.links.quorum.polls import rules_of
from laconic.links.quorum.port import (
    Announcement,
    Appointment,
    Closing,
    Delivery,
    Outcome,
    Port,
    Result,
    Rules,
    Speed,
)
from laconic.links.quorum.start import open_port
from laconic.links.quorum.syncer import Syncer
from laconic.tensors import state_dtype

MOST_CODES = 16
"""The most rounds that a worker can have missed to receive their codes."""


class Sent(NamedTuple):
    """The ``messages`` that a worker has sent after ``step``, and what it receives for them."""

    step: int
    messages: list[Tensor]
    pending: Pending[Outcome]


@dataclass
class Kind:
    """Rounds that are due at the same steps, and close together.

    ``base``: the number of the round whose result this worker last received; 0: the common start.
    ``since``: the step after which it received that result, at the time ``began``. ``pace``: the
    number of steps until it arrives again; 0: as the schedule says. ``known``: whether rank 0 has
    what this worker started from, bit for bit. ``sent``: the round that it takes part in and whose
    result it has not taken over, because something interrupted the wait. ``merger``: on rank 0.
    """

    runners: list[ParameterRunner]
    schedule: Every
    base: int = 0
    since: int = 0
    began: float = 0.0
    pace: int = 0
    known: bool = True
    sent: Sent | None = None
    merger: Merger | None = None

    @property
    def exchange(self) -> QuorumMean:
        """That of its rounds, which have the same rules."""
        exchange = self.runners[0].exchange
        assert isinstance(exchange, QuorumMean), "`check_quorum` has seen to it"
        return exchange

    @property
    def channels(self) -> list[Channel]:
        """Those of all its rounds."""
        return [channel for running in self.runners for channel in running.channels]

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rates of `channels`; NaN where it does not count."""
        return tuple(r.clock(c.bucket, 0).lr for r in self.runners for c in r.channels)

    def due(self, step: int) -> bool:
        """Whether this worker arrives after ``step``."""
        if self.pace:
            return step >= self.since + self.pace
        return self.schedule(step)


def appointments(
    exchange: QuorumMean,
    period: int,
    workers: int,
    speeds: Mapping[int, Speed],
    roster: Sequence[int],
) -> Sequence[Appointment]:
    """Return when each worker of ``roster`` takes part again: see `Paces`."""
    if exchange.pace == "equal":
        return [Appointment(0)] * len(roster)
    fastest = max((s.steps for s in speeds.values()), default=0.0)
    usual = median_low([s.sending for s in speeds.values()] or [0.0])
    known = [speeds.get(rank, Speed(fastest, usual)) for rank in roster]
    skip = exchange.workers is not None and exchange.workers < workers
    pace = partial(own_pace, period, fastest=fastest, grace=exchange.grace, skip=skip)
    return [Appointment(*pace(s.steps, sending=s.sending - usual)) for s in known]


class QuorumRounds:
    """The rounds of a recipe that close with a quorum. All ranks must make one at the same time."""

    def __init__(self, session: Session, rounds: Sequence[ParameterRunner]) -> None:
        self._session = session
        self._link = session.workers
        self.closed = False
        self.kinds = _kinds(rounds)
        like = [[_exchange(c).like(c.bucket.empty()) for c in k.channels] for k in self.kinds]
        self._syncer: Syncer | None = None
        self._elastic: ElasticPort | None = None
        self.port: Port
        if session.elastic is not None:
            rules = [rules_of(k.exchange.workers, k.exchange.grace) for k in self.kinds]
            self.port = self._elastic = ElasticPort(session, self.kinds, rules, self._paces)
        else:
            self.port = session.comm.call(
                partial(open_port, self._link, like, session.step, self._make_syncer),
                "opening rounds with a quorum",
            )
        self._booked = self.port.served
        """What of `Port.served` is in the ledger."""
        self._begin(session.step, first=True)

    def _begin(self, step: int, *, first: bool = False) -> None:
        """A period of every kind begins after ``step``; ``first``: that of the start."""
        for kind in self.kinds:
            kind.since, kind.began = step, self._worked(step)
            if kind.exchange.pace == "own":
                kind.pace = (first and kind.schedule.offset) or kind.schedule.period

    def _make_syncer(self, recorded: Sequence[Closing] | None) -> Syncer:
        n, seed = self._link.size, self._session.settings.seed
        mergers = [Merger(kind, n, seed) for kind in self.kinds]
        for kind, merger in zip(self.kinds, mergers, strict=True):
            kind.merger = merger
        rules = [Rules(k.exchange.workers or n, k.exchange.grace) for k in self.kinds]
        self._syncer = Syncer(n, rules, lambda c, d: mergers[c.kind](c, d), self._paces, recorded)
        return self._syncer

    def _paces(
        self, kind: int, speeds: Mapping[int, Speed], roster: Sequence[int]
    ) -> Sequence[Appointment]:
        period = self.kinds[kind].schedule.period
        return appointments(self.kinds[kind].exchange, period, self._link.size, speeds, roster)

    # -- one round ----

    def communicate(self, step: int) -> int:
        """Take part in the rounds that are due after ``step``. Returns their number."""
        ran = 0
        for index, kind in enumerate(self.kinds):
            if kind.due(step):
                self._session.status(kind.runners[0].label(step))
                self._deliver(index, kind, step)
                self._session.status("computing")
                ran += len(kind.runners)
        return ran

    def _deliver(self, index: int, kind: Kind, step: int) -> None:
        messages, bases, room = [], [], []
        for running in kind.runners:
            for channel in running.channels:
                exchange, bucket = _exchange(channel), channel.bucket
                clock = running.clock(bucket, step)
                x = running.round.update.send(bucket.pack(bucket.empty()), channel.state, clock)
                message = exchange.message(x, channel.exchange_state)
                messages.append(message)
                room.append(exchange.room(message, x))
                if not kind.known and kind.exchange.needs_bases:
                    bases.append(channel.exchange_state["base"].to(message.dtype))
        seconds, steps = self._worked(step) - kind.began, step - kind.since
        about = Announcement(index, kind.base, steps, seconds, step, kind.rates, kind.known)
        delivery = Delivery(about, messages, bases or None, room)
        job, label = partial(self._carry, delivery), kind.runners[0].label(step)
        comm, start = self._session.comm, time.perf_counter()
        if self._elastic is not None:
            self._elastic.expect()
        kind.sent = Sent(step, messages, comm.submit(job, label))
        if kind.sent.pending.done():  # where there is no thread, `submit` has waited
            comm.record_wait(start)
        self._take_over(kind, kind.sent)

    def _carry(self, delivery: Delivery) -> Outcome:
        """Deliver, and book what this process has sent and received since the previous delivery: on
        rank 0, the results of all rounds that have closed meanwhile."""
        ledger, start = self._session.ledger, time.perf_counter()
        outcome = self.port.deliver(delivery)
        if self._elastic is not None:  # its link books
            return outcome
        sent, received = delivery.nbytes, outcome.nbytes
        if self._link.rank == 0:
            before, self._booked = self._booked, self.port.served
            sent, received = (now - was for now, was in zip(self._booked, before, strict=True))
        ledger.add("quorum", "workers", Cost(sent, 1), received, start)
        return outcome

    def before_step(self) -> None:
        """The training takes a step."""
        self.settle()
        if self._elastic is not None:
            self._elastic.resume()

    def settle(self, *, failed: bool = False) -> None:
        """Take over the results of rounds whose wait something has interrupted, such as a signal
        handler that raised. To be called before x changes or is read. ``failed``: if a round has
        failed, restore what this worker was before it, in place of raising the error again."""
        for kind in self.kinds:
            sent = kind.sent
            if sent is None:
                continue
            if failed and sent.pending.done() and sent.pending.error is not None:
                for channel, message in zip(kind.channels, sent.messages, strict=True):
                    x = channel.bucket.pack(channel.bucket.empty())
                    _exchange(channel).withdraw(message, x, channel.exchange_state)
                kind.sent = None
            else:
                self._take_over(kind, sent)

    def _take_over(self, kind: Kind, sent: Sent) -> None:
        closing, results = sent.pending.wait()
        if kind.sent is not sent:  # a signal handler has taken it over meanwhile
            return
        for channel, result in zip(kind.channels, results, strict=True):
            channel.bucket.unpack(_exchange(channel).receive(result, channel.exchange_state))
        for running in kind.runners:
            running.complete()
        kind.base, kind.since, kind.known, kind.sent = closing.number, sent.step, True, None
        elastic = self._elastic
        kind.pace = closing.pace(self._link.rank) if elastic is None else elastic.pace
        kind.began = self._worked(sent.step)

    def _worked(self, step: int) -> float:
        """Seconds without those spent waiting, after ``step`` steps, since an arbitrary start."""
        return self.port.worked(step, self._session.comm.seconds_waiting)

    # -- newcomers of elastic runs ----

    def follow(self) -> None:
        """Repeat the round that this newcomer's donor has recorded next."""
        assert self._elastic is not None, "only there workers come"
        self._elastic.follow()

    def start(self) -> None:
        """This newcomer has caught up, and takes part from now on."""
        assert self._elastic is not None, "only there workers come"
        self._elastic.start()
        self._begin(self._session.step)
        self._elastic.begin()

    # -- calls of all workers ----

    def meet(self) -> None:
        """Announce a call that waits for all workers: see `Port.meet`."""
        self.settle()
        if self._elastic is None:
            self._session.comm.call(partial(self.port.meet, self._session.step), "a call of all")

    def catch_up(self, *, keep: bool) -> None:
        """Move x of a late worker from the result from which it started to that of the latest
        round: ``x <- x + (a - base)``. The mean of x over all workers then includes every step.
        ``keep``: the worker continues from there. All ranks must call it, after `meet`."""
        if self._elastic is not None:
            self._elastic.catch_up(keep=keep)
            return
        session = self._session
        latest = [0] * len(self.kinds) if self._syncer is None else self._syncer.rounds
        row = torch.tensor([*latest, *(kind.base for kind in self.kinds)])
        everyone = session.gather(row)
        for index, kind in enumerate(self.kinds):
            number = int(everyone[0, index])
            if bool((everyone[:, len(self.kinds) + index] == number).all()):
                continue
            for at, channel in enumerate(kind.channels):
                if not _exchange(channel).anchored:
                    continue  # running statistics are means: nothing is added to them
                base = channel.exchange_state["base"]
                a = torch.empty_like(base)
                if kind.merger is not None:
                    a.copy_(kind.merger.results[at])
                session.comm.call(partial(session.world.broadcast, a), "catching up")
                if kind.base < number:
                    x = channel.bucket.pack(channel.bucket.empty())
                    channel.bucket.unpack(x.to(base.dtype) + (a - base))
                    if keep:
                        base.copy_(a)
            if keep:
                kind.base = number
                if kind.merger is not None:
                    kind.merger.all_hold(number)

    def rebase(self) -> None:
        """Every worker has replaced what it started from."""
        if self._elastic is not None:
            self._elastic.rebase()
            return
        for kind in self.kinds:
            kind.known = False

    # -- saving ----

    def state_dict(self) -> dict[str, Any]:
        """Where this worker is, and on rank 0 which rounds have closed, as plain data."""
        worked = self._worked(self._session.step)
        numbers = [
            {"base": k.base, "since": k.since, "pace": k.pace, "taken": worked - k.began}
            for k in self.kinds
        ]
        syncer: dict[str, Any] | None = None
        if self._elastic is not None:
            syncer = self._elastic.state()
        if self._syncer is not None:
            mergers = [kind.merger for kind in self.kinds if kind.merger is not None]
            bases = {
                "held": [list(m.held) for m in mergers],
                "results": [[t.clone() for t in m.results] for m in mergers],
            }
            syncer = {**self._syncer.state(), "bases": bases}
        return {"kinds": numbers, "syncer": syncer}

    def load(self, state: Mapping[str, Any], step: int) -> None:
        """Restore what `state_dict` returned after ``step`` steps."""
        self.port.restart(step)
        worked = self._worked(step)
        for kind, saved in zip(self.kinds, state["kinds"], strict=True):
            kind.base, kind.since, kind.pace = saved["base"], saved["since"], saved["pace"]
            kind.began = worked - saved["taken"]
            kind.known, kind.sent = False, None
        if self._elastic is not None:
            self._elastic.load(state["syncer"])
        if self._syncer is not None and state["syncer"] is not None:
            self._syncer.load(state["syncer"])
            bases = state["syncer"]["bases"]
            each = zip(self.kinds, bases["held"], bases["results"], strict=True)
            for kind, held, results in each:
                if kind.merger is not None:
                    kind.merger.load(held, results)

    def abandon(self) -> None:
        """Tell the others that this worker has failed."""
        self.port.abandon()

    def close(self) -> None:
        """This worker takes part in no more rounds."""
        self.closed = True
        if self._elastic is not None:
            self._elastic.close()
        else:
            self._session.comm.submit(self.port.close, "leaving")


class Merger:
    """Takes the outer steps of one ``kind`` of round on rank 0, when a round closes. ``results``:
    what workers receive as the results of the latest one, by channel. ``held``: by rank, the number
    of the round from whose result this worker has started."""

    def __init__(self, kind: Kind, workers: int, seed: int) -> None:
        self._kind, self._workers, self._seed = kind, workers, seed
        self.results = [_exchange(c).start(c.exchange_state, c.bucket.dtype) for c in kind.channels]
        self.held = [0] * workers
        self._earlier = {0: self.results}
        """By round number: the results from which some worker has started."""
        self._codes: dict[int, list[Tensor | None]] = {}
        """By round number: the codes of what the round has changed, by channel."""

    @torch.no_grad()
    def __call__(
        self, closing: Closing, deliveries: Mapping[int, Delivery]
    ) -> dict[int, list[Result]]:
        """Take the outer step of each round that closes. Return what each worker of the roster
        receives, by channel."""
        for rank, delivery in deliveries.items():
            if delivery.announcement.base != self.held[rank]:
                raise ValueError(
                    f"rank {rank} continues from round {delivery.announcement.base}, but rank 0 "
                    f"expects round {self.held[rank]}: load states that all ranks saved in one "
                    "call of laconic.save, or while no rank was in optimizer.step()"
                )
        published: list[tuple[Tensor, Tensor | None]] = []
        for running in self._kind.runners:
            for channel in running.channels:
                at = len(published)
                published.append(self._merge(running, channel, at, closing, deliveries))
        self.results = [result for result, _ in published]
        self._earlier[closing.number] = self.results
        self._codes[closing.number] = [code for _, code in published]
        known = {rank: deliveries[rank].announcement.known for rank in closing.roster}
        answers = {rank: self._answer(closing, rank, known[rank]) for rank in closing.roster}
        for rank in closing.roster:
            self.held[rank] = closing.number
        self._forget()
        return answers

    def _answer(self, closing: Closing, rank: int, known: bool) -> list[Result]:
        """What worker ``rank`` receives: the codes of the rounds since its last one, if they can be
        added to what it started from, and are shorter than the whole result."""
        since = self.held[rank]
        near = known and closing.number - since <= MOST_CODES
        missed = range(since + 1, closing.number + 1) if near else range(0)
        rounds = [self._codes.get(number) for number in missed]
        answer: list[Result] = []
        for at, whole in enumerate(self.results):
            codes = [code for r in rounds if r is not None and (code := r[at]) is not None]
            assert len(codes) in (0, len(missed)), "the codes of as many rounds are kept"
            size = sum(code.nbytes for code in codes)
            answer.append(codes if codes and size < whole.nbytes else whole)
        return answer

    def _merge(
        self,
        running: ParameterRunner,
        channel: Channel,
        at: int,
        closing: Closing,
        deliveries: Mapping[int, Delivery],
    ) -> tuple[Tensor, Tensor | None]:
        """The outer step on channel number ``at``: see `QuorumMean.publish`."""
        exchange, update = _exchange(channel), running.round.update
        failed = [r for r in closing.roster if exchange.failed(deliveries[r].tensors[at])]
        if failed:
            raise NotFiniteError(f"ranks {failed} had NaN or infinite values to send")
        arrived = []
        for rank in closing.roster:
            tensors, bases = deliveries[rank].tensors, deliveries[rank].bases
            base, begun = None, self.held[rank]
            if self._kind.exchange.needs_bases and begun != closing.number - 1:
                base = (bases or self._earlier[begun])[at]
            arrived.append(Contribution(tensors[at], base))
        anchor = None  # the result of the previous round, to which late workers' steps are applied
        if exchange.anchored and update.anchor is not None:
            anchor = channel.state[update.anchor].to(state_dtype(channel.bucket.dtype))
        mean = exchange.mean(arrived, anchor, self._workers)
        first = deliveries[closing.roster[0]].announcement
        clock = Clock(
            *(first.step, first.rates[at], closing.number - 1, 0, self._workers, 0),
            seed=self._seed,
            arrived=len(arrived),
        )
        names = owned_names(update, channel.state)
        result = combined(update, mean, channel.state, names, clock)
        return exchange.publish(result, self.results[at])

    def all_hold(self, number: int) -> None:
        """Record that all workers continue from the result of round ``number``."""
        self.held = [number] * self._workers
        self._forget()

    def _forget(self) -> None:
        needed = {*self.held} if self._kind.exchange.needs_bases else ()
        self._earlier = {n: r for n, r in self._earlier.items() if n in needed}
        first = max(min(self.held), max(self._codes, default=0) - MOST_CODES) + 1
        self._codes = {n: c for n, c in self._codes.items() if n >= first}

    def load(self, held: Sequence[int], results: Sequence[Tensor]) -> None:
        """Continue a saved run. Late workers send their bases themselves."""
        self.held, self.results = list(held), [t.clone() for t in results]
        self._earlier, self._codes = {}, {}


def _exchange(channel: Channel) -> QuorumMean:
    assert isinstance(channel.exchange, QuorumMean), "this kind has no other"
    return channel.exchange


def _kinds(rounds: Sequence[ParameterRunner]) -> list[Kind]:
    found: dict[Every, list[ParameterRunner]] = {}
    for running in rounds:
        schedule = running.round.when
        assert isinstance(schedule, Every), "`check_quorum` has seen to it"
        found.setdefault(schedule, []).append(running)
    return [Kind(runners, schedule) for schedule, runners in found.items()]
