"""Fails if a page of the built docs site loads anything from elsewhere.

    python -m tests.offline build/site

Part of `make docs`. Links that a reader may follow are no matter.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

TAG = "link|script|img|iframe|source|video|audio"
LOADED = re.compile(rf"""<(?:{TAG})\b[^>]*\b(?:href|src)=["']?(?:https?:)?//[^>]*>""")
IMPORTED = re.compile(r"""url\(["']?(?:https?:)?//|@import""")


def main() -> None:
    site = Path(sys.argv[1])
    pages, sheets = sorted(site.rglob("*.html")), sorted(site.rglob("*.css"))
    assert pages, f"no pages in {site}"
    found = [f"{page}: {load}" for page in pages for load in LOADED.findall(page.read_text())]
    found += [f"{sheet}: of another host" for sheet in sheets if IMPORTED.search(sheet.read_text())]
    if found:
        sys.exit("\n".join(found))
    print(f"{site}: {len(pages)} pages, nothing from elsewhere")


if __name__ == "__main__":
    main()
