"""Format the numbers of a race as a table, for the terminal and, cell by cell, for the page."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from rich import box
from rich.align import VerticalAlignMethod
from rich.table import Table
from rich.text import Text

from laconic.lab.race.comparison import Summary, common, compared, competing, finished, summary
from laconic.lab.race.result import (
    NO_COMMUNICATION,
    SECONDS,
    STEPS,
    Axis,
    Result,
    Row,
    grouped,
    megabytes_per_step,
    repeats,
)
from laconic.lab.race.wording import (
    brief,
    loss_format,
    network,
    reason,
    task,
    three_digits,
)


@dataclass(frozen=True)
class Column:
    """One column: the ``figure`` of a run, its format, and which value is ``best`` (`min` or
    `max`).

    ``key`` is its name in JSON. ``show_spread`` adds the spread over seeds.
    """

    key: str
    header: str
    figure: Callable[[Row], float | None]
    format: Callable[[float | None], str]
    best: Callable[..., float]
    show_spread: bool = False


@dataclass(frozen=True)
class Cell:
    """A cell: its text and style, and what is below it, such as the spread."""

    text: str
    style: str = ""
    below: str = ""


def cells(result: Result) -> tuple[list[str], list[tuple[Row, list[Cell]]]]:
    """Return the headers except the recipe's, and for each recipe its first run and its cells.

    Cells contain means over the recipe's runs.
    """
    columns, competitors = _columns(result), competing(result)
    bests = [_best(column, competitors) for column in columns]
    lines = []
    for runs in grouped(result.rows):
        line, lost = [], [run for run in runs if run.status != "ok"]
        for column, best in zip(columns, bests, strict=True):
            figures = summary(map(column.figure, runs))
            text = column.format(figures.mean if figures is not None else None)
            bold = runs[0] in competitors and text == best
            spread = _spread(text, figures) if column.show_spread else ""
            line.append(Cell(text, "bold" if bold else "", spread))
        if lost:
            share = f"{len(lost)} of {len(runs)}" if len(runs) > 1 else ""
            line[3] = Cell(share or lost[0].status, "red", lost[0].status if share else "")
        lines.append((runs[0], line))
    return [column.header for column in columns], lines


def figures(result: Result) -> list[dict[str, object]]:
    """Return the table's figures, unrounded: a dict per recipe, with None for what is unknown.

    ``spread`` has the standard deviations between several runs.
    """
    columns, found = _columns(result), list[dict[str, object]]()
    for runs in grouped(result.rows):
        means = {c.key: summary(map(c.figure, runs)) for c in columns}
        lost = [run.status for run in runs if run.status != "ok"]
        found.append(
            {
                "recipe": runs[0].recipe,
                "peer": runs[0].peer,
                "status": lost[0] if lost else "ok",
                "runs": len(runs),
                **{key: mean.mean if mean is not None else None for key, mean in means.items()},
                "spread": {key: mean.spread for key, mean in means.items() if mean and mean.n > 1},
            }
        )
    return found


def table(result: Result) -> Table:
    """Return a table with one row per recipe, the best value of each column in bold."""
    headers, lines = cells(result)
    shown = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
        caption=Text("\n" + "\n".join(caption(result))),
        caption_justify="left",
        caption_style="",
    )
    words = [word for row, _ in lines for word in breakable(row.recipe).split()]
    widest = min(max(map(len, words), default=0), MOST_NAME)
    # With spreads below the figures, align names with the figures.
    vertical: VerticalAlignMethod = "top" if repeats(result) > 1 else "bottom"
    shown.add_column("recipe", vertical=vertical, min_width=widest, overflow="fold")
    for header in headers:
        shown.add_column(header, justify="right", vertical=vertical, no_wrap=True)
    for row, line in lines:
        texts = []
        for cell in line:
            text = Text(cell.text, style=cell.style)
            texts.append(text.append(f"\n{cell.below}" if cell.below else "", style="not bold"))
        faint = "dim" if row.reference else None
        shown.add_row(Text(heading(row)), *texts, style=faint)
    return shown


MOST_NAME = 22
"""Columns guaranteed to a word of a recipe's name. Longer words are folded."""


def breakable(name: str) -> str:
    """Return a recipe's name with a space, for line breaks, after every comma."""
    return re.sub(r",\s*", ", ", name)


def heading(row: Row) -> str:
    """Return the recipe's name in the table, with marks that refer to the notes below."""
    marks = "†" * (row.recipe == NO_COMMUNICATION) + "‡" * row.peer + "§" * row.free
    return breakable(row.recipe) + marks


def _best(column: Column, competitors: list[Row]) -> str:
    """Return the best figure among several competitors, formatted."""
    summaries = [summary(map(column.figure, runs)) for runs in grouped(competitors)]
    figures = [figures.mean for figures in summaries if figures is not None]
    return column.format(column.best(figures)) if len(summaries) > 1 and figures else ""


def _spread(text: str, figures: Summary | None) -> str:
    """Return the spread over several seeds, with as many decimals as the figure's ``text``."""
    if figures is None or figures.n < 2:
        return ""
    return f"±{figures.spread:.{len(text.partition('.')[2])}f}"


def _percent(share: float | None) -> str:
    return "–" if share is None or not math.isfinite(share) else f"{share:.0%}"


def _columns(result: Result) -> list[Column]:
    show = loss_format(result)
    seconds, steps = common(result, SECONDS), common(result, STEPS)
    baseline = [r for r in finished(result) if r.recipe == NO_COMMUNICATION]
    compute = summary(row.seconds_per_step for row in baseline)

    def pace(row: Row) -> float | None:
        return row.seconds_per_step if row.seconds_per_step > 0 else None

    def times_compute(row: Row) -> float | None:
        if compute is None or not compute.mean or pace(row) is None:
            return None
        return row.seconds_per_step / compute.mean

    def loss(axis: Axis) -> Callable[[Row], float | None]:
        return lambda row: compared(result, row, axis) if row.status == "ok" else None

    return [
        Column("seconds_per_step", "s/step", pace, three_digits, min, True),
        Column("times_no_communication", "× no\ncomm.", times_compute, three_digits, min),
        Column("steps", "steps\ndone", lambda row: row.steps, lambda n: f"{n:,.0f}", max),
        Column(
            "loss_at_equal_time",
            f"loss at\n{brief(seconds or 0)} s",
            loss(SECONDS),
            show,
            min,
            True,
        ),
        Column(
            "loss_at_equal_steps", f"loss at\nstep {steps or 0:,.0f}", loss(STEPS), show, min, True
        ),
        Column(
            "megabytes_per_step",
            "MB per\nstep",
            lambda row: megabytes_per_step(row) if row.steps else None,
            three_digits,
            min,
        ),
        Column("waiting", "waiting", lambda row: row.waiting if row.steps else None, _percent, min),
    ]


def caption(result: Result) -> list[str]:
    """Return the lines below the table: network, task, and how to read the figures."""
    lines = [network(result), task(result)]
    lines.append(
        "Loss: validation, nats, of the consensus model. MB: sent per host, payload, by the ledger"
        + _headers(result)
        + ". Waiting: share of the time spent waiting for the network."
    )
    if repeats(result) > 1:
        lines.append(
            "Figures are means over the runs, ± the sample standard deviation between them."
        )
    if any(row.recipe == NO_COMMUNICATION for row in result.rows):
        lines.append(
            "† Compute time alone: workers that never communicate. The loss is the mean of the "
            "workers' own models, not that of a consensus model."
        )
    if any(row.peer and row.status == "ok" for row in result.rows):
        lines.append(
            "‡ Another library: MB from the interfaces' counters, with headers; its waiting time "
            "is unknown."
        )
    if any(row.free for row in result.rows):
        lines.append("§ Processes of one machine, without a network: what the others can reach.")
    for runs in grouped(result.rows):
        for row in runs:
            seed = f" (seed {row.seed})" if len(runs) > 1 else ""
            lines += [f"{row.recipe}{seed}: {reason(row)}"] if row.status != "ok" else []
        notes = dict.fromkeys(note for row in runs for note in row.notes)
        lines += [f"{runs[0].recipe}: {note}" for note in notes]
    return [text for text in lines if text]


def _headers(result: Result) -> str:
    """Return how much more the interfaces counted than the ledger."""
    ratios = [
        row.interface_bytes_per_step / row.ledger_bytes_per_step
        for row in competing(result)
        if not row.peer and row.interface_bytes_per_step is not None and megabytes_per_step(row) > 0
    ]
    if not ratios:
        return ""
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return f" (the interfaces counted {low if low == high else f'{low} to {high}'} times that)"
