"""The docs: every page is in the site's navigation, and links lead somewhere, here and there."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from docs import pictures

import laconic
from laconic.algorithms.recipes import RECIPES
from laconic.predict import Facts, predict

from tests.offline import elsewhere

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = sorted(DOCS.rglob("*.md"))


def pages_of(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    assert hasattr(parts, "__iter__")
    return [page for part in parts for page in pages_of(part)]


def test_every_page_is_in_the_navigation_once() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert sorted(pages_of(nav)) == [page.relative_to(DOCS).as_posix() for page in PAGES]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.stem)
def test_links_lead_somewhere_in_the_repository_too(page: Path) -> None:
    text = page.read_text()
    pictures = re.findall(r'(?:src|srcset)="([^"]+)"', text)
    for link in (*re.findall(r"\]\(([^)\s]+)\)", text), *pictures):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.removesuffix("#only-light").removesuffix("#only-dark").partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link


def test_the_readme_is_one_page() -> None:
    text = README.read_bytes()
    assert len(text.splitlines()) <= 120
    assert len(text) <= 8000


def test_a_page_begins_with_what_the_reader_gets() -> None:
    """A heading, and then a paragraph: no table, code or list before it."""
    for page in [README, *PAGES]:
        lines = page.read_text().splitlines()
        start = 2 if lines[0].startswith("<!-- Written by") else 0
        heading, empty, first, *_ = lines[start:]
        assert heading.startswith("# ") and not empty, page
        assert re.match(r"[\w*`\[<]", first), f"{page}: {first}"


def test_every_recipe_is_in_the_index_of_algorithms() -> None:
    index = (DOCS / "algorithms" / "index.md").read_text()
    for name in (*RECIPES, "auto"):
        assert re.search(rf"\b{name}\b", index), name


def test_every_public_name_is_in_the_reference() -> None:
    """Functions and classes by name; recipes, codecs, graphs and links by their module."""
    text = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    named = set(re.findall(r"::: laconic\.(\w+)", text))
    assert set(laconic.__all__) - set(RECIPES) <= named


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


ALGORITHMS = sorted((DOCS / "algorithms").glob("*.md"))


def signature(recipe: Callable[..., object]) -> str:
    """Names and defaults, as the pages write them."""
    plain = [p.replace(annotation=p.empty) for p in inspect.signature(recipe).parameters.values()]
    return f"{recipe.__name__}{inspect.Signature(plain)}".replace("'", '"')


@pytest.mark.parametrize("recipe", [*RECIPES.values(), laconic.auto], ids=lambda r: r.__name__)
def test_every_recipe_has_a_page_with_its_defaults(recipe: Callable[..., object]) -> None:
    pages = [" ".join(page.read_text().split()) for page in ALGORITHMS]
    assert sum(signature(recipe) in page for page in pages) == 1, signature(recipe)


@pytest.mark.parametrize("picture", pictures.PICTURES, ids=lambda p: p.__name__)
def test_the_pictures_are_those_that_the_script_draws(picture: Callable[[], str]) -> None:
    committed = (DOCS / "algorithms" / f"{picture.__name__}.svg").read_text(encoding="utf-8")
    assert committed == picture(), "python docs/pictures.py"


def test_every_picture_is_on_a_page_and_says_what_is_to_be_seen() -> None:
    shown: list[str] = []
    for page in ALGORITHMS:
        found = re.findall(r"!\[([^\]]+)\]\(([^)]+)\)", page.read_text())
        assert found or page.stem == "index", f"{page.name} has no picture"
        assert all(len(alt) > 60 for alt, _ in found)
        shown += [file for _, file in found]
    assert sorted(shown) == sorted(f"{picture.__name__}.svg" for picture in pictures.PICTURES)


SHAPES = ((1024, 1024),) * 4


@pytest.mark.parametrize("n", [4, 8])
@pytest.mark.parametrize(
    ("recipe", "page", "formula", "share"),
    [
        (laconic.ddp(), "ddp", "2(n-1)/n B", lambda n: 2 * (n - 1) / n),
        (laconic.local_sgd(8), "local_sgd", "2(n-1)/n B / H", lambda n: 2 * (n - 1) / n / 8),
        (laconic.diloco(8), "diloco", "2(n-1)/n B / H", lambda n: 2 * (n - 1) / n / 8),
        (laconic.muloco(8), "muloco", "2(n-1)/n B / H per", lambda n: 2 * (n - 1) / n / 8),
        (
            laconic.des_loc(8),
            "des_loc",
            "2(n-1)/n B (1/H + 1/H_u + 1/H_v)",
            lambda n: 2 * (n - 1) / n * (1 / 8 + 1 / 24 + 1 / 48),
        ),
        (
            laconic.streaming_diloco(8),
            "streaming_diloco",
            "2(n-1)/n of about B/8 per period",
            lambda n: 2 * (n - 1) / n / 8 / 8,
        ),
        (
            laconic.sparse_loco(8),
            "sparse_loco",
            "(n-1)/144 B / H per step",
            lambda n: (n - 1) / 144 / 8,
        ),
        (laconic.noloco(8), "noloco", "2 B / H per worker", lambda n: 2 / 8),
        (laconic.power_sgd(4), "power_sgd", "1/128 of what DDP", lambda n: 2 * (n - 1) / n / 128),
        (laconic.demo(), "demo", "(n-1)/93 B per worker", lambda n: (n - 1) / 93),
        (laconic.sgp(), "gossip", "`peers` times B", lambda n: 1),
        (laconic.d_psgd(), "gossip", "it sends 2 B per step", lambda n: 2),
        (laconic.easgd(8), "elastic", "2(n-1)/n B / tau", lambda n: 2 * (n - 1) / n / 8),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_pages_say_of_bytes_is_what_the_cost_model_says(
    recipe: laconic.Recipe, page: str, formula: str, share: Callable[[int], float], n: int
) -> None:
    facts = Facts(n, SHAPES, 4, compute=1.0, rate=1e9, one_way=0.0)
    sent = predict(recipe, facts).bytes / (4 * facts.elements)
    assert formula in (DOCS / "algorithms" / f"{page}.md").read_text()
    assert sent == pytest.approx(share(n), rel=0.02)
