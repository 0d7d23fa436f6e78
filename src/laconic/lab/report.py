"""How a race between recipes came out: as a table, as plots and as one sentence.

The row without communication is shown beside the others and never competes. Every text says what
network it was, and that a link was throttled rather than emulated where it was.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

from rich import box
from rich.align import VerticalAlignMethod
from rich.table import Table
from rich.text import Text

from laconic.lab.result import (
    MEGABYTES,
    NO_COMMUNICATION,
    SECONDS,
    STEPS,
    Axis,
    Point,
    Result,
    Row,
    bandwidth,
    brief,
    common,
    compared,
    compared_runs,
    competing,
    equal_steps,
    equal_time,
    finished,
    grouped,
    line,
    loss_at,
    loss_format,
    network,
    number,
    read,
    reason,
    repeats,
    summary,
    task,
    three_digits,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "NO_COMMUNICATION",
    "Point",
    "Result",
    "Row",
    "equal_steps",
    "equal_time",
    "plots",
    "read",
    "table",
    "verdict",
    "write",
]


def write(result: Result, directory: Path) -> list[Path]:
    """`results.json` and the plots in `directory`, made if need be; returns what it wrote."""
    return [save(result, directory), *plots(result, directory)]


def prepare(directory: Path) -> None:
    """Make ``directory`` and see that results can be written there, before they are won.

    Raises `OSError` where they cannot.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "results.json"
    existed = path.exists()
    with path.open("a", encoding="utf-8"):
        pass
    if not existed:
        path.unlink()


def save(result: Result, directory: Path) -> Path:
    """`results.json` alone, in `directory`, made if need be."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "results.json"
    path.write_text(result.to_json() + "\n", encoding="utf-8")
    return path


# --- the sentence ---------------------------------------------------------------------------------


def verdict(result: Result) -> str:
    """One sentence: who is ahead at equal time, and who after equal steps.

    The one that the race was limited by comes first. Losses that are written alike count as level,
    and so do those of repeated runs that differ by less than their spread. Rows that failed or
    diverged are named as not counted.
    """
    left_out = [f"{row.recipe} {row.status}" for row in result.rows if row.status != "ok"]
    left_out = list(dict.fromkeys(left_out))
    end = f"; not counted: {_listed(left_out)}." if left_out else "."
    where = _where(result)
    by_steps = bool(number(result, "steps")) and not number(result, "seconds")
    first, second = (STEPS, SECONDS) if by_steps else (SECONDS, STEPS)
    standing = _standing(result, first)
    if not standing:
        silent = ": only the workers that never talk did" if finished(result) else ""
        return f"No recipe finished{where}{silent}{end}"
    if len(standing) == 1:
        (row, loss), seconds = standing[0], line(standing[0][0], SECONDS)[-1][0]
        return (
            f"{row.recipe} reached a validation loss of {loss_format(result)(loss)} in "
            f"{_mean(result, row, _steps):,.0f} steps and {brief(seconds)} s{where}; no other "
            f"recipe finished to compare it with{end}"
        )
    leaders = _leaders(result, first)
    clauses = _at_the_limit(result, first, where), _the_other_way(result, second, leaders)
    means = (
        f" These are means of {repeats(result)} runs; recipes that differ by less than the spread "
        "of their runs count as level."
        if repeats(result) > 1
        else ""
    )
    return "; ".join(filter(None, clauses)) + end + means + _silence(result, first, standing[0][1])


def _silence(result: Result, axis: Axis, best: float) -> str:
    """What a reader of a short race would otherwise be left to find out."""
    show = loss_format(result)
    silent = [row for row in finished(result) if row.recipe == NO_COMMUNICATION]
    loss = compared_runs(result, silent, axis)
    if loss is not None and float(show(loss.mean)) < float(show(best)):
        return (
            f" Workers that never talk are at {show(loss.mean)}: so early on, steps count for more "
            "than agreement; give the race more time."
        )
    return ""


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


Standing = list[tuple[Row, float]]
"""The recipes that are compared, each by its first run and the mean loss of all, lowest first."""


def _standing(result: Result, axis: Axis) -> Standing:
    losses = [(runs[0], compared_runs(result, runs, axis)) for runs in grouped(competing(result))]
    return sorted(
        ((row, loss.mean) for row, loss in losses if loss is not None), key=lambda pair: pair[1]
    )


def _leaders(result: Result, axis: Axis) -> list[Row]:
    """The recipes that share the lead, and whatever stands between them: those whose loss is
    written as the lowest is, or differs from it by less than the larger spread of the two."""
    standing, show = _standing(result, axis), loss_format(result)
    (best, lowest), level = standing[0], 0
    for place, (row, loss) in enumerate(standing):
        spread = max(_spread(result, best, axis), _spread(result, row, axis))
        if show(loss) == show(lowest) or loss - lowest < spread:
            level = place
    return [row for row, _ in standing[: level + 1]]


def _runs(result: Result, row: Row) -> list[Row]:
    return [run for run in result.rows if (run.recipe, run.peer) == (row.recipe, row.peer)]


def _spread(result: Result, row: Row, axis: Axis) -> float:
    losses = compared_runs(result, _runs(result, row), axis)
    return losses.spread if losses is not None else 0.0


def _mean(result: Result, row: Row, figure: Callable[[Row], float]) -> float:
    """Over the runs of the row's recipe; NaN where one has no figure."""
    figures = summary(map(figure, _runs(result, row)))
    return figures.mean if figures is not None else math.nan


def _steps(row: Row) -> float:
    return row.steps


def _seconds_per_step(row: Row) -> float:
    return row.seconds_per_step


def _where(result: Result) -> str:
    if not bandwidth(result):
        return ""
    if result.settings.get("network") == "throttled":
        return f" on a link throttled to {bandwidth(result)}"
    return f" on this {bandwidth(result)} network"


def _span(result: Result, axis: Axis) -> str:
    position = common(result, axis) or 0
    return f"{brief(position)} s" if axis is SECONDS else f"{position:,.0f} steps"


def _at_the_limit(result: Result, axis: Axis, where: str) -> str:
    """Who is ahead when the race ends, and how much faster than whom."""
    standing, show = _standing(result, axis), loss_format(result)
    leaders = _leaders(result, axis)
    span = f"{'In' if axis is SECONDS else 'After'} {_span(result, axis)} per recipe{where}"
    names, best = _listed([row.recipe for row in leaders]), show(standing[0][1])
    others = standing[len(leaders) :]
    if not others:
        return f"{span}, {names} end level at a validation loss of {best}"
    ddp = [pair for pair in others if pair[0].recipe.partition("(")[0] == "ddp"]
    rival, loss = (ddp or others)[0]  # what everybody knows, else the next best
    against = f"{rival.recipe} ({show(loss)})"
    if len(leaders) > 1:
        return f"{span}, {names} share the lowest validation loss ({best}) ahead of {against}"
    pace = _pace(result, leaders[0], rival, axis)
    return f"{span}, {names} reached the lowest validation loss ({best}), {pace} {against}"


def _pace(result: Result, leader: Row, rival: Row, axis: Axis) -> str:
    """How the leader's speed compares with the rival's, up to the word before its name."""
    figure = _seconds_per_step if axis is STEPS else _steps
    own, others = _mean(result, leader, figure), _mean(result, rival, figure)
    ratio = own / others if others else 0.0
    if axis is STEPS:
        if not ratio > 0:  # zero or NaN: nothing was measured
            return "ahead of"
        return f"at {_times(ratio)} times the time per step of"
    if 0.95 < ratio < 1.05:
        return "in as many steps as"
    if ratio < 1:
        return f"in {own:,.0f} steps against the {others:,.0f} of"
    return f"with {_times(ratio)} times as many steps as"


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.2g}" if ratio < 1 else f"{ratio:.1f}"


def _the_other_way(result: Result, axis: Axis, before: list[Row]) -> str:
    """Who is ahead after equal steps when the race was over time, or the other way round."""
    standing, show = _standing(result, axis), loss_format(result)
    if len(standing) < 2:
        return ""
    leaders, losses = _leaders(result, axis), {id(row): loss for row, loss in standing}
    span = f"{'in' if axis is SECONDS else 'after'} the same {_span(result, axis)}"
    best, others = show(standing[0][1]), standing[len(leaders) :]
    if not others:
        return f"{span} {'both' if len(leaders) == 2 else 'all'} are level ({best})"
    if leaders == before:
        it, (rival, loss) = "it is" if len(leaders) == 1 else "they are", others[0]
        return f"{span} {it} ahead too ({best} against {show(loss)} for {rival.recipe})"
    names = _listed([row.recipe for row in leaders])
    if len(leaders) > 1:
        return f"{span} {names} share the lead ({best})"
    beaten = before[0] if before[0] not in leaders and id(before[0]) in losses else others[0][0]
    name = "" if beaten is before[0] else f" for {beaten.recipe}"
    return f"{span} {names} is ahead ({best} against {show(losses[id(beaten)])}{name})"


# --- the table ------------------------------------------------------------------------------------

Column = tuple[
    str, Callable[[Row], float | None], Callable[[float | None], str], Callable[..., float]
]
"""Header, the figure of a row, how it is written, and which figure is best: `min` or `max`."""


def table(result: Result) -> Table:
    """One row per recipe, the best figure of each column in bold, what it all means below."""
    columns, rivals = _columns(result), competing(result)
    shown = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
        caption=_caption(result),
        caption_justify="left",
        caption_style="",
    )
    words = [word for row in result.rows for word in _breakable(row.recipe).split()]
    widest = min(max(map(len, words), default=0), MOST_NAME)
    # where a figure has its spread below it, names are to stand beside the figure
    vertical: VerticalAlignMethod = "top" if repeats(result) > 1 else "bottom"
    shown.add_column("recipe", vertical=vertical, min_width=widest, overflow="fold")
    for header, *_ in columns:
        shown.add_column(header, justify="right", vertical=vertical, no_wrap=True)
    bests = [_best(column, rivals) for column in columns]
    for runs in grouped(result.rows):
        row, lost = runs[0], [run for run in runs if run.status != "ok"]
        silent = row.recipe == NO_COMMUNICATION
        cells = [Text(_breakable(row.recipe) + "†" * silent + "‡" * row.peer)]
        for (header, figure, written, _), best in zip(columns, bests, strict=True):
            figures = summary(map(figure, runs))
            text = written(figures.mean if figures is not None else None)
            cell = Text(text, style="bold" if row in rivals and text == best else "")
            if figures is not None and figures.n > 1 and header.startswith(("s/step", "loss")):
                decimals = len(text.partition(".")[2])
                cell.append(f"\n±{figures.spread:.{decimals}f}", style="not bold")
            cells.append(cell)
        if lost:
            share = f"{len(lost)} of {len(runs)}\n" if len(runs) > 1 else ""
            cells[4] = Text(share + lost[0].status, style="red")
        shown.add_row(*cells, style="dim" if silent else None)
    return shown


MOST_NAME = 22
"""Columns that a word of a recipe's name is sure to get; longer ones are folded."""


def _breakable(name: str) -> str:
    """A recipe's name with room for a line break after every comma and before a nested recipe."""
    return re.sub(r",\s*", ", ", name)


def _best(column: Column, rivals: list[Row]) -> str:
    """The best figure among several rivals, as it is written."""
    _, figure, written, best = column
    summaries = [summary(map(figure, runs)) for runs in grouped(rivals)]
    figures = [figures.mean for figures in summaries if figures is not None]
    return written(best(figures)) if len(summaries) > 1 and figures else ""


def _megabytes(row: Row) -> float:
    sent = row.interface_bytes_per_step if row.peer else row.ledger_bytes_per_step
    megabytes = (sent or 0.0) / 1e6
    return megabytes if megabytes >= 5e-5 else 0.0  # announcements of a few bytes are nothing


def _percent(share: float | None) -> str:
    return "–" if share is None or not math.isfinite(share) else f"{share:.0%}"


def _columns(result: Result) -> list[Column]:
    show = loss_format(result)
    seconds, steps = common(result, SECONDS), common(result, STEPS)
    silent = [r.seconds_per_step for r in finished(result) if r.recipe == NO_COMMUNICATION]
    compute = summary(silent)

    def pace(row: Row) -> float | None:
        return row.seconds_per_step if row.seconds_per_step > 0 else None

    def times_compute(row: Row) -> float | None:
        return (
            row.seconds_per_step / compute.mean if pace(row) and compute and compute.mean else None
        )

    def loss(axis: Axis) -> Callable[[Row], float | None]:
        return lambda row: compared(result, row, axis) if row.status == "ok" else None

    return [
        ("s/step", pace, three_digits, min),
        ("× no\ncomm.", times_compute, three_digits, min),
        ("steps\ndone", lambda row: row.steps, lambda n: f"{n:,.0f}", max),
        (f"loss at\n{brief(seconds or 0)} s", loss(SECONDS), show, min),
        (f"loss at\nstep {steps or 0:,.0f}", loss(STEPS), show, min),
        ("MB per\nstep", lambda row: _megabytes(row) if row.steps else None, three_digits, min),
        ("waiting", lambda row: row.waiting if row.steps else None, _percent, min),
    ]


def _caption(result: Result) -> Text:
    """What network and task it was, and what a reader must know to read the figures."""
    lines = [network(result), task(result)]
    lines.append(
        "Loss: validation, nats, of the consensus model. MB: sent per host, payload, by the ledger"
        + _headers(result)
        + ". Waiting: share of the time spent waiting for the network."
    )
    if any(row.recipe == NO_COMMUNICATION for row in result.rows):
        lines.append(
            "† The compute alone: workers that never talk. Its loss is the mean over the workers "
            "of each one's own model, not of a consensus model."
        )
    if any(row.peer and row.status == "ok" for row in result.rows):
        lines.append(
            "‡ Another library: MB as the interfaces counted them, with headers; how long it "
            "waited is not known."
        )
    if repeats(result) > 1:
        lines.append("Means over the runs, ± the sample standard deviation.")
    for runs in grouped(result.rows):
        for row in runs:
            seed = f" (seed {row.seed})" if len(runs) > 1 else ""
            lines += [f"{row.recipe}{seed}: {reason(row)}"] if row.status != "ok" else []
        notes = dict.fromkeys(note for row in runs for note in row.notes)
        lines += [f"{runs[0].recipe}: {note}" for note in notes]
    return Text("\n" + "\n".join(text for text in lines if text))


def _headers(result: Result) -> str:
    """How much more than the ledger's bytes the interfaces counted."""
    ratios = [
        row.interface_bytes_per_step / row.ledger_bytes_per_step
        for row in competing(result)
        if row.interface_bytes_per_step is not None and row.ledger_bytes_per_step >= 50
    ]
    if not ratios:
        return ""
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return f" (the interfaces counted {low if low == high else f'{low} to {high}'} times that)"


# --- the plots ------------------------------------------------------------------------------------

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, which colour-blind people tell apart; dashes tell further rows apart."""
GREY = "#767676"


def plots(result: Result, directory: Path) -> list[Path]:
    """`loss.png` and `loss.svg`: loss against time, against MB sent and against steps.

    Raises:
        ImportError: without matplotlib.
    """
    try:
        from matplotlib.figure import Figure  # without pyplot: no backend, no global state
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise ImportError("the plots need the package matplotlib") from error
    layout = ConstrainedLayoutEngine(wspace=0.04)
    figure = Figure(figsize=(11, 5), dpi=150, layout=layout, facecolor="white")
    panels = figure.subplots(1, 3, sharey=True)
    for axes, axis in zip(panels, (SECONDS, MEGABYTES, STEPS), strict=True):
        _panel(axes, result, axis)
        name, finding = _titles(result, axis)
        axes.set_title(f"{name}\n\n", loc="left", fontsize=11, fontweight="bold")
        text = axes.text(0, 1.02, finding, transform=axes.transAxes, fontsize=9, color=GREY)
        text.set_in_layout(False)  # a long name must not make the panels narrow
    panels[0].set_ylabel("validation loss (nats)")
    _limit_loss(panels[0], result)
    figure.suptitle(f"{network(result)}\n{task(result)}", x=0.01, ha="left", fontsize=9, color=GREY)
    handles, labels = panels[0].get_legend_handles_labels()
    longest = max(map(len, labels), default=0)
    figure.legend(
        handles,
        labels,
        loc="outside lower left",
        ncols=max(1, min(4, 160 // (longest + 6))),
        frameon=False,
        fontsize=9,
    )
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / "loss.png", directory / "loss.svg"]
    for path in paths:
        figure.savefig(path)
    return paths


def _titles(result: Result, axis: Axis) -> tuple[str, str]:
    """What a panel shows, and what is seen there: who is ahead, or who sends least."""
    rivals = competing(result)
    if axis is MEGABYTES:
        finding = ""
        if len(rivals) > 1:
            least = min(rivals, key=_megabytes)
            finding = f"least, {brief(_megabytes(least))} MB per step:\n{_fit(least.recipe)}"
        return "By traffic", finding
    name = "By time" if axis is SECONDS else "By steps"
    standing = _standing(result, axis)
    if len(standing) < 2:
        return name, ""
    leaders = [row.recipe for row in _leaders(result, axis)]
    names = _listed(leaders) if len(leaders) < 3 else f"{len(leaders)} recipes, level"
    loss = loss_format(result)(standing[0][1])
    return name, f"lowest after {_span(result, axis)}, {loss}:\n{_fit(names)}"


def _fit(text: str) -> str:
    """As much of the text as a panel is wide."""
    return shorten(text, 52, placeholder=" …")


def _panel(axes: Axes, result: Result, axis: Axis) -> None:
    """One line per row, ending in a dot, or in a cross where it diverged or failed."""
    rivals = [row.recipe for row in result.rows if row.recipe != NO_COMMUNICATION]
    rivals = list(dict.fromkeys(rivals))
    firsts = [runs[0] for runs in grouped(result.rows)]
    for row in result.rows:
        pairs = line(row, axis)
        silent = row.recipe == NO_COMMUNICATION
        number = 0 if silent else rivals.index(row.recipe)
        if silent and axis is MEGABYTES:
            pairs = []
        label = "no communication (mean of own models)" if silent else row.recipe
        label = label if row.status == "ok" else f"{label}: {row.status}"
        axes.plot(
            [at for at, _ in pairs],
            [loss for _, loss in pairs],
            color=GREY if silent else COLOURS[number % len(COLOURS)],
            linestyle=":" if silent or row.status != "ok" else ("-", "--", "-.")[number // 7 % 3],
            linewidth=1.4 if silent or row.status != "ok" else 1.9,
            marker="o" if row.status == "ok" else "x",
            markevery=[-1] if pairs else None,
            markersize=5,
            label=label if any(row is first for first in firsts) else "_" + label,
        )
    axes.grid(color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
    axes.set_xlim(left=0)
    axes.set_xlabel(
        {SECONDS: "seconds of training", MEGABYTES: "MB sent per host", STEPS: "steps"}[axis]
    )
    position = common(result, axis)
    if axis is not MEGABYTES and position and position < 0.9 * axes.get_xlim()[1]:
        axes.axvline(position, color=GREY, linewidth=0.9, linestyle=(0, (1, 2)), zorder=1)


def _limit_loss(axes: Axes, result: Result) -> None:
    """Limits that show where the recipes differ: a huge loss at the start may leave the picture."""
    rows = finished(result)
    losses = [loss for row in rows for _, loss in line(row, STEPS)]
    if not losses:
        return
    # A quarter of the way on, the fall from the start is over; every row's end is in the picture.
    quarter = (common(result, SECONDS) or 0) / 4
    seen = [loss_at(row, SECONDS, quarter) for row in rows]
    seen += [line(row, SECONDS)[-1][1] for row in rows]
    low, high = min(losses), max(loss for loss in seen if loss is not None)
    if low > 0 and high / low > 8:
        axes.set_yscale("log", subs=[2, 5])
        for ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            ticks(lambda loss, _: f"{loss:g}")
        axes.set_ylim(low / 1.2, high * 1.2)
    else:
        margin = 0.06 * (high - low) or 0.1
        axes.set_ylim(low - margin, high + margin)
