"""Step times at random, failures, and the slices of a worker that are left."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.advisor.plan.cluster import Cluster, Distribution

SMALLEST = 1e-9
"""A smaller spread is none."""
BLOCK = 2**20
"""About how many step times are drawn at once."""


class StepTimes:
    """The times of the steps of all workers, in order. Each has its mean, and ``spread`` times that
    as standard deviation:

        lognormal    exp of a normal variable
        normal       at least a tenth of the mean
        exponential  has a spread of 1, whatever ``spread`` is
        constant     has none
    """

    def __init__(
        self,
        means: Sequence[float],
        spread: float,
        distribution: Distribution,
        generator: torch.Generator,
    ) -> None:
        self._means = torch.tensor(means, dtype=torch.float64)
        self._spread, self._kind, self._generator = spread, distribution, generator
        varies = distribution == "exponential" or spread > SMALLEST
        self.constant = distribution == "constant" or not varies
        self._rows = max(BLOCK // len(means), 1)
        self._block, self._used = torch.empty(0, len(means)), 0

    def sum(self, steps: int) -> Tensor:
        """Return the seconds of each worker's next ``steps`` steps together."""
        if self.constant:
            return self._means * steps
        total = torch.zeros_like(self._means)
        while steps:
            if self._used == len(self._block):
                self._block, self._used = self._draw(), 0
            rows = self._block[self._used : self._used + steps]
            total += rows.sum(0)
            self._used += len(rows)
            steps -= len(rows)
        return total

    def rows(self, worker: int, steps: int) -> Tensor:
        """Return the next ``steps`` times of one worker, each by itself."""
        mean = self._means[worker]
        if self.constant:
            return mean.expand(steps)
        return self._scaled(torch.empty(steps, dtype=torch.float64)) * mean

    def _draw(self) -> Tensor:
        shape = self._rows, len(self._means)
        return self._scaled(torch.empty(shape, dtype=torch.float64)).mul_(self._means)

    def _scaled(self, out: Tensor) -> Tensor:
        """Fill ``out`` with times of mean 1."""
        if self._kind == "exponential":
            return out.exponential_(generator=self._generator)
        if self._kind == "normal":
            return out.normal_(1.0, self._spread, generator=self._generator).clamp_min_(0.1)
        sigma = math.sqrt(math.log1p(self._spread**2))
        return out.log_normal_(-(sigma**2) / 2, sigma, generator=self._generator)


class Lives:
    """When workers fail, and when they are back. ``fails``: the time of each one's next failure."""

    def __init__(self, cluster: Cluster, generator: torch.Generator) -> None:
        self._about, self._generator = cluster.failures, generator
        self._mean = cluster.failures.mtbf / cluster.chips
        self.fails = torch.full((cluster.workers,), math.inf, dtype=torch.float64)
        self.renew(torch.arange(cluster.workers), torch.zeros(()))

    def renew(self, workers: Tensor, since: Tensor) -> None:
        """Draw the next failure of these ``workers``, which run ``since`` then."""
        if math.isfinite(self._mean) and len(workers):
            lives = torch.empty(len(workers), dtype=torch.float64)
            lives.exponential_(1 / self._mean, generator=self._generator)
            self.fails[workers] = since + lives
        for worker, at in self._about.at:
            if worker in workers.tolist() and at > float(since):
                self.fails[worker] = min(float(self.fails[worker]), at)

    def repairs(self, count: int) -> Tensor:
        """Return the seconds until that many failed machines are available again."""
        times = torch.full((count,), self._about.repair, dtype=torch.float64)
        if self._about.repairs == "exponential" and self._about.repair:
            times.exponential_(1 / self._about.repair, generator=self._generator)
        return times


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
        self.paused = torch.zeros(n, dtype=torch.float64)
        """Seconds of each worker in pauses."""
        self.short = torch.zeros(n, dtype=torch.float64)
        """Seconds by which each worker's steps took longer because it lacked slices."""
        self._renew(torch.arange(n), torch.zeros(n, dtype=torch.float64))

    def _renew(self, workers: Tensor, since: Tensor) -> None:
        share = 1 - self._down[workers] / self._all
        lives = torch.empty(len(workers), dtype=torch.float64)
        lives.exponential_(1.0, generator=self._generator)
        rate = self._chips * share / self._about.mtbf
        self._fails[workers] = torch.where(rate > 0, since + lives / rate, math.inf)

    def finish(self, now: Tensor, work: Tensor, workers: Tensor | None = None) -> Tensor:
        """Return when ``workers`` (None: all) have done ``work`` that they begin ``now``."""
        ids = torch.arange(len(self._down)) if workers is None else workers
        now, left = now.clone(), work.clone()
        active = torch.arange(len(ids))
        while len(active):
            who, since, rest = ids[active], now[active], left[active]
            speed = 1 - self._down[who] / self._all
            ends = torch.where(speed > 0, since + rest / speed, math.inf)
            event = torch.minimum(self._fails[who], self._backs[who].amin(1)).maximum(since)
            hit = event < ends
            done = ~hit
            self.short[who[done]] += (ends - since - rest)[done]
            now[active[done]] = ends[done]
            ran = (event - since)[hit]
            self.short[who[hit]] += ran * (1 - speed[hit])
            active = active[hit]
            left[active] = rest[hit] - ran * speed[hit]
            now[active] = event[hit] + self._about.reconfigure
            self._handle(who[hit], event[hit])
        return now

    def _handle(self, who: Tensor, at: Tensor) -> None:
        """Something has happened to each of ``who`` ``at`` these times, and they pause."""
        pause = self._about.reconfigure
        end = at + pause
        failed = self._fails[who] <= at
        if failed.any():
            self._lose(who[failed], at[failed])
        # what comes back until the end of the pause takes part in it
        backs = self._backs[who]
        returned = backs <= end[:, None]
        self._down[who] -= returned.sum(1)
        self._backs[who] = torch.where(returned, math.inf, backs)
        self._renew(who, end)
        self.paused[who] += pause

    def _lose(self, who: Tensor, at: Tensor) -> None:
        times = torch.full((len(who),), self._about.repair, dtype=torch.float64)
        if self._about.repairs == "exponential" and self._about.repair:
            times.exponential_(1 / self._about.repair, generator=self._generator)
        free = self._backs[who].isinf()
        if not bool(free.any(1).all()):
            more = torch.full_like(self._backs, math.inf)
            self._backs = torch.cat([self._backs, more], 1)
            free = self._backs[who].isinf()
        slot = free.to(torch.int8).argmax(1)
        self._backs[who, slot] = at + times
        self._down[who] += 1
