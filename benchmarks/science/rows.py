"""The rows of the table, what is tuned for each, and the claims that the table must support."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.science.experiment import Job, Outcome

LRS = (0.02, 0.04, 0.08, 0.16, 0.32, 0.64)
SUMS = (0.00125, 0.0025, 0.005, 0.01, *LRS)
"""Learning rates for a recipe that sums the updates of n workers: from n times smaller."""
BETAS = (0.2, 0.4, 0.6, 0.8)


@dataclass(frozen=True)
class Setting:
    """What is tuned: the peak learning rate and, for slow momentum, beta."""

    lr: float
    beta: float | None = None


@dataclass(frozen=True)
class Row:
    """One recipe, in which ``{beta}`` is tuned. ``best`` is the setting that the full run found.
    The quick run searches near it."""

    name: str
    recipe: str
    best: Setting
    lrs: tuple[float, ...] = LRS
    workers: int = 8
    group_size: int | None = None

    def settings(self, near: bool) -> list[Setting]:
        """Return the grid; with ``near``, only settings at most one position from the best."""
        betas = BETAS if self.best.beta is not None else (None,)
        return [
            Setting(lr, beta)
            for i, lr in enumerate(self.lrs)
            for j, beta in enumerate(betas)
            if not near
            or abs(i - self.lrs.index(self.best.lr)) + abs(j - betas.index(self.best.beta)) <= 1
        ]

    def job(self, setting: Setting, seed: int) -> Job:
        recipe = self.recipe.format(beta=setting.beta)
        return Job(recipe, setting.lr, seed, self.workers, self.group_size)


@dataclass(frozen=True)
class Finding:
    """The outcomes of a row at one setting, over several seeds."""

    row: Row
    setting: Setting
    outcomes: Sequence[Outcome]

    @property
    def losses(self) -> list[float]:
        """The losses in ascending order. NaN counts as the highest."""
        return sorted(math.inf if math.isnan(o.loss) else o.loss for o in self.outcomes)

    @property
    def loss(self) -> float:
        """The median loss.

        Near the largest learning rate that works, one run in ten ends with several times the loss
        of the others and would dominate the mean.
        """
        return statistics.median(self.losses)


SLOW_GOSSIP = Row("SGP + SlowMo, 48", "slowmo(sgp(), 48, {beta})", Setting(0.32, 0.8))
GRADIENTS = Row("all-reduce SGD", "ddp()", Setting(0.64))
GOSSIP = Row("SGP", "sgp()", Setting(0.32))
RING = Row("D-PSGD, ring", "d_psgd('ring')", Setting(0.64))
SLOW = Row(
    "SlowMo, 12",
    "slowmo(local_sgd(12), 12, {beta}, optimizer_state='reset')",
    Setting(0.16, 0.8),
)
LOCAL_AVERAGE = Row(
    "local SGD, 12, average", "local_sgd(12, optimizer_state='average')", Setting(0.32)
)
LOCAL_KEEP = Row("local SGD, 12, keep", "local_sgd(12)", Setting(0.16))
LOCAL_RESET = Row("local SGD, 12, reset", "local_sgd(12, optimizer_state='reset')", Setting(0.32))
LEADER = Row("LSGD, 48 and 12", "lsgd(48, local_period=12)", Setting(0.16), group_size=4)
ELASTIC = Row("EAMSGD, 12", "easgd(12, 0.9)", Setting(0.16))
ALONE = Row("one worker alone", "ddp()", Setting(0.16), workers=1)
ELASTIC_16 = Row("EASGD, 16", "easgd(16, 0.9)", Setting(0.16))
SUM_16 = Row("DOWNPOUR, 16", "diloco(16, 8, 0)", Setting(0.0025), lrs=SUMS)

ROWS = (
    SLOW_GOSSIP,
    GRADIENTS,
    GOSSIP,
    RING,
    SLOW,
    LOCAL_AVERAGE,
    LOCAL_KEEP,
    LOCAL_RESET,
    LEADER,
    ELASTIC,
    ALONE,
    ELASTIC_16,
    SUM_16,
)


def claims(loss: Mapping[Row, float]) -> dict[str, bool]:
    """Return the claims about the losses, and whether each holds."""
    slow, local = loss[SLOW], loss[LOCAL_RESET]
    return {
        "all-reduce SGD <= SGP": loss[GRADIENTS] <= loss[GOSSIP],
        "SGP < SlowMo": loss[GOSSIP] < slow,
        "SlowMo <= 0.75 of local SGD": slow <= 0.75 * local,
        "local SGD < one worker alone": local < loss[ALONE],
        "DOWNPOUR >= 3 times EASGD": loss[SUM_16] >= 3 * loss[ELASTIC_16],
    }
