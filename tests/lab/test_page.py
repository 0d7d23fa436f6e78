"""The report as a page: its words, its data, and that it needs nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from laconic.algorithms.recipes import RECIPES
from laconic.lab.race import report
from laconic.lab.race.page import explained, page
from laconic.lab.race.result import Result, Rounds
from laconic.lab.race.table import cells
from laconic.lab.race.verdict import question, sentences

from tests.lab.test_report import DDP, FAILED, FULL, LOCAL, SILENT, result, row

VOID = {"meta", "link", "br", "img", "input", "hr"}
SPANS = ((0.0, 0.4, "compute"), (0.4, 1.0, "wait"), (0.41, 0.93, "send"))


class Parsed(HTMLParser):
    """What a browser would see: the texts by tag, attributes, ids, and whether tags match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.attributes: list[tuple[str, str, str]] = []
        self.ids: list[str] = []
        self.data = ""
        self._embedded = False
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.attributes += [(tag, key, value or "") for key, value in attrs]
        found = dict(attrs)
        self.ids += [found["id"] or ""] if "id" in found else []
        self._embedded = found.get("id") == "data"
        self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self._embedded = False

    def handle_data(self, data: str) -> None:
        if self._embedded:
            self.data += data
        if self.open:
            self.texts[self.open[-1]][-1] += data

    def embedded(self) -> dict[str, object]:
        found = json.loads(self.data, parse_constant=pytest.fail)
        assert isinstance(found, dict)
        return found


RECORDED = result(
    SILENT,
    replace(DDP, timeline=(SPANS, SPANS), rounds=(Rounds(1, 75, 1, 2_000_000),)),  # type: ignore[arg-type]
    LOCAL,
    FAILED,
)


def test_the_data_in_the_page_are_those_of_the_json() -> None:
    data = Parsed(page(RECORDED)).embedded()
    assert data["result"] == json.loads(RECORDED.to_json())
    curves = data["curves"]
    assert isinstance(curves, list)
    for curve, run in zip(curves, RECORDED.rows, strict=True):
        assert curve["name"] == run.recipe
        assert curve["points"] == [
            [p.step, p.seconds, p.megabytes, p.loss, p.loss, p.loss, p.distance] for p in run.curve
        ]
    assert [curve["number"] for curve in curves] == [-1, 0, 1, 2]
    assert data["compared"] == {"seconds": 30.0, "step": 75}


def test_the_page_says_what_the_terminal_says() -> None:
    seen = Parsed(page(FULL))
    assert seen.texts["h1"] == seen.texts["title"] == [question(FULL)]
    assert question(FULL) == "Which recipe reaches the lowest loss in 30 s on a 100 Mbit/s network?"
    told = sentences(FULL)
    assert len(told) == 2 and " ".join(told) == report.verdict(FULL)
    assert seen.texts["p"][:2] == told
    headers, lines = cells(FULL)
    assert seen.texts["th"][: 1 + len(headers)] == ["recipe", *headers]
    assert seen.texts["td"] == [cell.text for _, line in lines for cell in line]
    names = seen.texts["th"][1 + len(headers) :]
    assert [name.rstrip("†") for name in names] == [run.recipe for run in FULL.rows]
    assert seen.texts["pre"] == [FULL.command]
    assert "4 hosts × 1 process, 100 Mbit/s, emulated with network namespaces" in seen.texts["p"]
    assert "sgp(): failed: worker 2 did not answer within 20 s in round 3" in seen.texts["p"]
    assert {"two cores", "2"} <= set(seen.texts["dd"])


def test_the_page_begins_with_the_answer_and_folds_the_details() -> None:
    html = page(RECORDED)
    order = ["<h1>", 'class="answer"', 'id="by-seconds"', "<table>", 'class="notes"', "<details"]
    places = [html.index(text) for text in order]
    assert places == sorted(places)
    details = html[places[-1] : html.index("<footer>")]
    for name in ("by-megabytes", "by-steps", "timeline", "rounds", "distance", "command"):
        assert f'id="{name}"' in details
    assert "<details open" not in html
    opened = re.findall(r'<details[^>]*class="printed"[^>]*>\n<summary>(.*)</summary>', details)
    assert opened == [
        "What the recipes do",
        "Loss by traffic and by steps",
        "What was run, on which machine",
        "Repeat this race",
    ]


def test_every_recipe_is_explained_to_those_who_do_not_know_it() -> None:
    base = "slowmo(local_sgd(12), period=24)"
    own, peer = row("mine(3)"), replace(row("torch-ddp"), peer=True)
    found = explained(result(SILENT, DDP, row(base), own, peer))
    assert list(found) == [SILENT.recipe, "ddp()", base, "mine(3)", "torch-ddp"]
    assert found["ddp()"] == "Average gradients over all ranks during every backward pass."
    assert found[base].startswith("slowmo: Take a slow momentum step")
    assert "local_sgd: Average the parameters" in found[base] and "`" not in found[base]
    assert found["mine(3)"] == "A recipe of the user's own."
    assert found["torch-ddp"] == "Another library, in the same training loop."
    for name in RECIPES:
        assert explained(result(row(f"{name}(4)")))[f"{name}(4)"].endswith(".")
    assert "Measure the first steps" in explained(result(row("auto()")))["auto()"]


def test_the_page_needs_nothing_from_elsewhere() -> None:
    html = page(RECORDED)
    for tag, key, value in Parsed(html).attributes:
        assert key not in ("src", "action", "srcset"), (tag, key, value)
        assert key != "href" or value == "data:,"
    addresses = set(re.findall(r"\w+://[^\s\"')]+", html))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert "@import" not in html and "fetch(" not in html and "url(#" in html
    assert not re.findall(r"url\((?!#)", html)


def test_every_place_that_the_script_fills_is_there() -> None:
    html = page(RECORDED)
    ids = Parsed(html).ids
    assert len(set(ids)) == len(ids)
    assert set(re.findall(r'byId\("([\w-]+)"\)', html)) <= set(ids)
    assert "{{" not in html


def test_names_are_text_and_never_markup() -> None:
    odd = row("</script><b>&{{data}}</b>", (0, 0, 3.0), (9, 9, 2.0), notes=("<i>a note</i>",))
    html = page(replace(result(odd, DDP), command="laconic compare '<script>'"))
    seen = Parsed(html)
    assert "b" not in seen.texts
    assert "</script><b>&{{data}}</b>: <i>a note</i>" in seen.texts["p"]
    assert "</script><b>&{{data}}</b>" in seen.texts["th"]
    assert seen.texts["pre"] == ["laconic compare '<script>'"]
    assert html.count("</script>") == 2
    assert seen.embedded()["result"] == json.loads(
        replace(result(odd, DDP), command="laconic compare '<script>'").to_json()
    )


@pytest.mark.parametrize("rows", [(), (DDP,), (SILENT,), (FAILED,), (row("empty()"),)])
def test_a_page_of_any_result(rows: tuple[report.Row, ...]) -> None:
    shown: Result = result(*rows)
    for each in (shown, replace(shown, settings={})):
        assert Parsed(page(each)).embedded()["result"] == json.loads(each.to_json())
