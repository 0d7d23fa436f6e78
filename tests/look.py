"""Look at a report in headless Chromium: pictures of it for both themes, on a desk and on a phone,
folded and with all details open, and how it prints.

    python -m tests.look [DIR/report.html [WHERE]]

Fails where there is no Chromium, where the page's script says anything on the console, or where a
chart stays empty. Not part of `make test`, which needs no browser.
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
SIZES = {  # a window cannot be narrower than 500
    "desk": ("", 1280, 1500),
    "desk-open": ("#all", 1280, 3600),
    "phone": ("", 500, 1900),
    "phone-open": ("#all", 500, 5600),
}
THEMES = {"dark": 0, "light": 1}


def chromium(browser: str, *options: str) -> str:
    """What it prints; fails if the page's script complains."""
    with tempfile.TemporaryDirectory() as profile:
        ended = subprocess.run(
            [browser, *QUIET, f"--user-data-dir={profile}", *options],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    said = [line for line in ended.stderr.splitlines() if "CONSOLE" in line]
    assert not said, said
    return ended.stdout


def main() -> None:
    arguments = sys.argv[1:]
    page = Path(arguments[0] if arguments else "laconic-demo/report.html").resolve()
    where = Path(arguments[1]).resolve() if len(arguments) > 1 else page.parent
    where.mkdir(parents=True, exist_ok=True)
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None or not page.exists():
        sys.exit(f"no {page}" if browser else f"none of {', '.join(BROWSERS)} is installed")
    drawn = chromium(browser, "--dump-dom", f"{page.as_uri()}#all")
    for chart in re.findall(r'<svg class="chart".*?</svg>', drawn, re.DOTALL):
        assert "<path" in chart, f"an empty chart: {chart[:300]}"
    printed = where / "report.pdf"
    chromium(browser, "--no-pdf-header-footer", f"--print-to-pdf={printed}", page.as_uri())
    print(printed)
    for size, (anchor, width, height) in SIZES.items():
        for theme, number in THEMES.items():
            picture = where / f"report-{size}-{theme}.png"
            chromium(
                browser,
                f"--window-size={width},{height}",
                f"--blink-settings=preferredColorScheme={number}",
                f"--screenshot={picture}",
                page.as_uri() + anchor,
            )
            print(picture)


if __name__ == "__main__":
    main()
