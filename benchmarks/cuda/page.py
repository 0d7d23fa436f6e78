"""Write the table of docs/gpu.md: what ran on which GPU, and what never did."""

from __future__ import annotations

import json
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
    heads = [f"{r['gpu']}, torch {r['torch']}, {r['date']}" for r in results]
    lines, never = [], []
    for each in PARTS:
        rows = [_row(result, each.name) for result in results]
        if any(rows):
            lines.append([f"{each.text} (`{each.name}`)", *map(_cell, rows)])
        else:
            never.append(f"`{each.name}`")
    table = study.table(["part", *heads], lines, left=1 + len(heads))
    return f"{table}\n\nNever run: {', '.join(never)}." if never else table


def _row(result: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((row for row in result["parts"] if row["name"] == name), None)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "never run"
    numbers = "; ".join(
        f"{name} {value:,.0f}" if value >= 1000 else f"{name} {value:.3g}"
        for name, value in row["numbers"].items()
    )
    said = "failed: " + row["error"].replace("|", "\\|") if row["error"] else "ok"
    return f"{said}. {numbers}" if numbers else said


def write(folder: Path) -> None:
    """Write the table of the results in ``folder`` into the page."""
    study.write(PAGE, NAME, table(read(folder)))
