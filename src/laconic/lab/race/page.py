"""Write the report as a single self-contained web page from the template `page.html`.

This module fills in the question, the answer, the table, and the text of the details. The page's
script draws the curves, timelines and rounds from the embedded data: `results.json` and values
derived from it.
"""

from __future__ import annotations

import json
import re
from html import escape
from importlib.resources import files
from inspect import getdoc

from laconic.algorithms.auto import auto
from laconic.algorithms.recipes import RECIPES
from laconic.lab.emulation.seeds import Group
from laconic.lab.race.comparison import common
from laconic.lab.race.plots import label, loss_limits, numbered
from laconic.lab.race.result import NO_COMMUNICATION, SECONDS, STEPS, Result
from laconic.lab.race.table import Cell, caption, cells, heading
from laconic.lab.race.verdict import question, sentences
from laconic.lab.race.wording import differences, network, task
from laconic.version import __version__

DESCRIBED = {**RECIPES, "auto": auto}
"""What the report explains, by name."""


def page(result: Result) -> str:
    """Return the page as HTML."""
    about = [text for text in (network(result), task(result), *differences(result)) if text]
    parts = {
        "title": escape(question(result)),
        "answer": _paragraphs(sentences(result)),
        "conditions": escape("; ".join(about[:2])),
        "table": _table(result),
        "notes": _paragraphs(caption(result)[len(about) :]),
        "recipes": _definitions(explained(result)),
        "about": _paragraphs(about),
        "machine": _definitions({**result.machine, **result.versions}),
        "command": escape(result.command),
        "version": escape(__version__),
        "data": _embedded(result),
    }
    template = (files("laconic.lab.race") / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def _paragraphs(texts: list[str]) -> str:
    return "\n".join(f"<p>{escape(text)}</p>" for text in texts if text)


def _definitions(values: dict[str, str]) -> str:
    return "\n".join(
        f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>"
        for key, value in values.items()
    )


def explained(result: Result) -> dict[str, str]:
    """Return what each recipe of the race does, by its name."""
    found = {}
    for row in result.rows:
        names = list(dict.fromkeys(re.findall(r"\w+(?=\()", row.recipe)))
        if row.recipe == NO_COMMUNICATION:
            text = "Each worker trains its own model. It shows what the network costs the others."
        elif row.free:
            text = "The same processes without a network. It shows what the others can reach."
        elif row.peer:
            text = "Another library, in the same training loop."
        else:
            known = [name for name in names if name in DESCRIBED]
            text = " ".join(_first_sentence(name, len(known) > 1) for name in known)
        found[row.recipe] = text or "A recipe of the user's own."
    return found


def _first_sentence(name: str, named: bool) -> str:
    """Return the first sentence of the recipe's documentation, after its name if asked."""
    text = " ".join((getdoc(DESCRIBED[name]) or "").split("\n\n")[0].split()).replace("`", "")
    return f"{name}: {text}" if named else text


def _table(result: Result) -> str:
    headers, lines = cells(result)
    head = "".join(f'<th scope="col">{escape(h)}</th>' for h in headers)
    body = []
    for row, line in lines:
        faint = ' class="baseline"' if row.reference else ""
        name = f'<th scope="row">{escape(heading(row))}</th>'
        body.append(f"<tr{faint}>{name}{''.join(map(_cell, line))}</tr>")
    head = f'<thead><tr><th scope="col">recipe</th>{head}</tr></thead>'
    return f"<table>{head}<tbody>{''.join(body)}</tbody></table>"


def _cell(cell: Cell) -> str:
    below = f"<small>{escape(cell.below)}</small>" if cell.below else ""
    return f'<td class="{cell.style}">{escape(cell.text)}{below}</td>'


def _embedded(result: Result) -> str:
    """Return the data as JSON that no HTML parser takes for markup."""
    limits = loss_limits(result)
    data = {
        "result": json.loads(result.to_json()),
        "curves": [_curve(group, number) for group, number in numbered(result)],
        "limits": limits and {"low": limits[0], "high": limits[1], "log": limits[2]},
        "compared": {"seconds": common(result, SECONDS), "step": common(result, STEPS)},
    }
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _curve(group: Group, number: int) -> dict[str, object]:
    """Return what is drawn of a recipe: the mean of its runs, and the minimum and maximum loss."""
    row = group.mean
    points = [
        [p.step, p.seconds, p.megabytes, p.loss, low, high, p.distance]
        for p, low, high in zip(row.curve, group.low, group.high, strict=True)
    ]
    return {
        "name": row.name,
        "label": label(row),
        "number": number,
        "ok": row.status == "ok",
        "runs": len(group.runs),
        "points": points,
    }
