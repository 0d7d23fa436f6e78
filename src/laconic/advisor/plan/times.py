"""Step times at random, and failures."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laconic.advisor.plan.cluster import Cluster

SMALLEST = 1e-9
"""A smaller spread is none."""
BLOCK = 2**20
"""About how many step times are drawn at once."""


class StepTimes:
    """The times of the steps of all workers of a ``cluster``, in order: lognormal, each with its
    mean, and ``spread`` times that as standard deviation."""

    def __init__(self, cluster: Cluster, generator: torch.Generator) -> None:
        self.means = torch.tensor(cluster.steps, dtype=torch.float64)
        self._sigma, self._generator = math.sqrt(math.log1p(cluster.spread**2)), generator
        self.constant = cluster.spread <= SMALLEST
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
        return out.log_normal_(-(self._sigma**2) / 2, self._sigma, generator=self._generator)


class Lives:
    """When workers fail. ``fails``: the time of each one's next failure."""

    def __init__(self, cluster: Cluster, generator: torch.Generator) -> None:
        self._about, self._generator = cluster.failures, generator
        self.fails = torch.full((cluster.workers,), math.inf, dtype=torch.float64)
        self.renew(torch.arange(cluster.workers), 0.0)

    def renew(self, workers: Tensor, since: float) -> None:
        """Draw the next failure of these ``workers``, which run ``since`` then."""
        if math.isfinite(self._about.mtbf) and len(workers):
            lives = torch.empty(len(workers), dtype=torch.float64)
            lives.exponential_(1 / self._about.mtbf, generator=self._generator)
            self.fails[workers] = since + lives
        for worker, at in self._about.at:
            if worker in workers.tolist() and at > since:
                self.fails[worker] = min(float(self.fails[worker]), at)
