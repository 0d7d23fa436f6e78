"""Write the table of docs/gpu.md: what ran on which GPU, and what never did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.cuda.training import PARTS

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
BEGIN, END = "<!-- begin: written by python -m benchmarks.cuda page -->", "<!-- end -->"


def read(folder: Path) -> list[dict[str, Any]]:
    """The results in ``folder``, by file name."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def table(results: list[dict[str, Any]]) -> str:
    """One row for each part that ran, one column for each GPU, and the names of the others."""
    heads = [f"{r['gpu']}, torch {r['torch']}, {r['date']}" for r in results]
    lines = [f"| part | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    never = []
    for each in PARTS:
        rows = [_row(result, each.name) for result in results]
        if any(rows):
            cells = " | ".join(map(_cell, rows))
            lines.append(f"| {each.text} (`{each.name}`) | {cells} |")
        else:
            never.append(f"`{each.name}`")
    return "\n".join([*lines, *(["", f"Never run: {', '.join(never)}."] * bool(never))])


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


def rendered(text: str, results: list[dict[str, Any]]) -> str:
    """The page ``text`` with the table of ``results``."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{after}"


def write(folder: Path) -> None:
    """Write the table of the results in ``folder`` into the page."""
    PAGE.write_text(rendered(PAGE.read_text(), read(folder)))
