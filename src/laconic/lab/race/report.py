"""Write the report on a race: page, plots, tables and data files.

`table` has the numbers, `verdict` the text, `plots` the plots, and `page` the web page.
"""

from __future__ import annotations

import csv
import webbrowser
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

from laconic.lab.race.comparison import common, compared, equal_steps, equal_time
from laconic.lab.race.page import page
from laconic.lab.race.plots import plots
from laconic.lab.race.result import NO_COMMUNICATION, SECONDS, STEPS, Point, Result, Row, read
from laconic.lab.race.table import caption, figures, table
from laconic.lab.race.verdict import question, sentences, verdict

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
    "summary",
    "table",
    "verdict",
    "write",
]


def write(result: Result, directory: Path) -> list[Path]:
    """Write `report.html`, `results.json`, `results.csv`, `rows.csv` and the plots.

    Creates `directory` if needed. Returns the paths of the files.
    """
    saved = save(result, directory)
    html = directory / "report.html"
    html.write_text(page(result), encoding="utf-8")
    return [html, saved, *_csv(result, directory), *plots(result, directory)]


def summary(result: Result) -> dict[str, object]:
    """Return what the page and the terminal say, for ``--json``: the question, the answer, the
    figures of each recipe, and the notes."""
    return {
        "question": question(result),
        "answer": sentences(result),
        "equal_time": common(result, SECONDS),
        "equal_steps": common(result, STEPS),
        "rows": figures(result),
        "notes": caption(result),
    }


def show(directory: Path) -> None:
    """Open the page in `directory` in the user's browser.

    Raises:
        OSError: no browser is available.
    """
    page = (directory / "report.html").resolve()
    if not webbrowser.open(page.as_uri()):
        raise OSError(f"no browser available: open {page} yourself")


def prepare(directory: Path) -> None:
    """Create ``directory`` and check, before a long run, that results can be written there.

    Raises `OSError` if they cannot.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "results.json"
    existed = path.exists()
    with path.open("a", encoding="utf-8"):
        pass
    if not existed:
        path.unlink()


def save(result: Result, directory: Path) -> Path:
    """Write only `results.json` in `directory`, which is created if needed."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "results.json"
    path.write_text(result.to_json() + "\n", encoding="utf-8")
    return path


# --- CSV ------------------------------------------------------------------------------------------


def _csv(result: Result, directory: Path) -> list[Path]:
    """Write `results.csv`, with a line per validation, and `rows.csv`, with a line per run.

    A missing value is an empty field.
    """
    keys = ("recipe", "source", "seed")
    points = [
        {**{key: getattr(row, key) for key in keys}, **asdict(point)}
        for row in result.rows
        for point in row.curve
    ]
    nested = ("curve", "notes", "timeline", "rounds", "worker_steps")
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
        for line in lines:  # v == v is False for NaN
            writer.writerow({key: v if v == v else None for key, v in line.items()})
    return path


# --- joining --------------------------------------------------------------------------------------


def join(runs: Sequence[tuple[str, Result]]) -> Result:
    """Combine several labeled results into one.

    Rows get the label as their source. Settings that differ go into ``settings["runs"]`` by label.
    """
    if len(runs) == 1:
        return runs[0][1]
    rows = [replace(row, source=label) for label, result in runs for row in result.rows]
    keys = list(dict.fromkeys(key for _, result in runs for key in result.settings))
    common = {
        key: runs[0][1].settings.get(key)
        for key in keys
        if all(result.settings.get(key) == runs[0][1].settings.get(key) for _, result in runs)
    }
    different = {
        label: {key: result.settings.get(key) for key in keys if key not in common}
        for label, result in runs
    }
    return Result(
        rows=tuple(rows),
        settings={**common, "runs": different},
        machine=_combine([(label, result.machine) for label, result in runs]),
        versions=_combine([(label, result.versions) for label, result in runs]),
        command="\n".join(result.command for _, result in runs),
    )


def _combine(runs: Sequence[tuple[str, dict[str, str]]]) -> dict[str, str]:
    """Return each value once if all runs agree, else the value of every run by label."""
    combined = {}
    for key in dict.fromkeys(key for _, values in runs for key in values):
        labeled = [(label, values.get(key, "–")) for label, values in runs]
        agree = len({value for _, value in labeled}) == 1
        text = "; ".join(f"[{label}] {value}" for label, value in labeled)
        combined[key] = labeled[0][1] if agree else text
    return combined
