"""The cells of a chapter's file, and chapters as plain programs."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
PLOTS = HERE.parent / "build" / "tutorial"
NOTICE = "**What to notice.**"


class Cell(NamedTuple):
    """A cell: the line of its first character, its tags, whether it is prose, and its text."""

    line: int
    tags: set[str]
    prose: bool
    text: str


def cells(path: Path) -> Iterator[Cell]:
    """The cells of a chapter. Prose is without its comment signs."""
    line = 0
    for part in path.read_text().split("\n# %%"):
        head, _, text = part.partition("\n")
        prose = head.startswith(" [markdown]")
        if line:  # what comes before the first cell is for Jupyter
            text = re.sub(r"^# ?", "", text, flags=re.MULTILINE) if prose else text
            yield Cell(line + 1, set(re.findall(r'"(\w+)"', head)), prose, text.rstrip("\n"))
        line += part.count("\n") + 1


def run(path: Path) -> None:
    """Run a chapter without its exercises. Print its titles, and what to notice."""
    names: dict[str, Any] = {"__name__": f"tutorial.{path.stem}"}
    title = ""
    for cell in cells(path):
        if cell.prose:
            noticed = notice(cell.text)
            if noticed:
                print(f"\n{noticed}")
            found = re.findall(r"^#+ (.*)", cell.text, re.MULTILINE)
            title = plain(found[-1]) if found else title
            continue
        if not cell.tags.isdisjoint({"exercise", "solution"}):
            continue
        if title:
            print(f"\n{title}\n{'=' * len(title)}\n")
            title = ""
        if "matplotlib" in cell.text:
            save_plots(path.stem)
        if "source" in cell.tags:
            names["show"] = name_source
        # Empty lines before the code, so that an error names the line of the file.
        code = "\n" * cell.line + cell.text
        exec(compile(code, path, "exec"), names)
    number = path.stem.removeprefix("chapter")
    print(f"\nExercises: python -m tutorial start {number}")


def notice(prose: str) -> str:
    """The part of ``prose`` that says what to notice, up to the next title, as plain text."""
    _, found, rest = prose.partition(NOTICE)
    text = re.split(r"^#", rest, maxsplit=1, flags=re.MULTILINE)[0].strip()
    return f"What to notice. {plain(text)}" if found else ""


def plain(prose: str) -> str:
    """Prose without the marks of links and bold text."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose).replace("**", "")


def name_source(*pieces: Any, **_: str) -> None:
    """Print where to read ``pieces``, in place of their source."""
    for piece in pieces:
        print(f"source: {piece.__qualname__} in {piece.__module__.replace('.', '/')}.py")


def save_plots(chapter: str) -> None:
    """Make `plt.show` write the current figure into a file and say where it is."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    def show() -> None:
        PLOTS.mkdir(parents=True, exist_ok=True)
        figure = plt.gcf()
        path = PLOTS / f"{chapter}-{figure.number}.png"
        figure.savefig(path)
        print(f"plot: {path}")

    plt.show = show  # type: ignore[assignment]


def titles() -> dict[str, tuple[str, str]]:
    """The title of each chapter, and how many minutes it runs, by its number."""
    found = {}
    for path in sorted(HERE.glob("chapter*.py")):
        prose = next(cell.text for cell in cells(path) if cell.prose)
        title = re.search(r"^# \d+\. (.*)", prose, re.MULTILINE)
        takes = re.search(r"runs\s+for\s+about\s+(\w+)\s+minute", prose)
        if not title or not takes:
            sys.exit(f"{path} lacks a title, or the minutes that it runs")
        found[path.stem.removeprefix("chapter")] = title[1], takes[1]
    return found


# --- exercises -----------------------------------------------------------------------------------


def exercises(path: Path) -> str:
    """A chapter's exercises as a file of your own: the questions, and the code to change."""
    number = path.stem.removeprefix("chapter")
    parts = [
        f"# Exercises of chapter {number}. Each answer is wrong: it makes a common mistake.\n"
        f"# Change it, and run python -m tutorial check {number}, or check {number}.1 for one."
    ]
    question = ""
    for cell in cells(path):
        if cell.prose:
            question = cell.text
        elif "exercise" in cell.tags:
            if re.match(r"\*\*\d\.\d\*\*", question):
                parts.append(re.sub("^", "# ", question.replace("**", ""), flags=re.MULTILINE))
            parts.append(cell.text)
    return "\n\n".join(parts) + "\n"
