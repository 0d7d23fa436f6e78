"""Advice for people: in the terminal, and as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from laconic.advisor.advice import Advice, Guide, Row
from laconic.advisor.choices import KNOWN
from laconic.errors import install
from laconic.lab.race.plots import COLOURS
from laconic.units import format_bytes, format_rate, format_seconds, three_digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console
    from rich.table import Table

LEGEND = (
    "hidden: the share of communication that training does not wait for; MB: sent by a rank to",
    "other workers in a step; memory: what rounds keep on it; x ddp: speed against ddp(); alone:",
    "share of the speed without communication; steps: for one of ddp()'s, as measured with one",
    "task; ~: not measured",
)


def show(advice: Advice, console: Console) -> None:
    """All of it, the recommendation last."""

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=not console.is_terminal)

    for text in facts_told(advice):
        say(text)
    console.print(table(advice))
    for text in LEGEND:
        say(text)
    say("")
    say("Quality, as far as it is known:")
    for text in quality(advice):
        say(f"  {text}")
    say("")
    for text in guide_told(advice):
        say(text)
    say("")
    say(advice.reason)
    say(f"    {advice.code}")


def facts_told(advice: Advice) -> Iterator[str]:
    """What the predictions rest on."""
    f, net = advice.facts, advice.facts.net("workers")
    ranks = f" of {f.ranks} ranks" if f.ranks > 1 else ""
    yield (
        f"{f.workers} workers{ranks}, {f.elements:,} parameters of {f.itemsize} bytes; a step "
        f"computes {format_seconds(f.compute)}, of which backward {f.backward:.0%}; a rank's "
        f"network does {format_rate(net.rate)}, {format_seconds(net.latency)} a message"
    )
    if advice.computes is not None and advice.held is not None and advice.peak is not None:
        least, most = min(advice.computes), max(advice.computes)
        yield (
            f"measured: steps of {format_seconds(least)} to {format_seconds(most)} on "
            f"{len(advice.computes)} ranks, {format_seconds(f.skew)} waiting for the slowest of "
            f"each; parameters, gradients and optimiser state are {format_bytes(advice.held)}, "
            f"in use were {format_bytes(advice.peak)}"
        )
    else:
        yield "from numbers: coding, copying and waiting for slower workers are taken for free"


def table(advice: Advice) -> Table:
    """A row for each recipe."""
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
    """The figures of a row."""
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
    """What is known of the recipes' quality; of those that are at least as fast as DDP."""
    for row in advice.rows:
        if row.speedup >= 1 or row.recipe == advice.recommendation:
            yield f"{row.recipe}: {row.quality}; steps: {row.steps_from}"


def guide_told(advice: Advice) -> Iterator[str]:
    """The inequality of fairscale's guide, with the numbers put in."""
    yield (
        "fairscale's rule for local SGD and SlowMo: faster than DDP where "
        "all-reduce * (1 - 1/H) > backward (+ average in a node)"
    )
    *rest, gossip = advice.guide
    for guide in rest:
        yield f"  H = {guide.frequency:g}: {_inequality(guide)}"
    yield f"  SGP, as H = 2(n-1)/n = {gossip.frequency:.3g}: {_inequality(gossip)}"
    if advice.facts.workers <= 2:
        yield "  but two workers have the least to gain: it is meant for more than two nodes"


def _inequality(guide: Guide) -> str:
    left = f"{format_seconds(guide.allreduce)} * (1 - 1/{guide.frequency:g})"
    left += f" = {format_seconds(guide.saved)}"
    backward, node = format_seconds(guide.backward), format_seconds(guide.node)
    said = {True: "pays", False: "does not pay"}
    if not guide.node:
        return f"{left} against {backward}: {said[guide.pays_here]}"
    return (
        f"{left} against {backward} + {node} (averaged after backward, as there): "
        f"{said[guide.pays_there]}; against max({backward}, {node}) (during it, as laconic): "
        f"{said[guide.pays_here]}"
    )


def plot(advice: Advice, path: Path) -> None:
    """Seconds per step by period, one line for each recipe that has one.

    Raises ``ImportError`` without matplotlib, ``ValueError`` for an ending that it cannot write.
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
    for colour, (name, rows) in zip(COLOURS, families.items(), strict=False):
        periods = [row.period or 0 for row in rows]
        axes.plot(periods, [r.seconds for r in rows], "o-", color=colour, label=name)
    every = [row for row in advice.rows if row.period is None]
    dashes = ("-", "--", ":", "-.")
    for number, row in enumerate(every):
        style = dashes[number % len(dashes)]
        axes.axhline(row.seconds, color="#767676", linestyle=style, label=row.recipe)
    axes.axhline(advice.facts.compute, color="#000000", linewidth=0.8, label="no communication")
