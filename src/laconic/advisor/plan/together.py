"""The simulation of rounds that wait for all workers, and of gossip.

One clock per worker, as a vector. Between two rounds it advances by the worker's own steps. At a
round it does what the engine does: rounds without a delay, and gradients, wait for the slowest
worker and then for the network; a delayed message is sent when the last worker has joined and the
network is free, and waited for when it is folded in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from laconic.advisor.advice import memory
from laconic.advisor.plan.rounds import Price, Rounds
from laconic.advisor.plan.times import Lives, Slices, StepTimes
from laconic.algorithms.exchange import Gossip
from laconic.policy.predict import often

CAUSES = ("compute", "stragglers", "bandwidth", "latency", "processors")
"""What a worker's time is spent on, apart from failures."""
LEAST, MOST = 5.0, 30.0
"""Seconds of silence, at least and at most, after which the others go on without a worker. Between
these, it is twice the time between rounds (docs/elastic.md)."""
DURING = 0.1
"""The share of its time for which a donor sends a newcomer its state while a round is under way."""
MARKS = 200
"""Points of a timeline, about."""
MOST_TRIES = 1000
"""Restarts from one checkpoint after which a run is given up."""
ADAM = 2
"""Numbers that the local optimizer stores for each parameter, which a newcomer receives, too."""


@dataclass
class Log:
    """What happened in a run: see `Result`. ``spent``: seconds of all workers by cause. ``redone``:
    those of computing that a failure has undone."""

    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    redone: float = 0.0
    sent: float = 0.0
    crossed: float = 0.0
    counted: float = 0.0
    useful: float = 0.0
    rounds: int = 0
    failures: int = 0
    joins: int = 0
    restarts: int = 0
    marks: list[tuple[float, float, int]] = field(default_factory=list)
    events: list[tuple[float, int, str]] = field(default_factory=list)


@dataclass
class _Flight:
    """A delayed message, by worker: when it was ``sent``, when all that it waits for had
    ``joined``, and when it is ``done``."""

    sent: Tensor
    joined: Tensor
    done: Tensor
    price: Price


class LostError(Exception):
    """A worker of a static run has failed at the time ``at``, or the last one of an elastic run."""

    def __init__(self, worker: int, at: float) -> None:
        super().__init__(worker, at)
        self.worker, self.at = worker, at


class Together:
    """A run in which all workers take the same steps."""

    def __init__(self, rounds: Rounds, generator: torch.Generator) -> None:
        self.rounds, self.cluster = rounds, rounds.cluster
        cluster = self.cluster
        self._generator = generator
        self._times = StepTimes(cluster.steps, cluster.spread, cluster.distribution, generator)
        self._means = torch.tensor(cluster.steps, dtype=torch.float64)
        n = cluster.workers
        self.now = torch.zeros(n, dtype=torch.float64)
        self._busy = torch.zeros(n, dtype=torch.float64)
        """Until when each worker's network sends."""
        self._received_until = torch.zeros(n, dtype=torch.float64)
        self._alive = torch.arange(n)
        self._flights: dict[tuple[int, int], _Flight] = {}
        """By round, and the step after which the message was sent."""
        self._executed = [0] * len(rounds.all)
        self._worked = torch.zeros(n, dtype=torch.float64)
        """Seconds that each worker has computed since its last round, and until when."""
        self._worked_until = torch.zeros(n, dtype=torch.float64)
        self._base = torch.zeros(n, dtype=torch.float64)
        self.log = Log()
        self._present = cluster.everybody
        self._latest = 0.0
        self._between = 0.0
        fails = cluster.failures
        self._slices = Slices(cluster, generator) if fails.happen and cluster.slices > 1 else None
        self._lives = Lives(cluster, generator) if fails.happen and cluster.slices == 1 else None
        self._tries = 0
        self._saved = 0.0, 0.0, 0.0
        """Steps that count, their seconds, and those of computing, at the last checkpoint."""
        self._saved_base = self._base.clone()
        """And the steps up to which they are counted: a checkpoint may lie between two rounds."""
        self._joins = torch.full((n,), math.inf, dtype=torch.float64)

    # -- the run ----

    def run(self, steps: int, first: int = 0) -> Log:
        """Simulate the ``steps`` after step ``first``."""
        due = {
            step: events
            for step in range(first + 1, first + steps + 1)
            if (events := list(self.rounds.events(step)))
        }
        saves = self._save_steps(first, steps)
        stops = sorted({*due, *saves, *self._mark_steps(first, steps), first + steps})
        self._base[:] = self._saved_base[:] = first
        at, saved, position = first, (first, 0), 0
        while position < len(stops):
            step = stops[position]
            try:
                self._compute(step - at)
                for k, what in due.get(step, ()):
                    self._event(k, what, step)
                at, position = step, position + 1
                self._mark(step)
                if step in saves:
                    self._save(step)
                    saved, self._tries = (step, position), 0
                    self._saved = self.log.counted, self.log.useful, self.log.spent["compute"]
                    self._saved_base = self._base.clone()
            except LostError as lost:
                at, position = self._restart(lost, *saved, at)
        for flight in [*self._flights]:
            self._fold(*flight)
        self._meet_all()
        self._contribute(first + steps, everything=True)
        return self.log

    def _mark_steps(self, first: int, steps: int) -> set[int]:
        every = max(steps // MARKS, 1)
        return {*range(first + every, first + steps + 1, every)}

    def _save_steps(self, first: int, steps: int) -> set[int]:
        every = self.cluster.failures.checkpoint
        if every is None or not self.cluster.failures.happen:
            return set()
        return {s for s in range(first + 1, first + steps + 1) if s % every == 0}

    def _mark(self, step: int) -> None:
        if self._lives is None or len(self._alive):
            time = float(self.now[self._alive].max())
            if not self.log.marks or self.log.marks[-1][1] < step:
                self.log.marks.append((time, step, len(self._alive)))

    def _compute(self, steps: int) -> None:
        if not steps:
            return
        work = self._times.sum(steps)
        ids = self._alive
        before = self.now[ids]
        if self._slices is None:
            self.now[ids] = before + work[ids]
        else:
            self.now[ids] = self._slices.finish(before, work[ids], ids)
        self.log.spent["compute"] += float(work[ids].sum())
        self._worked[ids] += work[ids]
        self._worked_until[ids] = self.now[ids]

    # -- one round ----

    def _event(self, k: int, what: str, step: int) -> None:
        r = self.rounds.all[k]
        if what == "folded":
            sent = step - r.delay
            if (k, sent) in self._flights:
                self._fold(k, sent)
            return
        self.log.rounds += 1
        if r.update.quiesces_others:
            for other in [flight for flight in self._flights if flight[0] != k]:
                self._fold(*other)
        if what == "backward":
            self._together(k, gradients=True)
        elif r.delay:
            self._send(k, step)
        elif isinstance(r.exchange, Gossip):
            self._gossip(k)
        else:
            self._together(k, gradients=False)
        self._executed[k] += 1
        self._worked.zero_()
        self._contribute(step)

    def _price(self, k: int) -> Price:
        return self.rounds.prices(self._present)[k]

    def _together(self, k: int, *, gradients: bool) -> None:
        """A round that all workers wait for."""
        done_part, repeated = 0.0, 0.0
        if not gradients and self._differ(k):
            part = self._in_stages(k)
            if part is None:
                return
            done_part, repeated = part
        while True:
            price = self._price(k)
            whole = price.exposed if gradients else price.network + price.work
            whole += self._late(price)
            seconds = (1 - done_part) * whole + repeated
            start = max(self._last(), 0.0 if gradients else float(self._busy[self._alive].max()))
            lost = self._lost_before(start + seconds)
            if lost is None:
                break
            if lost > start and seconds:  # what was exchanged by then remains
                done_part += (1 - done_part) * (lost - start) / seconds
                repeated = whole / price.units
        ids = self._alive
        self._wait("stragglers", start)
        self._spend_network(price, whole - price.work, price.work)
        self.now[ids] = start + seconds + price.stretch
        self.log.spent["processors"] += price.stretch * len(ids)
        self._busy[ids] = start + seconds
        self._account(price)
        self._rhythm(start + seconds)

    def _differ(self, k: int) -> bool:
        """Whether workers come to a round at different times, or send at different rates."""
        t = self._price(k).transfers
        if t is None:
            return False
        times, busy = self.now[self._alive], self._busy[self._alive]
        return any(bool(each.max() > each.min()) for each in (times, busy, t.send, t.receive))

    def _in_stages(self, k: int) -> tuple[float, float] | None:
        """A round that all wait for, in which each worker sends when it can. If one fails
        meanwhile, return the share of the round that was over, and the seconds of what runs
        again."""
        price, ids = self._price(k), self._alive
        assert price.transfers is not None, "asked for by `_together`"
        t = price.transfers
        before, start = self.now[ids], self._last()
        latency = (price.network - price.sending + self._late(price)) / t.stages
        ready = first = before
        busy = self._busy[ids]
        received = torch.maximum(self._received_until[ids], before - t.buffered * t.receive)
        for stage in range(t.stages):
            forwards = t.forwards and stage % 2 == 1  # the second stage of a bucket
            begin = torch.maximum(first if forwards else ready, busy)
            busy = torch.maximum(begin + t.send / t.stages, ready)
            since = -_of_others(-begin)
            received = torch.maximum(received, since) + t.receive / t.stages
            first = torch.maximum(before, since + latency)
            ready = torch.maximum(ready, torch.maximum(received, _of_others(busy)) + latency)
        done = torch.maximum(ready, busy - t.buffered * t.send) + price.work
        end = float(done.max())
        lost = self._lost_before(end)
        if lost is not None:
            whole = price.network + price.work
            part = min(max(lost - start, 0.0) / (end - start), 1.0) if end > start else 0.0
            return part, whole / price.units if part else 0.0
        waited = torch.clamp_max(done, start) - before
        self.log.spent["stragglers"] += float(waited.sum())
        self._share_network(price, float((done - before - waited).sum()) - price.work * len(ids))
        self.log.spent["processors"] += (price.work + price.stretch) * len(ids)
        self.now[ids] = done + price.stretch
        self._busy[ids], self._received_until[ids] = busy, received
        self._account(price)
        self._rhythm(end)
        return None

    def _send(self, k: int, step: int) -> None:
        """A message that is folded in later."""
        gossip = isinstance(self.rounds.all[k].exchange, Gossip)
        price = self._price(k)
        ids = self._alive
        sent, done, latest = self.now.clone(), self.now.clone(), self.now.clone()
        if gossip:
            latest[ids] = self._arrivals(k)
            done[ids], busy = self._received(k)
            self._busy[ids] = torch.maximum(done[ids] - price.work, busy)
        else:
            latest[ids] = joined = self.now[ids].max().expand(len(ids))
            seconds = price.network + price.work + self._late(price)
            done[ids] = torch.maximum(joined, self._busy[ids]) + seconds
            self._busy[ids] = done[ids] - price.work + price.idle
        self._flights[k, step] = _Flight(sent, latest, done, price)
        self.now[ids] += price.stretch
        self.log.spent["processors"] += price.stretch * len(ids)
        self._account(price)

    def _fold(self, k: int, sent: int) -> None:
        """Wait for the delayed message sent after the step ``sent``."""
        flight = self._flights.pop((k, sent))
        while True:
            done = max(self._last(), float(flight.done[self._alive].max()))
            lost = self._lost_before(done)
            if lost is None:
                break
            # what was not exchanged yet waits until the others go on, and a unit runs again
            again = self._detection() + flight.price.network / flight.price.units
            late = flight.done[self._alive]
            flight.done[self._alive] = torch.where(late > lost, late + again, late)
        ids = self._alive
        waits = torch.clamp_min(flight.done[ids] - self.now[ids], 0.0)
        whole = flight.price.network + flight.price.work
        # what it would have waited for had all joined at once, then for those that joined later
        own = torch.clamp(flight.sent[ids] + whole - self.now[ids], min=0.0).minimum(waits)
        late = torch.clamp_min(flight.joined[ids] - flight.sent[ids], 0.0).minimum(waits - own)
        if whole:
            part = float(own.sum()) / whole
            self.log.spent["bandwidth"] += part * flight.price.sending
            self.log.spent["latency"] += part * (flight.price.network - flight.price.sending)
            self.log.spent["processors"] += part * flight.price.work
        self.log.spent["stragglers"] += float(late.sum())
        self.log.spent["bandwidth"] += float((waits - own - late).sum())  # behind other messages
        self.now[ids] += waits
        self._rhythm(self._last())

    def _gossip(self, k: int) -> None:
        """Each worker waits for those that send to it."""
        while self._lost_before(self._last()) is not None:
            pass
        price, ids = self._price(k), self._alive
        before = self.now[ids]
        late = torch.clamp_min(self._arrivals(k) - before, 0.0)
        done, self._busy[ids] = self._received(k)
        self.log.spent["stragglers"] += float(late.minimum(done - before - price.work).sum())
        network = done - before - price.work - late
        self._share_network(price, float(torch.clamp_min(network, 0.0).sum()))
        self.log.spent["processors"] += (price.work + price.stretch) * len(ids)
        self.now[ids] = done + price.stretch
        self._account(price)
        self._rhythm(self._last())

    def _received(self, k: int) -> tuple[Tensor, Tensor]:
        """Return when each worker has received and folded what a gossip sends it, and until when
        its own network is busy with what it sends itself."""
        price, ids = self._price(k), self._alive
        begin = torch.maximum(self.now[ids], self._busy[ids])
        seconds = price.network + price.work + self._late(price)
        t = price.transfers
        if t is None:
            end = done = begin + price.sending
            if len(ids) > 1:
                done = self._from(k, begin).amax(1) + seconds
        else:
            end = begin + t.send
            first = self._from(k, begin).amin(1) + t.receive
            last = torch.maximum(self._from(k, end).amax(1), first)
            done = last + (seconds - price.sending)
            done = torch.maximum(done, end - t.buffered * t.send + price.work)
        return torch.maximum(done, self.now[ids] + price.work), end

    def _arrivals(self, k: int) -> Tensor:
        """When each worker has reached a gossip, and all that send to it."""
        own = self.now[self._alive]
        return own if len(own) == 1 else torch.maximum(own, self._from(k, own).amax(1))

    def _from(self, k: int, values: Tensor) -> Tensor:
        """Return the ``values`` of those that send to each worker in a gossip."""
        return values[self.rounds.sources(k, self._executed[k], len(values))]

    def _late(self, price: Price) -> float:
        """Return by how much jitter delays the last of a round's messages: of m messages that come
        up to j sooner or later, the last is ``j * (2 * u**(1/m) - 1)`` late."""
        jitter, n = self.cluster.jitter / 2, len(self._alive)  # that of a message
        if not jitter or not price.messages or n < 2:
            return 0.0
        draws = torch.rand(price.messages, dtype=torch.float64, generator=self._generator)
        late = jitter * (2 * draws ** (1 / (n * (n - 1))) - 1)
        return float(late.sum())

    def _last(self) -> float:
        return float(self.now[self._alive].max())

    def _wait(self, cause: str, until: float) -> None:
        self.log.spent[cause] += float((until - self.now[self._alive]).sum())

    def _spend_network(self, price: Price, seconds: float, work: float) -> None:
        n = len(self._alive)
        self._share_network(price, n * seconds)
        self.log.spent["processors"] += n * work

    def _share_network(self, price: Price, seconds: float) -> None:
        """The workers have spent so many seconds, all together, on the network."""
        share = price.sending / price.network if price.network else 0.0
        self.log.spent["bandwidth"] += share * seconds
        self.log.spent["latency"] += (1 - share) * seconds

    def _account(self, price: Price) -> None:
        n = len(self._alive)
        self.log.sent += price.sent * n
        pairs = sum(c * (c - 1) for c in self._present)
        crossing = 1 - pairs / (n * (n - 1)) if n > 1 else 0.0
        self.log.crossed += price.sent * n * crossing

    def _rhythm(self, now: float) -> None:
        self._between, self._latest = now - self._latest, now

    # -- who is there ----

    def _lost_before(self, done: float) -> float | None:
        """Return when the first of the present workers fails, if it does before ``done``. It is
        gone then, and the others know it."""
        if self._lives is None:
            return None
        ids = self._alive
        soonest, index = self._lives.fails[ids].min(0)
        at = float(soonest)
        if at >= done:
            return None
        worker = int(ids[index])
        self._undo(ids[index : index + 1], at)
        if self.cluster.failures.policy == "static" or len(ids) == 1:
            raise LostError(worker, at)
        self._lose(worker, at)
        until = at + self._detection()
        left = self._alive
        self.now[left] = torch.clamp_min(self.now[left], until)
        self._wait_for_enough()
        return at

    def _undo(self, ids: Tensor, at: float) -> None:
        """These workers have not computed what comes after the time ``at``."""
        over = torch.clamp_min(self._worked_until[ids] - at, 0.0).minimum(self._worked[ids])
        self.log.spent["compute"] -= float(over.sum())
        self._worked[ids] -= over

    def _detection(self) -> float:
        given = self.cluster.failures.detection
        return min(max(2 * self._between, LEAST), MOST) if given is None else given

    def _lose(self, worker: int, at: float) -> None:
        assert self._lives is not None, "somebody has failed"
        fails = self.cluster.failures
        self._alive = self._alive[self._alive != worker]
        self._count([worker], -1)
        back = at + float(self._lives.repairs(1)[0]) + fails.restart
        self._joins[worker] = back + self._transfer()
        self.log.redone += float(self._worked[worker])
        self._worked[worker] = 0.0
        self._lives.fails[worker] = math.inf
        self.log.failures += 1
        self.log.events.append((at, worker, "lost"))

    def _count(self, workers: Sequence[int], change: int) -> None:
        counts = list(self._present)
        for worker in workers:
            counts[self.cluster.site_of[worker]] += change
        self._present = tuple(counts)

    def _transfer(self) -> float:
        """Return the seconds until a newcomer has a donor's state, which the donor sends while no
        round is under way, and a tenth of the time during rounds."""
        facts = self.rounds.facts(self._present)
        size: float = facts.elements * (facts.itemsize + ADAM * max(facts.itemsize, 4))
        size += memory(self.rounds.all, facts)
        shares = [often(r) for r in self.rounds.all]
        prices = self.rounds.prices(self._present)
        busy = sum(s * p.network for s, p in zip(shares, prices, strict=True))
        step = max(facts.compute, busy, 1e-12)
        used = min(busy / step, 1.0)
        return 8 * size / facts.net("workers").rate / (1 - (1 - DURING) * used)

    def _wait_for_enough(self) -> None:
        while len(self._alive) < self.cluster.failures.min_workers:
            soonest = float(self._joins.min())
            self.now[self._alive] = torch.clamp_min(self.now[self._alive], soonest)
            self._welcome(soonest)

    def _welcome(self, now: float) -> None:
        """Let newcomers in that have caught up by ``now``."""
        back = torch.nonzero(self._joins <= now).flatten()
        if not len(back):
            return
        assert self._lives is not None, "somebody had failed"
        self._joins[back] = math.inf
        here = torch.zeros(self.cluster.workers, dtype=torch.bool)
        here[self._alive] = here[back] = True
        self._alive = torch.nonzero(here).flatten()
        self._count(back.tolist(), 1)
        self.now[back] = now
        self._busy[back] = self._busy[self._alive].max()
        for flight in self._flights.values():
            for each in (flight.sent, flight.joined):
                each[back] = now
            flight.done[back] = flight.done.max()
        self._base[back] = math.nan
        self._lives.renew(back, torch.tensor(now, dtype=torch.float64))
        self.log.joins += len(back)
        for worker in back.tolist():
            self.log.events.append((now, worker, "joined"))

    def _contribute(self, step: int, *, everything: bool = False) -> None:
        """The present workers have contributed their steps until ``step``."""
        ids = self._alive
        if self._lives is None:
            if everything:
                done = step - float(self._base[0])
                self.log.counted += done * len(ids)
                self.log.useful += done * float(self._means[ids].sum())
            return
        since = torch.nan_to_num(step - self._base[ids], nan=0.0)
        self.log.counted += float(since.sum())
        self.log.useful += float((since * self._means[ids]).sum())
        self._base[ids] = step
        if not everything:
            self._welcome(self._last())
            fresh = self._alive[self._base[self._alive].isnan()]
            self._base[fresh] = step

    def _meet_all(self) -> None:
        """`finish` waits for all workers."""
        end = self._last()
        self._wait("stragglers", end)
        self.now[self._alive] = end

    # -- checkpoints ----

    def _save(self, step: int) -> None:
        seconds = self.cluster.failures.save
        while self._lost_before(self._last() + seconds) is not None:
            pass
        last = self._last()
        self._wait("stragglers", last)
        self.now[self._alive] = last + seconds

    def _restart(self, lost: LostError, step: int, position: int, at: int) -> tuple[int, int]:
        """All workers start again from the checkpoint of ``step``."""
        assert self._lives is not None, "somebody has failed"
        self._tries += 1
        check_tries(self._tries, step)
        fails = self.cluster.failures
        detection = LEAST if fails.detection is None else fails.detection
        back = float(self._lives.repairs(1)[0])
        resumed = lost.at + max(detection, back) + fails.restart
        self._undo(self._alive[self._alive != lost.worker], lost.at)
        counted, useful, computed = self._saved
        self.log.redone += self.log.spent["compute"] - computed
        self._saved = counted, useful, self.log.spent["compute"]
        everyone = torch.arange(self.cluster.workers)
        self._alive = everyone
        self._present = self.cluster.everybody
        self._joins[:] = math.inf
        self.now[:] = resumed
        self._busy[:] = self._received_until[:] = resumed
        self._flights.clear()
        self._lives.renew(everyone, torch.tensor(resumed, dtype=torch.float64))
        self.log.counted, self.log.useful = counted, useful
        self._worked.zero_()
        self._base[:] = self._saved_base if fails.policy == "static" else step
        self.log.marks = [mark for mark in self.log.marks if mark[1] <= step]
        self.log.failures += 1
        self.log.restarts += 1
        self.log.events.append((lost.at, lost.worker, "lost"))
        self.log.events.append((resumed, lost.worker, f"started again from step {step}"))
        return step, position


def _of_others(values: Tensor) -> Tensor:
    """Return the largest of the ``values`` of the others, for each of them."""
    two = values.topk(2).values
    return torch.where(values == two[0], two[1], two[0])


def check_tries(tries: int, step: float) -> None:
    """Raise ``ValueError`` if a run has begun too often at the same ``step``."""
    if tries > MOST_TRIES:
        raise ValueError(
            f"the workers fail too often: in {MOST_TRIES:,} tries the run did not get from step "
            f"{step:,.0f} to the next checkpoint. Save more often, or plan an elastic run"
        )


def shares_of(log: Log, total: float) -> dict[str, float]:
    """Return what was spent as shares of ``total`` seconds of all workers; what no cause explains,
    and computing that was undone, is due to failures."""
    shares = {cause: log.spent[cause] / total for cause in CAUSES}
    shares["compute"] -= log.redone / total
    return {**shares, "failures": 1 - sum(shares.values())}
