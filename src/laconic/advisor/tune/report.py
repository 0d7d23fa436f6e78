"""Report the results of a search: a table, a plot, and the code to paste."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from laconic.advisor.tune.runs import VALIDATIONS
from laconic.advisor.tune.space import LR, Setting, Space
from laconic.advisor.tune.tuning import Trial, best, pareto
from laconic.algorithms.parse import qualified
from laconic.lab.race.plots import COLORS, GRAY

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_ROWS = 20
"""Rows shown in the terminal, besides those of the Pareto front. The CSV file has all."""


def setting_text(space: Space, setting: Setting) -> str:
    """Return the setting as text, without names that have only one value."""
    return " ".join(f"{name}={setting[name]}" for name in tuned(space)) or "the only setting"


def tuned(space: Space) -> list[str]:
    """Return the names that have more than one value."""
    return [name for name, values in space.grids.items() if len(values) > 1]


def table(space: Space, trials: Sequence[Trial]) -> Table:
    """Return a table of the finished trials, the lowest loss first.

    The Pareto front is marked and always included.
    """
    done = sorted((t for t in trials if t.status == "ok"), key=lambda t: t.run.loss)
    front = pareto(done)
    rows = [t for place, t in enumerate(done) if place < MOST_ROWS or t in front]
    left = len(done) - len(rows)
    caption = f"{left} more in trials.csv" if left else None
    shown = Table(
        box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), caption=caption,
        caption_justify="left",
    )  # fmt: skip
    for name in (*tuned(space), "loss", "ms/step", "MB/step", "steps"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("")
    for trial in rows:
        run = trial.run
        shown.add_row(
            *(str(trial.setting[name]) for name in tuned(space)),
            f"{run.loss:.4f}",
            f"{run.seconds_per_step * 1e3:.4g}",
            f"{run.bytes_per_step / 1e6:.3g}",
            str(run.steps),
            "front" if trial in front else "",
            style="bold" if trial is done[0] else "",
        )
    return shown


def summary(space: Space, trials: Sequence[Trial], group_size: int | None = None) -> str:
    """Summarize the trials: their outcomes, the best setting, and the code for it.

    The code has groups of ``group_size`` workers if the trials had groups.
    """
    stopped = sum(trial.status == "stopped" for trial in trials)
    diverged = sum(trial.status == "diverged" for trial in trials)
    steps = sum(trial.run.steps for trial in trials)
    lines = [
        f"{len(trials)} of {space.size} settings tried, in {steps} steps: {stopped} stopped early, "
        f"{diverged} diverged. 'front': no other setting is both faster and better.",
    ]
    winner = best(trials)
    text = setting_text(space, winner.setting)
    lines.append(f"Lowest validation loss: {winner.run.loss:.4f}, {text}.")
    for name in edges(space, winner.setting):
        lowest = winner.setting[name] == space.grids[name][0]
        lines.append(
            f"{name}={winner.setting[name]} is the {'smallest' if lowest else 'largest'} of its "
            f"values: try {'smaller' if lowest else 'larger'} ones, --values {name}=..."
        )
    lines += ["Code:", "", *code(space, winner.setting, group_size)]
    return "\n".join(lines)


def edges(space: Space, setting: Setting) -> list[str]:
    """Return names whose best value is the smallest or largest of at least three.

    A better value may be outside the grid. 0 and 1 do not count, since there often is nothing
    beyond.
    """
    return [
        name
        for name in tuned(space)
        if space.ordered(name)
        and len(values := space.grids[name]) > 2
        and setting[name] in (values[0], values[-1])
        and setting[name] not in (0, 1)
    ]


def code(space: Space, setting: Setting, group_size: int | None = None) -> list[str]:
    """Return the lines of a training program."""
    recipe = qualified(space.text(setting))
    scale = setting[LR]
    groups = "" if group_size is None else f", group_size={group_size}"
    lines = [f"    sync = laconic.attach(model, optimizer, {recipe}{groups})"]
    if scale != 1:
        lines[:0] = [
            "    for group in optimizer.param_groups:",
            f'        group["lr"] *= {scale}  # of the workload\'s own',
        ]
    return lines


def write(space: Space, trials: Sequence[Trial], title: str, out: Path) -> list[Path]:
    """Write `trials.csv` and `tune.png` in ``out``. Return their paths."""
    return [
        write_csv(space, trials, out / "trials.csv"),
        plot(space, trials, title, out / "tune.png"),
    ]


def write_csv(space: Space, trials: Sequence[Trial], path: Path) -> Path:
    """Write a row per trial, including stopped ones."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(
            [*space.grids, "status", "loss", "steps", "seconds_per_step", "bytes_per_step"]
        )
        for t in trials:
            run = t.run
            figures = (run.loss, run.steps, run.seconds_per_step, run.bytes_per_step)
            rows.writerow([*(t.setting[name] for name in space.grids), t.status, *figures])
    return path


def plot(space: Space, trials: Sequence[Trial], title: str, path: Path) -> Path:
    """Plot loss against seconds per step with the Pareto front, and the loss curves of all runs."""
    from matplotlib.figure import Figure  # without pyplot: no backend, no global state

    figure = Figure(figsize=(11, 4.6), dpi=150, layout="constrained", facecolor="white")
    figure.suptitle(title, x=0.01, ha="left", fontsize=9, color=GRAY)
    speed, curves = figure.subplots(1, 2)
    _speed(speed, space, trials)
    _curves(curves, trials)
    for axes in (speed, curves):
        axes.set_yscale("log")
        axes.set_ylabel("validation loss")
        axes.spines[["top", "right"]].set_visible(False)
        axes.yaxis.set_major_formatter("{x:.3g}")
        axes.yaxis.set_minor_formatter("{x:.3g}")
        axes.tick_params(axis="y", which="both", labelsize=7)
        axes.legend(frameon=False, fontsize=9, loc="upper right")
    figure.savefig(path)
    return path


def _speed(axes: Axes, space: Space, trials: Sequence[Trial]) -> None:
    done, front = [t for t in trials if t.status == "ok"], pareto(trials)
    xs = [t.run.seconds_per_step * 1e3 for t in done]
    axes.scatter(xs, [t.run.loss for t in done], s=28, color=COLORS[5], label="trained to the end")
    points = [(t.run.seconds_per_step * 1e3, t.run.loss) for t in front]
    axes.step(*zip(*points, strict=True), "o-", where="post", color=COLORS[0], label="front")
    for (x, y), t in zip(points, front, strict=True):
        right = x > (min(xs) + max(xs)) / 2
        axes.annotate(
            setting_text(space, t.setting).replace(" ", "\n"), (x, y), fontsize=7, color=COLORS[0],
            xytext=(-8 if right else 8, 4), textcoords="offset points",
            ha="right" if right else "left", va="bottom",
        )  # fmt: skip
    axes.set_xlabel("milliseconds per step")


def _curves(axes: Axes, trials: Sequence[Trial]) -> None:
    winner = best(trials)
    for t in trials:
        color, width, label = COLORS[5], 0.9, "trained to the end"
        if t.status != "ok":
            color, width, label = COLORS[1], 0.7, "stopped early"
        elif t is winner:
            color, width, label = COLORS[0], 2.2, "lowest loss"
        checks = [check for check in sorted(t.curve) if math.isfinite(t.curve[check])]
        shares = [check / VALIDATIONS for check in checks]
        known = axes.get_legend_handles_labels()[1]
        axes.plot(
            shares, [t.curve[check] for check in checks], color=color, linewidth=width,
            marker="x" if t.status != "ok" else None, markevery=[-1] if checks else None,
            markersize=4, label=None if label in known else label,
        )  # fmt: skip
    axes.set_xlabel("share of a run")
