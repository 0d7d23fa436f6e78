"""The workers of a run that wait for each other: who is there, who is lost, and who joins."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.advisor.advice import memory
from laconic.advisor.plan.rounds import Price, Rounds
from laconic.advisor.plan.run import LEAST, Run
from laconic.policy.predict import often

MOST = 30.0
"""Seconds of silence, at most, after which the others go on without a worker. From `LEAST` on, it
is twice the time between rounds (docs/elastic.md)."""
DURING = 0.1
"""The share of its time for which a donor sends a newcomer its state while a round is under way."""
ADAM = 2
"""Numbers that the local optimizer stores for each parameter, which a newcomer receives, too."""


@dataclass
class Flight:
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


class Workers(Run):
    """A run whose workers take the same steps, as far as they are there."""

    def __init__(self, rounds: Rounds, generator: torch.Generator) -> None:
        super().__init__(rounds, generator)
        n = self.cluster.workers
        self._sites = torch.tensor(self.cluster.site_of)
        self._set_alive(torch.arange(n))
        self._busy, self._received_until = torch.zeros_like(self.now), torch.zeros_like(self.now)
        """Until when each worker's network sends, and receives."""
        self._flights: dict[tuple[int, int], Flight] = {}
        """By round, and the step after which the message was sent."""
        self._worked, self._worked_until = torch.zeros_like(self.now), torch.zeros_like(self.now)
        """Seconds that each worker has computed since its last round, and until when."""
        self._base = torch.zeros_like(self.now)
        """The step until which each worker's steps are counted."""
        self._joins = torch.full((n,), math.inf, dtype=torch.float64)
        """When each worker that is lost is back."""
        self._latest = self._between = 0.0

    def _set_alive(self, ids: Tensor) -> None:
        self._alive = ids
        counts = self._sites[ids].bincount(minlength=len(self.cluster.sites))
        self._present: tuple[int, ...] = tuple(counts.tolist())

    def _last(self) -> float:
        return float(self.now[self._alive].max())

    def _rhythm(self, now: float) -> None:
        self._between, self._latest = now - self._latest, now

    def _join(self, until: float, then: float) -> None:
        """The present workers wait for the last of them ``until`` that time, and go on ``then``."""
        self.log.spent["stragglers"] += float((until - self.now[self._alive]).sum())
        self.now[self._alive] = then

    def _lost_before(self, done: float) -> float | None:
        """Return when the first of the present workers fails, if it does before ``done``. It is
        gone then, and the others know it."""
        ids = self._alive
        failure = self._failure(ids, done)
        if failure is None:
            return None
        assert self._lives is not None, "somebody fails"
        worker, at = failure
        self._undo(torch.tensor([worker]), at)
        if self.cluster.failures.policy == "static" or len(ids) == 1:
            raise LostError(worker, at)
        self._set_alive(ids[ids != worker])
        back = at + self.cluster.failures.repair + self.cluster.failures.restart
        self._joins[worker] = back + self._transfer()
        self.log.redone += float(self._worked[worker])
        self._worked[worker] = 0.0
        self._lives.fails[worker] = math.inf
        self.log.failures += 1
        self.log.events.append((at, worker, "lost"))
        self._wait_until(at + self._detection())
        while len(self._alive) < self.cluster.failures.min_workers:
            soon = float(self._joins.min())
            self._wait_until(soon)
            self._welcome(soon)
        return at

    def _wait_until(self, time: float) -> None:
        self.now[self._alive] = torch.clamp_min(self.now[self._alive], time)

    def _undo(self, ids: Tensor, at: float) -> None:
        """These workers have not computed what comes after the time ``at``."""
        over = torch.clamp_min(self._worked_until[ids] - at, 0.0).minimum(self._worked[ids])
        self.log.spent["compute"] -= float(over.sum())
        self._worked[ids] -= over

    def _detection(self) -> float:
        given = self.cluster.failures.detection
        return min(max(2 * self._between, LEAST), MOST) if given is None else given

    def _transfer(self) -> float:
        """Return the seconds until a newcomer has a donor's state, which the donor sends while no
        round is under way, and a tenth of the time during rounds."""
        facts = self.cluster.facts(self._present)
        size: float = facts.elements * (facts.itemsize + ADAM * max(facts.itemsize, 4))
        size += memory(self.rounds.all, facts)
        prices = self.rounds.prices(self._present)
        busy = sum(often(r) * p.network for r, p in zip(self.rounds.all, prices, strict=True))
        used = min(busy / max(facts.compute, busy, 1e-12), 1.0)
        return 8 * size / facts.net("workers").rate / (1 - (1 - DURING) * used)

    def _welcome(self, now: float) -> None:
        """Let newcomers in that have caught up by ``now``."""
        back = torch.nonzero(self._joins <= now).flatten()
        if not len(back):
            return
        assert self._lives is not None, "somebody had failed"
        self._joins[back] = math.inf
        self._set_alive(torch.cat([self._alive, back]).sort().values)
        self.now[back] = now
        self._busy[back] = self._busy[self._alive].max()
        for flight in self._flights.values():
            flight.sent[back] = flight.joined[back] = now
            flight.done[back] = flight.done.max()
        self._base[back] = math.nan
        self._lives.renew(back, now)
        self.log.joins += len(back)
        self.log.events += [(now, worker, "joined") for worker in back.tolist()]

    def _contribute(self, step: int, *, everything: bool = False) -> None:
        """The present workers have contributed their steps until ``step``."""
        ids = self._alive
        if self._lives is None and not everything:
            return
        since = torch.nan_to_num(step - self._base[ids], nan=0.0)
        self.log.counted += float(since.sum())
        self.log.useful += float((since * self._times.means[ids]).sum())
        self._base[ids] = step
        if not everything:
            self._welcome(self._last())
            fresh = self._alive[self._base[self._alive].isnan()]
            self._base[fresh] = step
