"""Draw the picture of README and the docs' home page, for light pages and for dark ones.

    python -m benchmarks.race.headline

It shows what a network of 100 Mbit/s costs, and how much of that ``auto()`` gets back, with the
optimizer of ``auto()``, outer step included, in three of the four lines: ``docs/headline.jsonl``
has the runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import matplotlib

from benchmarks.race.networks import Network
from benchmarks.race.page import networks
from benchmarks.race.runs import Entry, journal
from benchmarks.study import DOCS
from laconic.lab.race.comparison import groups
from laconic.lab.race.result import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FREE, SLOW = Network(1e10), Network(1e8)
SAME = "outer_step(ddp(), 4, outer='muon')"
LINES = {
    (SLOW, "torch-ddp"): ("torch DDP, no outer step", "ddp", "--"),
    (SLOW, SAME): ("same optimizer, full gradients", "same", "--"),
    (FREE, SAME): ("same optimizer, at 10 Gbit/s", "text", ":"),
    (SLOW, "auto()"): ("laconic auto()", "ours", "-"),
}
"""Network and row: its name, color and style."""
THEMES = {
    "light": {"ours": "#00796b", "same": "#0072b2", "ddp": "#d55e00", "text": "#33373d"},
    "dark": {"ours": "#4db6ac", "same": "#6cb8ee", "ddp": "#ff9d5c", "text": "#d5d8de"},
}
GRAY = "#8a9099"
LEAST, MOST, APART = 1.4, 2.8, 0.08
"""The losses shown, and the least difference of two labels."""
SETTINGS = {"svg.hashsalt": "laconic", "font.size": 11}
"""Of matplotlib; the salt makes equal pictures equal files."""
Curve = list[tuple[float, float]]


def curves(entries: Sequence[Entry]) -> dict[tuple[Network, str], Curve]:
    """The mean loss over the seeds by seconds of training, for each of `LINES`."""
    found = {}
    for network, rows in networks(entries).items():
        for row in rows:
            runs = tuple(entry.run for entry in row.entries)
            seconds = row.entries[0].result.settings["seconds"]
            (group,) = groups(Result(runs, {"seconds": seconds}, {}, {}, ""))
            found[network, row.text] = [
                (point.seconds, point.loss) for point in group.curve if point.loss is not None
            ]
    return {one: found[one] for one in LINES}


def reached(curve: Curve, loss: float) -> float:
    """The seconds after which the curve, straight between its points, is at ``loss``."""
    for (s, a), (t, b) in pairwise(curve):
        if b <= loss <= a:
            return s + (t - s) * (a - loss) / (a - b) if a > b else s
    raise ValueError(f"no loss of {loss}")


def picture(found: dict[tuple[Network, str], Curve], theme: str) -> Figure:
    """Plot loss against seconds, with each line's name at its end."""
    from matplotlib.figure import Figure

    colors = THEMES[theme]
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots()
    ends = sorted((curve[-1][1], one) for one, curve in found.items())
    at = float("-inf")
    for loss, one in ends:
        name, color, style = LINES[one]
        ours = color == "ours"
        axes.plot(*zip(*found[one], strict=True), style, color=colors[color], lw=3.4 if ours else 2)
        at = max(loss, at + APART)
        seconds = found[one][-1][0]
        axes.annotate(
            f"{loss:.2f}  {name}",
            (seconds, loss),
            (seconds + 5, at),
            color=colors[color],
            fontweight="bold" if ours else "normal",
            va="center",
            annotation_clip=False,
        )
    full, own = found[SLOW, SAME], found[SLOW, "auto()"]
    last, loss = full[-1]
    soon = reached(own, loss)
    axes.annotate("", (soon, loss), (last, loss), arrowprops={"arrowstyle": "->", "color": GRAY})
    axes.text(soon + 3, loss + 0.02, f"after {soon:.0f} s", color=colors["text"], fontsize=10)
    axes.set_title("4 hosts, 100 Mbit/s each", loc="left", fontweight="bold", color=colors["text"])
    axes.set_ylim(LEAST, MOST)
    axes.set_xlim(0, last)
    axes.set_xlabel("seconds of training", color=colors["text"])
    axes.set_ylabel("validation loss (nats)", color=colors["text"])
    axes.grid(color=GRAY, alpha=0.25, linewidth=0.7)
    axes.patch.set_alpha(0)
    axes.spines[:].set_visible(False)
    axes.tick_params(colors=colors["text"], length=0)
    return figure


def main() -> None:
    found = curves(journal(DOCS / "headline.jsonl").load())
    for theme in THEMES:
        path = DOCS / f"headline_{theme}.svg"
        with matplotlib.rc_context(SETTINGS):
            picture(found, theme).savefig(path, metadata={"Date": None})
        print(path)


if __name__ == "__main__":
    main()
