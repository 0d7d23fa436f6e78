"""Write the tables and the plot of docs/validation.md."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import study
from benchmarks.validate.launches import Launch
from benchmarks.validate.rows import Network
from laconic.units import format_rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "written by python -m benchmarks.validate"
MEDIAN, WORST, NEAR = 0.05, 0.15, 0.05
"""Bounds: the errors' median and maximum, and how much slower than the fastest recipe the one
predicted to be fastest may be."""


def write(path: Path, launches: Sequence[Launch]) -> list[Path]:
    """Write between the markers of the page at ``path``, and the plot next to it."""
    picture = path.with_suffix(".png")
    draw(picture, launches)
    study.write(path, NAME, f"![Predicted against measured]({picture.name})\n\n{body(launches)}")
    return [path, picture]


def body(launches: Sequence[Launch]) -> str:
    """Return the tables, by number of processes per host."""
    parts = []
    for per_host in sorted({launch.network.per_host for launch in launches}):
        these = sorted(
            (launch for launch in launches if launch.network.per_host == per_host),
            key=lambda launch: launch.network,
        )
        parts += [f"## {heading(per_host)}", verdict(these), table(these)]
    of = launches[0].shared
    parts.append(f"Machine: {of['processor']}, {of['cores']} cores; torch {of['torch']}.")
    return "\n\n".join(parts)


def heading(per_host: int) -> str:
    """Return the heading of a table and a panel."""
    word = "One process" if per_host == 1 else f"{per_host} processes"
    return f"{word} on each host"


def verdict(launches: Sequence[Launch]) -> str:
    """Return a summary of the errors and the bounds."""
    errors = [abs(launch.error(row)) for launch in launches for row in launch.rows]
    near = sum(launch.regret() <= NEAR for launch in launches)
    return (
        f"Of {len(errors)} predictions the median error is {statistics.median(errors):.1%} (bound "
        f"{MEDIAN:.0%}), the largest {max(errors):.1%} (bound {WORST:.0%}). The recipe predicted "
        f"to be fastest is right on {near} of {len(launches)} networks."
    )


def bounds_met(launches: Sequence[Launch]) -> bool:
    """Return whether all bounds are met. The recipe must be right on eight of nine networks."""
    errors = [abs(launch.error(row)) for launch in launches for row in launch.rows]
    near = sum(launch.regret() <= NEAR for launch in launches)
    within = statistics.median(errors) <= MEDIAN and max(errors) <= WORST
    return within and 9 * near >= 8 * len(launches)


def table(launches: Sequence[Launch]) -> str:
    """Return a table of measured seconds per step and the errors of the predictions."""
    lines = []
    for text in dict.fromkeys(row.recipe for launch in launches for row in launch.rows):
        rows = [(a, next((r for r in a.rows if r.recipe == text), None)) for a in launches]
        cells = [f"{row.seconds:.3g} ({a.error(row):+.0%})" if row else "" for a, row in rows]
        lines.append([f"`{text}`", *cells])
    chosen = [f"`{launch.chosen().recipe}` ({launch.regret():+.0%})" for launch in launches]
    lines.append(["predicted fastest, against the fastest", *chosen])
    head = ["recipe", *(name_of(launch.network) for launch in launches)]
    return study.table(head, lines, left=len(head))


def name_of(network: Network) -> str:
    """Return the heading of a column."""
    return f"{network.hosts} hosts, {format_rate(network.rate)}"


def draw(path: Path, launches: Sequence[Launch]) -> None:
    """Plot predicted against measured seconds, with a panel per number of processes per host."""
    from matplotlib.figure import Figure

    kinds = sorted({launch.network.per_host for launch in launches})
    figure = Figure(figsize=(6 * len(kinds), 5.5), dpi=150, layout="constrained", facecolor="white")
    panels = figure.subplots(1, len(kinds), squeeze=False)[0]
    for axes, per_host in zip(panels, kinds, strict=True):
        _panel(axes, [launch for launch in launches if launch.network.per_host == per_host])
        axes.set_title(heading(per_host), loc="left")
    panels[-1].legend(fontsize=7, loc="upper left")
    figure.savefig(path)


def _panel(axes: Axes, launches: Sequence[Launch]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    from laconic.lab.race.plots import COLORS

    families: dict[str, list[tuple[float, float]]] = {}
    for launch in launches:
        for row in launch.rows:
            family = families.setdefault(row.recipe.partition("(")[0], [])
            family.append((row.seconds, launch.predicted(row)))
    for color, (name, points) in zip(COLORS, families.items(), strict=False):
        axes.plot(*zip(*points, strict=True), "o", color=color, label=name, markersize=4)
    ends = [f(x for points in families.values() for p in points for x in p) for f in (min, max)]
    axes.plot(ends, ends, color="#000000", linewidth=0.8, label="as predicted")
    for factor in (1 - WORST, 1 + WORST):
        axes.plot(ends, [factor * e for e in ends], color="#767676", linewidth=0.6, linestyle=":")
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):  # few numbers, so that they do not overlap
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("measured seconds per step")
    axes.set_ylabel("predicted seconds per step")
