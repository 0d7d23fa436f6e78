"""Write the table of docs/gpu.md: what ran on which GPU, and what never did."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks import study
from benchmarks.cuda.tuning import PARTS

PAGE, NAME = study.DOCS / "gpu.md", "written by python -m benchmarks.cuda page"


def read(folder: Path) -> list[dict[str, Any]]:
    """The results in ``folder``, by file name."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def table(results: list[dict[str, Any]]) -> str:
    """One row for each part that ran, one column for each GPU, and the names of the others."""
    heads = [f"{r['gpu']}, {_when(r)}" for r in results]
    lines, never = [], []
    for each in PARTS:
        cells = [_cell(result, each.name) for result in results]
        if any(cells):
            shown = [cell or "never run" for cell in cells]
            lines.append([f"{each.text} (`{each.name}`)", *shown])
        else:
            never.append(f"`{each.name}`")
    table = study.table(["part", *heads], lines, left=1 + len(heads))
    return f"{table}\n\nNever run: {', '.join(never)}." if never else table


def _when(result: dict[str, Any], row: dict[str, Any] | None = None) -> str:
    """With which torch, and when, a part ran; None: most parts. Older files say it once."""
    if row is not None:
        return f"torch {row.get('torch', result['torch'])}, {row.get('date', result['date'])}"
    return statistics.mode(_when(result, each) for each in result["parts"])


def _cell(result: dict[str, Any], name: str) -> str:
    row = next((row for row in result["parts"] if row["name"] == name), None)
    if row is None:
        return ""
    numbers = "; ".join(
        f"{name} {value:,.0f}" if value >= 1000 else f"{name} {value:.3g}"
        for name, value in row["numbers"].items()
    )
    said = "failed: " + row["error"].replace("|", "\\|") if row["error"] else "ok"
    said = f"{said}. {numbers}" if numbers else said
    when = _when(result, row)
    return said if when == _when(result) else f"{said} ({when})"


def write(folder: Path) -> None:
    """Write the table of the results in ``folder`` into the page."""
    study.write(PAGE, NAME, table(read(folder)))
