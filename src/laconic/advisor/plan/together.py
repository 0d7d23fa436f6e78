"""The simulation of rounds that wait for all workers, and of gossip.

One clock per worker, as a vector. Between two rounds it advances by the worker's own steps. At a
round it does what the engine does: rounds without a delay, and gradients, wait for the slowest
worker and then for the network; a delayed message is sent when the last worker has joined and the
network is free, and waited for when it is folded in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.advisor.plan.rounds import Price, Rounds
from laconic.advisor.plan.run import Log
from laconic.advisor.plan.workers import Flight, LostError, Workers
from laconic.algorithms.round import Round


class Together(Workers):
    """A run in which all workers take the same steps."""

    def __init__(self, rounds: Rounds, generator: torch.Generator) -> None:
        super().__init__(rounds, generator)
        self._executed = [0] * len(rounds.all)
        self._saved_base = self._base.clone()
        """The steps up to which a checkpoint counts each worker's: it may lie between rounds."""

    # -- the run ----

    def run(self, steps: int, first: int = 0) -> Log:
        """Simulate the ``steps`` after step ``first``."""
        last = first + steps
        numbers = range(first + 1, last + 1)
        due = {step: events for step in numbers if (events := list(self.rounds.events(step)))}
        often = None if self._lives is None else self.cluster.failures.checkpoint
        saves = {step for step in numbers if often and step % often == 0}
        stops = sorted({*due, *saves, last})
        self._base[:] = self._saved_base[:] = first
        at, saved, position = first, (first, 0), 0
        while position < len(stops):
            step = stops[position]
            try:
                self._compute(step - at)
                for k, what in due.get(step, ()):
                    self._event(k, what, step)
                at, position = step, position + 1
                if step in saves:
                    self._save(step)
                    saved = step, position
                    self._saved_base = self._base.clone()
            except LostError as lost:
                at, position = saved
                self._restart(lost, at)
        for flight in [*self._flights]:
            self._fold(*flight)
        self._join(self._last(), self._last())
        self._contribute(last, everything=True)
        return self.log

    def _compute(self, steps: int) -> None:
        if not steps:
            return
        ids = self._alive
        work = self._times.sum(steps)[ids]
        self.now[ids] += work
        self.log.spent["compute"] += float(work.sum())
        self._worked[ids] += work
        self._worked_until[ids] = self.now[ids]

    # -- one round ----

    def _event(self, k: int, what: str, step: int) -> None:
        r = self.rounds.all[k]
        if what == "folded":
            sent = step - r.delay
            if (k, sent) in self._flights:
                self._fold(k, sent)
            return
        if isinstance(r, Round) and r.quiesces_others:
            for other in [flight for flight in self._flights if flight[0] != k]:
                self._fold(*other)
        if what == "backward":
            self._together(k, gradients=True)
        elif r.delay:
            self._send(k, step)
        elif r.exchange.out_degree is not None:
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
            whole = (price.exposed if gradients else price.network) + self._late(price)
            seconds = (1 - done_part) * whole + repeated
            start = max(self._last(), 0.0 if gradients else float(self._busy[self._alive].max()))
            lost = self._lost_before(start + seconds)
            if lost is None:
                break
            if lost > start and seconds:  # what was exchanged by then remains
                done_part += (1 - done_part) * (lost - start) / seconds
                repeated = whole / price.units
        ids = self._alive
        self._join(start, start + seconds)
        self._busy[ids] = start + seconds
        self._finish(price, self.now[ids], len(ids) * whole)

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
        done = torch.maximum(ready, busy - t.buffered * t.send)
        end = float(done.max())
        lost = self._lost_before(end)
        if lost is not None:
            part = min(max(lost - start, 0.0) / (end - start), 1.0) if end > start else 0.0
            return part, price.network / price.units if part else 0.0
        waited = torch.clamp_max(done, start) - before
        self.log.spent["stragglers"] += float(waited.sum())
        self._busy[ids], self._received_until[ids] = busy, received
        self._finish(price, done, float((done - before - waited).sum()))
        return None

    def _send(self, k: int, step: int) -> None:
        """A message that is folded in later."""
        gossip = self.rounds.all[k].exchange.out_degree is not None
        price = self._price(k)
        ids = self._alive
        sent, done, latest = self.now.clone(), self.now.clone(), self.now.clone()
        if gossip:
            latest[ids] = self._arrivals(k)
            done[ids], busy = self._received(k)
            self._busy[ids] = torch.maximum(done[ids], busy)
        else:
            latest[ids] = joined = self.now[ids].max().expand(len(ids))
            seconds = price.network + self._late(price)
            done[ids] = torch.maximum(joined, self._busy[ids]) + seconds
            self._busy[ids] = done[ids] + price.idle
        self._flights[k, step] = Flight(sent, latest, done, price)
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
        price = flight.price
        # what it would have waited for had all joined at once, then for those that joined later
        own = torch.clamp(flight.sent[ids] + price.network - self.now[ids], min=0.0).minimum(waits)
        late = torch.clamp_min(flight.joined[ids] - flight.sent[ids], 0.0).minimum(waits - own)
        if price.network:
            part = float(own.sum()) / price.network
            self.log.spent["bandwidth"] += part * price.sending
            self.log.spent["latency"] += part * (price.network - price.sending)
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
        self.log.spent["stragglers"] += float(late.minimum(done - before).sum())
        network = done - before - late
        self._finish(price, done, float(torch.clamp_min(network, 0.0).sum()))

    def _received(self, k: int) -> tuple[Tensor, Tensor]:
        """Return when each worker has received and folded what a gossip sends it, and until when
        its own network is busy with what it sends itself."""
        price, ids = self._price(k), self._alive
        begin = torch.maximum(self.now[ids], self._busy[ids])
        seconds = price.network + self._late(price)
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
            done = torch.maximum(done, end - t.buffered * t.send)
        return torch.maximum(done, self.now[ids]), end

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

    def _finish(self, price: Price, done: Tensor, network: float) -> None:
        """The present workers go on when a round without a delay is ``done``. They have spent so
        many seconds, all together, on the ``network``."""
        share = price.sending / price.network if price.network else 0.0
        self.log.spent["bandwidth"] += share * network
        self.log.spent["latency"] += (1 - share) * network
        self.now[self._alive] = done
        self._account(price)
        self._rhythm(float(done.max()))

    def _account(self, price: Price) -> None:
        self._account_for(price.sent * len(self._alive), self._present)

    # -- checkpoints ----

    def _save(self, step: int) -> None:
        seconds = self.cluster.failures.save
        while self._lost_before(self._last() + seconds) is not None:
            pass
        last = self._last()
        self._join(last, last + seconds)
        self._checkpoint()

    def _restart(self, lost: LostError, step: int) -> None:
        """All workers start again from the checkpoint of ``step``."""
        self._undo(self._alive[self._alive != lost.worker], lost.at)
        resumed = self._start_again(lost.worker, lost.at, step)
        self.log.events.append((resumed, lost.worker, f"started again from step {step}"))
        self._set_alive(torch.arange(self.cluster.workers))
        self._joins[:] = torch.inf
        for clock in (self.now, self._busy, self._received_until):
            clock[:] = resumed
        self._flights.clear()
        self._worked.zero_()
        self._base[:] = self._saved_base if self.cluster.failures.policy == "static" else step


def _of_others(values: Tensor) -> Tensor:
    """Return the largest of the ``values`` of the others, for each of them."""
    two = values.topk(2).values
    return torch.where(values == two[0], two[1], two[0])
