"""Execute chapters as notebooks, and write each with what it printed and drew as a page.

python -m tutorial.pages            all chapters, into docs/tutorial
python -m tutorial.pages 1 3        some
python -m tutorial.pages --keep 7   keep what the page says that code printed, if the code is the
                                    same; run only what shows source, and the exercises
"""

from __future__ import annotations

import ast
import io
import re
import sys
from base64 import b64decode, b64encode
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
PAGES = HERE.parent / "docs" / "tutorial"
CHEAP = {"source", "exercise", "solution", "cheap"}
"""Tags of cells that need nothing but the first cell's imports, and less than a second."""
CODE = re.compile(
    r"```python\n(.*?)\n```(?:\n\n```text\n(.*?)\n```)?(?:\n\n!\[[^\]]*\]\(([\w-]+\.png)\))?",
    re.DOTALL,
)
"""A code cell on a page: its code, what it printed, and the picture that it drew."""


def main() -> None:
    arguments = sys.argv[1:]
    keeping = "--keep" in arguments
    for number in [each for each in arguments if each != "--keep"] or chapters():
        notebook = jupytext.read(HERE / f"chapter{number}.py")
        page = PAGES / f"chapter{number}.md"
        if keeping:
            keep(notebook, page)
        else:
            execute(notebook, HERE.parent)
        page.write_text(markdown(notebook.cells, page))
        print(page)


def chapters() -> list[str]:
    """Their numbers, in order."""
    return sorted(path.stem.removeprefix("chapter") for path in HERE.glob("chapter*.py"))


def execute(notebook: Any, where: Path) -> None:
    """Run all cells in the directory ``where``; an error in one is an error here."""
    with TemporaryDirectory() as sockets:  # and no port is opened
        client = NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(where)}})
        kernel = client.create_kernel_manager()
        kernel.transport, kernel.ip = "ipc", f"{sockets}/kernel"
        client.execute()


def keep(notebook: Any, page: Path) -> None:
    """Give cells the output that ``page`` has for the same code; run those that are cheap."""
    found = {meaning(code): rest for code, *rest in CODE.findall(page.read_text())}
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    names: dict[str, Any] = {"__name__": "__main__"}
    run(cells[0], names)  # its imports
    for cell in cells:
        if not CHEAP.isdisjoint(tags(cell)):
            printed, picture = run(cell, names), ""
        elif "hidden" in tags(cell):
            continue
        elif meaning(cell.source) not in found:
            sys.exit(f"{page.name} does not have this code, so it must run:\n\n{cell.source}")
        else:
            printed, picture = found[meaning(cell.source)]
        cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=printed)]
        if picture:
            data = {"image/png": b64encode(page.with_name(picture).read_bytes()).decode()}
            cell.outputs.append(nbformat.v4.new_output("display_data", data=data))


def meaning(code: str) -> str:
    """Equal for code that differs only in comments and layout."""
    try:
        return ast.dump(ast.parse(code))
    except SyntaxError:  # a part of a page that is no cell
        return code


def run(cell: Any, names: dict[str, Any]) -> str:
    """Run a cell in this process; what it printed."""
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(cell.source, "a cell", "exec"), names)
    return printed.getvalue()


def tags(cell: Any) -> list[str]:
    return cell.metadata.get("tags", [])


def markdown(cells: list[Any], page: Path) -> str:
    """Prose as it is, code and what it printed as blocks, pictures in files beside ``page``.

    Of code that shows source there is only the source, of solutions only the code. Hidden cells are
    for those who run a chapter: remarks, which print nothing unless a claim is wrong."""
    parts = [f"<!-- Written by make tutorial from tutorial/{page.stem}.py: change that. -->"]
    pictures = 0
    for cell in cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        if "hidden" in tags(cell):
            continue
        blocks = [] if "source" in tags(cell) else [block("python", cell.source)]
        printed = "".join(o.text for o in cell.outputs if o.get("name") == "stdout").rstrip()
        if printed and "solution" not in tags(cell):
            blocks.append(block(language_of(tags(cell)), printed))
        for output in cell.outputs:
            if "image/png" in output.get("data", {}):
                pictures += 1
                picture = page.with_name(f"{page.stem}-{pictures}.png")
                picture.write_bytes(b64decode(output.data["image/png"]))
                blocks.append(f"![{cell.metadata.get('alt', 'figure')}]({picture.name})")
        if "solution" in tags(cell):
            opening = '<details markdown="1">\n<summary>Solution</summary>'
            blocks = [opening, *blocks, "</details>"]
        parts += blocks
    return "\n\n".join(parts) + "\n"


def language_of(tags: list[str]) -> str:
    """Of what a cell with these tags prints. The lines of verdicts wrap (docs/site.css)."""
    if "source" in tags:
        return "python"
    return "{.text .verdict}" if "exercise" in tags else "text"


def block(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


if __name__ == "__main__":
    main()
