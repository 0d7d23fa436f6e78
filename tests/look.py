"""Look at a report, or at the docs site, in headless Chromium: pictures for both themes, on a desk
and on a phone; of a report also how it prints.

    python -m tests.look [DIR/report.html [WHERE]]
    python -m tests.look docs [WHERE]                  after make docs

Fails where there is no Chromium, where a page says anything on the console, or where the site's
search, from files, finds nothing. Not part of `make test`, which needs no browser.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--virtual-time-budget=2000", "--enable-logging=stderr", "--v=0",
)  # fmt: skip
SITE = Path(__file__).parents[1] / "build" / "site"
PAGES = ("index", "quickstart", "choose", "algorithms/slowmo", "elastic", "race", "demo", "cli")


def chromium(*options: str) -> str:
    """What it prints; fails if the page's script complains."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"none of {', '.join(BROWSERS)} is installed")
    with tempfile.TemporaryDirectory() as profile:
        argv = [browser, *QUIET, f"--user-data-dir={profile}", *options]
        ended = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    said = [line for line in ended.stderr.splitlines() if "CONSOLE" in line]
    assert not said, said
    return ended.stdout


def pictures(page: Path, where: Path, name: str, desk: int, phone: int) -> None:
    """Of these heights; a window cannot be narrower than 500."""
    for size in (f"1280,{desk}", f"500,{phone}"):
        for theme, number in {"dark": 0, "light": 1}.items():
            picture = where / f"{name}-{size.partition(',')[0]}-{theme}.png"
            options = (f"--window-size={size}", f"--screenshot={picture}")
            scheme = f"--blink-settings=preferredColorScheme={number}"
            chromium(*options, scheme, page.as_uri())
            print(picture)


def main() -> None:
    what = sys.argv[1] if len(sys.argv) > 1 else "laconic-demo/report.html"
    page = SITE / "algorithms" / "ddp.html" if what == "docs" else Path(what).resolve()
    if not page.exists():
        sys.exit(f"no {page}")
    where = SITE.parent / "look" if what == "docs" else page.parent
    where = Path(sys.argv[2]).resolve() if len(sys.argv) > 2 else where
    where.mkdir(parents=True, exist_ok=True)
    if what == "docs":
        found = chromium("--dump-dom", f"{page.as_uri()}?q=anchor")
        assert re.search(r"\d+ matching documents", found), "the search, from files, finds nothing"
        for name in PAGES:
            pictures(SITE / f"{name}.html", where, name.replace("/", "_"), 1600, 1600)
        return
    printed = where / "report.pdf"
    chromium("--no-pdf-header-footer", f"--print-to-pdf={printed}", page.as_uri())
    pictures(page, where, "report", 2600, 3600)


if __name__ == "__main__":
    main()
