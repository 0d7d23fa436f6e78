"""Execute chapters as notebooks and write each, with what it printed and drew, as a page.

python -m tutorial.pages            all chapters, into docs/tutorial
python -m tutorial.pages 1 3        some
"""

from __future__ import annotations

import sys
from base64 import b64decode
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jupytext
from nbclient import NotebookClient

HERE = Path(__file__).parent
PAGES = HERE.parent / "docs" / "tutorial"


def main() -> None:
    for number in sys.argv[1:] or chapters():
        notebook = jupytext.read(HERE / f"chapter{number}.py")
        where = {"metadata": {"path": str(HERE.parent)}}
        with TemporaryDirectory() as sockets:  # and no port is opened
            client = NotebookClient(notebook, timeout=900, resources=where)
            kernel = client.create_kernel_manager()
            kernel.transport, kernel.ip = "ipc", f"{sockets}/kernel"
            client.execute()
        page = PAGES / f"chapter{number}.md"
        page.write_text(markdown(notebook.cells, page))
        print(page)


def chapters() -> list[str]:
    """Their numbers, in order."""
    return sorted(path.stem.removeprefix("chapter") for path in HERE.glob("chapter*.py"))


def markdown(cells: list[Any], page: Path) -> str:
    """Prose as it is, code and what it printed as blocks, pictures in files beside ``page``."""
    parts = [f"<!-- Written by make tutorial from tutorial/{page.stem}.py: change that. -->"]
    for cell in cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        source = "source" in cell.metadata.get("tags", ())
        parts.append(block("python", cell.source))
        printed = "".join(o.text for o in cell.outputs if o.get("name") == "stdout")
        if printed:
            parts.append(block("python" if source else "text", printed.rstrip()))
        for output in cell.outputs:
            if "image/png" in output.get("data", {}):
                picture = page.with_name(f"{page.stem}-{len(parts)}.png")
                picture.write_bytes(b64decode(output.data["image/png"]))
                parts.append(f"![{cell.metadata.get('alt', 'figure')}]({picture.name})")
    return "\n\n".join(parts) + "\n"


def block(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


if __name__ == "__main__":
    main()
