"""Plans: figures of several simulated runs with their ranges, and what limits a run."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from laconic.advisor.advice import reason as reason_of
from laconic.advisor.advice import rows_of
from laconic.advisor.choices import Choice, choices, steps_of
from laconic.advisor.plan.cluster import Cluster
from laconic.advisor.plan.simulate import Result, check_plannable, recipe_of, simulate_plan
from laconic.advisor.show import Row
from laconic.algorithms.round import Recipe
from laconic.algorithms.schedules import Every
from laconic.errors import check_int
from laconic.policy.candidates import candidates
from laconic.policy.choice import TIE
from laconic.policy.facts import Facts
from laconic.units import finite, format_rate, format_seconds

SEEDS, FEW_SEEDS = 5, 2
"""Runs of each recipe, by default, and of `LARGE` plans."""
SIMULATED, FEW_SIMULATED = 6, 4
"""Of the recipes that are compared by default, how many are simulated: those that the cost model
predicts to make the most progress, and ddp(). The second number is for `LARGE` plans."""
LARGE = 10**7
"""Steps of all workers together above which a plan is large: chance matters less, and time more."""
HORIZON = 2000
"""Without failures, and if its rounds are periodic, a run is alike from beginning to end. Then so
many steps are simulated, or `PERIODS` periods if these are longer, and continued."""
PERIODS = 20
FIGURES = (
    "seconds", "goodput", "utilization", "bytes", "crossed", "memory", "money", "failures", "joins",
    "restarts",
)  # fmt: skip
"""Figures of a `Result` of which a plan has the range."""
QUANTILES = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
MATTERS = 0.05
"""The share of the time above which something other than computing limits a run."""


@dataclass(frozen=True)
class Range:
    """The `QUANTILES` over the runs."""

    low: float
    median: float
    high: float


@dataclass(frozen=True)
class Planned:
    """The runs of one recipe. ``steps_factor``: the steps that it needs per step of ddp(), and
    ``steps_from``, where that is from (`laconic.advisor.choices.steps_of`)."""

    text: str
    recipe: Recipe
    results: tuple[Result, ...]
    steps_factor: float
    steps_from: str

    def range(self, figure: str) -> Range:
        """Return the range of one of the `FIGURES`."""
        values = torch.tensor([getattr(r, figure) for r in self.results], dtype=torch.float64)
        return Range(*values.quantile(QUANTILES).tolist())

    @property
    def seconds(self) -> Range:
        """Of the whole run."""
        return self.range("seconds")

    @property
    def shares(self) -> dict[str, float]:
        """What the workers' time is spent on, in the mean."""
        names = self.results[0].shares
        return {k: statistics.fmean(r.shares[k] for r in self.results) for k in names}


@dataclass(frozen=True)
class Plan:
    """A plan: the ``rows`` that were simulated, the one that is recommended, and why; and what
    limits it."""

    cluster: Cluster
    steps: int
    rows: tuple[Planned, ...]
    best: Planned
    reason: str
    limit: str

    def to_json(self) -> str:
        """Return everything as JSON."""
        rows = [
            {
                "recipe": row.text,
                **{name: asdict(row.range(name)) for name in FIGURES},
                "shares": row.shares,
                "steps_factor": row.steps_factor,
                "steps_from": row.steps_from,
                "events": row.results[0].events,
            }
            for row in self.rows
        ]
        plain = {
            "workers": self.cluster.workers,
            "sites": [asdict(site) for site in self.cluster.sites],
            "steps": self.steps,
            "recommendation": self.best.text,
            "reason": self.reason,
            "limit": self.limit,
            "recipes": rows,
        }
        return json.dumps(finite(plain), indent=2)


def plan(
    cluster: Cluster,
    recipes: Sequence[str] = (),
    *,
    steps: int = 10_000,
    seeds: int | None = None,
) -> Plan:
    """Plan a run of ``steps`` steps on ``cluster``.

    ``recipes``: those to simulate; none: the ones that ``laconic advise`` compares. ``seeds``: how
    many runs of each; None: `SEEDS`, or fewer of large plans. Raises ``ValueError`` for a recipe
    that cannot run on the cluster.
    """
    check_int("steps", steps, 1)
    large = steps * cluster.workers > LARGE
    seeds = (FEW_SEEDS if large else SEEDS) if seeds is None else check_int("seeds", seeds, 1)
    if cluster.workers < 2:
        raise ValueError("a plan needs at least 2 workers")
    facts = cluster.facts()
    if recipes:
        wanted = [Choice(text, recipe_of(text, cluster), "") for text in recipes]
    else:
        compared = list(_plannable(choices(facts), cluster))
        wanted = _promising(compared, facts, FEW_SIMULATED if large else SIMULATED)
    rows = tuple(_planned(choice, cluster, steps, seeds) for choice in wanted)
    if recipes:
        best = min(rows, key=lambda row: row.seconds.median * row.steps_factor)
        most = "It makes the most progress per second of the given recipes."
        reason = most if len(rows) > 1 else ""
    else:
        best, reason = _recommended(wanted, rows, facts)
    return Plan(cluster, steps, rows, best, reason, limit(best, cluster))


def _plannable(found: Sequence[Choice], cluster: Cluster) -> Iterator[Choice]:
    for choice in found:
        try:
            check_plannable(choice.recipe, choice.text, cluster)
        except ValueError:  # such as a quorum where workers come and go
            continue
        yield choice


def _promising(compared: Sequence[Choice], facts: Facts, count: int) -> list[Choice]:
    """Return ``count`` choices to simulate, in their order: the first, which is DDP, and those that
    are predicted to make the most progress per second."""
    rows = {row.recipe: row for row in rows_of(compared, facts)}
    others = sorted(compared[1:], key=lambda c: rows[c.text].seconds * rows[c.text].steps)
    wanted = (compared[0], *others[: count - 1])
    return [c for c in compared if c in wanted]


def _planned(choice: Choice, cluster: Cluster, steps: int, seeds: int) -> Planned:
    alike = not (cluster.spread or cluster.jitter or cluster.failures.happen)  # all runs
    results = runs(choice.recipe, cluster, steps, 1 if alike else seeds)
    return Planned(choice.text, choice.recipe, results, *_steps(choice.recipe))


def _steps(recipe: Recipe) -> tuple[float, str]:
    try:
        return steps_of(recipe)
    except ValueError as error:  # its rounds end
        return 1.0, str(error)


def runs(recipe: Recipe, cluster: Cluster, steps: int, seeds: int) -> tuple[Result, ...]:
    """Return runs with the seeds from 0, of which only as much is simulated as is needed."""
    period = None if cluster.failures.happen else _period(recipe)
    half = 0 if period is None else max(HORIZON, PERIODS * period) // 2 // period * period
    if period is None or steps <= 3 * half:
        return tuple(simulate_plan(recipe, cluster, steps, seed) for seed in range(seeds))
    begin = half + (steps - half) % period  # what is left are whole periods
    short = [simulate_plan(recipe, cluster, begin, seed) for seed in range(seeds)]
    long = [simulate_plan(recipe, cluster, begin + half, seed) for seed in range(seeds)]
    return tuple(_longer(short, long, half, steps - begin - half))


def _period(recipe: Recipe) -> int | None:
    """Return after how many steps the rounds repeat. None: they do not."""
    periods = [r.when.period for r in recipe if isinstance(r.when, Every)]
    return math.lcm(*periods) if len(periods) == len(recipe) else None


def _longer(
    short: Sequence[Result], long: Sequence[Result], half: int, more: int
) -> Iterator[Result]:
    """Yield the ``long`` runs with so many ``more`` steps, which go on as the last ``half`` steps,
    by which they are longer than the ``short`` ones. By chance, runs differ: over k steps as
    sqrt(k)."""

    def longer(name: str) -> list[float]:
        ends = [getattr(b, name) for b in long]
        slopes = [(b - getattr(a, name)) / half for a, b in zip(short, ends, strict=True)]
        mean = statistics.fmean(slopes)
        return [
            end + more * mean + math.sqrt(more * half) * (slope - mean)
            for end, slope in zip(ends, slopes, strict=True)
        ]

    names = ("seconds", "bytes", "crossed", "money")
    columns = {name: longer(name) for name in names}
    for k, result in enumerate(long):
        figures: dict[str, Any] = {name: column[k] for name, column in columns.items()}
        yield replace(result, steps=result.steps + more, **figures)


def _recommended(
    wanted: Sequence[Choice], rows: Sequence[Planned], facts: Facts
) -> tuple[Planned, str]:
    """Apply the rule of `laconic.auto` to the simulated seconds of its candidates."""
    ddp = rows[0].seconds.median

    def timed_row(row: Row, planned: Planned) -> Row:
        total, compute = planned.seconds.median, planned.shares["compute"]
        each = total / planned.results[0].steps
        return replace(row, seconds=each, speedup=ddp / total, share=compute)

    timed = [timed_row(*each) for each in zip(rows_of(wanted, facts), rows, strict=True)]
    known = {candidate.text for candidate in candidates(facts)}
    chosen = [row for row in timed if row.recipe in known]
    least = min(row.seconds * row.steps for row in chosen)
    best = next(row for row in chosen if row.seconds * row.steps <= (1 + TIE) * least)
    return rows[timed.index(best)], " ".join(reason_of(timed[0], best))


# -- what limits a run ----


def limit(planned: Planned, cluster: Cluster) -> str:
    """Return what limits the run, in words."""
    shares = planned.shares
    cause = max((k for k in shares if k != "compute"), key=lambda k: shares[k])
    if shares[cause] < MATTERS:
        return f"computing ({shares['compute']:.0%} of the workers' time)"
    part = f"({shares[cause]:.0%} of the workers' time)"
    words = {
        "stragglers": "waiting for the slowest worker",
        "bandwidth": f"the bandwidth of {bottleneck(cluster)}",
        "latency": f"the latency, {format_seconds(2 * cluster.facts().one_way)} per round trip",
        "failures": "failures",
    }
    return f"{words[cause]} {part}"


def bottleneck(cluster: Cluster) -> str:
    """Return the name of the resource that is busy for longest in a collective."""
    n, slowest = cluster.workers, min(cluster.sites, key=lambda s: min(s.bandwidth, s.receives))
    rate = min(slowest.bandwidth, slowest.receives)
    alike = len({min(site.bandwidth, site.receives) for site in cluster.sites}) == 1
    where = "each worker's interface" if alike else f"the workers' interfaces in {slowest.name}"
    found = [(rate, f"{where}, {format_rate(rate)}")]
    for site in cluster.sites:
        if site.uplink is not None and site.workers < n:
            share = site.uplink * (n - 1) / (site.workers * (n - site.workers))
            found.append((share, f"the uplink of {site.name}, {format_rate(site.uplink)}"))
    return min(found)[1]
