"""Rounds with a quorum.

A round is one of all workers, with the outer state on each (`QuorumMean`): its part is taken by the
communication thread, whatever the training does. A worker that has not arrived contributes no
change. All decide in a poll (`laconic.links.polls`) that a round closes, and with whom; every call
of all workers begins with a poll, too. In an elastic run a round is a few units of the link, all or
nothing, the first of which begins with the poll, and any worker may be lost.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from laconic.algorithms.exchanges.quorum import QuorumMean
from laconic.algorithms.schedules import Every, own_pace
from laconic.algorithms.update import Clock
from laconic.engine.channel import Channel
from laconic.engine.messages import outer_step
from laconic.engine.parameter_rounds import ParameterRunner
from laconic.engine.session import Session
from laconic.errors import LinkError
from laconic.links.calls import FINISH
from laconic.links.comm_thread import Pending
from laconic.links.elastic.link import ElasticLink
from laconic.links.elastic.polling import polling_over_elastic
from laconic.links.link import complete, one_by_one
from laconic.links.polls import (
    ARRIVED,
    BUSY,
    CALLING,
    CALLS,
    Closing,
    Decision,
    Polling,
    Polls,
    Rules,
    Standing,
    polling_over,
)

SHORTEST, LONGEST, POLLS = 0.005, 1.0, 50
"""Between two polls is a ``POLLS``-th of the time between two rounds, in these bounds (seconds)."""


class Outcome(NamedTuple):
    """What a worker receives when its round has closed: the number of the round, after how many
    steps it arrives again (0: as the schedule says), and the results, by channel."""

    number: int
    pace: int
    results: list[Tensor]


@dataclass
class Kind:
    """Rounds that are due at the same steps, and close together.

    ``exchange``: that of the first of them, since all have the same rules. ``base``: the number of
    the round whose result this worker last received; 0: the common start. ``bases``: by channel,
    that result, from which its x has started; None for what has no anchor.
    ``since``: the step after which it received that result, at the time ``began``. ``pace``: the
    number of steps until it arrives again; 0: as the schedule says. ``sent``: what it receives from
    the round that it takes part in after the present step, until it has taken that over.
    """

    exchange: QuorumMean
    schedule: Every
    runners: list[ParameterRunner] = field(default_factory=list)
    base: int = 0
    bases: list[Tensor | None] = field(default_factory=list)
    since: int = 0
    began: float = 0.0
    pace: int = 0
    sent: Pending[Outcome] | None = None

    @property
    def all(self) -> list[tuple[ParameterRunner, Channel]]:
        """The channels of all its rounds."""
        return [(running, channel) for running in self.runners for channel in running.channels]

    def due(self, step: int) -> bool:
        """Whether this worker arrives after ``step``."""
        if self.pace:
            return step >= self.since + self.pace
        return self.schedule(step)

    def begin(self, step: int, worked: float, offset: int = 0) -> None:
        """A period begins after ``step``, at the time ``worked``. ``offset``: its length, if it
        differs from that of others."""
        self.since, self.began = step, worked
        if self.exchange.pace == "own":
            self.pace = offset or self.schedule.period

    def messages(self, step: int) -> list[Tensor]:
        """This worker's x, by channel."""
        return [
            running.round.update.send(
                channel.bucket.pack(channel.bucket.empty()),
                channel.state,
                running.clock(channel.bucket, step),
            )
            for running, channel in self.all
        ]

    def rates(self) -> tuple[float, ...]:
        """The learning rates of the channels; NaN where it does not count."""
        return tuple(running.clock(channel.bucket, 0).lr for running, channel in self.all)

    def anchors(self) -> list[Tensor | None]:
        """Copies of the anchors, as x has them."""
        found: list[Tensor | None] = []
        for running, channel in self.all:
            name = running.round.update.anchor
            with channel.states() as (state, _):
                a = None if name is None else state[name]
            found.append(None if a is None else a.to(channel.bucket.dtype).to(a.dtype, copy=True))
        return found


class Waits(NamedTuple):
    """What a worker waits for (see `Standing.state`), and since when. ``x``: what it contributes,
    by channel, with the learning ``rates``."""

    state: int
    since: float
    kind: int = 0
    x: Sequence[Tensor] = ()
    rates: tuple[float, ...] = ()


class PollLoop:
    """What the communication thread does for rounds of these ``kinds``."""

    def __init__(self, session: Session, kinds: Sequence[Kind], polling: Polling) -> None:
        self._session, self._kinds, self._polling = session, kinds, polling
        rules = [Rules(k.exchange.workers or sys.maxsize, k.exchange.grace) for k in kinds]
        again = [partial(paces, k.exchange, k.schedule.period) for k in kinds]
        self.polls = Polls(rules, again)
        self.clock = polling.clock(session.step)
        self.speed = 0.0
        """This worker's steps per second; 0 if unknown."""
        self.closings: list[Closing] = []
        self.resting = False
        """Whether all have finished: no poll is needed before this worker goes on."""
        self.alone = False
        """Whether the next job polls itself."""
        self.ended = False
        self.error: Exception | None = None
        self.turn_lock = threading.RLock()
        self._admit = True
        """Whether newcomers may begin: not between two units of one call."""
        self._latest, self._between = time.monotonic(), 0.0
        """When the latest round closed, and after how many seconds."""
        self._computing = self._latest
        """Since when the training computes."""

    def begin(self) -> None:
        """This worker takes part from now on."""
        self._computing = time.monotonic()
        self._session.comm.run_by(self.around, self._idle)

    def end(self) -> None:
        """This worker takes part in no more rounds."""
        self.ended, comm = True, self._session.comm
        if self._session.elastic is None and comm.around == self.around:  # no other has begun
            comm.run_by(None)

    def around(self, job: Callable[[], Any]) -> Any:
        """Run a job of the communication thread once all workers are in the same call."""
        if self.alone or self.ended or self._polling.replaying:
            alone, self.alone = self.alone, False
            return job() if alone else self._polling.unit(job)
        return self.until(Waits(CALLING, self.clock.arrive(self._session.step)), job)

    def until(self, waits: Waits, job: Callable[[], Any] = lambda: None) -> Any:
        """Poll until that has come which this worker waits for: the result of its round, or that of
        the ``job`` of a call."""
        while True:
            if self.error is not None:
                raise self.error
            with self.turn_lock:
                found = self.turn(waits, job)
            if found:
                self._computing = time.monotonic()
                return found[0]
            if found is None:
                time.sleep(self._pause)

    def _idle(self) -> float | None:
        """Take part in a poll while the training computes. Returns when to do so again."""
        if self._session.comm.failed:  # the other workers have stopped, or will
            return None
        if self.resting:
            return LONGEST
        try:
            with self.turn_lock:
                if not self.ended:
                    self.turn(Waits(BUSY, self._computing))
        except Exception as error:  # the next job raises it
            self.error = error
        return None if self.ended or self.error is not None else self._pause

    @property
    def _pause(self) -> float:
        between = max(self._between, time.monotonic() - self._latest)
        return pause(between)

    def turn(self, waits: Waits, job: Callable[[], Any] = lambda: None) -> list[Any] | None:
        """A poll, and what follows from it: a round, or the ``job`` of a call. Returns what this
        worker waits for, if that has come, in a list; None if nothing follows."""
        polling, unit = self._polling, self._polling.unit

        def begin() -> tuple[Decision, Any] | None:
            decision = polling.poll(self._standing(waits), self.polls, admit=self._admit)
            if decision is None:
                return None
            if decision.kind == CALLS:
                return decision, polling.call(job)
            return decision, self._exchange(decision, waits, 0)

        found = unit(begin)
        if found is None:
            return None
        decision, first = found
        if decision.kind == CALLS:
            self._admit = False
            self.resting = self._session.ledger.call == FINISH
            return [first]
        polling.note(decision)
        rest = range(1, len(self._kinds[decision.kind].all))
        others = [unit(partial(self._exchange, decision, waits, at)) for at in rest]
        return self._close(decision, [first, *others])

    def _standing(self, waits: Waits) -> Standing:
        most = max(len(kind.all) for kind in self._kinds)
        step, waited = self._session.step, self.clock.waited(waits.since)
        rates = (*waits.rates, *[math.nan] * (most - len(waits.rates)))
        return Standing(waits.state, waits.kind, waited, step, self.speed, rates)

    def _exchange(self, decision: Decision, waits: Waits, at: int) -> Tensor | None:
        """The round on channel number ``at``, if there is one. Returns the result if this worker
        contributes."""
        kind, polling, seed = self._kinds[decision.kind], self._polling, self._session.settings.seed
        if not kind.all:
            return None
        running, channel = kind.all[at]
        update, exchange, bucket = running.round.update, channel.exchange, channel.bucket
        assert isinstance(exchange, QuorumMean), "as in `_kinds`"
        contributes = polling.me in decision.roster
        x = waits.x[at] if contributes else bucket.empty()
        base = None if kind.base == decision.number - 1 else kind.bases[at]
        # one of the roster may have been lost since the poll, in an earlier unit of this round
        arrived = sum(id in decision.roster for id in polling.ids)
        n, link = running.link.size, one_by_one(running.link)
        about = decision.step, decision.rates[at], decision.number - 1, 0, n, running.link.rank
        clock = Clock(*about, seed=seed, arrived=arrived)
        with channel.states() as (state, carried):
            anchor = None if update.anchor is None else state[update.anchor]
            message = exchange.contribution(x, contributes, base, anchor, all_arrive=arrived == n)
            combine = outer_step(update, state, clock)
            arrival = complete(exchange.run(link, message, combine, clock, carried))
            return arrival.flat.to(bucket.dtype, copy=True) if contributes else None

    def _close(self, decision: Decision, results: list[Any]) -> list[Outcome]:
        """The round has closed. Returns what this worker has waited for, if it contributes."""
        kind, now, me = self._kinds[decision.kind], time.monotonic(), self._polling.me
        self.polls.rounds[decision.kind] = decision.number
        self._latest, self._between, self._admit = now, now - self._latest, True
        if self._session.elastic is None:
            roster = tuple(map(int, decision.roster))
            closing = Closing(decision.kind, decision.number, roster, decision.paces)
            self.closings.append(closing)
        if me not in decision.roster:
            return []
        results = results[: len(kind.all)]
        for base, result in zip(kind.bases, results, strict=True):
            if base is not None:
                base.copy_(result)
        pace = decision.paces[decision.roster.index(me)]
        return [Outcome(decision.number, pace, results)]


class QuorumRounds:
    """The rounds of a recipe that close with a quorum. All ranks must make one at the same time."""

    def __init__(self, session: Session, rounds: Sequence[ParameterRunner]) -> None:
        self._session = session
        self.kinds = _kinds(rounds)
        self.rebase()
        elastic = session.elastic
        if elastic is None:
            polling = polling_over(session.workers)
        else:
            assert isinstance(elastic, ElasticLink), "`check_quorum` has seen to it"
            polling = polling_over_elastic(elastic)
        self._loop = PollLoop(session, self.kinds, polling)
        for kind in self.kinds:
            kind.begin(session.step, self._worked(session.step), kind.schedule.offset)
        if elastic is None:  # in a call of all, if other rounds with a quorum have run so far
            session.comm.call(self._loop.begin, "opening rounds with a quorum")
        elif polling.replaying:
            session.comm.run_by(self._loop.around)
        else:
            self._loop.begin()

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
        x, rates, loop = kind.messages(step), kind.rates(), self._loop
        seconds, steps = self._worked(step) - kind.began, step - kind.since
        if seconds > 0 and steps > 0:
            loop.speed = steps / seconds
        arrived = Waits(ARRIVED, loop.clock.arrive(step), index, x, rates)
        session, comm, start = self._session, self._session.comm, time.perf_counter()
        loop.alone = True
        with session.at_work(f"the rounds after step {step}"):  # later they can be taken over
            kind.sent = comm.submit(partial(loop.until, arrived), kind.runners[0].label(step))
        if kind.sent.done():  # where there is no thread, `submit` has waited
            comm.record_wait(start)
        self._take_over(kind, kind.sent)

    def before_step(self) -> None:
        """The training takes a step."""
        self.settle()
        if self._loop.resting:
            self._loop.resting = False
            self._loop.begin()

    def settle(self, *, failed: bool = False) -> None:
        """Take over the results of rounds whose wait something has interrupted, such as a signal
        handler that raised. To be called before x changes or is read. ``failed``: if a round has
        failed, the error is not raised again."""
        for kind in self.kinds:
            sent = kind.sent
            if sent is None:
                continue
            if failed and sent.done() and sent.error is not None:
                kind.sent = None
            else:
                self._take_over(kind, sent)

    def _take_over(self, kind: Kind, sent: Pending[Outcome]) -> None:
        outcome, step = sent.wait(), self._session.step
        if kind.sent is not sent:  # a signal handler has taken it over meanwhile
            return
        for (_, channel), result in zip(kind.all, outcome.results, strict=True):
            channel.bucket.unpack(result)
        for running in kind.runners:
            running.complete()
        kind.base, kind.since, kind.sent = outcome.number, step, None
        kind.pace, kind.began = outcome.pace, self._worked(step)

    def _worked(self, step: int) -> float:
        """Seconds without those spent waiting, after ``step`` steps, since an arbitrary start."""
        return self._loop.clock.worked(step, self._session.comm.seconds_waiting)

    @property
    def closings(self) -> list[Closing]:
        """See `Synchronizer.closings`."""
        return list(self._loop.closings)

    def seconds(self, step: int) -> float:
        """See `Synchronizer.seconds`."""
        return self._loop.clock.seconds(step)

    # -- newcomers of elastic runs ----

    def follow(self) -> None:
        """Repeat the round that this newcomer's donor has recorded next. It contributes nothing."""
        loop = self._loop
        loop.alone = True
        self._session.comm.call(lambda: loop.turn(Waits(BUSY, 0.0)), "catching up")

    def start(self) -> None:
        """This newcomer has caught up, and takes part from now on, from the latest results."""
        step = self._session.step
        for kind, number in zip(self.kinds, self._loop.polls.rounds, strict=True):
            kind.base, kind.bases = number, kind.anchors()
            for (_, channel), a in zip(kind.all, kind.bases, strict=True):
                if a is not None:
                    channel.bucket.unpack(a)
            kind.begin(step, self._worked(step))
        self._loop.begin()

    # -- calls of all workers ----

    def catch_up(self, *, keep: bool) -> None:
        """Move x of a late worker from the result from which it started to that of the latest
        round: ``x <- x + (a - base)``. The mean of x over all workers then includes every step.
        ``keep``: the worker continues from there. All ranks must call it, in a call of all."""
        for kind, number in zip(self.kinds, self._loop.polls.rounds, strict=True):
            if kind.base == number:
                continue
            anchors = kind.anchors()
            for (_, channel), a, base in zip(kind.all, anchors, kind.bases, strict=True):
                if a is not None and base is not None:
                    x = channel.bucket.pack(channel.bucket.empty())
                    channel.bucket.unpack(x.to(a.dtype) + (a - base))
            if keep:
                kind.base, kind.bases = number, anchors

    def rebase(self) -> None:
        """Every worker has replaced what it started from by the anchor."""
        for kind in self.kinds:
            kind.bases = kind.anchors()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """A context in which no round changes the state of this worker. No job may be submitted
        inside."""
        with self._loop.turn_lock, self._session.comm.between_jobs():
            yield

    # -- saving ----

    def state_dict(self) -> dict[str, Any]:
        """Where this worker is, and which rounds have closed, as plain data."""
        worked = self._worked(self._session.step)
        kinds = [
            {"base": k.base, "since": k.since, "pace": k.pace, "taken": worked - k.began}
            for k in self.kinds
        ]
        bases = [[None if b is None else b.clone() for b in kind.bases] for kind in self.kinds]
        rounds, speed = [*self._loop.polls.rounds], self._loop.speed
        return {"kinds": kinds, "bases": bases, "rounds": rounds, "speed": speed}

    def load(self, state: Mapping[str, Any], step: int) -> None:
        """Restore what `state_dict` returned after ``step`` steps."""
        self._loop.clock.restart(step)
        worked = self._worked(step)
        each = zip(self.kinds, state["kinds"], state["bases"], strict=True)
        for kind, saved, bases in each:
            kind.base, kind.since, kind.pace = saved["base"], saved["since"], saved["pace"]
            kind.began, kind.sent = worked - saved["taken"], None
            device = self._session.device
            kind.bases = [None if b is None else b.to(device, copy=True) for b in bases]
        self._loop.polls.rounds = list(state["rounds"])
        self._loop.speed = state["speed"]

    # -- ending ----

    def abandon(self) -> bool:
        """This worker has failed. Returns whether the others may wait for it."""
        loop = self._loop
        waited_for = self._session.elastic is None and not (loop.resting or loop.ended)
        loop.ended, loop.error = True, LinkError("this worker has failed")
        return waited_for

    def close(self) -> None:
        """This worker takes part in no more rounds, once all leave: until then its communication
        thread does. Does not wait for that."""
        comm, loop = self._session.comm, self._loop
        alone = self._session.elastic is not None or not comm.threaded
        if alone or loop.resting or loop.ended or comm.failed:
            loop.end()
        else:
            comm.submit(loop.end, "leaving")


def pause(between: float) -> float:
    """The seconds between two polls where rounds are ``between`` seconds apart."""
    return min(max(between / POLLS, SHORTEST), LONGEST)


def paces(
    exchange: QuorumMean, period: int, speeds: Mapping[int, float], roster: Sequence[int]
) -> Sequence[int]:
    """Return after how many steps each worker of ``roster`` arrives again: see `Paces`."""
    if exchange.pace == "equal":
        return [0] * len(roster)
    fastest = max(speeds.values(), default=0.0)
    known = (speeds.get(rank, fastest) for rank in roster)
    return [own_pace(period, speed, fastest, grace=exchange.grace) for speed in known]


def _kinds(rounds: Sequence[ParameterRunner]) -> list[Kind]:
    found: dict[Every, Kind] = {}
    for running in rounds:
        schedule, exchange = running.round.when, running.round.exchange
        assert isinstance(schedule, Every), "`check_quorum` has seen to it"
        assert isinstance(exchange, QuorumMean), "`check_quorum` has seen to it"
        found.setdefault(schedule, Kind(exchange, schedule)).runners.append(running)
    return list(found.values())
