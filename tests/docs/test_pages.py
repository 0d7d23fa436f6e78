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
from laconic.algorithms.compile import STATIC
from laconic.algorithms.recipes import RECIPES
from laconic.policy.facts import Facts
from laconic.policy.predict import predict
from tutorial import pictures as diagrams

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
ALGORITHMS = sorted((DOCS / "algorithms").glob("*.md"))


def pages_of(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [p for part in (nav.values() if isinstance(nav, dict) else nav) for p in pages_of(part)]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).strip().replace(" ", "-") for each in headings}


def test_navigation_links_and_anchors_lead_somewhere_in_the_repository_too() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert sorted(pages_of(nav)) == sorted(p.relative_to(DOCS).as_posix() for p in PAGES[1:])
    for page in PAGES:
        text = page.read_text()
        sources = re.findall(r'(?:src|srcset)="([^"]+)"', text)
        for link in (*re.findall(r"\]\(([^)\s]+)\)", text), *sources):
            if link.startswith("https://"):
                continue
            path, _, anchor = re.sub("#only-(light|dark)$", "", link).partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.is_file(), f"{page}: {link}"
            assert not anchor or anchor in anchors(target), f"{page}: {link}"
    readme = PAGES[0].read_bytes()
    assert len(readme.splitlines()) <= 120 and len(readme) <= 8000


def test_the_tests_and_files_that_pages_name_exist() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    text = "".join(page.read_text() for page in [*PAGES, ROOT / "packaging" / "matrix.py"])
    named = set(re.findall(r"`(test_\w+)`", text))
    assert len(named) > 10
    assert [name for name in sorted(named) if f"def {name}(" not in tests] == []
    for file in re.findall(r"(?:examples|tests)/[\w/.-]+\.\w+", text):
        assert (ROOT / file).is_file(), file


def test_the_page_of_elastic_runs_names_the_recipes_that_are_not_for_them() -> None:
    page = (DOCS / "elastic.md").read_text()
    (listed,) = re.findall(r"- \*\*Recipes\.\*\* All but (.*?) work\.", page, re.S)
    assert tuple(re.findall(r"`(\w+)`", listed)) == STATIC


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


def test_pictures_are_those_that_the_scripts_draw() -> None:
    """Else run `make pictures`."""
    for folder, drawn in (("algorithms", pictures.PICTURES), ("tutorial", diagrams.PICTURES)):
        text = "".join(page.read_text() for page in (DOCS / folder).glob("*.md"))
        shown = re.findall(r"!\[[^\]]{60,}\]\(([^)]+\.svg)\)", text)
        assert sorted(shown) == sorted(f"{p.__name__}.svg" for p in drawn)
        for picture in drawn:
            committed = (DOCS / folder / f"{picture.__name__}.svg").read_text(encoding="utf-8")
            assert committed == picture(), picture.__name__


def mean(n: int) -> float:
    return 2 * (n - 1) / n


LAWS: list[tuple[laconic.Recipe, str, str, Callable[[int], float]]] = [
    (laconic.ddp(), "ddp", "2(n-1)/n B", mean),
    (laconic.local_sgd(8), "local_sgd", "2(n-1)/n B / H", lambda n: mean(n) / 8),
    (laconic.diloco(8), "diloco", "2(n-1)/n B / H", lambda n: mean(n) / 8),
    (laconic.streaming_diloco(8), "streaming_diloco", "2(n-1)/n of about B/8 per period",
     lambda n: mean(n) / 8 / 8),
    (laconic.power_sgd(4), "power_sgd", "1/128 of what DDP", lambda n: mean(n) / 128),
    (laconic.sgp(), "gossip", "`peers` times B", lambda n: 1),
    (laconic.d_psgd(), "gossip", "it sends 2 B per step", lambda n: 2),
    (laconic.easgd(8), "elastic", "2(n-1)/n B / tau", lambda n: mean(n) / 8),
]  # fmt: skip


def test_what_pages_say_of_bytes_is_what_the_cost_model_says() -> None:
    for recipe, page, formula, share in LAWS:
        assert formula in (DOCS / "algorithms" / f"{page}.md").read_text()
        for n in (4, 8):
            facts = Facts(n, ((1024, 1024),) * 4, 4, compute=1.0, rate=1e9, one_way=0.0)
            sent = predict(recipe, facts).bytes / (4 * facts.elements)
            assert sent == pytest.approx(share(n), rel=0.02), page
