"""Step times at random, failures, and the slices of a worker that are left."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laconic.advisor.plan.cluster import Cluster, Failures

SMALLEST = 1e-9
"""A smaller spread is none."""
BLOCK = 2**20
"""About how many step times are drawn at once."""


class StepTimes:
    """The times of the steps of all workers of a ``cluster``, in order. Each has its mean, and
    ``spread`` times that as standard deviation:

        lognormal    exp of a normal variable
        normal       at least a tenth of the mean
        exponential  has a spread of 1, whatever ``spread`` is
        constant     has none
    """

    def __init__(self, cluster: Cluster, generator: torch.Generator) -> None:
        self.means = torch.tensor(cluster.steps, dtype=torch.float64)
        self._spread, self._kind, self._generator = cluster.spread, cluster.distribution, generator
        varies = self._kind == "exponential" or self._spread > SMALLEST
        self.constant = self._kind == "constant" or not varies
        self._rows = max(BLOCK // len(self.means), 1)
        self._block, self._used = torch.empty(0, len(self.means)), 0

    def sum(self, steps: int) -> Tensor:
        """Return the seconds of each worker's next ``steps`` steps together."""
        if self.constant:
            return self.means * steps
        total = torch.zeros_like(self.means)
        while steps:
            if self._used == len(self._block):
                self._block, self._used = self._draw(self._rows, len(self.means)) * self.means, 0
            rows = self._block[self._used : self._used + steps]
            total += rows.sum(0)
            self._used += len(rows)
            steps -= len(rows)
        return total

    def rows(self, worker: int, steps: int) -> Tensor:
        """Return the next ``steps`` times of one worker, each by itself, at random."""
        return self._draw(steps) * self.means[worker]

    def _draw(self, *shape: int) -> Tensor:
        """Return times of mean 1."""
        out = torch.empty(shape, dtype=torch.float64)
        if self._kind == "exponential":
            return out.exponential_(generator=self._generator)
        if self._kind == "normal":
            return out.normal_(1.0, self._spread, generator=self._generator).clamp_min_(0.1)
        sigma = math.sqrt(math.log1p(self._spread**2))
        return out.log_normal_(-(sigma**2) / 2, sigma, generator=self._generator)


def _repairs(about: Failures, count: int, generator: torch.Generator) -> Tensor:
    """Return the seconds until that many failed machines are available again."""
    times = torch.full((count,), about.repair, dtype=torch.float64)
    if about.repairs == "exponential" and about.repair:
        times.exponential_(1 / about.repair, generator=generator)
    return times


class Lives:
    """When workers fail, and when they are back. ``fails``: the time of each one's next failure."""

    def __init__(self, cluster: Cluster, generator: torch.Generator) -> None:
        self._about, self._generator = cluster.failures, generator
        self._mean = cluster.failures.mtbf / cluster.chips
        self.fails = torch.full((cluster.workers,), math.inf, dtype=torch.float64)
        self.renew(torch.arange(cluster.workers), 0.0)

    def renew(self, workers: Tensor, since: float) -> None:
        """Draw the next failure of these ``workers``, which run ``since`` then."""
        if math.isfinite(self._mean) and len(workers):
            lives = torch.empty(len(workers), dtype=torch.float64)
            lives.exponential_(1 / self._mean, generator=self._generator)
            self.fails[workers] = since + lives
        for worker, at in self._about.at:
            if worker in workers.tolist() and at > since:
                self.fails[worker] = min(float(self.fails[worker]), at)

    def repair(self) -> float:
        """Return the seconds until a failed machine is available again."""
        return float(_repairs(self._about, 1, self._generator))


class Slices:
    """Workers of several slices, which lose a slice and not their state when a chip fails.

    `finish` says when work is done: the seconds that it takes with all slices, on those that are
    left, and with the pauses that begin meanwhile.
    """

    def __init__(self, cluster: Cluster, generator: torch.Generator) -> None:
        self._all, self._about = cluster.slices, cluster.failures
        self._generator = generator
        self._chips = cluster.chips
        n = cluster.workers
        self._backs = torch.full((n, 1), math.inf, dtype=torch.float64)
        """When each slice that a worker lacks is back."""
        self._down = torch.zeros(n, dtype=torch.float64)
        self._fails = torch.full((n,), math.inf, dtype=torch.float64)
        self._renew(torch.arange(n), torch.zeros(n, dtype=torch.float64))

    def _renew(self, workers: Tensor, since: Tensor) -> None:
        share = 1 - self._down[workers] / self._all
        lives = torch.empty(len(workers), dtype=torch.float64)
        lives.exponential_(1.0, generator=self._generator)
        rate = self._chips * share / self._about.mtbf
        self._fails[workers] = torch.where(rate > 0, since + lives / rate, math.inf)

    def finish(self, now: Tensor, work: Tensor, workers: Tensor) -> Tensor:
        """Return when ``workers`` have done ``work`` that they begin ``now``."""
        now, left = now.clone(), work.clone()
        active = torch.arange(len(workers))
        while len(active):
            who, since, rest = workers[active], now[active], left[active]
            speed = 1 - self._down[who] / self._all
            ends = torch.where(speed > 0, since + rest / speed, math.inf)
            event = torch.minimum(self._fails[who], self._backs[who].amin(1)).maximum(since)
            hit = event < ends
            now[active[~hit]] = ends[~hit]
            active = active[hit]
            left[active] = rest[hit] - (event - since)[hit] * speed[hit]
            now[active] = event[hit] + self._about.reconfigure
            self._handle(who[hit], event[hit])
        return now

    def _handle(self, who: Tensor, at: Tensor) -> None:
        """Something has happened to each of ``who`` ``at`` these times, and they pause."""
        end = at + self._about.reconfigure
        failed = self._fails[who] <= at
        if failed.any():
            self._lose(who[failed], at[failed])
        # what comes back until the end of the pause takes part in it
        backs = self._backs[who]
        returned = backs <= end[:, None]
        self._down[who] -= returned.sum(1)
        self._backs[who] = torch.where(returned, math.inf, backs)
        self._renew(who, end)

    def _lose(self, who: Tensor, at: Tensor) -> None:
        free = self._backs[who].isinf()
        if not bool(free.any(1).all()):
            more = torch.full_like(self._backs, math.inf)
            self._backs = torch.cat([self._backs, more], 1)
            free = self._backs[who].isinf()
        slot = free.to(torch.int8).argmax(1)
        self._backs[who, slot] = at + _repairs(self._about, len(who), self._generator)
        self._down[who] += 1
