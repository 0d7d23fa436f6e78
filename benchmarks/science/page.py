"""Write the table and the plot of docs/science.md, and the table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from benchmarks import study
from benchmarks.science.rows import (
    ELASTIC_16,
    GOSSIP,
    GRADIENTS,
    LEADER,
    SLOW_GOSSIP,
    SUM_16,
    Finding,
)
from benchmarks.study import DOCS

HEAD = ("recipe, 8 workers", "lr, beta", "median loss", "range", "floats")
INK, GRAY, BLUE = "#222222", "#8A8A8A", "#0B6BB8"


def terminal(findings: Sequence[Finding]) -> Table:
    """Return the table for the terminal."""
    table = Table(box=None, pad_edge=False)
    for name in HEAD:
        table.add_column(name, justify="left" if name == HEAD[0] else "right")
    for f in _by_loss(findings):
        table.add_row(*_cells(f))
    return table


def write(findings: Sequence[Finding], tuning_seeds: int) -> None:
    """Write the table into docs/science.md, between its markers, and science.png next to it."""
    study.write(DOCS / "science.md", "written by make science", markdown(findings, tuning_seeds))
    picture(findings).savefig(DOCS / "science.png")


def markdown(findings: Sequence[Finding], tuning_seeds: int) -> str:
    """Return the table."""
    found = _by_loss(findings)
    table = study.table(HEAD, map(_cells, found))
    return f"Tuned on {tuning_seeds} seeds; reported on {len(found[0].outcomes)} others:\n\n{table}"


def picture(findings: Sequence[Finding]) -> Figure:
    """Plot loss against floats sent: a dot per seed, and a larger one at the median."""
    figure = Figure(figsize=(8.5, 5.2), dpi=150, layout="constrained", facecolor="white")
    axes = figure.subplots()
    for f in findings:
        floats = f.outcomes[0].floats
        axes.plot([floats] * len(f.losses), f.losses, ".", color=GRAY, markersize=3, alpha=0.6)
        axes.plot([floats], [f.loss], "o", color=BLUE, markersize=6)
        offset, side = BESIDE.get(f.row, ((7, 0), "left"))
        axes.annotate(
            f.row.name,
            (floats, f.loss),
            offset,
            textcoords="offset points",
            ha=side,
            va="center",
            fontsize=8.5,
            color=INK,
        )
    _style(axes)
    axes.set_title(
        f"Digits, 8 workers, 240 steps: {len(findings[0].outcomes)} seeds and their median",
        loc="left",
        fontsize=10,
    )
    return figure


BESIDE = {row: ((-7, 0), "right") for row in (SLOW_GOSSIP, GOSSIP, LEADER, SUM_16, GRADIENTS)}
BESIDE[ELASTIC_16] = ((0, -15), "center")
"""Offsets of names that do not fit to the right of their points."""


def _style(axes: Axes) -> None:
    axes.set_xscale("symlog", linthresh=0.08, linscale=0.6)
    axes.set_yscale("log", subs=[2, 5])
    axes.set_xlim(-0.012, 3.6)
    ticks = [0, 0.1, 0.2, 0.5, 1, 2]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks([0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5])
    axes.yaxis.set_major_formatter(lambda loss, _: f"{loss:g}")
    axes.set_xlabel("floats that a worker sends, per parameter and step (log; 0 at the left edge)")
    axes.set_ylabel("training loss of the consensus model (nats, log)")
    axes.grid(color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _by_loss(findings: Sequence[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda f: f.loss)


def _cells(f: Finding) -> list[str]:
    """Return one row of the table, with the columns of `HEAD`."""
    job, losses = f.row.job(f.setting, 0), f.losses
    groups = f", in groups of {job.group_size}" if job.group_size else ""
    return [
        f"`{job.recipe}`{groups}" + (", 1 worker" if job.workers == 1 else ""),
        ", ".join(f"{x:g}" for x in (f.setting.lr, f.setting.beta) if x is not None),
        _three(f.loss),
        f"{_three(losses[0])}-{_three(losses[-1])}",
        f"{f.outcomes[0].floats:.3f}",
    ]


def _three(loss: float) -> str:
    return f"{loss:.4f}" if loss < 0.1 else f"{loss:.3f}"
