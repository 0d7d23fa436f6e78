"""Write the report as a single self-contained web page from the template `page.html`."""

from __future__ import annotations

import re
from html import escape
from importlib.resources import files

from laconic.lab.race.plots import STYLE, pictures
from laconic.lab.race.result import Result
from laconic.lab.race.table import Cell, caption, cells, heading
from laconic.lab.race.verdict import question, sentences
from laconic.lab.race.wording import network, task
from laconic.version import __version__


def page(result: Result) -> str:
    """Return the page as HTML."""
    about = [text for text in (network(result), task(result)) if text]
    parts = {
        "title": escape(question(result)),
        "style": STYLE,
        "answer": _paragraphs(sentences(result)),
        "conditions": _paragraphs(about),
        "pictures": "\n".join(f"<figure>{picture}</figure>" for picture in pictures(result)),
        "table": _table(result),
        "notes": _paragraphs(caption(result)[len(about) :]),
        "machine": _definitions({**result.machine, **result.versions}),
        "command": escape(result.command),
        "version": escape(__version__),
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


def _table(result: Result) -> str:
    headers, lines = cells(result)
    head = "".join(f'<th scope="col">{escape(h)}</th>' for h in headers)
    body = []
    for group, line in lines:
        faint = ' class="baseline"' if group.first.reference else ""
        name = f'<th scope="row">{escape(heading(group.first))}</th>'
        body.append(f"<tr{faint}>{name}{''.join(map(_cell, line))}</tr>")
    head = f'<thead><tr><th scope="col">recipe</th>{head}</tr></thead>'
    return f"<table>{head}<tbody>{''.join(body)}</tbody></table>"


def _cell(cell: Cell) -> str:
    below = f"<small>{escape(cell.below)}</small>" if cell.below else ""
    return f'<td class="{cell.style}">{escape(cell.text)}{below}</td>'
