"""Plot the curves of a race."""

from __future__ import annotations

import itertools
from pathlib import Path
from statistics import fmean
from textwrap import shorten
from typing import TYPE_CHECKING

from laconic.lab.emulation.seeds import Group, groups
from laconic.lab.race.comparison import common, competing, finished, loss_at
from laconic.lab.race.result import (
    MEGABYTES,
    NO_COMMUNICATION,
    SECONDS,
    STEPS,
    Axis,
    Result,
    Row,
    grouped,
    line,
    megabytes_per_step,
)
from laconic.lab.race.verdict import leaders, listed, span, standing
from laconic.lab.race.wording import brief, loss_format, network, task

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""The color-blind safe palette of Okabe and Ito. Dashes distinguish further rows."""
GRAY = "#767676"


def plots(result: Result, directory: Path) -> list[Path]:
    """Write `loss.png` and `loss.svg`: loss against time, MB sent and steps.

    Raises:
        ImportError: matplotlib is not installed.
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
        text = axes.text(0, 1.02, finding, transform=axes.transAxes, fontsize=9, color=GRAY)
        text.set_in_layout(False)  # a long name must not shrink the panels
    panels[0].set_ylabel("validation loss (nats)")
    limit_loss(panels[0], result)
    figure.suptitle(f"{network(result)}\n{task(result)}", x=0.01, ha="left", fontsize=9, color=GRAY)
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
    """Return a panel's title and finding: which recipe leads, or which sends least."""
    if axis is MEGABYTES:
        finding = ""
        competitors = grouped(competing(result))
        if len(competitors) > 1:
            sent = {runs[0].name: fmean(map(megabytes_per_step, runs)) for runs in competitors}
            least = min(sent, key=sent.__getitem__)
            finding = f"least, {brief(sent[least])} MB per step:\n{_fit(least)}"
        return "By traffic", finding
    name = "By time" if axis is SECONDS else "By steps"
    order = standing(result, axis)
    if len(order) < 2:
        return name, ""
    ahead = [group.name for group in leaders(result, axis)]
    names = listed(ahead) if len(ahead) < 3 else f"{len(ahead)} recipes, level"
    loss = loss_format(result)(order[0][1])
    return name, f"lowest after {span(result, axis)}, {loss}:\n{_fit(names)}"


def _fit(text: str) -> str:
    """Shorten the text to the width of a panel."""
    return shorten(text, 52, placeholder=" …")


def label(row: Row) -> str:
    """Return the row's label in legends."""
    name = row.name + " (mean of own models)" * (row.recipe == NO_COMMUNICATION)
    return name if row.status == "ok" else f"{name}: {row.status}"


def numbered(result: Result) -> list[tuple[Group, int]]:
    """Return each recipe with the number of its color and dashes: -1 without communication, -2 on a
    free network."""
    count = itertools.count()
    return [
        (group, -1 - group.mean.free if group.mean.reference else next(count))
        for group in groups(result)
    ]


def _panel(axes: Axes, result: Result, axis: Axis) -> None:
    """Draw one line per recipe, ending in a dot, or in a cross if it diverged or failed.

    A band shows the range over several seeds.
    """
    for group, number in numbered(result):
        row, baseline = group.mean, number < 0
        pairs = line(row, axis)
        if baseline and axis is MEGABYTES:
            pairs = []
        color = GRAY if baseline else COLORS[number % len(COLORS)]
        style = {-1: ":", -2: "--"}.get(number) or ("-", "--", "-.")[number // 7 % 3]
        axes.plot(
            [at for at, _ in pairs],
            [loss for _, loss in pairs],
            color=color,
            linestyle=style if row.status == "ok" else ":",
            linewidth=1.4 if baseline or row.status != "ok" else 1.9,
            marker="o" if row.status == "ok" else "x",
            markevery=[-1] if pairs else None,
            markersize=5,
            label=label(row),
        )
        if len(group.runs) > 1 and pairs:
            known = [k for k, point in enumerate(row.curve) if point.loss is not None]
            axes.fill_between(
                [axis(row.curve[k]) for k in known],
                [group.low[k] or 0.0 for k in known],
                [group.high[k] or 0.0 for k in known],
                color=color,
                alpha=0.15,
                linewidth=0,
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
        axes.axvline(position, color=GRAY, linewidth=0.9, linestyle=(0, (1, 2)), zorder=1)


def loss_limits(result: Result) -> tuple[float, float, bool] | None:
    """Return the minimum and maximum loss to show, and whether on a logarithmic axis.

    The limits show where the recipes differ, so a huge initial loss may be outside. None if there
    is nothing to show.
    """
    rows = finished(result)
    losses = [loss for row in rows for _, loss in line(row, STEPS)]
    if not losses:
        return None
    # After a quarter of the time the initial fall is over. Every row's final loss is visible.
    quarter = (common(result, SECONDS) or 0) / 4
    visible = [loss_at(row, SECONDS, quarter) for row in rows]
    visible += [line(row, SECONDS)[-1][1] for row in rows]
    low, high = min(losses), max(loss for loss in visible if loss is not None)
    if low > 0 and high / low > 8:
        return low / 1.2, high * 1.2, True
    margin = 0.06 * (high - low) or 0.1
    return low - margin, high + margin, False


def limit_loss(axes: Axes, result: Result) -> None:
    """Apply `loss_limits` to ``axes``."""
    limits = loss_limits(result)
    if limits is None:
        return
    low, high, logarithmic = limits
    if logarithmic:
        axes.set_yscale("log", subs=[2, 5])
        for ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            ticks(lambda loss, _: f"{loss:g}")
    axes.set_ylim(low, high)
