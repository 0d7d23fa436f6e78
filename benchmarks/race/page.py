"""Write the table and the plot of docs/race.md."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from benchmarks import study
from benchmarks.race.networks import Network
from benchmarks.race.rows import NONE, ROWS
from benchmarks.race.runs import Entry
from laconic.lab.race.comparison import compared, groups
from laconic.lab.race.plots import COLORS, GRAY, loss_limits
from laconic.lab.race.result import SECONDS, Result, Row
from laconic.lab.race.wording import reason, three_digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "written by python -m benchmarks.race table"
HEAD = ("network", "row", "loss", "seeds", "s per step", "MB per step")
OURS = ("auto()", "ddp()")
"""laconic's recipes in the table and the plot, beside all other libraries."""
COLUMNS = 3
"""Panels of the plot next to each other."""


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


def shown(entries: Sequence[Entry]) -> dict[Network, list[Line]]:
    """Return what the page shows of `networks`: `OURS`, other libraries, and no communication."""
    chosen = [e for e in entries if e.run.peer or e.job.row in (*OURS, NONE)]
    return networks(chosen)


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


def markdown(entries: Sequence[Entry], picture: str) -> str:
    """Return everything between the markers of the page. ``picture`` is the name of the plot."""
    found = shown(entries)
    rows, notes = [], []
    for network, lines in found.items():
        ranked = sorted((one for one in lines if one.text != NONE), key=lambda one: one.loss)
        rows += [_cells(one, str(network) if at == 0 else "") for at, one in enumerate(ranked)]
        notes += [
            f"- `{one.text}`, {network}, seed {entry.job.seed}, {reason(entry.run)}."
            for one in ranked
            for entry in one.entries
            if entry.run.status != "ok"
        ]
    rows += [_cells(one, "any") for one in next(iter(found.values())) if one.text == NONE]
    parts = [
        f"{task(entries)[0].upper()}{task(entries)[1:]}.",
        f"![Loss against wall clock]({picture})",
        study.table(HEAD, rows, left=2),
    ]
    return "\n\n".join([*parts, "\n".join(notes)] if notes else parts)


def _cells(one: Line, network: str) -> tuple[str, ...]:
    """Return a row of the table."""
    sent = _mean(row.interface_bytes_per_step for row in one.finished) / 1e6
    return (
        network,
        f"`{one.text}`",
        f"{one.loss:.3f}" if one.losses else "–",
        str(len(one.losses)),
        three_digits(one.pace),
        # Without communication, acknowledgments and neighbor discovery do not count.
        "0" if one.text == NONE else three_digits(sent),
    )


# --- the plot -------------------------------------------------------------------------------------


def picture(entries: Sequence[Entry]) -> Figure:
    """Plot loss against wall time, with a band for the range over seeds.

    There is a panel for each network on which several rows ran, and a last one for the names.
    """
    from matplotlib.figure import Figure  # without pyplot: no backend, no global state

    found = {
        n: lines for n, lines in shown(entries).items() if sum(o.text != NONE for o in lines) > 1
    }
    looks = _looks({one.text: one.peer for lines in found.values() for one in lines})
    rows = math.ceil((len(found) + 1) / COLUMNS)
    figure = Figure(figsize=(4 * COLUMNS, 3.4 * rows), dpi=110, layout="constrained")
    panels = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
    for axes, (network, lines) in zip(panels, found.items(), strict=False):
        _curves(axes, lines, looks)
        axes.set_title(str(network), loc="left", fontsize=10)
    for axes in panels[len(found) :]:
        axes.set_axis_off()
    for text, look in looks.items():
        panels[len(found)].plot([], [], label=fill(text, 42), **look)
    panels[len(found)].legend(frameon=False, fontsize=7, loc="center", labelspacing=0.9)
    return figure


def _looks(texts: Mapping[str, bool]) -> dict[str, dict[str, str]]:
    """Return the color and dashes of each row: solid for recipes, dashed for other libraries."""
    ours, peers = iter(COLORS), itertools.product(("--", "-."), COLORS[1:])
    looks = {}
    for text, peer in texts.items():
        if text == NONE:
            looks[text] = {"color": GRAY, "linestyle": ":"}
        elif peer:
            dashes, color = next(peers)
            looks[text] = {"color": color, "linestyle": dashes}
        else:
            looks[text] = {"color": next(ours), "linestyle": "-"}
    return looks


def _curves(axes: Axes, lines: Sequence[Line], looks: Mapping[str, dict[str, str]]) -> None:
    budget = lines[0].entries[0].result.settings["seconds"]
    # Group the runs by name and by whether they are another library.
    rows = tuple(entry.run for one in lines for entry in one.entries)
    result = Result(rows, {"seconds": budget}, {}, {}, "")
    for group, one in zip(groups(result), lines, strict=True):
        look = looks[one.text]
        known = [k for k, point in enumerate(group.curve) if point.loss is not None]
        seconds = [group.curve[k].seconds for k in known]
        losses = [group.curve[k].loss or 0.0 for k in known]
        axes.plot(seconds, losses, linewidth=1.5, **look)
        if len(group.runs) > 1 and known:
            axes.fill_between(
                seconds,
                [group.low[k] or 0.0 for k in known],
                [group.high[k] or 0.0 for k in known],
                color=look["color"],
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
    axes.set_ylabel("validation loss (nats)")
    axes.grid(color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def write(path: Path, entries: Sequence[Entry]) -> list[Path]:
    """Write the table into the page at ``path``, between its markers, and the plot next to it.

    Raises ``ValueError`` for a page without the markers and ``ImportError`` without matplotlib.
    """
    if not shown(entries):
        raise ValueError(f"no run of {' or '.join(OURS)} or another library on a network yet")
    drawn = path.with_suffix(".png")
    figure = picture(entries)
    study.write(path, NAME, markdown(entries, drawn.name))
    figure.savefig(drawn)
    return [path, drawn]
