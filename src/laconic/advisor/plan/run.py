"""What both kinds of simulated runs share: clocks, failures, a log, and the last checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from laconic.advisor.plan.rounds import Rounds
from laconic.advisor.plan.times import Lives, StepTimes

CAUSES = ("compute", "stragglers", "bandwidth", "latency")
"""What a worker's time is spent on, apart from failures."""
LEAST = 5.0
"""Seconds of silence, at least, after which a worker counts as lost (docs/elastic.md)."""
MOST_TRIES = 1000
"""Restarts from one checkpoint after which a run is given up."""


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
