"""The report on a race: a page, plots, tables and numbers, all from one result.

`table` has the figures, `verdict` the words, `plots` the pictures, `page` the page.
Here is what they are written to.
"""

from __future__ import annotations

import csv
import webbrowser
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

from laconic.lab.race.page import page
from laconic.lab.race.plots import plots
from laconic.lab.race.result import (
    NO_COMMUNICATION,
    SECONDS,
    STEPS,
    Point,
    Result,
    Row,
    compared,
    equal_steps,
    equal_time,
    read,
)
from laconic.lab.race.table import table
from laconic.lab.race.verdict import verdict

__all__ = [
    "NO_COMMUNICATION",
    "Point",
    "Result",
    "Row",
    "equal_steps",
    "equal_time",
    "join",
    "plots",
    "prepare",
    "read",
    "save",
    "show",
    "table",
    "verdict",
    "write",
]


def write(result: Result, directory: Path) -> list[Path]:
    """`report.html`, `results.json`, `results.csv`, `rows.csv` and the plots in `directory`, made
    if need be; returns what it wrote."""
    saved = save(result, directory)
    html = directory / "report.html"
    html.write_text(page(result), encoding="utf-8")
    return [html, saved, *_csv(result, directory), *plots(result, directory)]


def show(directory: Path) -> None:
    """Open the page in `directory` in the user's browser.

    Raises:
        OSError: there is no browser to be had.
    """
    page = (directory / "report.html").resolve()
    if not webbrowser.open(page.as_uri()):
        raise OSError(f"no browser to be had: open {page} yourself")


def prepare(directory: Path) -> None:
    """Make ``directory`` and see that results can be written there, before they are won.

    Raises `OSError` where they cannot.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "results.json"
    existed = path.exists()
    with path.open("a", encoding="utf-8"):
        pass
    if not existed:
        path.unlink()


def save(result: Result, directory: Path) -> Path:
    """`results.json` alone, in `directory`, made if need be."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "results.json"
    path.write_text(result.to_json() + "\n", encoding="utf-8")
    return path


# --- CSV ------------------------------------------------------------------------------------------


def _csv(result: Result, directory: Path) -> list[Path]:
    """`results.csv`, a line for each validation, and `rows.csv`, a line for each run of a recipe;
    a figure that there is not is an empty field."""
    keys = ("recipe", "source", "seed")
    points = [
        {**{key: getattr(row, key) for key in keys}, **asdict(point)}
        for row in result.rows
        for point in row.curve
    ]
    nested = ("curve", "notes", "timeline", "rounds")
    rows = [
        {
            **{field.name: getattr(row, field.name) for field in fields(row)},
            "loss_at_equal_time": compared(result, row, SECONDS) if row.status == "ok" else None,
            "loss_at_equal_steps": compared(result, row, STEPS) if row.status == "ok" else None,
        }
        for row in result.rows
    ]
    rows = [{key: value for key, value in row.items() if key not in nested} for row in rows]
    columns = [*keys, *(field.name for field in fields(Point))]
    return [
        _write_csv(directory / "results.csv", columns, points),
        _write_csv(directory / "rows.csv", list(rows[0]) if rows else [], rows),
    ]


def _write_csv(path: Path, columns: Sequence[str], lines: Iterable[dict[str, object]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for line in lines:  # NaN is not equal to itself
            writer.writerow({key: v if v == v else None for key, v in line.items()})
    return path


# --- joining --------------------------------------------------------------------------------------


def join(runs: Sequence[tuple[str, Result]]) -> Result:
    """Several results, by label, as one. Rows carry the label as their source. Settings in which
    the results differ stand, by label, in ``settings["runs"]``; the others are those of all."""
    if len(runs) == 1:
        return runs[0][1]
    rows = [replace(row, source=label) for label, result in runs for row in result.rows]
    keys = list(dict.fromkeys(key for _, result in runs for key in result.settings))
    alike = {
        key: runs[0][1].settings.get(key)
        for key in keys
        if all(result.settings.get(key) == runs[0][1].settings.get(key) for _, result in runs)
    }
    apart = {
        label: {key: result.settings.get(key) for key in keys if key not in alike}
        for label, result in runs
    }
    return Result(
        rows=tuple(rows),
        settings={**alike, "runs": apart},
        machine=_together([(label, result.machine) for label, result in runs]),
        versions=_together([(label, result.versions) for label, result in runs]),
        command="\n".join(result.command for _, result in runs),
    )


def _together(runs: Sequence[tuple[str, dict[str, str]]]) -> dict[str, str]:
    """Each value once, where all agree; else every run's, by label."""
    together = {}
    for key in dict.fromkeys(key for _, values in runs for key in values):
        found = [(label, values.get(key, "–")) for label, values in runs]
        agree = len({value for _, value in found}) == 1
        told = "; ".join(f"[{label}] {value}" for label, value in found)
        together[key] = found[0][1] if agree else told
    return together
