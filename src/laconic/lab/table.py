"""The figures of a race as a table: for the terminal and, cell by cell, for the page."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from statistics import stdev

from rich import box
from rich.table import Table
from rich.text import Text

from laconic.lab.result import (
    NO_COMMUNICATION,
    SECONDS,
    STEPS,
    Axis,
    Result,
    Row,
    brief,
    common,
    compared,
    competing,
    differences,
    finished,
    loss_format,
    megabytes_per_step,
    network,
    reason,
    task,
    three_digits,
)
from laconic.lab.seeds import Group, averaged, groups


@dataclass(frozen=True)
class Column:
    """``figure`` of a row, how it is ``written``, and which is ``best``: `min` or `max`. The spread
    over seeds is shown where it ``spreads``."""

    header: str
    figure: Callable[[Row], float | None]
    written: Callable[[float | None], str]
    best: Callable[..., float]
    spreads: bool = False


@dataclass(frozen=True)
class Cell:
    """What stands in the table, and how it stands out."""

    text: str
    style: str = ""


def cells(result: Result) -> tuple[list[str], list[tuple[Row, list[Cell]]]]:
    """The table's headers but for the recipe's, and for each recipe its row and cells."""
    grouped, shown = groups(result), averaged(result)
    columns, rivals = _columns(shown), competing(shown)
    bests = [_best(column, rivals) for column in columns]
    lines = []
    for group in grouped:
        line = []
        for column, best in zip(columns, bests, strict=True):
            text = column.written(column.figure(group.mean))
            bold = group.mean in rivals and text == best
            line.append(Cell(text + _spread(column, group), "bold" if bold else ""))
        if group.mean.status != "ok":
            line[3] = Cell(group.mean.status, "red")
        lines.append((group.mean, line))
    return [column.header for column in columns], lines


def table(result: Result) -> Table:
    """One row per recipe, the best figure of each column in bold, what it all means below."""
    headers, lines = cells(result)
    shown = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
        caption=Text("\n" + "\n".join(caption(result))),
        caption_justify="left",
        caption_style="",
    )
    words = [word for row, _ in lines for word in breakable(row.name).split()]
    widest = min(max(map(len, words), default=0), MOST_NAME)
    shown.add_column("recipe", vertical="bottom", min_width=widest, overflow="fold")
    for header in headers:
        shown.add_column(header, justify="right", vertical="bottom", no_wrap=True)
    for row, line in lines:
        silent = row.recipe == NO_COMMUNICATION
        texts = [Text(cell.text, style=cell.style) for cell in line]
        name = breakable(row.name) + "†" * silent
        shown.add_row(Text(name), *texts, style="dim" if silent else None)
    return shown


MOST_NAME = 22
"""Columns that a word of a recipe's name is sure to get; longer ones are folded."""


def breakable(name: str) -> str:
    """A recipe's name with room for a line break after every comma and before a nested recipe."""
    return re.sub(r",\s*", ", ", name)


def _best(column: Column, rivals: list[Row]) -> str:
    """The best figure among several rivals, as it is written."""
    figures = [value for value in map(column.figure, rivals) if value is not None]
    return column.written(column.best(figures)) if len(rivals) > 1 and figures else ""


def _spread(column: Column, group: Group) -> str:
    """The sample standard deviation over seeds, where there are several and it is to be seen."""
    figures = [value for value in map(column.figure, group.runs) if value is not None]
    if not column.spreads or len(figures) < 2 or group.mean.status != "ok":
        return ""
    return f" ± {column.written(stdev(figures))}"


def _percent(share: float | None) -> str:
    return "–" if share is None or not math.isfinite(share) else f"{share:.0%}"


def _columns(result: Result) -> list[Column]:
    show = loss_format(result)
    seconds, steps = common(result, SECONDS), common(result, STEPS)
    compute = {
        r.source: r.seconds_per_step for r in finished(result) if r.recipe == NO_COMMUNICATION
    }

    def pace(row: Row) -> float | None:
        return row.seconds_per_step if row.seconds_per_step > 0 else None

    def times_compute(row: Row) -> float | None:
        alone = compute.get(row.source)
        return row.seconds_per_step / alone if pace(row) and alone else None

    def loss(axis: Axis) -> Callable[[Row], float | None]:
        return lambda row: compared(result, row, axis) if row.status == "ok" else None

    return [
        Column("s/step", pace, three_digits, min),
        Column("× no\ncomm.", times_compute, three_digits, min),
        Column("steps\ndone", lambda row: row.steps, lambda n: f"{n:,.0f}", max),
        Column(f"loss at\n{brief(seconds or 0)} s", loss(SECONDS), show, min, True),
        Column(f"loss at\nstep {steps or 0:,.0f}", loss(STEPS), show, min, True),
        Column(
            "MB per\nstep",
            lambda row: megabytes_per_step(row) if row.steps else None,
            three_digits,
            min,
        ),
        Column("waiting", lambda row: row.waiting if row.steps else None, _percent, min),
    ]


def caption(result: Result) -> list[str]:
    """What network and task it was, and what a reader must know to read the figures."""
    shown = averaged(result)
    lines = [network(shown), task(result), *differences(shown)]
    lines.append(
        "Loss: validation, nats, of the consensus model. MB: sent per host, payload, by the ledger"
        + _headers(shown)
        + ". Waiting: share of the time spent waiting for the network."
    )
    if any(len(group.runs) > 1 for group in groups(result)):
        lines.append("Figures are means over the seeds; ±: sample standard deviation between them.")
    if any(row.recipe == NO_COMMUNICATION for row in shown.rows):
        lines.append(
            "† The compute alone: workers that never talk. Its loss is the mean over the workers "
            "of each one's own model, not of a consensus model."
        )
    lines += [f"{row.name}: {reason(row)}" for row in shown.rows if row.status != "ok"]
    lines += [f"{row.name}: {note}" for row in shown.rows for note in row.notes]
    return [text for text in lines if text]


def _headers(result: Result) -> str:
    """How much more than the ledger's bytes the interfaces counted."""
    ratios = [
        row.interface_bytes_per_step / row.ledger_bytes_per_step
        for row in competing(result)
        if row.interface_bytes_per_step is not None and megabytes_per_step(row) > 0
    ]
    if not ratios:
        return ""
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return f" (the interfaces counted {low if low == high else f'{low} to {high}'} times that)"
