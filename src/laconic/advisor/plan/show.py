"""A plan as text."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

from laconic.advisor.choices import KNOWN
from laconic.advisor.plan.report import Plan, Planned, Range
from laconic.advisor.show import table
from laconic.algorithms.parse import qualified
from laconic.units import format_bytes, format_rate, format_seconds, three_digits

COLUMNS = ("time", "s/step", "steps", "goodput", "GB", "price")
LEGEND = (
    "time: of the whole run; steps: needed per step of ddp() for the same loss (~: not measured); "
    "goodput: share of the workers' time in steps that count; GB: sent by a worker; all medians"
)
LONG = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def text(plan: Plan) -> Iterator[str]:
    """Yield the answer, the recipes that were simulated, and what the plan is based on."""
    yield from (*answer(plan), "")
    yield from table([("recipe", *COLUMNS), *(_cells(row, plan) for row in plan.rows)])
    yield from ("", LEGEND, "", *assumptions(plan))


def answer(plan: Plan) -> Iterator[str]:
    """Yield the answer: the recipe and its time, where that goes, and the cost."""
    best, cluster = plan.best, plan.cluster
    sites = "one site" if len(cluster.sites) == 1 else f"{len(cluster.sites)} sites"
    yield (
        f"{best.text}: {plan.steps:,} steps of {cluster.workers} workers on {sites} take "
        f"{spread(best.seconds, duration)}, "
        f"{three_digits(best.seconds.median / plan.steps)} s per step"
    )
    parts = [f"{k} {share:.0%}" for k, share in best.shares.items() if share >= 0.005]
    yield f"The workers' time goes to: {', '.join(parts)}. Limited by {plan.limit}."
    goodput = spread(best.range("goodput"), lambda x: f"{three_digits(100 * x)}%")
    lost = ""
    if cluster.failures.happen:
        failures = statistics.fmean(r.failures for r in best.results)
        lost = f" with {three_digits(failures)} failures on average"
    money = best.range("money")
    first = best.results[0]
    yield (
        f"Goodput {goodput}{lost}; {format_bytes(first.bytes)} sent by a worker, "
        f"{format_bytes(best.range('crossed').median)} between sites; "
        f"{format_bytes(first.memory)} of memory for rounds"
        f"{f'; price {spread(money, three_digits)}' if money.high else ''}."
    )
    if best.steps_factor > 1.005:
        more = best.steps_factor
        paid = f", price {three_digits(money.median * more)}" if money.high else ""
        yield (
            f"For what {plan.steps:,} steps of ddp() reach, it needs about "
            f"{plan.steps * more:,.0f} steps: {duration(best.seconds.median * more)}{paid}."
        )
    if plan.reason:
        yield plan.reason
    fails = cluster.failures
    elastic = fails.happen and fails.policy == "elastic"
    option = ', elastic=laconic.Elastic("HOST:29400")' if elastic else ""
    yield f"    sync = laconic.attach(model, optimizer, {qualified(best.text)}{option})"


def _cells(row: Planned, plan: Plan) -> tuple[str, ...]:
    return (
        row.text,
        duration(row.seconds.median),
        three_digits(row.seconds.median / plan.steps),
        f"{'' if row.steps_from in KNOWN else '~'}{row.steps_factor:.2f}",
        f"{row.range('goodput').median:.0%}",
        three_digits(row.range("bytes").median / 1e9),
        three_digits(row.range("money").median),
    )


def assumptions(plan: Plan) -> Iterator[str]:
    """Yield lines about what the plan is based on."""
    c = plan.cluster
    sites = ", ".join(
        f"{s.name} {s.workers} x {format_rate(s.bandwidth)}"
        + (f" (download {format_rate(s.download)})" if s.download is not None else "")
        + (f" (uplink {format_rate(s.uplink)})" if s.uplink is not None else "")
        for s in c.sites
    )
    yield (
        f"{c.params:,} parameters in {c.dtype}; a step computes for {format_seconds(c.step_time)}, "
        f"spread {c.spread:.0%}; {sites}; {format_seconds(c.latency)} round trip between sites"
    )
    fails = c.failures
    if fails.happen:
        yield (
            f"a worker fails every {duration(fails.mtbf)} on average and is back after "
            f"{duration(fails.repair + fails.restart)}; {fails.policy}"
        )
    yield (
        f"runs of each recipe: {len(plan.best.results)}, with 5% to 95% of them in parentheses; "
        "encoding and copying count as free; docs/planning.md has what else is left out"
    )


def spread(figure: Range, text: Callable[[float], str]) -> str:
    """Return a range as text: the median, and in parentheses the quantiles where they differ."""
    low, median, high = (text(x) for x in (figure.low, figure.median, figure.high))
    return median if low == high == median else f"{median} ({low} to {high})"


def duration(seconds: float) -> str:
    """Format ``seconds`` in the largest unit that fits, with three digits: 5400 is "1.5 h"."""
    for size, unit in LONG:
        if seconds >= size:
            return f"{three_digits(seconds / size)} {unit}"
    return format_seconds(seconds)
