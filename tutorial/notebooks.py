"""Write chapters as notebooks that open in Jupyter: python -m tutorial.notebooks

A notebook that exists is kept, with your changes. Delete it to have it written again.

python -m tutorial.notebooks 1 3            some chapters
python -m tutorial.notebooks --to DIR       elsewhere than build/notebooks
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jupytext
import nbformat

HERE = Path(__file__).parent
ROOT = HERE.parent
PAGES = ROOT / "docs" / "tutorial"
FOLDED = {"source_hidden": True, "outputs_hidden": True}  # JupyterLab shows three dots to click
BEGIN = """\
# This notebook imports the repository's modules and starts its programs.
import os
import sys

os.chdir({root!r})
sys.path[:0] = [os.getcwd(), os.path.join(os.getcwd(), "src")]\
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tutorial.notebooks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    there = sorted(path.stem.removeprefix("chapter") for path in HERE.glob("chapter*.py"))
    parser.add_argument("chapters", nargs="*", metavar="chapter", help="all by default")
    parser.add_argument("--to", type=Path, default=ROOT / "build" / "notebooks", metavar="DIR")
    given = parser.parse_args(arguments)
    for number in given.chapters:
        if number not in there:
            parser.error(f"no chapter {number!r}: choose from {', '.join(there)}")
    given.to.mkdir(parents=True, exist_ok=True)
    for number in given.chapters or there:
        path = given.to / f"chapter{number}.ipynb"
        if path.exists():
            print(f"{path} (kept as it is)")
        else:
            print(write(number, given.to))


def write(number: str, folder: Path) -> Path:
    """Write chapter ``number`` into ``folder``, with links to this repository."""
    notebook: Any = jupytext.read(HERE / f"chapter{number}.py")
    pages = os.path.relpath(PAGES, folder.resolve())
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"\]\((?!https:|#)", f"]({pages}/", cell.source)
            cell.source = re.sub(r"\]\(\S*/(chapter\d)\.md\)", r"](\1.ipynb)", cell.source)
        elif "solution" in cell.metadata.get("tags", []):
            cell.metadata["jupyter"] = dict(FOLDED)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(BEGIN.format(root=str(ROOT))))
    path = folder / f"chapter{number}.ipynb"
    nbformat.write(notebook, path)
    return path


if __name__ == "__main__":
    main()
