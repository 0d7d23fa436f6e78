"""The pages: links, navigation, pictures, and what they say of recipes, bytes and tests."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs import pictures

import laconic
from laconic.algorithms.recipes import RECIPES
from laconic.links import cost
from laconic.predict import Facts, predict
from tutorial import pictures as diagrams

from tests.offline import elsewhere

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
ALGORITHMS = sorted((DOCS / "algorithms").glob("*.md"))


def pages_of(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    assert hasattr(parts, "__iter__")
    return [page for part in parts for page in pages_of(part)]


def test_every_page_is_in_the_navigation_once() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert sorted(pages_of(nav)) == sorted(p.relative_to(DOCS).as_posix() for p in PAGES[1:])


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).strip().replace(" ", "-") for each in headings}


def test_links_and_anchors_lead_somewhere_in_the_repository_too() -> None:
    for page in PAGES:
        text = page.read_text()
        sources = re.findall(r'(?:src|srcset)="([^"]+)"', text)
        for link in (*re.findall(r"\]\(([^)\s]+)\)", text), *sources):
            if link.startswith("https://"):
                continue
            bare = link.removesuffix("#only-light").removesuffix("#only-dark")
            path, _, anchor = bare.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.is_file(), f"{page}: {link}"
            assert not anchor or anchor in anchors(target), f"{page}: {link}"


def test_pages_begin_with_what_the_reader_gets_and_the_readme_is_one_page() -> None:
    """A heading, and then a paragraph: no table, code or list before it."""
    for page in PAGES:
        lines = page.read_text().splitlines()
        start = 2 if lines[0].startswith("<!-- Written by") else 0
        heading, empty, first, *_ = lines[start:]
        assert heading.startswith("# ") and not empty, page
        assert re.match(r"[\w*`\[<]", first), f"{page}: {first}"
    text = README.read_bytes()
    assert len(text.splitlines()) <= 120 and len(text) <= 8000


def test_the_tests_and_files_that_pages_name_exist() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    text = "".join(page.read_text() for page in [*PAGES, ROOT / "packaging" / "matrix.py"])
    named = set(re.findall(r"`(test_\w+)`", text))
    assert len(named) > 10
    assert [name for name in sorted(named) if f"def {name}(" not in tests] == []
    for file in re.findall(r"(?:examples|tests)/[\w/.-]+\.\w+", text):
        assert (ROOT / file).is_file(), file


def signature(recipe: Callable[..., object]) -> str:
    """Names and defaults, as the pages write them."""
    plain = [p.replace(annotation=p.empty) for p in inspect.signature(recipe).parameters.values()]
    return f"{recipe.__name__}{inspect.Signature(plain)}".replace("'", '"')


def test_every_recipe_has_a_page_with_its_defaults_and_public_names_are_in_the_reference() -> None:
    pages = [" ".join(page.read_text().split()) for page in ALGORITHMS]
    index = (DOCS / "algorithms" / "index.md").read_text()
    recipes: list[Any] = [*RECIPES.values(), laconic.auto]
    for recipe in recipes:
        assert sum(signature(recipe) in page for page in pages) == 1, signature(recipe)
        assert re.search(rf"\b{recipe.__name__}\b", index), recipe.__name__
    text = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    assert set(laconic.__all__) - set(RECIPES) <= set(re.findall(r"::: laconic\.(\w+)", text))


def test_pictures_are_those_that_the_scripts_draw_and_say_what_is_to_be_seen() -> None:
    """Else run `make pictures`."""
    for folder, drawn in (("algorithms", pictures.PICTURES), ("tutorial", diagrams.PICTURES)):
        pages = sorted((DOCS / folder).glob("*.md"))
        text = "".join(page.read_text() for page in pages)
        shown = re.findall(r"!\[([^\]]+)\]\(([^)]+\.svg)\)", text)
        assert sorted(file for _, file in shown) == sorted(f"{p.__name__}.svg" for p in drawn)
        assert all(len(alt) > 60 for alt, _ in shown)
        for picture in drawn:
            committed = (DOCS / folder / f"{picture.__name__}.svg").read_text(encoding="utf-8")
            assert committed == picture(), picture.__name__


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ('<a href="https://arxiv.org">paper</a><script src="assets/x.js"></script>', 0),
        ('<link rel="stylesheet" href="//fonts.example/css"><img src="http://a.b/c.png">', 2),
    ],
)
def test_what_a_page_loads_from_elsewhere_is_found(page: str, found: int) -> None:
    assert len(elsewhere(page)) == found


LAWS: list[tuple[laconic.Recipe, str, str, Callable[[int], float]]] = [
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
    (laconic.sparse_loco(8), "sparse_loco", "(n-1)/144 B / H", lambda n: (n - 1) / 144 / 8),
    (laconic.noloco(8), "noloco", "2 B / H per worker", lambda n: 2 / 8),
    (laconic.power_sgd(4), "power_sgd", "1/128 of what DDP", lambda n: 2 * (n - 1) / n / 128),
    (laconic.demo(), "demo", "(n-1)/93 B per worker", lambda n: (n - 1) / 93),
    (laconic.sgp(), "gossip", "`peers` times B", lambda n: 1),
    (laconic.d_psgd(), "gossip", "it sends 2 B per step", lambda n: 2),
    (laconic.easgd(8), "elastic", "2(n-1)/n B / tau", lambda n: 2 * (n - 1) / n / 8),
]


def test_what_pages_say_of_bytes_is_what_the_cost_model_says() -> None:
    for recipe, page, formula, share in LAWS:
        assert formula in (DOCS / "algorithms" / f"{page}.md").read_text()
        for n in (4, 8):
            facts = Facts(n, ((1024, 1024),) * 4, 4, compute=1.0, rate=1e9, one_way=0.0)
            sent = predict(recipe, facts).bytes / (4 * facts.elements)
            assert sent == pytest.approx(share(n), rel=0.02), page


def test_what_the_page_on_slowmo_says_of_shards_and_of_when_it_pays() -> None:
    page = (DOCS / "slowmo.md").read_text()
    table = re.findall(r"^\| (?:.*?owner.*?|sent by.*?) \| (.*) \|$", page, re.MULTILINE)
    owners, kept, by_owners, by_others = ([*map(str.strip, row.split("|"))] for row in table)
    shards = [*map(int, owners)]
    assert [*map(float, kept)] == [8 / s for s in shards]

    def sent(s: int, rank: int) -> float:
        into, out = (f(8000, 8, s, rank) for f in (cost.reduce_scatter, cost.all_gather))
        return (into.bytes + out.bytes) / 8000

    assert [*map(float, by_owners)] == [sent(s, 0) for s in shards]
    assert by_others == ["", *(str(int(sent(s, 7))) for s in shards[1:])]
    backward, node, reduce, theirs, ours, ddp = (
        int(found)
        for pattern in (
            r"t_backward = (\d+) ms",
            r"t_node = (\d+) ms",
            r"t_allreduce = (\d+) ms",
            r"\| fairscale \| 180 [^|]+ \| (\d+) ms",
            r"\| laconic \| 180 [^|]+ \| (\d+) ms",
            r"\| DDP \|\s+\| (\d+) ms",
        )
        for found in re.findall(pattern, page)
    )
    saved = reduce * 2 // 3
    assert ddp == max(backward, reduce) and theirs == backward + node + reduce // 3
    assert ours == max(backward, node) + reduce // 3
    assert (
        f"{saved} > {backward + node} does not hold" in page
        and f"{saved} > {backward} holds" in page
    )


def test_terms_of_the_glossary_are_in_order_short_and_those_of_the_pages() -> None:
    parts = (DOCS / "glossary.md").read_text().split("\n### ")[1:]
    terms = {name: " ".join(text.split()) for name, _, text in (p.partition("\n") for p in parts)}
    assert list(terms) == sorted(terms, key=str.lower)
    assert all(len(text) < 320 for text in terms.values())
    algorithms = "".join(path.read_text() for path in ALGORITHMS)
    found = {s for text in terms.values() for s in re.findall(r"`([A-Za-z]{1,3})`", text)}
    assert {"x", "g", "lr", "a", "n", "B", "H", "m", "D"} <= found
    assert all(re.search(rf"\b{symbol}\b", algorithms) for symbol in found)
