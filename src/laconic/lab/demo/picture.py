"""The picture of ``laconic demo``: loss against time, readable on a phone."""

from __future__ import annotations

from pathlib import Path

from laconic.lab.demo.outcome import DDP, finals, seconds_to_ddp
from laconic.lab.race.plots import COLORS, GRAY, limit_loss, numbered
from laconic.lab.race.result import SECONDS, Result, line, number
from laconic.lab.race.wording import bandwidth, brief, loss_format


def draw(result: Result, path: Path) -> Path:
    """Draw the losses of all rows against the seconds of training. The legend is in their order."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    losses, show, seconds = finals(result), loss_format(result), seconds_to_ddp(result)
    layout = ConstrainedLayoutEngine()
    figure = Figure(figsize=(6, 6.4), dpi=150, layout=layout, facecolor="white")
    axes = figure.add_subplot()
    rows = {group.mean.recipe: (group.mean, place) for group, place in numbered(result)}
    for name in sorted(rows, key=lambda name: -losses.get(name, float("inf"))):
        row, place = rows[name]
        pairs = line(row, SECONDS)
        final = show(losses[name]) if name in losses else row.status
        axes.plot(
            [at for at, _ in pairs],
            [loss for _, loss in pairs],
            color=GRAY if place < 0 else COLORS[place % len(COLORS)],
            linestyle={-1: ":", -2: "--"}.get(place, "-"),
            linewidth=2.6,
            label=f"{final}  {name}",
        )
    target = losses.get(DDP)
    if target is not None:
        axes.axhline(target, color=GRAY, linewidth=1, linestyle=(0, (1, 2)), zorder=1)
        axes.plot([*seconds.values()], [target] * len(seconds), "o", color="black", markersize=5)
    axes.set_title(
        f"{number(result, 'hosts') or 0:.0f} hosts at {bandwidth(result)}, "
        f"{brief(number(result, 'seconds') or 0)} s of training each",
        loc="left",
        fontsize=13,
    )
    axes.set_xlabel("seconds of training", fontsize=13)
    axes.set_ylabel("loss on new text (lower is better)", fontsize=13)
    axes.set_xlim(left=0)
    limit_loss(axes, result)
    axes.tick_params(labelsize=12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)
    figure.legend(
        loc="outside lower left",
        frameon=False,
        fontsize=12,
        title="dots: where ddp()'s final loss is reached" if seconds else None,
        title_fontsize=12,
        alignment="left",
    )
    figure.savefig(path)
    return path
