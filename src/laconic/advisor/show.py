"""Advice, as text and as a plot."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic.advisor.choices import (
    KNOWN,
    MEASURED_ELEMENTS,
    MEASURED_STEPS,
    MEASURED_WORKERS,
    UNKNOWN,
)
from laconic.advisor.rows import Guide, Row, Slow
from laconic.errors import install
from laconic.policy.facts import Facts
from laconic.units import (
    finite,
    format_bytes,
    format_rate,
    format_seconds,
    format_share,
    three_digits,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = ("s/step", "speed", "steps", "progress")
MORE_COLUMNS = ("hidden", "MB", "memory")
LEGEND = (
    "speed: share of the speed without communication; steps: needed for one of ddp(), ~: not "
    "measured for this recipe, ?: unknown; progress: at most, per second, relative to ddp()"
)
MORE_LEGEND = (
    "hidden: share of communication that overlaps with training; MB: sent by a rank to other "
    "workers per step; memory: bytes that rounds keep on a rank"
)
LEAST_WIDTH = 80
"""Columns below which text is not folded: the terminal folds it."""


@dataclass(frozen=True)
class Advice:
    """The result of `laconic.advise`, equal on every rank.

    Attributes:
        facts: what was measured, or given.
        rows: the prediction for each recipe.
        guide: fairscale's rule of thumb for SlowMo, for several periods.
        recommendation: the text of the recipe that `laconic.auto` would choose from ``facts``.
        code: the line for a training loop.
        reason: the explanation.
        computes: seconds of a step on each rank. None without a measurement.
        held: bytes of parameters, gradients and optimizer state. None without a measurement.
        peak: bytes of memory in use. None without a measurement.
        slow: the ranks that the others wait for.
        alternatives: other recipes to consider, at most 5.

    As text, an advice is what ``laconic advise`` prints.

    Examples:
        >>> from laconic.advisor.advice import advice_on
        >>> from laconic.policy.facts import Facts
        >>> shapes = ((1024, 1024),) * 4  # 4 workers, 0.1 s per step, 1 Gbit/s in bytes per second
        >>> advice = advice_on(Facts(4, shapes, 4, compute=0.1, rate=1.25e8, one_way=0.001))
        >>> advice.recommendation in [row.recipe for row in advice.rows]
        True
    """

    facts: Facts
    rows: tuple[Row, ...]
    guide: tuple[Guide, ...]
    recommendation: str
    code: str
    reason: str
    computes: tuple[float, ...] | None = None
    held: int | None = None
    peak: int | None = None
    slow: tuple[Slow, ...] = ()
    alternatives: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the answer, the lines to paste, and the alternatives."""
        return "\n".join(answer(self))

    @property
    def row(self) -> Row:
        """The row of the recommended recipe."""
        return next(r for r in self.rows if r.recipe == self.recommendation)

    @property
    def fastest(self) -> Row:
        """The row with the fewest seconds per step, regardless of quality."""
        return min(self.rows, key=lambda r: r.seconds)

    def to_json(self) -> str:
        """Return everything as JSON."""
        plain = asdict(self)
        facts: dict[str, Any] = plain["facts"]
        del facts["shapes"], facts["work"]
        facts["parameters"] = self.facts.elements
        for row, made in zip(plain["rows"], self.rows, strict=True):
            row["progress"] = made.progress
        for guide, source in zip(plain["guide"], self.guide, strict=True):
            for name in ("saved", "pays_there", "pays_here"):
                guide[name] = getattr(source, name)
        return json.dumps(finite(plain), indent=2)


def answer(advice: Advice, width: int | None = None) -> Iterator[str]:
    """Yield lines: the answer, the code to paste, the alternatives, and what they are based on.

    ``width``: the columns of the terminal; None: lines are not folded.
    """
    yield from _folded(advice.reason, width)
    yield from _folded(measured_with(advice), width)
    yield ""
    yield "    import laconic"
    yield f"    {advice.code}  # before the loop"
    yield "    sync.finish()  # after the loop"
    yield ""
    by_text = {row.recipe: row for row in advice.rows}
    shown = [advice.row, *(by_text[text] for text in advice.alternatives)]
    yield from _table("beside alternatives", shown, COLUMNS, width, quality=True)
    yield ""
    yield from _folded(LEGEND, width)
    for text in facts_text(advice):
        yield from _folded(text, width)


def everything(advice: Advice, width: int | None = None) -> Iterator[str]:
    """Yield the lines of the `answer`, then every recipe, and the rule of fairscale's guide."""
    yield from answer(advice, width)
    yield ""
    yield from _table("all recipes", advice.rows, COLUMNS + MORE_COLUMNS, width)
    yield ""
    yield from _folded(MORE_LEGEND, width)
    yield ""
    yield "Quality, as far as it is known:"
    for row in advice.rows:
        yield from _folded(f"{row.recipe}: {known(row)}", width, indent="  ")
    yield ""
    for text in guide_text(advice):
        yield from _folded(text, width)


def measured_with(advice: Advice) -> str:
    """Return a line on what all numbers of steps were measured with, and how far that is from the
    user's model."""
    ratio = advice.facts.elements / MEASURED_ELEMENTS
    size = "equally" if ratio == 1 else f"{three_digits(ratio)} times as"
    return (
        f"All numbers of steps come from one task: {MEASURED_WORKERS} workers that train a "
        f"transformer of {MEASURED_ELEMENTS:,} parameters on text with AdamW, for {MEASURED_STEPS} "
        f"steps. Your model is {size} large: on your task, measure with laconic compare."
    )


def facts_text(advice: Advice) -> Iterator[str]:
    """Yield lines about what the predictions are based on."""
    f, net = advice.facts, advice.facts.net("workers")
    lost = f", {format_share(f.loss)} of packets lost" if f.loss else ""
    ranks = f" of {f.ranks} ranks" if f.ranks > 1 else ""
    yield (
        f"{f.workers} workers{ranks}, {f.elements:,} parameters of {f.itemsize} bytes; a step "
        f"computes for {format_seconds(f.compute)}, {f.backward:.0%} of it backward; network per "
        f"rank: {format_rate(net.rate)}, {format_seconds(2 * net.one_way)} per round trip"
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
        adam = "Adam's kind of optimizer or SGD; most elements in matrices; " if f.muon else ""
        muon = " the outer step in Muon's direction," if f.muon and not f.turning else ""
        yield f"assumed: {adam}encoding, copying,{muon} and waiting for slower workers are free"


def known(row: Row) -> str:
    """Return where the recipe's steps are from, unless they were determined for it, and what is
    known about its quality."""
    sure = row.steps_from in (*KNOWN, UNKNOWN)
    return row.quality if sure else f"steps: {row.steps_from}; {row.quality}"


def _table(
    title: str,
    rows: Sequence[Row],
    columns: Sequence[str],
    width: int | None,
    quality: bool = False,
) -> Iterator[str]:
    """Yield a line per row, or more where a recipe is folded, with its ``quality`` below."""
    figures = [dict(zip(COLUMNS + MORE_COLUMNS, _figures(row), strict=True)) for row in rows]
    widths = [max(len(c), *(len(line[c]) for line in figures)) + 2 for c in columns]
    room = max(len(title), *(len(row.recipe) for row in rows))
    if width is not None and width >= LEAST_WIDTH:
        room = min(room, max(20, width - 1 - sum(widths)))

    def line(cells: Sequence[str]) -> str:
        return "".join(cell.rjust(wide) for cell, wide in zip(cells, widths, strict=True))

    yield title.ljust(room) + line(columns)
    for row, cells in zip(rows, figures, strict=True):
        first, *rest = textwrap.wrap(row.recipe, room, subsequent_indent="  ")
        yield first.ljust(room) + line([cells[c] for c in columns])
        yield from rest
        if quality:
            yield from _folded(known(row), width, indent="    ")


def _figures(row: Row) -> tuple[str, ...]:
    known = row.steps_from != UNKNOWN
    steps = f"{'' if row.steps_from in KNOWN else '~'}{row.steps:.2f}"
    return (
        three_digits(row.seconds),
        f"{row.share:.0%}",
        steps if known else "?",
        three_digits(row.progress) if known else "?",
        f"{row.hidden:.0%}",
        three_digits(row.megabytes),
        format_bytes(row.memory),
    )


def _folded(text: str, width: int | None, indent: str = "") -> list[str]:
    if width is None or width < LEAST_WIDTH:
        return [indent + text]
    return textwrap.wrap(
        text,
        width - 1,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


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
    from laconic.lab.race.plots import COLORS

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
