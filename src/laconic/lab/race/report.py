"""Write the report on a race: page, plots, tables and data files.

`table` has the numbers, `verdict` the text, `plots` the plots, and `page` the web page.
"""

from __future__ import annotations

from pathlib import Path

from laconic.lab.race.comparison import common
from laconic.lab.race.page import page
from laconic.lab.race.plots import picture
from laconic.lab.race.result import SECONDS, STEPS, Result, read
from laconic.lab.race.table import caption, figures, table
from laconic.lab.race.verdict import question, sentences, verdict

__all__ = ["prepare", "read", "save", "summary", "table", "verdict", "write"]


def write(result: Result, directory: Path) -> list[Path]:
    """Write `report.html`, `results.json` and `loss.svg`.

    Creates `directory` if needed. Returns the paths of the files.
    """
    saved = save(result, directory)
    html, plot = directory / "report.html", directory / "loss.svg"
    html.write_text(page(result), encoding="utf-8")
    plot.write_text(picture(result), encoding="utf-8")
    return [html, saved, plot]


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
