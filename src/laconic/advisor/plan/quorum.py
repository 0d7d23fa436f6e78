"""The simulation of rounds that close with a quorum: events in the order of their times.

`laconic.links.polls` says which round closes when, as in a training.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from laconic.advisor.plan.rounds import Price, Rounds
from laconic.advisor.plan.run import Log, Run
from laconic.algorithms.exchanges import QuorumMean
from laconic.algorithms.schedules import Every
from laconic.engine.quorum_rounds import paces
from laconic.links.polls import Rules, closing_time

DRAWN = 1024
"""Step times of a worker that are drawn at once."""


@dataclass
class _Kind:
    """Rounds that are due at the same steps, and close together.

    ``since`` and ``pace`` by worker: see `laconic.engine.quorum_rounds.Kind`. ``price``: of all its
    rounds. ``arrived``: when those that wait for it did.
    """

    schedule: Every
    exchange: QuorumMean
    since: list[int]
    pace: list[int]
    price: Price
    rules: Rules
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
    """What a worker does from one of its rounds to the next: seconds of ``exchanging``, and then of
    ``computing`` until ``end``."""

    end: float = 0.0
    exchanging: float = 0.0
    computing: float = 0.0

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
        self._present = self.cluster.everybody
        prices = rounds.prices(self._present)
        self.kinds: list[_Kind] = []
        for when in dict.fromkeys(r.when for r in rounds.all):
            alike = [k for k, r in enumerate(rounds.all) if r.when == when]
            exchange = rounds.all[alike[0]].exchange
            assert isinstance(exchange, QuorumMean) and isinstance(when, Every), "checked"
            pace = (when.offset or when.period) if exchange.pace == "own" else 0
            price = Price(
                network=sum(prices[k].network for k in alike),
                sending=sum(prices[k].sending for k in alike),
                sent=sum(prices[k].sent for k in alike),
            )
            rules = Rules(exchange.workers or n, exchange.grace)
            self.kinds.append(_Kind(when, exchange, [0] * n, [pace] * n, price, rules))
        self._there: dict[int, float] = {}
        """When each worker arrived that waits for a round."""
        self._speeds: dict[int, float] = {}
        self._closing: tuple[float, int] | None = None
        self._least = min(min(k.rules.quorum for k in self.kinds), n)
        self._arrivals: list[tuple[float, int, int]] = []
        self._step = [0] * n
        self._began: list[list[float]] = [[0.0] * n for _ in self.kinds]
        self._worked = [0.0] * n
        self._exchanged = 0.0
        """When the latest exchange ends: the next one begins then."""
        self._under_way = [_UnderWay() for _ in range(n)]

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
            self.log.spent["bandwidth"] -= each.after(at, each.exchanging, -each.computing)
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
                heapq.heappush(self._arrivals, (now, worker, index))
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
        heapq.heappush(self._arrivals, (now + seconds, worker, index))

    # -- rounds ----

    def _arrive(self, now: float, worker: int, index: int) -> None:
        kind, step = self.kinds[index], self._step[worker]
        seconds = self._worked[worker] - self._began[index][worker]
        if seconds > 0 and step > kind.since[worker]:
            self._speeds[worker] = (step - kind.since[worker]) / seconds
        kind.arrived[worker] = self._there[worker] = now

    def _next_closing(self) -> tuple[float, int] | None:
        """The time and the kind of the next closing, if no other worker arrives before it: not
        before the exchange under way ends. One that is known stays so until all have arrived, where
        there is one kind."""
        there, several = len(self._there), len(self.kinds) > 1
        if there >= self._least and (self._closing is None or several or there == self._n):
            times = [
                (time, index)
                for index, kind in enumerate(self.kinds)
                if (time := self._closing_time(kind)) is not None
            ]
            self._closing = min(times, default=None)
        if self._closing is None:
            return None
        return max(self._closing[0], self._exchanged), self._closing[1]

    def _closing_time(self, kind: _Kind) -> float | None:
        return closing_time(kind.rules, self._n, kind.arrived.values(), self._there.values())

    def close(self, index: int, until: float) -> None:
        """Close a round of the kind ``index`` with the workers that are there."""
        self._closing = None
        kind, price = self.kinds[index], self.kinds[index].price
        roster = sorted(worker for worker, time in kind.arrived.items() if time <= until)
        network = price.network
        if self.cluster.jitter and network:
            network = max(network + self._jitter.uniform(-1, 1) * self.cluster.jitter, 0.0)
        before, self._exchanged = self._exchanged, until + network
        latency = max(price.network - price.sending, 0.0)
        period = kind.schedule.period
        again = paces(kind.exchange, period, self._speeds, roster)
        for worker, steps in zip(roster, again, strict=True):
            arrived = kind.arrived.pop(worker)
            queued = max(before - arrived, 0.0)
            self.log.spent["stragglers"] += until - arrived - queued
            del self._there[worker]
            self.log.spent["latency"] += min(latency, network)
            self.log.spent["bandwidth"] += queued + max(network - latency, 0.0)
            self._under_way[worker] = _UnderWay(self._exchanged, network)
            count = self._step[worker] - kind.since[worker]
            share = 1 / len(self.kinds)
            self.log.counted += share * count
            self.log.useful += share * count * self.cluster.steps[worker]
            kind.since[worker] = self._step[worker]
            kind.pace[worker] = steps
            self._began[index][worker] = self._worked[worker]
        for worker in roster:
            self._go_on(worker, self._exchanged, index)
        self._account_for(self._n * price.sent, self._present)

    # -- failures ----

    def _restart(self, worker: int, at: float) -> float:
        """A lost worker is an error on all others: they start again from the checkpoint."""
        self._undo(at)
        resumed = self._start_again(worker, at, self._saved[0] / self._n)
        self._closing = None
        self._there.clear()
        for index, kind in enumerate(self.kinds):
            kind.arrived.clear()
            kind.since = list(self._step)
            self._began[index] = list(self._worked)
        self._arrivals.clear()
        self._exchanged = resumed
        for each in range(self._n):
            self._go_on(each, resumed, -1)
        return resumed
