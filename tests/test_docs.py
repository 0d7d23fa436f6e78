"""The docs: every page is in the site's navigation, and links lead somewhere, here and there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import laconic
from laconic.recipes import RECIPES
from offline import elsewhere

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def pages_of(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    assert hasattr(parts, "__iter__")
    return [page for part in parts for page in pages_of(part)]


@pytest.mark.timeout(10)
def test_every_page_is_in_the_navigation_once() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert sorted(pages_of(nav)) == [page.relative_to(DOCS).as_posix() for page in PAGES]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


@pytest.mark.timeout(10)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_links_lead_somewhere_in_the_repository_too(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.timeout(10)
def test_every_recipe_is_in_the_index_of_algorithms() -> None:
    index = (DOCS / "algorithms" / "index.md").read_text()
    for name in (*RECIPES, "auto"):
        assert re.search(rf"\b{name}\b", index), name


@pytest.mark.timeout(10)
def test_every_public_name_is_in_the_reference() -> None:
    """Functions and classes by name; recipes, codecs, graphs and links by their module."""
    text = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    named = set(re.findall(r"::: laconic\.(\w+)", text))
    assert set(laconic.__all__) - set(RECIPES) <= named


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    ("page", "found"),
    [
        ('<a href="https://arxiv.org">paper</a><script src="assets/x.js"></script>', 0),
        ('<script src="https://cdn.example/x.js"></script>', 1),
        ('<link rel="stylesheet" href="//fonts.example/css"><img src="http://a.b/c.png">', 2),
    ],
)
def test_what_a_page_loads_from_elsewhere_is_found(page: str, found: int) -> None:
    assert len(elsewhere(page)) == found
