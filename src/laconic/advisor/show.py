"""Show advice in the terminal and as a plot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from laconic.advisor.advice import Advice, Guide, Row
from laconic.advisor.choices import KNOWN
from laconic.errors import install
from laconic.lab.race.plots import COLORS
from laconic.units import format_bytes, format_rate, format_seconds, format_share, three_digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console
    from rich.table import Table

LEGEND = (
    "hidden: share of communication that overlaps with training; MB: sent by a rank to other",
    "workers per step; memory: bytes that rounds keep on a rank; x ddp: speed relative to ddp();",
    "alone: share of the speed without communication; steps: needed per step of ddp(), measured",
    "with one task; ~: not measured",
)


def show(advice: Advice, console: Console) -> None:
    """Print all of the advice, with the recommendation at the end."""

    def write(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=not console.is_terminal)

    for text in facts_text(advice):
        write(text)
    console.print(table(advice))
    for text in LEGEND:
        write(text)
    write("")
    write("Quality, as far as it is known:")
    for text in quality(advice):
        write(f"  {text}")
    write("")
    for text in guide_text(advice):
        write(text)
    write("")
    write(advice.reason)
    write(f"    {advice.code}")


def facts_text(advice: Advice) -> Iterator[str]:
    """Yield lines about what the predictions are based on."""
    f, net = advice.facts, advice.facts.net("workers")
    lost = f", {format_share(f.loss)} of packets lost" if f.loss else ""
    ranks = f" of {f.ranks} ranks" if f.ranks > 1 else ""
    yield (
        f"{f.workers} workers{ranks}, {f.elements:,} parameters of {f.itemsize} bytes; a step "
        f"computes for {format_seconds(f.compute)}, {f.backward:.0%} of it backward; network per "
        f"rank: {format_rate(net.rate)}, {format_seconds(net.latency)} per message"
        f"{lost}"
    )
    if advice.computes is not None and advice.held is not None and advice.peak is not None:
        least, most = min(advice.computes), max(advice.computes)
        yield (
            f"measured: steps of {format_seconds(least)} to {format_seconds(most)} on "
            f"{len(advice.computes)} ranks, {format_seconds(f.skew)} per step waiting for the "
            f"slowest; parameters, gradients and optimizer state: {format_bytes(advice.held)}; "
            f"memory in use: {format_bytes(advice.peak)}"
        )
    else:
        yield "from numbers: encoding, copying and waiting for slower workers count as free"


def table(advice: Advice) -> Table:
    """Return a table with a row per recipe."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column("recipe", overflow="fold", min_width=24)
    columns = ("s/step", "hidden", "MB", "memory", "x ddp", "alone", "steps")
    for header in columns:
        made.add_column(header, justify="right", no_wrap=True)
    for row in advice.rows:
        style = "bold green" if row.recipe == advice.recommendation else ""
        made.add_row(row.recipe, *cells(row), style=style)
    return made


def cells(row: Row) -> tuple[str, ...]:
    """Return the formatted figures of a row."""
    return (
        three_digits(row.seconds),
        f"{row.hidden:.0%}",
        three_digits(row.megabytes),
        format_bytes(row.memory),
        three_digits(row.speedup),
        f"{row.share:.0%}",
        f"{'' if row.steps_from in KNOWN else '~'}{row.steps:.2f}",
    )


def quality(advice: Advice) -> Iterator[str]:
    """Yield what is known about the quality of the recipes that are at least as fast as DDP."""
    for row in advice.rows:
        if row.speedup >= 1 or row.recipe == advice.recommendation:
            yield f"{row.recipe}: {row.quality}; steps: {row.steps_from}"


def guide_text(advice: Advice) -> Iterator[str]:
    """Yield the inequality of fairscale's guide with the numbers filled in."""
    yield (
        "fairscale's rule for local SGD and SlowMo: faster than DDP if "
        "all-reduce * (1 - 1/H) > backward (+ average in a node)"
    )
    *rest, gossip = advice.guide
    for guide in rest:
        yield f"  H = {guide.frequency:g}: {_inequality(guide)}"
    yield f"  SGP, as H = 2(n-1)/n = {gossip.frequency:.3g}: {_inequality(gossip)}"
    if advice.facts.workers <= 2:
        yield "  but two workers gain least: it is meant for more than two nodes"


def _inequality(guide: Guide) -> str:
    left = f"{format_seconds(guide.allreduce)} * (1 - 1/{guide.frequency:g})"
    left += f" = {format_seconds(guide.saved)}"
    backward, node = format_seconds(guide.backward), format_seconds(guide.node)
    verdict = {True: "faster", False: "not faster"}
    if not guide.node:
        return f"{left} against {backward}: {verdict[guide.pays_here]}"
    return (
        f"{left} against {backward} + {node} (averaged after backward, as in fairscale): "
        f"{verdict[guide.pays_there]}; against max({backward}, {node}) (during backward, as in "
        f"laconic): {verdict[guide.pays_here]}"
    )


def plot(advice: Advice, path: Path) -> None:
    """Plot seconds per step by period, with one line per recipe that has a period.

    Raises ``ImportError`` without matplotlib, and ``ValueError`` for an unsupported file type.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"--plot needs matplotlib: {install('lab')}") from error
    figure = Figure(figsize=(9, 5), dpi=150, layout="constrained", facecolor="white")
    axes = figure.subplots()
    _lines(axes, advice)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("period: steps between two rounds of the same tensors")
    axes.set_ylabel("predicted seconds per step")
    f = advice.facts
    axes.set_title(
        f"{f.workers} workers, {f.elements:,} parameters, {format_rate(f.net('workers').rate)}",
        loc="left",
    )
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    if path.suffix.removeprefix(".").lower() not in figure.canvas.get_supported_filetypes():
        choices = ", ".join(sorted(figure.canvas.get_supported_filetypes()))
        raise ValueError(f"--plot must be a file that ends in one of {choices}, not {path}")
    figure.savefig(path)


def _lines(axes: Axes, advice: Advice) -> None:
    families: dict[str, list[Row]] = {}
    for row in advice.rows:
        if row.period is not None:
            families.setdefault(row.recipe.partition("(")[0], []).append(row)
    for color, (name, rows) in zip(COLORS, families.items(), strict=False):
        periods = [row.period or 0 for row in rows]
        axes.plot(periods, [r.seconds for r in rows], "o-", color=color, label=name)
    every = [row for row in advice.rows if row.period is None]
    dashes = ("-", "--", ":", "-.")
    for number, row in enumerate(every):
        style = dashes[number % len(dashes)]
        axes.axhline(row.seconds, color="#767676", linestyle=style, label=row.recipe)
    axes.axhline(advice.facts.compute, color="#000000", linewidth=0.8, label="no communication")
