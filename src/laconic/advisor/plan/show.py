"""Show a plan in the terminal, and as a picture."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from laconic.advisor.plan.report import Plan, Planned, Range
from laconic.algorithms.parse import qualified
from laconic.errors import install
from laconic.units import format_bytes, format_rate, format_seconds, three_digits

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from laconic.advisor.plan.cluster import Cluster
    from laconic.advisor.plan.measured import Measured

LEGEND = (
    "time: of the whole run; steps: needed per step of ddp() for the same loss (~: not",
    "measured); goodput: share of the workers' time in steps that count; GB: sent by a worker.",
    "All are medians.",
)
UPGRADE = ", without the price of the upgrade"
"""Faster networks and repairs have a price that is not in the description."""
LONG = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def show(plan: Plan, console: Console, measured: Measured | None = None) -> None:
    """Print the answer in a few lines, and then what it is based on."""

    def write(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=not console.is_terminal)

    for text in answer(plan):
        write(text)
    write("")
    console.print(table(plan))
    for text in LEGEND:
        write(text)
    write("")
    for text in ranges(plan.best):
        write(text)
    write("")
    for text in assumptions(plan):
        write(text)
    if measured is not None:
        for text in measured.notes:
            write(text)
        write("")
        for text in measured.comparison(plan.rows):
            write(text)


def answer(plan: Plan) -> Iterator[str]:
    """Yield the answer: the recipe and its time, where that goes, the cost, and what would help."""
    best, cluster = plan.best, plan.cluster
    first = best.results[0]
    yield (
        f"{best.text}: {plan.steps:,} steps of {cluster.workers} workers on "
        f"{_sites(len(cluster.sites))} take {spread(best.seconds, duration)}, "
        f"{three_digits(best.seconds.median / plan.steps)} s per step"
    )
    shares = best.shares
    parts = [f"{k} {share:.0%}" for k, share in shares.items() if share >= 0.005]
    yield f"The workers' time goes to: {', '.join(parts)}. Limited by {plan.limit}."
    goodput = spread(best.range(lambda r: 100 * r.goodput), _percent)
    lost = ""
    if cluster.failures.happen:
        failures = statistics.fmean(r.failures for r in best.results)
        lost = f" with {three_digits(failures)} failures on average"
        if not failures:  # the runs had none, but more of them would
            each = best.seconds.median * cluster.workers * cluster.chips / cluster.failures.mtbf
            lost = f"; {three_digits(each)} failures are expected, and no run had one"
    crossed = best.range(lambda r: r.crossed)
    money = best.range(lambda r: r.money)
    yield (
        f"Goodput {goodput}{lost}; {format_bytes(first.bytes)} sent by a worker, "
        f"{format_bytes(crossed.median)} between sites; {format_bytes(first.memory)} of memory for "
        f"rounds{f'; price {spread(money, three_digits)}' if money.high else ''}."
    )
    if best.loss.loss is not None:
        yield (
            f"Loss at the end: {best.loss.loss:.2f} ({best.loss.low:.2f} to {best.loss.high:.2f}): "
            f"{best.loss.why}."
        )
    else:
        yield f"Loss: {best.loss.why}."
    yield _help(plan)
    if best.steps_factor > 1.005:
        more = best.steps_factor
        whole = duration(best.seconds.median * more)
        paid = f", price {three_digits(money.median * more)}" if money.high else ""
        yield (
            f"For what {plan.steps:,} steps of ddp() reach, it needs about "
            f"{plan.steps * more:,.0f} steps: {whole}{paid}."
        )
    if plan.reason:
        yield plan.reason
    yield f"    sync = laconic.attach(model, optimizer, {qualified(best.text)}{_elastic(plan)})"


def _elastic(plan: Plan) -> str:
    fails = plan.cluster.failures
    elastic = fails.happen and fails.policy == "elastic" and plan.cluster.slices == 1
    return ', elastic=laconic.Elastic("HOST:29400")' if elastic else ""


def _help(plan: Plan) -> str:
    if not plan.changes:
        return "No change that was tried would shorten the run by 5% or more."
    first = next((c for c in plan.changes if c.free), plan.changes[0])
    rest = [c for c in plan.changes if c is not first]
    more = [f"{c.what} ({c.gain:.0%}{'' if c.free else UPGRADE})" for c in rest[:2]]
    price = f", for {three_digits(first.money)} in all" if first.money else ""
    head = "Cheapest change that helps" if first.free else "Change that helps"
    price += "" if first.free else UPGRADE
    text = f"{head}: {first.what}, {first.gain:.0%} shorter{price}."
    return text + (f" Also: {'; '.join(more)}." if more else "")


def _sites(count: int) -> str:
    return "one site" if count == 1 else f"{count} sites"


def table(plan: Plan) -> Table:
    """Return a table with a row per recipe."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column("recipe", overflow="fold", min_width=20)
    priced = any(row.range(lambda r: r.money).high for row in plan.rows)
    heads = ["time", "s/step", "steps", "goodput", "GB", *(["price"] * priced)]
    for head in heads:
        made.add_column(head, justify="right", no_wrap=True, min_width=5)
    for row in plan.rows:
        style = "bold green" if row is plan.best else ""
        made.add_row(row.text, *_cells(row, plan.steps, priced), style=style)
    return made


def _cells(row: Planned, steps: int, priced: bool) -> list[str]:
    from laconic.advisor.choices import KNOWN

    known = "" if row.steps_from in KNOWN else "~"
    cells = [
        duration(row.seconds.median),
        three_digits(row.seconds.median / steps),
        f"{known}{row.steps_factor:.2f}",
        f"{row.range(lambda r: r.goodput).median:.0%}",
        three_digits(row.range(lambda r: r.bytes).median / 1e9),
    ]
    return cells + [three_digits(row.range(lambda r: r.money).median)] * priced


def ranges(row: Planned) -> Iterator[str]:
    """Yield the figures of a recipe with their ranges."""
    runs = len(row.results)
    yield f"{row.text}, median and 5% to 95% of {runs} runs:" if runs > 1 else f"{row.text}:"
    figures: tuple[tuple[str, Range, Callable[[float], str]], ...] = (
        ("time", row.seconds, duration),
        ("utilization", row.range(lambda r: 100 * r.utilization), _percent),
        ("goodput", row.range(lambda r: 100 * r.goodput), _percent),
        ("sent by a worker", row.range(lambda r: r.bytes), format_bytes),
        ("sent between sites", row.range(lambda r: r.crossed), format_bytes),
        ("memory of rounds", row.range(lambda r: r.memory), format_bytes),
        ("price", row.range(lambda r: r.money), three_digits),
        ("failures", row.range(lambda r: float(r.failures)), three_digits),
    )
    for name, figure, text in figures:
        if figure.high or name not in ("price", "failures"):
            yield f"  {name + ':':<20}{spread(figure, text)}"


def _percent(number: float) -> str:
    return f"{three_digits(number)}%"


def assumptions(plan: Plan) -> Iterator[str]:
    """Yield lines about what the plan is based on."""
    c = plan.cluster
    sites = ", ".join(
        f"{s.name} {s.workers} x {format_rate(s.rate)}"
        + (f" (download {format_rate(s.download)})" if s.download is not None else "")
        + (f" (uplink {format_rate(s.uplink)})" if s.uplink is not None else "")
        for s in c.sites
    )
    yield (
        f"{c.parameters:,} parameters in {c.dtype}; a step computes for {format_seconds(c.step)}, "
        f"spread {c.spread:.0%} ({c.distribution}); {sites}; {format_seconds(c.latency)} "
        f"round trip between sites{''.join(_links(c))}"
    )
    fails = c.failures
    if fails.happen:
        chips = "worker" if c.chips == 1 else "chip"
        yield (
            f"a {chips} fails every {duration(fails.mtbf)} on average and is back after "
            f"{duration(fails.repair + fails.restart)}; {fails.policy}"
        )
    runs = len(plan.best.results)
    many = f"{runs} runs of each recipe"
    if runs == 1:
        many = "one run, as nothing is random" if c.deterministic else "one run of each recipe"
    yield (
        f"{many}; encoding and copying on the processors count as free unless they were measured "
        "(--from-metrics); docs/planning.md has what else is left out"
    )


def _links(cluster: Cluster) -> Iterator[str]:
    for link in cluster.links:
        parts = [] if link.latency is None else [f"{format_seconds(link.latency)} round trip"]
        parts += [] if link.rate is None else [format_rate(link.rate)]
        yield f", {link.between[0]} to {link.between[1]} {' and '.join(parts)}"


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


def check_plot(path: Path) -> None:
    """Raise an error if `plot` could not write a picture to ``path``: ``ImportError`` without
    matplotlib, ``ValueError`` for a path that cannot be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"--plot needs matplotlib: {install('lab')}") from error
    suffixes = Figure().canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in suffixes:
        raise ValueError(f"--plot must end in one of {', '.join(sorted(suffixes))}, not {path}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--plot {path}: no such directory")
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ValueError(f"--plot {path}: cannot be written: give the path of a file that can")


def plot(plan: Plan, path: Path, measured: Measured | None = None) -> None:
    """Draw the steps over time of each recipe, and of the measured run if there is one. See
    `check_plot`."""
    from matplotlib.figure import Figure

    from laconic.lab.race.plots import COLORS

    figure = Figure(figsize=(9, 5), dpi=150, layout="constrained", facecolor="white")
    axes = figure.subplots()
    for number, row in enumerate(plan.rows):
        color = COLORS[number % len(COLORS)]
        for k, result in enumerate(row.results):
            points: Sequence[tuple[float, float, int]] = ((0.0, 0.0, result.workers), *result.marks)
            x, y = [p[0] for p in points], [p[1] for p in points]
            axes.plot(x, y, color=color, alpha=0.5, label=row.text if not k else None)
    if measured is not None:
        x, y = [p[0] for p in measured.marks], [p[1] for p in measured.marks]
        label = f"measured: {measured.recipe}, {measured.workers} workers"
        axes.plot(x, y, "k.", markersize=3, label=label)
    axes.set_xlabel("seconds")
    axes.set_ylabel("steps")
    axes.set_title(f"{plan.cluster.workers} workers, {plan.steps:,} steps", loc="left")
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path)
