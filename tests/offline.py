"""Fails if a page of the built docs site loads anything from elsewhere.

    python -m tests.offline build/site

Part of `make docs`. Links that a reader may follow are no matter.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path

LOADED = {"href": {"link"}, "src": {"script", "img", "iframe", "source", "video", "audio"}}


class Loads(HTMLParser):
    """What a page loads by itself from other hosts."""

    def __init__(self) -> None:
        super().__init__()
        self.elsewhere: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if tag in LOADED.get(name, ()) and (value or "").startswith(("http:", "https:", "//")):
                self.elsewhere.append(f"<{tag} {name}={value}>")


def elsewhere(page: str) -> list[str]:
    parser = Loads()
    parser.feed(page)
    return parser.elsewhere


def main() -> None:
    site = Path(sys.argv[1])
    pages = sorted(site.rglob("*.html"))
    assert pages, f"no pages in {site}"
    found = [f"{page}: {load}" for page in pages for load in elsewhere(page.read_text())]
    found += [
        f"{sheet}: @import or url() of another host"
        for sheet in sorted(site.rglob("*.css"))
        if any(mark in sheet.read_text() for mark in ("url(http", "url(//", 'url("http', "@import"))
    ]
    if found:
        sys.exit("\n".join(found))
    print(f"{site}: {len(pages)} pages, nothing from elsewhere")


if __name__ == "__main__":
    main()
