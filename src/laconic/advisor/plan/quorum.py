"""The simulation of rounds that close with a quorum: events in the order of their times.

`laconic.links.quorum.syncer` says which round closes when, as in a training.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from laconic.advisor.plan.rounds import Rounds, message_bytes
from laconic.advisor.plan.run import Log, Run
from laconic.advisor.quorum import quorum_travel
from laconic.algorithms.exchanges import QuorumMean
from laconic.algorithms.round import AnyRound
from laconic.algorithms.schedules import Every
from laconic.engine.quorum_rounds import appointments
from laconic.links.quorum.port import Announcement, Appointment, Delivery, Rules, Speed
from laconic.links.quorum.syncer import Syncer

DRAWN = 1024
"""Step times of a worker that are drawn at once."""


@dataclass
class _Kind:
    """Rounds that are due at the same steps, and close together.

    ``since`` and ``pace`` by worker: see `laconic.engine.quorum_rounds.Kind`. ``send``: seconds of
    each worker's message. ``arrived``: when those that wait for it did.
    """

    rounds: list[AnyRound]
    schedule: Every
    exchange: QuorumMean
    since: list[int]
    pace: list[int]
    send: list[float]
    arrived: dict[int, float] = field(default_factory=dict)

    def next_step(self, worker: int, step: int) -> int:
        """The first step after ``step`` after which this worker arrives."""
        pace = self.pace[worker]
        if pace:
            return max(self.since[worker] + pace, step + 1)
        period, offset = self.schedule.period, self.schedule.offset
        return max(step + 1 + (offset - step - 1) % period, offset)


@dataclass
class _UnderWay:
    """What a worker does from one of its rounds to the next: seconds of ``receiving``, of
    ``computing`` until ``end``, and of ``sending``, one after the other."""

    end: float = 0.0
    receiving: float = 0.0
    computing: float = 0.0
    sending: float = 0.0

    def after(self, at: float, seconds: float, later: float) -> float:
        """Return how many of the ``seconds`` that last until ``later`` than ``end`` come after the
        time ``at``."""
        return min(max(self.end + later - at, 0.0), seconds)


class Quorum(Run):
    """A run whose rounds close with a quorum."""

    def __init__(self, rounds: Rounds, generator: torch.Generator) -> None:
        self._jitter = random.Random(int(torch.randint(2**31, (), generator=generator)))
        super().__init__(rounds, generator)
        n = self._n = self.cluster.workers
        self._all = torch.arange(n)
        self._rows: dict[int, tuple[Tensor, int]] = {}
        self._facts = self.cluster.facts()
        self._latency = self._facts.net("workers").one_way
        self._results: dict[tuple[int, int], list[float]] = {}
        self.kinds: list[_Kind] = []
        for when in dict.fromkeys(r.when for r in rounds.all):
            alike = [r for r in rounds.all if r.when == when]
            exchange = alike[0].exchange
            assert isinstance(exchange, QuorumMean) and isinstance(when, Every), "checked"
            pace = (when.offset or when.period) if exchange.pace == "own" else 0
            there = [quorum_travel(r, self._facts)[0] for r in alike]
            send = [sum(each) for each in zip(*there, strict=True)]
            self.kinds.append(_Kind(alike, when, exchange, [0] * n, [pace] * n, send))
        self._syncer = self._new_syncer()
        self._closing: tuple[float, int] | None = None
        self._least = min(min(k.exchange.workers or n for k in self.kinds), n)
        self._alike = len(self.kinds) == 1 and self.kinds[0].exchange.pace == "equal"
        """Whether each round waits for all workers during its grace."""
        self._arrivals: list[tuple[float, int, int]] = []
        self._step = [0] * n
        self._began: list[list[float]] = [[0.0] * n for _ in self.kinds]
        self._worked = [0.0] * n
        self._sent_until = 0.0
        self._under_way = [_UnderWay() for _ in range(n)]

    def _new_syncer(self) -> Syncer:
        rules = [Rules(k.exchange.workers or self._n, k.exchange.grace) for k in self.kinds]
        nothing: tuple[Tensor, ...] = ()
        return Syncer(
            self._n, rules, lambda closing, _: dict.fromkeys(closing.roster, nothing), self._paces
        )

    def _paces(
        self, kind: int, speeds: Mapping[int, Speed], roster: Sequence[int]
    ) -> Sequence[Appointment]:
        about = self.kinds[kind]
        return appointments(about.exchange, about.schedule.period, self._n, speeds, roster)

    # -- the run ----

    def run(self, steps: int) -> Log:
        """Simulate until the workers have contributed ``steps`` each, on average."""
        goal, time = self._n * steps, 0.0
        every = self.cluster.failures.checkpoint if self._lives is not None else None
        for worker in range(self._n):
            self._go_on(worker, 0.0, -1)
        while self.log.counted < goal:
            closing = self._next_closing()
            arrival = self._arrivals[0][0] if self._arrivals else math.inf
            soonest = min(closing[0] if closing else math.inf, arrival)
            failure = self._failure(self._all, soonest)
            if failure is not None:
                time = self._restart(*failure)
                continue
            if closing is not None and closing[0] < arrival:
                time = closing[0]
                self.close(closing[1], time)
                if every is not None and self.log.counted >= self._saved[0] + every * self._n:
                    self._save()
            else:
                assert self._arrivals, "somebody can always arrive"
                self._arrive(*heapq.heappop(self._arrivals))
        self._undo(time)
        self.now[:] = time
        return self.log

    def _save(self) -> None:
        """All workers write a checkpoint."""
        self._checkpoint()
        seconds = self.cluster.failures.save
        self._arrivals = [(at + seconds, worker, kind) for at, worker, kind in self._arrivals]
        for _, worker, _ in self._arrivals:
            self._under_way[worker].end += seconds

    def _undo(self, at: float) -> None:
        """What the workers would have done after the time ``at`` has not happened."""
        for each in self._under_way:
            self.log.spent["compute"] -= each.after(at, each.computing, 0.0)
            network = each.after(at, each.sending, each.sending)
            network += each.after(at, each.receiving, -each.computing)
            self.log.spent["bandwidth"] -= network
        self._under_way = [_UnderWay() for _ in range(self._n)]

    def _seconds(self, worker: int, steps: int) -> float:
        """Return the seconds of this worker's next ``steps`` steps."""
        if self._times.constant:
            return self.cluster.steps[worker] * steps
        total = 0.0
        while steps:
            sums, used = self._rows.get(worker, (torch.zeros(1), 0))
            if used == len(sums) - 1:
                drawn = self._times.rows(worker, DRAWN)
                sums, used = torch.cat([torch.zeros(1, dtype=torch.float64), drawn.cumsum(0)]), 0
            take = min(steps, len(sums) - 1 - used)
            total += float(sums[used + take] - sums[used])
            self._rows[worker] = sums, used + take
            steps -= take
        return total

    def _go_on(self, worker: int, now: float, after: int) -> None:
        """Worker ``worker`` continues ``now``, after its rounds up to the kind ``after``."""
        step = self._step[worker]
        for index in range(after + 1, len(self.kinds) if after >= 0 else 0):
            if self.kinds[index].next_step(worker, step - 1) == step:
                self._deliver(worker, index, now)
                return
        nexts = [(kind.next_step(worker, step), index) for index, kind in enumerate(self.kinds)]
        due, index = min(nexts)
        steps = due - step
        seconds = self._seconds(worker, steps)
        self._worked[worker] += seconds
        self._step[worker] = due
        self.log.spent["compute"] += seconds
        under_way = self._under_way[worker]
        under_way.end, under_way.computing = now + seconds, seconds
        self._deliver(worker, index, now + seconds)

    def _deliver(self, worker: int, index: int, now: float) -> None:
        kind = self.kinds[index]
        sending = kind.send[worker]
        if self.cluster.jitter and sending:
            jitter = self.cluster.jitter / 2  # that of a message
            sending = max(sending + self._jitter.uniform(-jitter, jitter), 0.0)
        self._spend(sending)
        self._under_way[worker].end, self._under_way[worker].sending = now, sending
        heapq.heappush(self._arrivals, (now + sending, worker, index))

    def _spend(self, network: float) -> None:
        latency = min(self._latency, network)
        self.log.spent["latency"] += latency
        self.log.spent["bandwidth"] += network - latency

    # -- rounds ----

    def _arrive(self, now: float, worker: int, index: int) -> None:
        kind, step = self.kinds[index], self._step[worker]
        seconds = self._worked[worker] - self._began[index][worker]
        announced = Announcement(index, 0, step - kind.since[worker], seconds, step)
        self._syncer.arrive(worker, Delivery(announced, ()), now, kind.send[worker])
        kind.arrived[worker] = now

    def _next_closing(self) -> tuple[float, int] | None:
        """See `Syncer.next_closing`, which looks at all workers: it is asked where it may have
        another answer than before."""
        there = sum(len(kind.arrived) for kind in self.kinds)
        if there < self._least:
            return None
        if self._closing is None or there == self._n or not self._alike:
            self._closing = self._syncer.next_closing()
        return self._closing

    def close(self, index: int, until: float) -> None:
        """Close a round of the kind ``index`` with the workers that are there."""
        self._closing = None
        self._syncer.close(index, until)
        kind, closing = self.kinds[index], self._syncer.closings.pop()
        roster = closing.roster
        remote = len(roster) - (roster[0] == 0)
        receive = self._result_seconds(index, remote)
        behind = max(self._sent_until - until, 0.0)  # other results that rank 0 still sends
        self._sent_until = until + behind + min((receive[w] for w in roster if w), default=0.0)
        for worker, steps in zip(roster, closing.paces, strict=True):
            self.log.spent["stragglers"] += until - kind.arrived.pop(worker)
            receiving = receive[worker] + (behind if worker else 0.0)
            self._spend(receiving)
            self._under_way[worker] = _UnderWay(until + receiving, receiving)
            count = self._step[worker] - kind.since[worker]
            share = 1 / len(self.kinds)
            self.log.counted += share * count
            self.log.useful += share * count * self.cluster.steps[worker]
            kind.since[worker] = self._step[worker]
            kind.pace[worker] = steps
            self._began[index][worker] = self._worked[worker]
        for worker in roster:
            self._go_on(worker, until + self._under_way[worker].receiving, index)
        size, sites = sum(message_bytes(r, self._facts) for r in kind.rounds), self.cluster.site_of
        self.log.sent += 2 * remote * size
        self.log.crossed += 2 * size * sum(sites[worker] != sites[0] for worker in roster)

    def _result_seconds(self, index: int, remote: int) -> list[float]:
        """Return the seconds of a result, by worker, if ``remote`` workers other than rank 0 get
        one."""
        if not remote:
            return [0.0] * self._n
        if (index, remote) not in self._results:
            rounds = self.kinds[index].rounds
            back = [quorum_travel(r, self._facts, remote)[1] for r in rounds]
            self._results[index, remote] = [sum(each) for each in zip(*back, strict=True)]
        return self._results[index, remote]

    # -- failures ----

    def _restart(self, worker: int, at: float) -> float:
        """A lost worker is an error on all others: they start again from the checkpoint."""
        self._undo(at)
        resumed = self._start_again(worker, at, self._saved[0] / self._n)
        state = self._syncer.state()
        self._syncer, self._closing = self._new_syncer(), None
        self._syncer.load(state)
        for index, kind in enumerate(self.kinds):
            kind.arrived.clear()
            kind.since = list(self._step)
            self._began[index] = list(self._worked)
        self._arrivals.clear()
        self._sent_until = resumed
        for each in range(self._n):
            self._go_on(each, resumed, -1)
        return resumed
