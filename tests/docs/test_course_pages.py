"""The course's pages: goals, pictures, glossary, shown source; and its notebooks."""

from __future__ import annotations

import re
from base64 import b64decode
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tutorial import notebooks, pages, pictures

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NUMBERS = pages.chapters()
PIXEL = b64decode("iVBORw0KGgo=")


def page(number: str) -> str:
    return (DOCS / "tutorial" / f"chapter{number}.md").read_text()


@pytest.mark.parametrize("number", NUMBERS)
def test_a_chapter_begins_with_its_goal_what_to_know_and_how_long_it_takes(number: str) -> None:
    text = page(number)
    goal, before = text.index("**After this chapter you can**"), text.index("**Before you start.**")
    assert goal < before < text.index("```python")
    takes = re.search(r"runs for\s+about\s+(\w+)\s+minute", text[before:])
    assert takes
    words = {"1": "one", "3": "three", "7": "seven"}
    row = re.search(rf"\(chapter{number}\.md\).*\| (\d) \|", index())
    assert row and words[row[1]] == takes[1]


def index() -> str:
    return (DOCS / "tutorial" / "index.md").read_text()


@pytest.mark.parametrize("number", NUMBERS)
def test_a_page_shows_the_source_as_it_is(number: str) -> None:
    """Else make tutorial has to be run again, or python -m tutorial.pages --keep."""
    notebook = pages.jupytext.read(pages.HERE / f"chapter{number}.py")
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    names: dict[str, Any] = {"__name__": "__main__"}
    pages.run(cells[0], names)
    shown = [cell for cell in cells if "source" in pages.tags(cell)]
    for cell in shown:
        assert pages.run(cell, names).rstrip() in page(number)
    assert shown
    if "folder" in names:  # a chapter's temporary directory, which its last cell removes
        names["folder"].cleanup()


def test_the_script_for_slurm_is_shown_as_it_is() -> None:
    assert (pages.HERE / "full_ddp.slurm").read_text() in page("5")


@pytest.mark.parametrize("number", NUMBERS)
def test_solutions_are_folded(number: str) -> None:
    folded = re.findall(
        r"<details.*?>\n<summary>Solution</summary>(.*?)</details>", page(number), re.S
    )
    assert len(folded) >= 3
    assert all(re.search(r"\nExercise \d\.\d: right\.", each) for each in folded)
    rest = re.sub(r"<details.*?</details>", "", page(number), flags=re.S)
    assert ": right." not in rest


@pytest.mark.parametrize("picture", pictures.PICTURES, ids=lambda p: p.__name__)
def test_diagrams_are_those_that_the_script_draws_and_on_one_page(picture: Any) -> None:
    file = f"{picture.__name__}.svg"
    committed = (DOCS / "tutorial" / file).read_text(encoding="utf-8")
    assert committed == picture(), "python -m tutorial.pictures"
    found = re.findall(rf"!\[([^\]]+)\]\({file}\)", "".join(map(page, NUMBERS)))
    assert len(found) == 1 and len(found[0]) > 60


# --- glossary ------------------------------------------------------------------------------------


def terms() -> dict[str, str]:
    parts = (DOCS / "glossary.md").read_text().split("\n### ")[1:]
    return {name: " ".join(text.split()) for name, _, text in (p.partition("\n") for p in parts)}


def test_terms_are_in_order_and_short() -> None:
    assert list(terms()) == sorted(terms(), key=str.lower)
    for name, text in terms().items():
        assert 1 <= len(re.findall(r"[.:](?= |$)", text)) <= 5 and len(text) < 320, name


def test_symbols_are_those_of_the_algorithm_pages() -> None:
    algorithms = "".join(path.read_text() for path in (DOCS / "algorithms").glob("*.md"))
    found = {s for text in terms().values() for s in re.findall(r"`([A-Za-z]{1,3})`", text)}
    assert {"x", "g", "lr", "a", "n", "B", "H", "m", "D"} <= found
    for symbol in found:
        assert re.search(rf"\b{symbol}\b", algorithms), symbol


@pytest.mark.parametrize("number", NUMBERS)
def test_chapters_lead_to_the_glossary(number: str) -> None:
    assert "../glossary.md#" in page(number)


# --- writing pages -------------------------------------------------------------------------------


def chapter(*cells: Any) -> Any:
    return nbformat.v4.new_notebook(cells=list(cells))


def code(source: str, *tags: str) -> Any:
    return nbformat.v4.new_code_cell(source, metadata={"tags": list(tags)})


def test_what_code_printed_and_drew_is_kept_and_cheap_cells_run(tmp_path: Path) -> None:
    path = tmp_path / "chapter9.md"
    path.with_name("chapter9-7.png").write_bytes(PIXEL)
    path.write_text(
        "text\n\n```python\nmeasure(1)  # slow\n```\n\n```text\n2.5 s\n```\n\n"
        "![figure](chapter9-7.png)\n"
    )
    prose = nbformat.v4.new_markdown_cell("other text")
    cells = code("x = 3"), prose, code("measure( 1 )"), code("print(x)", "exercise")
    with pytest.raises(SystemExit, match="this code"):
        pages.keep(chapter(*cells), path)
    path.write_text("```python\nx = 3\n```\n\n" + path.read_text())
    notebook = chapter(*cells)
    pages.keep(notebook, path)
    text = pages.markdown(notebook.cells, path)
    kept = "```python\nmeasure( 1 )\n```\n\n```text\n2.5 s\n```\n\n![figure](chapter9-1.png)"
    ran = "```python\nprint(x)\n```\n\n```{.text .verdict}\n3\n```\n"
    assert f"other text\n\n{kept}\n\n{ran}" in text
    assert (tmp_path / "chapter9-1.png").read_bytes() == PIXEL


# --- notebooks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", NUMBERS)
def test_a_notebook_is_valid_its_links_lead_somewhere_and_solutions_are_folded(
    number: str, tmp_path: Path
) -> None:
    written = nbformat.read(notebooks.write(number, tmp_path), as_version=4)
    nbformat.validate(written)
    for cell in written.cells:
        if cell.cell_type == "markdown":
            for link in re.findall(r"\]\(([^)\s]+)\)", cell.source):
                path = link.partition("#")[0]
                to_chapter = re.fullmatch(r"chapter\d\.ipynb", path)
                assert to_chapter or link.startswith("https:") or (tmp_path / path).is_file(), link
        elif "solution" in cell.metadata.get("tags", []):
            assert cell.metadata["jupyter"] == notebooks.FOLDED
    assert sum("solution" in cell.metadata.get("tags", []) for cell in written.cells) >= 3


def test_a_notebook_with_changes_is_kept_and_others_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "chapter1.ipynb").write_text("mine")
    notebooks.main(["1", "2", "--to", str(tmp_path)])
    assert (tmp_path / "chapter1.ipynb").read_text() == "mine"
    one, two = capsys.readouterr().out.splitlines()
    assert one.endswith("chapter1.ipynb (kept as it is)") and two.endswith("chapter2.ipynb")
    assert (tmp_path / "chapter2.ipynb").is_file()


def test_an_unknown_chapter_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        notebooks.main(["8"])
    assert "no chapter '8': choose from 1, 2, 3, 4, 5, 6, 7" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["1"])
def test_a_notebook_runs_from_top_to_bottom(
    number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chapter 3's cells start processes, which import the repository's modules."""
    monkeypatch.setenv("TUTORIAL_SCALE", "0.01")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    notebook = nbformat.read(notebooks.write(number, tmp_path), as_version=4)
    pages.execute(notebook, tmp_path)
    printed = "".join(o.get("text", "") for c in notebook.cells for o in c.get("outputs", ()))
    assert "scaled to 0.01 of the work" in printed
    assert len(re.findall(rf"Exercise {number}\.\d: right", printed)) == 3
