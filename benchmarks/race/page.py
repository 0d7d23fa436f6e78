"""Write the tables and the plot of docs/race.md."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from benchmarks.race.journal import Entry, key
from benchmarks.race.networks import Network
from benchmarks.race.rows import NONE, ROWS
from laconic.lab.emulation.seeds import groups
from laconic.lab.race.comparison import compared
from laconic.lab.race.plots import COLORS, GRAY, loss_limits
from laconic.lab.race.result import SECONDS, Result, Row, line
from laconic.lab.race.wording import reason, three_digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEAD = ("row", "s per step", "speed", "MB per step", "loss", "least to most", "steps")
BEGIN, END = "<!-- begin: written by python -m benchmarks.race table -->", "<!-- end -->"
Dashes = str | tuple[float, tuple[float, ...]]
DASHES: dict[bool, tuple[Dashes, ...]] = {
    False: ("-", "-.", ":"),
    True: ("--", (0.0, (1.0, 1.0))),
}
"""Line styles of recipes (the last one is for the row without communication) and of other
libraries. The second of each is used when the colors repeat."""
LINE_INCHES = 0.17
"""Height of a line in the rows' names."""


@dataclass(frozen=True)
class Line:
    """A row on a network, with its runs, one per seed."""

    text: str
    entries: tuple[Entry, ...]

    @property
    def peer(self) -> bool:
        """Whether the row is another library."""
        return self.entries[0].run.peer

    @property
    def finished(self) -> list[Row]:
        """The runs that finished without diverging."""
        return [entry.run for entry in self.entries if entry.run.status == "ok"]

    @property
    def seeds(self) -> set[int]:
        """The seeds of the runs that finished."""
        return {entry.job.seed for entry in self.entries if entry.run.status == "ok"}

    @property
    def by_seed(self) -> dict[int, float]:
        """The losses of the runs that finished, at the end of the given time, by seed."""
        found = {
            entry.job.seed: compared(entry.result, entry.run, SECONDS)
            for entry in self.entries
            if entry.run.status == "ok"
        }
        return {seed: loss for seed, loss in found.items() if loss is not None}

    @property
    def losses(self) -> list[float]:
        """The same without the seeds."""
        return list(self.by_seed.values())

    @property
    def pace(self) -> float:
        """Mean seconds per step over the runs that finished; NaN if there are none."""
        return _mean(row.seconds_per_step for row in self.finished)

    @property
    def loss(self) -> float:
        """Mean loss; NaN if there is none."""
        return _mean(self.losses)


def _mean(values: Iterable[float | None]) -> float:
    known = [math.nan if value is None else value for value in values]
    return statistics.fmean(known) if known else math.nan


def networks(entries: Sequence[Entry]) -> dict[Network, list[Line]]:
    """Return the rows on each network, in the order of the table, then of their runs.

    The row without communication is on each network.
    """
    found = sorted({e.job.network for e in entries if e.job.network is not None})
    texts = dict.fromkeys((*ROWS, *(entry.job.row for entry in entries)))
    lines: dict[Network, list[Line]] = {}
    for network in found:
        here = [e for e in entries if e.job.network in (None, network)]
        runs = {text: tuple(e for e in here if e.job.row == text) for text in texts}
        lines[network] = [Line(text, found) for text, found in runs.items() if found]
    return lines


def best(lines: Sequence[Line]) -> Line | None:
    """Return the row with the lowest mean loss.

    Only rows that finished with every seed in use compete, and there must be at least two. The row
    without communication does not compete.
    """
    competitors = [one for one in lines if one.text != NONE]
    seeds = {entry.job.seed for one in competitors for entry in one.entries}
    competitors = [one for one in competitors if one.seeds == seeds and not math.isnan(one.loss)]
    return min(competitors, key=lambda one: one.loss) if len(competitors) > 1 else None


def task(entries: Sequence[Entry]) -> str:
    """Describe what the runs have in common."""
    s = entries[0].shared
    return (
        f"{s['workload']} workload on {s['data']}, {s['hosts']} hosts, {s['seconds']:g} s of "
        f"training each, {s['processor']}, {s['cores']} cores, torch {s['torch']}"
    )


# --- the tables -----------------------------------------------------------------------------------


def markdown(entries: Sequence[Entry], picture: str) -> str:
    """Return everything between the markers of the page. ``picture`` is the name of the plot."""
    seeds = ", ".join(map(str, sorted({entry.job.seed for entry in entries})))
    parameters = max(int(str(entry.result.settings["parameters"])) for entry in entries)
    parts = [
        f"Settings `{key(entries[0].shared)}`: {task(entries)}; {parameters:,} parameters, seeds "
        f"{seeds}. {_versions(entries)}",
        f"![Loss against wall clock, and at its end]({picture})",
    ]
    for network, lines in networks(entries).items():
        parts += [f"### {network}", _table(lines)]
        parts += ["\n".join(notes)] if (notes := _notes(lines)) else []
    return "\n\n".join(parts)


def _versions(entries: Sequence[Entry]) -> str:
    """List the installed versions."""
    names = dict.fromkeys(name for entry in entries for name in entry.result.versions)
    texts = []
    for name in sorted(names.keys() - {"torch", "commit"}):
        versions = {e.result.versions[name] for e in entries if name in e.result.versions}
        texts.append(f"{name} {' and '.join(sorted(versions))}")
    return f"With {', '.join(texts)}."


def _table(lines: Sequence[Line]) -> str:
    winner = best(lines)
    baseline = next((one.pace for one in lines if one.text == NONE), math.nan)
    rows = [HEAD, ("---", *["---:"] * (len(HEAD) - 1))]
    rows += [_cells(one, baseline, one is winner) for one in lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cells(one: Line, baseline: float, wins: bool) -> tuple[str, ...]:
    """Return a table row. ``baseline`` is the seconds per step without communication."""
    sent = _mean(row.interface_bytes_per_step for row in one.finished) / 1e6
    share = baseline / one.pace
    losses = one.losses
    loss = f"{one.loss:.3f}" if losses else "–"
    return (
        f"`{one.text}`",
        three_digits(one.pace),
        "–" if math.isnan(share) else f"{share:.0%}",
        # Without communication, acknowledgments and neighbor discovery do not count.
        "0" if one.text == NONE else three_digits(sent),
        f"**{loss}**" if wins else loss,
        f"{min(losses):.3f} to {max(losses):.3f}" if losses else "–",
        f"{_mean(row.steps for row in one.finished):,.0f}" if one.finished else "–",
    )


def _notes(lines: Sequence[Line]) -> list[str]:
    """Return notes for the readers of a table."""
    seeds = {entry.job.seed for one in lines for entry in one.entries if one.text != NONE}
    notes = []
    for one in lines:
        lacking = sorted(seeds - {entry.job.seed for entry in one.entries})
        if lacking:
            notes.append(f"- `{one.text}` was not run with seed {', '.join(map(str, lacking))}.")
        notes += [
            f"- `{one.text}`, seed {entry.job.seed}, {reason(entry.run)}."
            for entry in one.entries
            if entry.run.status != "ok"
        ]
        remarks = dict.fromkeys(note for entry in one.entries for note in entry.run.notes)
        notes += [f"- `{one.text}`: {note}." for note in remarks]
    return notes


# --- the plot -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Style:
    """How a row is drawn: its color and dashes, its name split into lines, and its height below the
    top of the lower panels, in lines of text."""

    color: str
    dashes: Dashes
    name: str
    height: float


def picture(entries: Sequence[Entry]) -> Figure:
    """Plot loss against wall time, with a panel per network and a band for the range over seeds.

    The panels below show the final losses: each seed, their range, and their mean.
    """
    from matplotlib.figure import Figure  # without pyplot: no backend, no global state

    found = networks(entries)
    styles = _styles({one.text: one.peer for lines in found.values() for one in lines})
    below = 0.7 + LINE_INCHES * (max(style.height for style in styles.values()) + 1)
    figure = Figure(
        figsize=(3.6 + 3.6 * len(found), 4.6 + below),
        dpi=150,
        layout="constrained",
        facecolor="white",
    )
    panels = figure.subplots(2, len(found), squeeze=False, height_ratios=[4.0, below])
    for column, (network, lines) in enumerate(found.items()):
        curves, ends = panels[0][column], panels[1][column]
        _curves(curves, lines, styles)
        curves.set_title("\n".join(network.parts), loc="left", fontsize=11, fontweight="bold")
        _ends(ends, lines, styles, named=column == 0)
    panels[0][0].set_ylabel("validation loss (nats)")
    legend = "Solid: laconic's recipes; dashed: other libraries; gray: no communication."
    words = "\n".join((fill(task(entries), 60 + 45 * len(found)), legend))
    figure.suptitle(words, x=0.01, ha="left", fontsize=8.5, color=GRAY)
    return figure


def _styles(texts: Mapping[str, bool]) -> dict[str, Style]:
    """Return the style of each row. Colors of recipes and of other libraries are counted apart."""
    count = {False: itertools.count(), True: itertools.count()}
    styles, height = {}, 0.0
    for text, peer in texts.items():
        name = fill(text, 50, break_long_words=False)
        half = (name.count("\n") + 1.4) / 2
        color, dashes = GRAY, DASHES[False][-1]
        if text != NONE:
            number = next(count[peer])
            color = COLORS[number % len(COLORS)]
            dashes = DASHES[peer][number // len(COLORS) % 2]
        height += half
        styles[text] = Style(color, dashes, name, height)
        height += half
    return styles


def _curves(axes: Axes, lines: Sequence[Line], styles: dict[str, Style]) -> None:
    seconds = lines[0].entries[0].result.settings["seconds"]
    # Group the runs by name and by whether they are another library.
    rows = tuple(entry.run for one in lines for entry in one.entries)
    result = Result(rows, {"seconds": seconds}, {}, {}, "")
    for group, one in zip(groups(result), lines, strict=True):
        style, pairs = styles[one.text], line(group.mean, SECONDS)
        axes.plot(
            [at for at, _ in pairs],
            [loss for _, loss in pairs],
            color=style.color,
            linestyle=style.dashes,
            linewidth=1.5,
        )
        if len(group.runs) > 1 and pairs:
            known = [k for k, point in enumerate(group.mean.curve) if point.loss is not None]
            axes.fill_between(
                [group.mean.curve[k].seconds for k in known],
                [group.low[k] or 0.0 for k in known],
                [group.high[k] or 0.0 for k in known],
                color=style.color,
                alpha=0.15,
                linewidth=0,
            )
    if (limits := loss_limits(result)) is not None:
        low, high, logarithmic = limits
        if logarithmic:
            axes.set_yscale("log", subs=[2, 5])
            axes.yaxis.set_major_formatter(lambda loss, _: f"{loss:g}")
            axes.yaxis.set_minor_formatter(lambda loss, _: f"{loss:g}")
        axes.set_ylim(low, high)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds of training")
    _style(axes)


def _ends(axes: Axes, lines: Sequence[Line], styles: dict[str, Style], named: bool) -> None:
    winner = best(lines)
    beside = axes.get_yaxis_transform()
    for one in lines:
        style, losses = styles[one.text], one.losses
        if not losses:
            axes.text(
                0.02, style.height, "no run finished", fontsize=7, color=GRAY, transform=beside
            )
            continue
        heights = [style.height] * len(losses)
        axes.plot(losses, heights, color=style.color, linewidth=1.2)
        axes.plot(losses, heights, "|", color=style.color, markersize=7)
        marker = "D" if one is winner else "o"
        axes.plot(one.loss, style.height, marker, color=style.color, markersize=5)
    names = [style.name if named else "" for style in styles.values()]
    axes.set_yticks([style.height for style in styles.values()], names)
    axes.set_ylim(max(style.height for style in styles.values()) + 1, 0)
    axes.set_xlabel("final loss" + " (diamond: lowest)" * (winner is not None))
    _style(axes)
    if named:  # draw a piece of each row's line next to its name, as a legend for all panels
        axes.tick_params(axis="y", pad=34, labelsize=7.5)
        for style in styles.values():
            axes.annotate(
                "",
                (0, style.height),
                (-32, 0),
                xycoords=beside,
                textcoords="offset points",
                arrowprops={
                    "arrowstyle": "-",
                    "color": style.color,
                    "linestyle": style.dashes,
                    "linewidth": 1.6,
                    "shrinkA": 0,
                    "shrinkB": 4,
                },
                annotation_clip=False,
            )


def _style(axes: Axes) -> None:
    axes.grid(color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.tick_params(axis="y", length=0)


def write(path: Path, entries: Sequence[Entry]) -> list[Path]:
    """Write the tables into the page at ``path``, between its markers, and the plot next to it.

    Raises ``ValueError`` for a page without the markers and ``ImportError`` without matplotlib.
    """
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{path} must have a line {BEGIN!r} and after it a line {END!r}")
    if not networks(entries):
        raise ValueError("no run on a network yet")
    drawn = path.with_suffix(".png")
    picture(entries).savefig(drawn)
    text = markdown(entries, drawn.name)
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")
    return [path, drawn]
