"""Write the tables and plots of docs/evidence.md from runs in a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.evidence import signals
from benchmarks.evidence.runs import Job, Outcome
from benchmarks.evidence.studies import (
    CELLS,
    OUTER_MOMENTA,
    OUTER_RATES,
    STUDIES,
    WORKERS,
    Row,
)
from benchmarks.evidence.tasks import NAMES, TUNED
from benchmarks.study import table
from benchmarks.study import write as write_page
from laconic.policy.candidates import MUON

GRAY, COLORS = "#8A8A8A", {"adamw": "#c76a08", "muon": "#3f78d8"}
NAMED = {"adamw": "AdamW", "muon": "Muon"}
ENDS = signals.PERIODS[0], signals.PERIODS[-1]
SHADES = {0.5: "#1b998b", 0.7: "#3f78d8", 1.0: "#c2417e"}


class MissingError(LookupError):
    """A study has not been run to its end."""


def rows_of(study: str, known: Mapping[Job, Outcome]) -> dict[str, list[Row]]:
    """The rows of a study by task, of those tasks for which all runs are known."""

    def runs(jobs: Sequence[Job]) -> Mapping[Job, Outcome]:
        if not all(job in known for job in jobs):
            raise MissingError
        return known

    found = {}
    for task in TUNED if study == "tuned" else NAMES:
        try:
            rows = list(STUDIES[study](runs, task))
        except MissingError:
            continue
        if rows:
            found[task] = rows
    return found


def write(page: Path, known: Mapping[Job, Outcome]) -> None:
    """Write between the markers of each study in the page, and pictures next to it."""
    for study, (markdown, picture) in PAGES.items():
        if rows := rows_of(study, known):
            _insert(page, study, markdown(rows), picture(rows))
    for study in ("direction", "late", "own"):
        rows = rows_of(study, known)
        if f"{study}_sgd" in STUDIES:
            sgd = rows_of(f"{study}_sgd", known)
            rows |= {f"{task}, SGD": of for task, of in sgd.items()}
        if rows:
            write_page(page, study, by_task(rows))
    if rows := rows_of("tuned", known):
        write_page(page, "tuned", tuned_table(rows))


def write_signals(page: Path, found: Sequence[signals.Line]) -> None:
    """The same for what runs show of themselves."""
    if len(found) > 1:
        _insert(page, "signals", signals_table(found), signals_picture(found))


def _insert(page: Path, study: str, markdown: str, picture: Figure) -> None:
    write_page(page, study, markdown)
    picture.savefig(page.with_name(f"evidence_{study}.png"))


def loss_of(row: Row) -> str:
    """The mean loss and its error."""
    return f"{row.mean:.3f} ± {row.spread:.3f}"


# -- muloco ----


def gives_up(rows: Sequence[Row], row: Row) -> tuple[float, float]:
    """The loss of ``row`` beyond that of one worker with the same seed: mean and standard error."""
    inner = row.job.inner
    one = next(r for r in rows if (r.job.inner, r.job.workers, r.what) == (inner, 1, "DiLoCo"))
    apart = [a - b for a, b in zip(row.losses, one.losses, strict=True)]
    between = Row(row.what, row.job, tuple(apart), 0.0)
    return between.mean, between.spread


def muloco_table(found: Mapping[str, Sequence[Row]]) -> str:
    (rows,) = found.values()
    lines: dict[str, dict[int, str]] = {}
    for r in rows:
        name = NAMED[r.job.inner] + ("" if r.what == "DiLoCo" else f", {r.what}")
        lines.setdefault(name, {})[r.job.workers] = loss_of(r)
    head = ("inside", "1 worker", *(f"{n} workers" for n in WORKERS[1:]))
    return table(head, ([name, *(of.get(n, "") for n in WORKERS)] for name, of in lines.items()))


def muloco_picture(found: Mapping[str, Sequence[Row]]) -> Figure:
    figure, axes = _panels(len(found))
    for at, (task, rows) in zip(axes, found.items(), strict=False):
        for inner, color in COLORS.items():
            of = [r for r in rows if r.job.inner == inner and r.what == "DiLoCo"]
            values = [gives_up(rows, r) for r in of]
            _line(at, values, color, f"{NAMED[inner]} inside")
        at.axhline(0, color=GRAY, linewidth=0.8)
        at.set_xticks(range(len(WORKERS)), WORKERS)
        at.set_xlabel("workers (32 samples per step of all together)")
        at.set_title(task, loc="left", fontsize=10)
    axes[0].set_ylabel("loss given up relative to one worker (nats)")
    axes[0].legend(frameon=False)
    return figure


# -- direction and late ----


def by_task(found: Mapping[str, Sequence[Row]]) -> str:
    """A column for each task."""
    lines = ([rows[0].what, *map(loss_of, rows)] for rows in zip(*found.values(), strict=True))
    return table(["outer step, period", *found], lines)


# -- fine-tuning ----


def tuned_table(found: Mapping[str, Sequence[Row]]) -> str:
    """A column for each task, with the learning rates."""
    lines: dict[str, dict[str, str]] = {}
    for task, rows in found.items():
        for r in rows:
            lines.setdefault(r.what, {})[task] = f"{r.mean:.3f} ({r.job.lr:.2g})"
    head = ["inside", *found]
    return table(head, ([what, *(of.get(t, "") for t in found)] for what, of in lines.items()))


# -- outer ----


def best(rows: Sequence[Row], at: tuple[int, int, int]) -> Row:
    n, period, steps = at
    return min(
        (r for r in rows if _cell(r) == (n, period, steps)),
        key=lambda r: r.mean,
    )


def _cell(r: Row) -> tuple[int, int, int]:
    return r.job.workers, int(r.job.recipe.partition("(")[2].partition(",")[0]), r.job.steps


def outer_table(found: Mapping[str, Sequence[Row]]) -> str:
    (rows,) = found.values()
    lines = []
    for cell in CELLS:
        _, period, _ = cell
        least = best(rows, cell)
        of = {r.job.recipe: r for r in rows if _cell(r) == cell}
        lines.append([str(period)])
        for eta in OUTER_RATES:
            ends = [of[f"diloco({period}, {eta}, {mu})"] for mu in OUTER_MOMENTA]
            k = min(range(len(ends)), key=lambda i: ends[i].mean)
            mark = "**" if ends[k] is least else ""
            lines[-1].append(f"{mark}{ends[k].mean:.3f}{mark} ({OUTER_MOMENTA[k]:g})")
        lines[-1].append(f"{least.spread:.3f}")
    return table(("period", *(f"lr {eta:g}" for eta in OUTER_RATES), "±"), lines)


def outer_picture(found: Mapping[str, Sequence[Row]]) -> Figure:
    ((task, rows),) = found.items()
    figure, axes = _panels(len(CELLS))
    for at, cell in zip(axes, CELLS, strict=True):
        _, period, steps = cell
        of = {r.job.recipe: r for r in rows if _cell(r) == cell}
        for eta in OUTER_RATES:
            ends = [of[f"diloco({period}, {eta}, {mu})"] for mu in OUTER_MOMENTA]
            means, errors = [r.mean for r in ends], [r.spread for r in ends]
            look = {"color": SHADES[eta], "marker": ".", "label": f"lr {eta:g}"}
            at.errorbar(OUTER_MOMENTA, means, errors, **look)
        least = best(rows, cell).mean
        at.set_ylim(least - 0.02 * abs(least), least * 1.35)
        at.set_title(f"{task}: period {period}, {steps // period} rounds", loc="left", fontsize=10)
        at.set_xlabel("momentum")
    axes[0].set_ylabel("loss (nats)")
    axes[0].legend(frameon=False, fontsize=8)
    return figure


# -- signals ----


def signals_table(found: Sequence[signals.Line]) -> str:
    head = ["task", "optimizer, lr", "batch", "agreement", "gradients"]
    head += [*(f"f({period})" for period in ENDS), "growth", "f, gradients"]
    lines = [
        [
            line.case[0],
            f"{line.case[1]}, {line.case[2]:g}",
            str(line.case[3]),
            f"{line.agreement:.2f}",
            f"{line.gradients:.2f}",
            *(f"{line.factors[period]:.2f}" for period in ENDS),
            f"{line.growth:.2f}",
            f"{line.outer:.2f}",
        ]
        for line in found
    ]
    one, other = signals.correlations(found)
    rows = table(head, lines)
    return (
        f"{rows}\n\nThe correlation of log(growth) with the agreement is {one:.2f}, with the "
        f"gradients' share {other:.2f}."
    )


def signals_picture(found: Sequence[signals.Line]) -> Figure:
    figure, (at,) = _panels(1)
    shapes = {"text, small": "o", "images, small": "s", "series": "^"}
    for line in found:
        name, inner, *_ = line.case
        color = COLORS["muon"] if inner == "sgd" else COLORS["adamw"]
        label = f"{name}, {inner}"
        named = at.get_legend_handles_labels()[1]
        look = {"color": color, "marker": shapes[name], "linestyle": ""}
        at.plot(line.agreement, line.growth, label="" if label in named else label, **look)
    at.axhline(MUON[64] / MUON[8], color=GRAY, linewidth=0.8, label="auto()'s table")
    at.set_xlabel("agreement of the workers over a period of 8")
    at.set_ylabel("growth of steps: f(64) / f(8)")
    at.legend(frameon=False, fontsize=8)
    return figure


def _line(at: Any, values: Sequence[tuple[float, float]], color: str, label: str) -> None:
    """Draw means with their errors, one after the other."""
    means, errors = zip(*values, strict=True)
    look = {"color": color, "marker": "o", "capsize": 3, "label": label}
    at.errorbar(range(len(values)), means, errors, **look)


def _panels(count: int) -> tuple[Figure, Any]:
    figure = Figure(figsize=(4.6 * count + 0.6, 3.8), dpi=130, layout="constrained")
    grid: Any = figure.subplots(1, count, squeeze=False)
    for at in grid[0]:
        at.spines[["top", "right"]].set_visible(False)
    return figure, grid[0]


PAGES = {"muloco": (muloco_table, muloco_picture), "outer": (outer_table, outer_picture)}
