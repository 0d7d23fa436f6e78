"""What both kinds of simulated runs share: clocks, step times at random, failures, a log, and the
last checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from laconic.advisor.plan.cluster import Cluster
from laconic.advisor.plan.rounds import Rounds

CAUSES = ("compute", "stragglers", "bandwidth", "latency")
"""What a worker's time is spent on, apart from failures."""
LEAST = 5.0
"""Seconds of silence, at least, after which a worker counts as lost (docs/elastic.md)."""
MOST_TRIES = 1000
"""Restarts from one checkpoint after which a run is given up."""

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
    failures: int = 0
    joins: int = 0
    restarts: int = 0
    events: list[tuple[float, int, str]] = field(default_factory=list)

    def shares(self, total: float) -> dict[str, float]:
        """What was spent as shares of ``total`` seconds of all workers; what no cause explains, and
        computing that was undone, is due to failures."""
        shares = {cause: self.spent[cause] / total for cause in CAUSES}
        shares["compute"] -= self.redone / total
        return {**shares, "failures": 1 - sum(shares.values())}


class Run:
    """A simulated run. ``now``: each worker's clock."""

    def __init__(self, rounds: Rounds, generator: torch.Generator) -> None:
        self.rounds, self.cluster = rounds, rounds.cluster
        self.log = Log()
        self.now = torch.zeros(self.cluster.workers, dtype=torch.float64)
        self._generator = generator
        self._times = StepTimes(self.cluster, generator)
        self._lives = Lives(self.cluster, generator) if self.cluster.failures.happen else None
        self._tries = 0
        self._saved = 0.0, 0.0, 0.0
        """Steps that count, their seconds, and those of computing, at the last checkpoint."""

    def _account_for(self, sent: float, present: Sequence[int]) -> None:
        """Workers, so many on each site, have ``sent`` bytes in all, as many to each other one."""
        n, pairs = sum(present), sum(c * (c - 1) for c in present)
        self.log.sent += sent
        self.log.crossed += sent * (1 - pairs / (n * (n - 1)) if n > 1 else 0.0)

    def _failure(self, workers: Tensor, before: float) -> tuple[int, float] | None:
        """Return which of these ``workers`` fails first ``before`` that time, and when."""
        if self._lives is None:
            return None
        at, index = self._lives.fails[workers].min(0)
        return (int(workers[index]), float(at)) if float(at) < before else None

    def _checkpoint(self) -> None:
        self._saved = self.log.counted, self.log.useful, self.log.spent["compute"]
        self._tries = 0

    def _start_again(self, worker: int, at: float, step: float) -> float:
        """This ``worker`` has failed ``at`` that time, and all workers start again from the
        checkpoint of ``step``. Return when they do."""
        assert self._lives is not None, "somebody has failed"
        self._tries += 1
        if self._tries > MOST_TRIES:
            raise ValueError(
                f"the workers fail too often: in {MOST_TRIES:,} tries the run did not get from "
                f"step {step:,.0f} to the next checkpoint. Save more often, or plan an elastic run"
            )
        fails = self.cluster.failures
        detection = LEAST if fails.detection is None else fails.detection
        resumed = at + max(detection, fails.repair) + fails.restart
        self._lives.renew(torch.arange(self.cluster.workers), resumed)
        counted, useful, computed = self._saved
        self.log.redone += self.log.spent["compute"] - computed
        self._saved = counted, useful, self.log.spent["compute"]
        self.log.counted, self.log.useful = counted, useful
        self.log.failures += 1
        self.log.restarts += 1
        self.log.events.append((at, worker, "lost"))
        return resumed
