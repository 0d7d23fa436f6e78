"""Look at the docs site in headless Chromium: its search, from files, and pictures of some pages.

    python -m tests.look_docs [WHERE]     after make docs

Fails where there is no Chromium, where a page's script says anything on the console, or where the
search finds nothing. Not part of `make test`, which needs no browser.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from tests.look import BROWSERS, THEMES, chromium

SITE = Path(__file__).parents[1] / "build" / "site"
PAGES = ("index", "quickstart", "choose", "spot", "algorithms/streaming_diloco", "api/attach")
SIZES = {"desk": (1280, 1600), "phone": (500, 1600)}


def main() -> None:
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else SITE.parent / "look"
    where.mkdir(parents=True, exist_ok=True)
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None or not SITE.exists():
        sys.exit("make docs first" if browser else f"none of {', '.join(BROWSERS)} is installed")
    page = (SITE / "algorithms" / "ddp.html").as_uri()
    found = re.search(
        r"(\d+) matching documents", chromium(browser, "--dump-dom", f"{page}?q=anchor")
    )
    assert found is not None, "the search, from files, finds nothing"
    print(f"search, from files: {found[0]}")
    for name in PAGES:
        for size, (width, height) in SIZES.items():
            for theme, number in THEMES.items():
                picture = where / f"{name.replace('/', '_')}-{size}-{theme}.png"
                chromium(
                    browser,
                    f"--window-size={width},{height}",
                    f"--blink-settings=preferredColorScheme={number}",
                    f"--screenshot={picture}",
                    (SITE / f"{name}.html").as_uri(),
                )
                print(picture)


if __name__ == "__main__":
    main()
