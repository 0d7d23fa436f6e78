"""Format the numbers of a race as a table, for the terminal and, cell by cell, for the page."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from rich import box
from rich.align import VerticalAlignMethod
from rich.table import Table
from rich.text import Text

from laconic.lab.race.comparison import (
    Group,
    Summary,
    common,
    compared,
    competing,
    groups,
    limit,
    seconds_to_ddp,
    standing,
    summary,
)
from laconic.lab.race.result import (
    NO_COMMUNICATION,
    SECONDS,
    STEPS,
    Axis,
    Result,
    Row,
    megabytes_per_step,
    repeats,
)
from laconic.lab.race.wording import loss_format, network, reason, task, three_digits
from laconic.units import three_digits as short


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


def rows(result: Result) -> list[Group]:
    """Return the recipes in the order of the table: the lowest loss first, then those that did not
    finish, and last the rows for reference."""
    order = [group.runs for group, _ in standing(result, limit(result))]

    def place(group: Group) -> tuple[bool, int]:
        rank = order.index(group.runs) if group.runs in order else len(order)
        return group.first.reference, rank

    return sorted(groups(result), key=place)


def cells(
    result: Result, keys: Container[str] | None = None
) -> tuple[list[str], list[tuple[Group, list[Cell]]]]:
    """Return the headers except the recipe's, and each recipe with its cells: means over its runs.

    ``keys`` chooses some columns.
    """
    columns = [c for c in _columns(result) if keys is None or c.key in keys]
    competitors = [group.runs for group in competing(result)]
    lines = []
    for group in rows(result):
        cells = []
        for column in columns:
            figures = summary(map(column.figure, group.runs))
            text = column.format(figures.mean if figures is not None else None)
            bold = group.runs in competitors and text == _best(column, competitors)
            spread = _spread(text, figures) if column.show_spread else ""
            cells.append(Cell(text, "bold" if bold else "", spread))
        if group.lost:
            share = f"{len(group.lost)} of {len(group.runs)}" if len(group.runs) > 1 else ""
            cells[0] = Cell(share or group.status, "red", group.status if share else "")
        lines.append((group, cells))
    return [column.header for column in columns], lines


def figures(result: Result) -> list[dict[str, object]]:
    """Return the table's figures, unrounded: a dict per recipe, with None for what is unknown.

    ``spread`` has the standard deviations between several runs.
    """
    columns, found = _columns(result), list[dict[str, object]]()
    for group in rows(result):
        means = {c.key: summary(map(c.figure, group.runs)) for c in columns}
        found.append(
            {
                "recipe": group.name,
                "peer": group.first.peer,
                "status": group.status,
                "runs": len(group.runs),
                **{key: mean.mean if mean is not None else None for key, mean in means.items()},
                "spread": {key: mean.spread for key, mean in means.items() if mean and mean.n > 1},
            }
        )
    return found


def table(result: Result, keys: Container[str] | None = None) -> Table:
    """Return a table with one row per recipe, the best value of each column in bold.

    Below it are the network, the task and notes, unless ``keys`` chooses some columns, by their
    names in JSON.
    """
    headers, lines = cells(result, keys)
    shown = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
        caption=Text("\n" + "\n".join(caption(result))) if keys is None else None,
        caption_justify="left",
        caption_style="",
    )
    words = [word for group, _ in lines for word in heading(group.first).split()]
    widest = min(max(map(len, words), default=0), MOST_NAME)
    # With spreads below the figures, align names with the figures.
    vertical: VerticalAlignMethod = "top" if repeats(result) > 1 else "bottom"
    shown.add_column("recipe", vertical=vertical, min_width=widest, overflow="fold")
    for header in headers:
        shown.add_column(header, justify="right", vertical=vertical, no_wrap=True)
    for group, line in lines:
        texts = []
        for cell in line:
            text = Text(cell.text, style=cell.style)
            texts.append(text.append(f"\n{cell.below}" if cell.below else "", style="not bold"))
        if group.first.reference and shown.rows and not shown.rows[-1].style:
            shown.add_section()
        faint = "dim" if group.first.reference else None
        shown.add_row(Text(heading(group.first)), *texts, style=faint)
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


def _best(column: Column, competitors: Sequence[Sequence[Row]]) -> str:
    """Return the best figure among several competitors, formatted."""
    found = [summary(map(column.figure, runs)) for runs in competitors]
    means = [figures.mean for figures in found if figures is not None]
    return column.format(column.best(means)) if len(competitors) > 1 and means else ""


def _spread(text: str, figures: Summary | None) -> str:
    """Return the spread over several seeds, with as many decimals as the figure's ``text``."""
    if figures is None or figures.n < 2:
        return ""
    return f"±{figures.spread:.{len(text.partition('.')[2])}f}"


def _percent(share: float | None) -> str:
    return "–" if share is None or not math.isfinite(share) else f"{share:.0%}"


def _columns(result: Result) -> list[Column]:
    show = loss_format(result)
    seconds, steps = common(result, SECONDS) or 0.0, common(result, STEPS) or 0.0

    def loss(axis: Axis) -> Callable[[Row], float | None]:
        return lambda row: compared(result, row, axis) if row.status == "ok" else None

    def known(figure: Callable[[Row], float]) -> Callable[[Row], float | None]:
        return lambda row: figure(row) if row.steps else None

    columns = [
        Column(
            "loss_at_equal_time", f"loss at\n{short(seconds)} s", loss(SECONDS), show, min, True
        ),
        Column(
            "seconds_to_ddp",
            "s to loss\nof ddp()",
            lambda row: seconds_to_ddp(result, row),
            lambda value: "–" if value is None else f"{value:.1f}",
            min,
        ),
        Column("steps", "steps\ndone", lambda row: row.steps, lambda n: f"{n:,.0f}", max),
        Column("loss_at_equal_steps", f"loss at\nstep {steps:,.0f}", loss(STEPS), show, min, True),
        Column(
            "seconds_per_step",
            "s per\nstep",
            lambda row: row.seconds_per_step or None,
            three_digits,
            min,
            True,
        ),
        Column("megabytes_per_step", "MB per\nstep", known(megabytes_per_step), three_digits, min),
        Column("waiting", "waiting", known(lambda row: row.waiting), _percent, min),
    ]
    compare = any(seconds_to_ddp(result, row) is not None for row in result.rows)
    return [c for c in columns if compare or c.key != "seconds_to_ddp"]


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
            "Figures are means over the runs, ± the sample standard deviation between them. "
            "Recipes that differ by less are tied."
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
    for group in groups(result):
        for row in group.lost:
            seed = f" (seed {row.seed})" if len(group.runs) > 1 else ""
            lines.append(f"{row.recipe}{seed}: {reason(row)}")
        notes = dict.fromkeys(note for row in group.runs for note in row.notes)
        lines += [f"{group.name}: {note}" for note in notes]
    return [text for text in lines if text]


def _headers(result: Result) -> str:
    """Return how much more the interfaces counted than the ledger."""
    ratios = [
        row.interface_bytes_per_step / row.ledger_bytes_per_step
        for row in (row for group in competing(result) for row in group.runs)
        if not row.peer and row.interface_bytes_per_step is not None and megabytes_per_step(row) > 0
    ]
    if not ratios:
        return ""
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return f" (the interfaces counted {low if low == high else f'{low} to {high}'} times that)"
