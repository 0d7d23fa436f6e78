"""Rounds with a quorum where workers come and go.

A round is one of all workers, with the outer state on each (`ReplicatedQuorumMean`): its part is
taken by the communication thread, whatever the training does. A worker that has not arrived
contributes no change. So a round is a few units of the link, all or nothing, and any worker may be
lost. The first unit begins with a poll (`laconic.links.quorum.polls`), in which all decide that a
round closes, and with whom; every call of all workers begins with one, too.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from laconic.algorithms.exchanges.quorum import ReplicatedQuorumMean
from laconic.algorithms.update import Clock
from laconic.engine.channel import Channel
from laconic.engine.messages import combined, owned_names
from laconic.engine.parameter_rounds import ParameterRunner
from laconic.engine.session import Session
from laconic.links.calls import FINISH
from laconic.links.comm_thread import coroutine, run_here
from laconic.links.elastic.link import ElasticLink
from laconic.links.elastic.polling import Polling
from laconic.links.elastic.simulated import SimulatedElasticLink, SimulatedPolling
from laconic.links.link import one_by_one
from laconic.links.quorum.polls import ARRIVED, BUSY, CALLING, CALLS, Decision, Polls, Standing
from laconic.links.quorum.port import Closing, Delivery, Outcome, Paces, Rules

SHORTEST, LONGEST, POLLS = 0.005, 0.1, 50
"""Between two polls are so many seconds, or a ``POLLS``-th of the time between two rounds."""


class Rounds(Protocol):
    """Rounds that close together, such as `laconic.engine.quorum_rounds.Kind`. ``base``: the number
    of the round whose result this worker received last."""

    base: int
    runners: list[ParameterRunner]

    @property
    def channels(self) -> list[Channel]:
        """Those of all its rounds."""

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rates of `channels`."""


class _Waits(NamedTuple):
    """What this worker waits for, if it does not compute, and since when."""

    state: int
    kind: int
    since: float


class ElasticPort:
    """The port of one worker of an elastic run. ``bases``: by kind and channel, the result from
    which this worker's x has started; None for what has no anchor. ``pace``: the number of steps
    until it arrives again, as of the latest round that it took part in."""

    closings: list[Closing] = []  # noqa: RUF012  never changed
    served = 0, 0

    def __init__(
        self, session: Session, kinds: Sequence[Rounds], rules: Sequence[Rules], paces: Paces
    ) -> None:
        link = session.elastic
        assert isinstance(link, ElasticLink), "`check_quorum` has seen to it"
        self._session, self._link, self._kinds = session, link, kinds
        self._polling = Polling(link)
        if isinstance(link, SimulatedElasticLink):
            self._polling = SimulatedPolling(link)
        self._clock = self._polling.clock(session.step)
        self._polls = Polls(rules, paces)
        self.bases = [[self._anchor(k, at) for at in range(len(k.channels))] for k in kinds]
        self.pace = 0
        self._delivery: Delivery | None = None
        self._speed = 0.0
        self._call = link.units.call
        """The latest call of all workers."""
        self._admit = True
        """Whether newcomers may begin: not between two units of one call."""
        self._rests = False
        """Whether all have finished: no poll is needed before this worker goes on."""
        self._alone = False
        """Whether the next job makes units itself."""
        self._closed = False
        self._error: Exception | None = None
        self._turn_lock = threading.RLock()
        self._latest, self._between = time.monotonic(), 0.0
        """When the latest round closed, and after how many seconds."""
        self._computing = self._latest
        """Since when the training computes."""
        link.around = self._around
        if not link.replaying:
            self.begin()

    # -- the time ----

    def seconds(self, step: int) -> float:
        """See `Port.seconds`."""
        return self._clock.seconds(step)

    def worked(self, step: int, waited: float) -> float:
        """See `Port.worked`."""
        return self._clock.worked(step, waited)

    def restart(self, step: int) -> None:
        """See `Port.restart`."""
        self._clock.restart(step)

    def quiet(self) -> AbstractContextManager[object]:
        """See `Port.quiet`. No job may be submitted inside."""
        return self._turn_lock

    # -- in the communication thread ----

    def deliver(self, delivery: Delivery) -> Outcome:
        """See `Port.deliver`."""
        about = delivery.announcement
        if about.seconds > 0 and about.steps > 0:
            self._speed = about.steps / about.seconds
        self._delivery = delivery
        waits = _Waits(ARRIVED, about.kind, self._clock.arrive(about.step))
        outcome: Outcome = self._until(waits, lambda: None)
        self._delivery = None
        return outcome

    def _around(self, job: Callable[[], Any]) -> Any:
        """Run a job of the communication thread once all workers are in the same call."""
        if self._alone or self._closed or self._link.replaying:
            alone, self._alone = self._alone, False
            return job() if alone else self._link.run(job)
        return self._until(_Waits(CALLING, 0, self._clock.arrive(self._session.step)), job)

    def _until(self, waits: _Waits, job: Callable[[], Any]) -> Any:
        while True:
            if self._error is not None:
                raise self._error
            with self._turn_lock:
                found = self._turn(waits, job)
            if found:
                self._computing = time.monotonic()
                return found[0]
            if found is None:
                time.sleep(self._pause)

    def _idle(self) -> float | None:
        """Take part in a poll while the training computes. Returns when to do so again."""
        if self._rests:
            return LONGEST
        try:
            with self._turn_lock:
                if not self._closed:
                    self._turn(_Waits(BUSY, 0, self._computing), lambda: None)
        except Exception as error:  # the next job raises it
            self._error = error
        return None if self._closed or self._error is not None else self._pause

    @property
    def _pause(self) -> float:
        between = max(self._between, time.monotonic() - self._latest)
        return min(max(between / POLLS, SHORTEST), LONGEST)

    def _turn(self, waits: _Waits, job: Callable[[], Any]) -> list[Any] | None:
        """A poll, and what follows from it: a round, or the ``job`` of a call. Returns what this
        worker waits for, if that has come, in a list; None if nothing follows."""
        link = self._link

        def begin() -> tuple[Decision, Any] | None:
            decision = self._polling.poll(self._standing(waits), self._polls, admit=self._admit)
            if decision is None:
                return None
            if decision.kind == CALLS:
                self._polling.resume(self._call)
                return decision, job()
            return decision, self._exchange(decision, 0)

        found = link.run(begin)
        if found is None:
            return None
        decision, first = found
        if decision.kind == CALLS:
            self._call, self._admit = link.units.call, False
            self._rests = self._call.name == FINISH
            return [first]
        if not link.replaying:
            event = {"round": decision.as_json(), "serial": link.units.serial - 1}
            link.units.note(event)
        rest = range(1, len(self._kinds[decision.kind].channels))
        results = [first, *(link.run(partial(self._exchange, decision, at)) for at in rest)]
        return self._close(decision, results if self._kinds[decision.kind].channels else [])

    def _standing(self, waits: _Waits) -> Standing:
        expected = tuple(kind.base + 1 for kind in self._kinds)
        most = max(len(kind.channels) for kind in self._kinds)
        delivery = self._delivery
        rates = () if delivery is None else delivery.announcement.rates
        return Standing(
            *(waits.state, waits.kind, self._clock.waited(waits.since), self._session.step),
            *(self._speed, expected, (*rates, *[math.nan] * (most - len(rates)))),
        )

    def _contributes(self, decision: Decision) -> bool:
        return self._link.units.me in decision.roster

    def _exchange(self, decision: Decision, at: int) -> Tensor | None:
        """The round on channel number ``at``. Returns the result if this worker contributes."""
        kind, contributes = self._kinds[decision.kind], self._contributes(decision)
        if not kind.channels:
            return None
        running, channel = [(r, c) for r in kind.runners for c in r.channels][at]
        exchange, update, bucket = channel.exchange, running.round.update, channel.bucket
        assert isinstance(exchange, ReplicatedQuorumMean), "`replicated` has made it"
        delivery, x = self._delivery, bucket.empty()
        if contributes:
            assert delivery is not None, "it has arrived"
            x = delivery.tensors[at]
        late = kind.base != decision.number - 1
        base = self.bases[decision.kind][at] if late else None
        anchor = None if update.anchor is None else channel.state[update.anchor]
        n, rank = running.link.size, running.link.rank
        arrived = min(len(decision.roster), n)
        message = exchange.contribution(x, contributes, base, anchor, all_arrive=arrived == n)
        clock = Clock(
            *(decision.step, decision.rates[at], decision.number - 1, 0, n, rank),
            seed=self._session.settings.seed,
            arrived=arrived,
        )
        names = owned_names(update, channel.state)
        combine = partial(combined, update, state=channel.state, names=names, clock=clock)
        state, link = channel.exchange_state, one_by_one(running.link)
        job = coroutine(lambda: exchange.run(link, message, combine, clock, state))
        arrival = run_here(None, job)
        return arrival.flat.to(bucket.dtype, copy=True) if contributes else None

    def _close(self, decision: Decision, results: list[Any]) -> list[Outcome]:
        """The round has closed. Returns what this worker has waited for, if it contributes."""
        index, now = decision.kind, time.monotonic()
        self._polls.rounds[index] = decision.number
        self._latest, self._between, self._admit = now, now - self._latest, True
        if not self._contributes(decision):
            return []
        for at, (base, result) in enumerate(zip(self.bases[index], results, strict=True)):
            if base is not None:
                self.bases[index][at] = result.to(base.dtype, copy=True)
        self.pace = decision.paces[decision.roster.index(self._link.units.me)]
        return [Outcome(Closing(index, decision.number, (0,), (self.pace,)), results)]

    # -- in the training's thread ----

    def expect(self) -> None:
        """The next job makes units itself."""
        self._alone = True

    def begin(self) -> None:
        """This worker takes part from now on."""
        self._computing = time.monotonic()
        self._session.comm.while_idle(self._idle)

    def resume(self) -> None:
        """The training goes on."""
        self._rests = False

    def follow(self) -> None:
        """A newcomer repeats the round that its donor has recorded next."""
        self.expect()
        job = partial(self._turn, _Waits(BUSY, 0, 0.0), lambda: None)
        self._session.comm.call(job, "catching up")

    def start(self) -> None:
        """A newcomer has caught up: it continues from the results of the latest rounds."""
        for index, kind in enumerate(self._kinds):
            kind.base = self._polls.rounds[index]
            for at, channel in enumerate(kind.channels):
                base = self.bases[index][at] = self._anchor(kind, at)
                if base is not None:
                    channel.bucket.unpack(base)

    def catch_up(self, *, keep: bool) -> None:
        """See `QuorumRounds.catch_up`."""
        for index, kind in enumerate(self._kinds):
            if kind.base == self._polls.rounds[index]:
                continue
            for at, channel in enumerate(kind.channels):
                base, a = self.bases[index][at], self._anchor(kind, at)
                if base is not None and a is not None:
                    x = channel.bucket.pack(channel.bucket.empty())
                    channel.bucket.unpack(x.to(a.dtype) + (a - base))
                    if keep:
                        self.bases[index][at] = a
            if keep:
                kind.base = self._polls.rounds[index]

    def rebase(self) -> None:
        """Every worker has replaced what it started from by the anchor."""
        for kind, bases in zip(self._kinds, self.bases, strict=True):
            bases[:] = [self._anchor(kind, at) for at in range(len(bases))]

    def _anchor(self, kind: Rounds, at: int) -> Tensor | None:
        """A copy of the anchor of channel number ``at``, as x has it."""
        running, channel = [(r, c) for r in kind.runners for c in r.channels][at]
        name = running.round.update.anchor
        if name is None:
            return None
        a = channel.state[name]
        return a.to(channel.bucket.dtype).to(a.dtype, copy=True)

    def state(self) -> dict[str, Any]:
        """What a worker that goes on from here needs, as plain data."""
        bases = [[None if b is None else b.clone() for b in each] for each in self.bases]
        return {"rounds": [*self._polls.rounds], "bases": bases, "speed": self._speed}

    def load(self, state: Any) -> None:
        """Restore what `state` returned."""
        self._polls.rounds = list(state["rounds"])
        self.bases = [[None if b is None else b.clone() for b in each] for each in state["bases"]]
        self._speed = state["speed"]

    def meet(self, step: int) -> None:
        """Does nothing: every call begins with a poll."""

    def close(self) -> None:
        """This worker takes part in no more rounds."""
        self._closed = True

    def abandon(self) -> None:
        """This worker has failed."""
        self._closed = True
